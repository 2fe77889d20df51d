"""What a framework saves of an optimizer, with a description of the run, so that no other run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from variable_batch_size.training.description import differences
from variable_batch_size.training.optimizer import CustomOptimizer

_RUN_KEY = "variable_batch_size_run"


def state_of(optimizer: CustomOptimizer) -> dict[str, Any]:
    """The optimizer's state, and what its run is."""
    return {**optimizer.state_dict(), _RUN_KEY: dict(optimizer.description)}


def load_state(optimizer: CustomOptimizer, state: Mapping[str, Any]) -> None:
    """Take over such a state, if it is of the same run; one without a description is taken as it is."""
    refuse_another_run(optimizer, state.get(_RUN_KEY))
    optimizer.load_state_dict({name: value for name, value in state.items() if name != _RUN_KEY})


def refuse_another_run(optimizer: CustomOptimizer, saved: Mapping[str, object] | None) -> None:
    """Raise if what was saved is of another run than the optimizer's, whose steps would have other samples."""
    found = differences(saved, optimizer.description) if saved is not None else []
    if found:
        raise ValueError(f"the checkpoint was saved by another run: {'; '.join(found)}")
