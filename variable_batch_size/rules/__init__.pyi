"""Scaling rules: map a step's batch size to the optimizer's settings."""

from .adam import AdamRule as AdamRule
from .adascale import AdamScaleRule as AdamScaleRule
from .adascale import AdaScaleRule as AdaScaleRule
from .adascale import SurgeRule as SurgeRule
from .noise import Noise as Noise
from .registry import RULES as RULES
from .registry import make_rule as make_rule
from .rule import Norms as Norms
from .rule import Rule as Rule
from .rule import Step as Step
from .scaling import ConstantRule as ConstantRule
from .scaling import LEGWRule as LEGWRule
from .scaling import LinearMomentumRule as LinearMomentumRule
from .scaling import LinearRule as LinearRule
from .scaling import MuonRule as MuonRule
from .scaling import RootRule as RootRule
from .scaling import ema_decay as ema_decay
