"""What Accelerate has prepared by itself, and would deal, count or leave out beside the library: refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from variable_batch_size.training.owners import alive
from variable_batch_size.training.wrapper import Wrapper, optimizers_of

_INSTEAD = (
    "call prepare(accelerator, …) of variable_batch_size.integrations.accelerate instead, and in Transformers take the "
    "VariableBatchTrainer of variable_batch_size.integrations.transformers"
)

_OPTIMIZER = f"accelerator.prepare was given an optimizer of this library, or its inner one: {_INSTEAD}"
_SCHEDULER = f"accelerator.prepare was given a scheduler, which would count minibatches: {_INSTEAD}"
_LOADER = f"accelerator.prepare was given a loader that the sampler deals to already: {_INSTEAD}"
_STREAM = f"accelerator.prepare was given a loader that the stream deals to already: {_INSTEAD}"
_SKIP = (
    "skip_first_batches would leave out minibatches that the optimizer counts: `for epoch in vbs.epochs(optimizer, …)` "
    "goes on behind the step that was saved, without it"
)

# why it is wrong, what Accelerate makes, and the name under which that has what it is made of
_MADE = (
    (_OPTIMIZER, "optimizer", "AcceleratedOptimizer", "optimizer"),
    (_SCHEDULER, "scheduler", "AcceleratedScheduler", "scheduler"),
    (_LOADER, "data_loader", "DataLoaderShard", "batch_sampler"),
    (_LOADER, "data_loader", "DataLoaderDispatcher", "batch_sampler"),
    (_STREAM, "data_loader", "DataLoaderShard", "dataset"),
    (_STREAM, "data_loader", "DataLoaderDispatcher", "dataset"),
    (_SKIP, "data_loader", "SkipBatchSampler", "batch_sampler"),
    (_SKIP, "data_loader", "SkipDataLoader", "dataset"),
)


def refuse_prepared(parameters: Iterable[torch.Tensor]) -> None:
    """Raise if Accelerate was given the optimizer, the loader or a scheduler of these parameters.

    The prepared optimizer leaves out minibatches where Accelerate accumulates, the loader is dealt out a second time,
    and the scheduler makes a step for each minibatch of each process.
    """
    if "accelerate.accelerator" not in sys.modules:
        return
    kinds = [getattr(sys.modules[f"accelerate.{module}"], kind) for _, module, kind, _ in _MADE]
    things = alive(Wrapper, *kinds)  # all in one search, which goes through everything there is
    own = _of(set(parameters), things)
    for kind, (sentence, _, _, name) in zip(kinds, _MADE, strict=True):
        theirs = [thing for thing in things if issubclass(type(thing), kind)]
        if any(_has(thing, name, own) or any(thing is one for one in own) for thing in theirs):
            raise RuntimeError(sentence)
    _refuse_accumulation(sys.modules["accelerate.state"].GradientState)


def _of(parameters: set[torch.Tensor], things: list[Any]) -> list[Any]:
    """The optimizers of this library that have some of the parameters, their inner ones, and their samplers."""
    own = [thing for thing in things if isinstance(thing, Wrapper) and hasattr(thing, "inner")]
    own = [one for one in own if not parameters.isdisjoint(one.parameters())]
    inner = [thing for one in own for thing in (one.inner, *optimizers_of(one.inner))]
    return [*own, *inner, *(one.sampler for one in own if hasattr(one, "sampler"))]


def _has(prepared: Any, name: str, own: list[Any]) -> bool:
    """Whether what was prepared is made of one of these things, of a scheduler of one, or of its part for a process."""
    made_of = getattr(prepared, name, None)
    made_of = getattr(made_of, "optimizer" if name == "scheduler" else name, made_of)
    return any(made_of is thing for thing in own)


def _refuse_accumulation(state: Any) -> None:
    if state._shared_state and state().num_steps != 1:
        raise RuntimeError(
            f"Accelerate's `gradient_accumulation_steps` must be 1, got {state().num_steps}: the trace says how many "
            "minibatches make up a step"
        )
