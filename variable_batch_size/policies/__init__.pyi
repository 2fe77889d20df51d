"""Policies: choose batch sizes during a run; numbers in, a batch size out."""

from .autoscale import Autoscale as Autoscale
from .autoscale import Goodput as Goodput
from .builtin import POLICIES as POLICIES
from .builtin import CriticalBatch as CriticalBatch
from .builtin import NormTest as NormTest
from .builtin import OnPlateau as OnPlateau
from .builtin import PerCore as PerCore
from .builtin import make_policy as make_policy
from .hints import Hints as Hints
from .policy import FunctionPolicy as FunctionPolicy
from .policy import Policy as Policy
from .policy import Situation as Situation
from .throughput import Throughput as Throughput
from .throughput import best_split as best_split
from .throughput import split as split
