"""Train PyTorch models with a variable global batch size, on XLA cores, torch.distributed processes or one process.

Names are imported when they are first used, so that what needs no torch starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from variable_batch_size.version import __version__

if TYPE_CHECKING:
    from variable_batch_size.launcher import launch
    from variable_batch_size.optimizer import (
        ConstantOptimizer,
        CustomOptimizer,
        LinearRuleMomentumOptimizer,
        LinearRuleOptimizer,
        RootRuleOptimizer,
    )
    from variable_batch_size.rules import ConstantRule, LinearMomentumRule, LinearRule, RootRule, Rule, Step
    from variable_batch_size.sampler import CustomSampler
    from variable_batch_size.schedule import Schedule
    from variable_batch_size.trace import Trace

_HOME = {
    "launch": "launcher",
    "ConstantOptimizer": "optimizer",
    "CustomOptimizer": "optimizer",
    "LinearRuleMomentumOptimizer": "optimizer",
    "LinearRuleOptimizer": "optimizer",
    "RootRuleOptimizer": "optimizer",
    "ConstantRule": "rules",
    "LinearMomentumRule": "rules",
    "LinearRule": "rules",
    "RootRule": "rules",
    "Rule": "rules",
    "Step": "rules",
    "CustomSampler": "sampler",
    "Schedule": "schedule",
    "Trace": "trace",
}

__all__ = [
    "ConstantOptimizer",
    "ConstantRule",
    "CustomOptimizer",
    "CustomSampler",
    "LinearMomentumRule",
    "LinearRule",
    "LinearRuleMomentumOptimizer",
    "LinearRuleOptimizer",
    "RootRule",
    "RootRuleOptimizer",
    "Rule",
    "Schedule",
    "Step",
    "Trace",
    "__version__",
    "launch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
