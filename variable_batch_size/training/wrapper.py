"""Wrapper: a torch.optim.Optimizer around another one, whose parameter groups and state are its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.training.together import Inner, Together


class Wrapper(Optimizer):
    """Reads everything that an optimizer has from the inner one; a copy would go stale when a state is loaded.

    Args:
        inner: any optimizer of torch that updates from one gradient, or several for one model.
    """

    def __init__(self, inner: Inner) -> None:
        inner = inner if isinstance(inner, Optimizer) or not isinstance(inner, Sequence) else Together(inner)
        if not isinstance(inner, Optimizer) or isinstance(inner, Wrapper):
            raise ValueError(f"`inner` must be an optimizer of torch, got {type(inner).__name__}")
        if any(isinstance(one, torch.optim.LBFGS) for one in optimizers_of(inner)):
            raise ValueError(
                "`inner` must update from one gradient, got LBFGS, which evaluates the loss again and again"
            )
        if any(isinstance(one, torch.optim.SparseAdam) for one in optimizers_of(inner)):
            raise ValueError(
                "`inner` must take dense gradients, as sums over minibatches are, got SparseAdam: use Adam or SGD, "
                "also for embeddings with sparse gradients"
            )
        if any(len(set(group["params"])) < len(group["params"]) for group in inner.param_groups):
            raise ValueError("`inner` must have each parameter once, got one that is in a group several times")
        self.inner: Optimizer = inner
        # sets up hooks and profiling as Optimizer.__init__ does, without a second set of param_groups and state
        super().__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of all groups."""
        return (p for group in self.inner.param_groups for p in group["params"])

    def __getstate__(self) -> dict[str, Any]:
        # a scheduler puts a step() there that is bound to this very object
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def optimizers_of(inner: Optimizer) -> list[Optimizer]:
    """The optimizer itself, or the several that it is."""
    return inner.optimizers if isinstance(inner, Together) else [inner]


def name_of(inner: Optimizer) -> str:
    """The name of an optimizer's class, or of the one of torch that it is made of."""
    names = [kind.__name__ for kind in type(inner).__mro__ if kind.__module__.startswith("torch.optim.")]
    return next((name for name in names if name != "Optimizer"), type(inner).__name__)
