"""What page.js draws: the curves of a comparison as plain data."""

from __future__ import annotations

import math
from typing import Any

from variable_batch_size.comparison.experiment import REFERENCE
from variable_batch_size.comparison.report.arm import Arm, Arms
from variable_batch_size.comparison.report.curves import curves
from variable_batch_size.comparison.results import Results


def charts(results: Results, arms: Arms) -> dict[str, Any]:
    """The curves of the yardstick and of each arm, by trace, and the name of the metric."""
    settings, reference = results.settings(), arms.reference

    def of(arm: Arm) -> dict[str, Any]:
        return {"rule": arm.rule, **_plain(curves(results, arm))}

    return {
        "metric": settings.metric_name + settings.unit,
        "reference": {**of(reference), "rule": REFERENCE} if reference is not None else None,
        "traces": {name: [of(arm) for arm in on_trace] for name, on_trace in arms.on_traces.items()},
    }


def _plain(found: Any) -> Any:
    """Curves as JSON knows them, with as many digits as a picture needs; NaN becomes null, a gap."""
    if isinstance(found, dict):
        return {name: _plain(part) for name, part in found.items()}
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in found.tolist()]
