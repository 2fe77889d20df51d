"""Names of earlier versions, which still work and will be removed in 0.3."""

import warnings
from collections.abc import Iterator
from typing import Any

from variable_batch_size.optim.attachments import Follower
from variable_batch_size.rules.registry import make_rule as make_rule
from variable_batch_size.rules.rule import Step as Step

INSTEAD = {
    "make_rule": "vbs.rules.make_rule, or the rule's name",
    "Step": "vbs.rules.Step",
    "epochs": "optimizer.epochs(num_epochs)",
    "follow_samples": 'optimizer.attach(scheduler, per="samples", every=N)',
    "follow_weight": 'optimizer.attach(scheduler, per="tokens", every=N)',
    "follow_progress": 'optimizer.attach(scheduler, per="progress")',
}


def warn(name: str) -> None:
    """Warn about the use of a name, in the module that uses it."""
    warnings.warn(f"vbs.{name} is deprecated: use {INSTEAD[name]}", DeprecationWarning, stacklevel=3)


def epochs(optimizer: Any, num_epochs: int) -> Iterator[int]:
    """The remaining epochs of a run."""
    if not hasattr(optimizer, "epochs"):
        raise ValueError(f"`optimizer` must be a CustomOptimizer, got {type(optimizer).__name__}")
    return optimizer.epochs(num_epochs)  # type: ignore[no-any-return]


def follow_samples(scheduler: Any, optimizer: Any, *, per: int) -> None:
    """Step a scheduler for each `per` samples; called after each ``optimizer.step()``."""
    Follower.checked(scheduler, "samples", per).follow(optimizer)


def follow_weight(scheduler: Any, optimizer: Any, *, per: float) -> None:
    """Step a scheduler for each `per` of the minibatches' weight; called after each ``optimizer.step()``."""
    if not optimizer.is_accumulating:
        Follower.checked(scheduler, "tokens", per).follow(optimizer)


def follow_progress(scheduler: Any, optimizer: Any) -> None:
    """Step a scheduler for each step at `ref_batchsize` that the run is worth."""
    Follower.checked(scheduler, "progress", 1).follow(optimizer)
