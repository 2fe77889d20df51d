"""What Accelerate has prepared by itself, and would deal, count or leave out beside the library: refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from variable_batch_size.training.owners import alive
from variable_batch_size.training.wrapper import Wrapper

_INSTEAD = "call prepare(accelerator, …) of variable_batch_size.integrations.accelerate instead of accelerator.prepare"

# what Accelerate makes of something, by the name under which it has that
_MADE_OF = {
    "optimizer": ("accelerate.optimizer", "AcceleratedOptimizer"),
    "scheduler": ("accelerate.scheduler", "AcceleratedScheduler"),
    "batch_sampler": ("accelerate.data_loader", "DataLoaderShard"),
}

_WHAT = {
    "optimizer": "an optimizer of this library, or its inner one",
    "scheduler": "a scheduler, which would count minibatches",
    "batch_sampler": "a loader that the sampler deals to already",
}


def refuse_prepared(parameters: Iterable[torch.Tensor]) -> None:
    """Raise if ``accelerator.prepare`` was given the optimizer, the loader or a scheduler of these parameters.

    The prepared optimizer leaves out minibatches where Accelerate accumulates, the loader is dealt out a second time,
    and the scheduler makes a step for each minibatch of each process.
    """
    if "accelerate.accelerator" not in sys.modules:
        return
    kinds = {name: getattr(sys.modules[module], kind) for name, (module, kind) in _MADE_OF.items()}
    things = alive(Wrapper, *kinds.values())  # all in one search, which goes through everything there is
    own = _of(set(parameters), things)
    for name, kind in kinds.items():
        if any(_has(thing, name, own) for thing in things if issubclass(type(thing), kind)):
            raise RuntimeError(f"accelerator.prepare was given {_WHAT[name]}: {_INSTEAD}")
    if any(issubclass(type(thing), kinds["optimizer"]) for thing in own):
        raise RuntimeError(f"accelerator.prepare was given {_WHAT['optimizer']}: {_INSTEAD}")
    _refuse_accumulation(sys.modules["accelerate.state"].GradientState)


def _of(parameters: set[torch.Tensor], things: list[Any]) -> list[Any]:
    """The optimizers of this library that have some of the parameters, their inner ones, and their samplers."""
    own = [thing for thing in things if isinstance(thing, Wrapper) and hasattr(thing, "inner")]
    own = [one for one in own if not parameters.isdisjoint(one.parameters())]
    return [thing for one in own for thing in (one, one.inner, getattr(one, "sampler", None)) if thing is not None]


def _has(prepared: Any, name: str, own: list[Any]) -> bool:
    """Whether what was prepared is made of one of these things, a scheduler of one of them being another."""
    made_of = getattr(prepared, name, None)
    if name == "scheduler":
        made_of = getattr(made_of, "optimizer", None)
    made_of = getattr(made_of, "batch_sampler", made_of)  # dealt out once more, to several processes
    return any(made_of is thing for thing in own)


def _refuse_accumulation(state: Any) -> None:
    if state._shared_state and state().num_steps != 1:
        raise RuntimeError(
            f"Accelerate's `gradient_accumulation_steps` must be 1, got {state().num_steps}: the trace says how many "
            "minibatches make up a step"
        )
