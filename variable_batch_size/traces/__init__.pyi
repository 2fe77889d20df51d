"""Traces: the batch size of every step, read from files, generated or converted from recordings."""

from .generators import constant_trace as constant_trace
from .generators import doubling_ramp as doubling_ramp
from .generators import growth_for_decay as growth_for_decay
from .generators import linear_ramp as linear_ramp
from .generators import rampup as rampup
from .generators import seesaw as seesaw
from .generators import spot_market as spot_market
from .recording import Recording as Recording
from .recording import convert_recording as convert_recording
from .recording import step_seconds as step_seconds
from .trace import Stages as Stages
from .trace import Trace as Trace
from .trace import TraceLike as TraceLike
from .watched import WatchedTrace as WatchedTrace
