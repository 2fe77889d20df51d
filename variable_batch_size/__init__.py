"""Train PyTorch models with a variable global batch size, on XLA cores, torch.distributed processes or one process.

Names are imported when they are first used, so that what needs no torch starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from variable_batch_size.version import __version__

if TYPE_CHECKING:
    from variable_batch_size.buffers import share_buffers
    from variable_batch_size.checkpoint import Checkpoint
    from variable_batch_size.comparison.workload import Workload
    from variable_batch_size.convert import Conversion, convert_recording, step_seconds
    from variable_batch_size.generate import (
        constant_trace,
        doubling_ramp,
        growth_for_decay,
        linear_ramp,
        seesaw,
        spot_market,
    )
    from variable_batch_size.launcher import launch
    from variable_batch_size.logs import Log
    from variable_batch_size.metrics import Metrics
    from variable_batch_size.noise import Noise, NoiseAverage
    from variable_batch_size.optimizer import (
        AdamRuleOptimizer,
        AdamScaleOptimizer,
        AdaScaleOptimizer,
        ConstantOptimizer,
        CustomOptimizer,
        LinearRuleMomentumOptimizer,
        LinearRuleOptimizer,
        RootRuleOptimizer,
    )
    from variable_batch_size.plan import Plan
    from variable_batch_size.plot import plot_plan
    from variable_batch_size.recording import Recording
    from variable_batch_size.report import conversion_report, plan_report, trace_report
    from variable_batch_size.rules import ConstantRule, LinearMomentumRule, LinearRule, RootRule, Rule, Step
    from variable_batch_size.sampler import CustomSampler
    from variable_batch_size.schedule import Schedule
    from variable_batch_size.sinks import JsonLines, ProgressBar, TensorBoard
    from variable_batch_size.stages import Stages
    from variable_batch_size.stopping import EXIT_STOPPED
    from variable_batch_size.trace import Trace

_HOME = {
    "Checkpoint": "checkpoint",
    "EXIT_STOPPED": "stopping",
    "JsonLines": "sinks",
    "Log": "logs",
    "Metrics": "metrics",
    "ProgressBar": "sinks",
    "TensorBoard": "sinks",
    "share_buffers": "buffers",
    "Workload": "comparison.workload",
    "Conversion": "convert",
    "convert_recording": "convert",
    "step_seconds": "convert",
    "constant_trace": "generate",
    "doubling_ramp": "generate",
    "growth_for_decay": "generate",
    "linear_ramp": "generate",
    "seesaw": "generate",
    "spot_market": "generate",
    "launch": "launcher",
    "AdaScaleOptimizer": "optimizer",
    "AdamRuleOptimizer": "optimizer",
    "AdamScaleOptimizer": "optimizer",
    "LEGWRuleOptimizer": "optimizer",
    "AdaScaleRule": "rules",
    "AdamRule": "rules",
    "AdamScaleRule": "rules",
    "LEGWRule": "rules",
    "Transition": "rules",
    "ema_decay": "rules",
    "Noise": "noise",
    "NoiseAverage": "noise",
    "follow_progress": "progress",
    "ConstantOptimizer": "optimizer",
    "CustomOptimizer": "optimizer",
    "LinearRuleMomentumOptimizer": "optimizer",
    "LinearRuleOptimizer": "optimizer",
    "RootRuleOptimizer": "optimizer",
    "Plan": "plan",
    "plot_plan": "plot",
    "Recording": "recording",
    "conversion_report": "report",
    "plan_report": "report",
    "trace_report": "report",
    "ConstantRule": "rules",
    "LinearMomentumRule": "rules",
    "LinearRule": "rules",
    "RootRule": "rules",
    "Rule": "rules",
    "Step": "rules",
    "CustomSampler": "sampler",
    "Schedule": "schedule",
    "Stages": "stages",
    "Trace": "trace",
}

__all__ = [
    "EXIT_STOPPED",
    "AdaScaleOptimizer",
    "AdaScaleRule",
    "AdamRule",
    "AdamRuleOptimizer",
    "AdamScaleOptimizer",
    "AdamScaleRule",
    "Checkpoint",
    "ConstantOptimizer",
    "ConstantRule",
    "Conversion",
    "CustomOptimizer",
    "CustomSampler",
    "JsonLines",
    "LEGWRule",
    "LEGWRuleOptimizer",
    "LinearMomentumRule",
    "LinearRule",
    "LinearRuleMomentumOptimizer",
    "LinearRuleOptimizer",
    "Log",
    "Metrics",
    "Noise",
    "NoiseAverage",
    "Plan",
    "ProgressBar",
    "Recording",
    "RootRule",
    "RootRuleOptimizer",
    "Rule",
    "Schedule",
    "Stages",
    "Step",
    "TensorBoard",
    "Trace",
    "Transition",
    "Workload",
    "__version__",
    "constant_trace",
    "conversion_report",
    "convert_recording",
    "doubling_ramp",
    "ema_decay",
    "follow_progress",
    "growth_for_decay",
    "launch",
    "linear_ramp",
    "plan_report",
    "plot_plan",
    "seesaw",
    "share_buffers",
    "spot_market",
    "step_seconds",
    "trace_report",
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
