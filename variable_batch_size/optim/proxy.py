"""OptimizerProxy: a torch.optim.Optimizer around one or several inner optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class OptimizerProxy(Optimizer):
    """Reads everything that an optimizer has from the inner one; a copy would go stale when a state is loaded.

    Args:
        inner: any optimizer of torch that updates from one gradient, or several for one model.
    """

    def __init__(self, inner: Inner) -> None:
        inner = inner if isinstance(inner, Optimizer) or not isinstance(inner, Sequence) else MultiOptimizer(inner)
        if not isinstance(inner, Optimizer) or isinstance(inner, OptimizerProxy):
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
    return inner.optimizers if isinstance(inner, MultiOptimizer) else [inner]


def name_of(inner: Optimizer) -> str:
    """The name of an optimizer's class, or of the one of torch that it is made of."""
    names = [kind.__name__ for kind in type(inner).__mro__ if kind.__module__.startswith("torch.optim.")]
    return next((name for name in names if name != "Optimizer"), type(inner).__name__)


Inner = Optimizer | Sequence[Optimizer]
Group = dict[str, Any]


class MultiOptimizer(Optimizer):
    """Has the parameter groups of all, in their order, and the state of all.

    Args:
        optimizers: each with parameters of its own.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
            raise ValueError(f"`inner` must be one or several optimizers of torch, got {kinds}")
        self.optimizers = list(optimizers)
        super().__setstate__({})  # hooks and profiling, as Optimizer.__init__ sets them up
        self._collect()
        parameters = [p for group in self.param_groups for p in group["params"]]
        if len(set(parameters)) < len(parameters):
            raise ValueError("`inner` must be optimizers with parameters of their own, got one that several have")

    def __getstate__(self) -> dict[str, Any]:
        # a scheduler puts a step() there that is bound to this very object
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _collect(self) -> None:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.param_groups = groups
        self._num_groups = [len(optimizer.param_groups) for optimizer in self.optimizers]
        self._owners = {p: owner for owner in self.optimizers for group in owner.param_groups for p in group["params"]}

    @property
    def name(self) -> str:
        """Of all: ``Muon and AdamW``."""
        return " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizers[0].defaults

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # type: ignore[override]
        return _States(self._owners)

    def owner(self, group: Mapping[str, Any]) -> Optimizer:
        """The optimizer that a parameter group, or a part of one, belongs to."""
        return next((self._owners[p] for p in group["params"]), self.optimizers[-1])

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Let each make its step, on its own of the parameter groups as they are now."""
        for optimizer, num_groups in zip(self.optimizers, self._num_groups, strict=True):
            found = optimizer.param_groups
            if len(found) != num_groups:
                raise RuntimeError(
                    f"{type(optimizer).__name__} had {num_groups} parameter groups and has {len(found)}: add a group "
                    "to the optimizer of this library, which gives it to the last of several"
                )
            optimizer.param_groups = [group for group in self.param_groups if self.owner(group) is optimizer]
            try:
                optimizer.step()
            finally:
                optimizer.param_groups = found

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters to the last one."""
        self.optimizers[-1].add_param_group(param_group)
        self._collect()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._collect()


class _States(Mapping[torch.Tensor, Any]):
    """The state of each parameter, at its owner."""

    def __init__(self, owners: Mapping[torch.Tensor, Optimizer]) -> None:
        self._owners = owners

    def __getitem__(self, p: torch.Tensor) -> Any:
        return self._owners[p].state[p]

    def get(self, p: torch.Tensor, default: Any = None) -> Any:
        return self._owners[p].state.get(p, default)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (p for p, owner in self._owners.items() if p in owner.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)
