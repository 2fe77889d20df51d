"""OptimizerProxy: a torch.optim.Optimizer around one or several inner optimizers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch.optim import Optimizer

Inner = Optimizer | Sequence[Optimizer]


class OptimizerProxy(Optimizer):
    """Reads all attributes of an optimizer from the inner one; a copy would go stale when a state is loaded."""

    def __init__(self, inner: Inner) -> None:
        inner = inner if isinstance(inner, Optimizer) or not isinstance(inner, Sequence) else MultiOptimizer(inner)
        if not isinstance(inner, Optimizer) or isinstance(inner, OptimizerProxy):
            raise ValueError(f"`inner` must be an optimizer of torch, {_found(inner)}")
        if any(isinstance(one, torch.optim.LBFGS) for one in optimizers_of(inner)):
            raise ValueError("`inner` must update from one gradient, got LBFGS, which needs several: use SGD or Adam")
        if any(isinstance(one, torch.optim.SparseAdam) for one in optimizers_of(inner)):
            raise ValueError("`inner` must take dense gradients, got SparseAdam: use Adam or SGD, also for embeddings")
        if any(len(set(group["params"])) < len(group["params"]) for group in inner.param_groups):
            raise ValueError("`inner` must have each parameter once, got one that is in a group several times")
        if not any(group["params"] for group in inner.param_groups):
            raise ValueError("`inner` must have parameters, got only empty groups")
        for group in inner.param_groups:
            if not isinstance(group.get("lr"), int | float | torch.Tensor):
                rule = f"`inner` must have a learning rate in each parameter group, for rules, got {group.get('lr')!r}"
                advice = "pass a number as its `lr`, and switch off a schedule of its own, such as `relative_step`"
                raise ValueError(f"{rule}: {advice}")
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

    def wrapped(self) -> list[Optimizer]:
        """This optimizer and the inner ones: a scheduler may be of any of them."""
        return [self, self.inner, *optimizers_of(self.inner)]

    def __getstate__(self) -> dict[str, Any]:
        # a scheduler puts a step() there that is bound to this very object
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _found(inner: Any) -> str:
    """What was passed in place of an optimizer of torch, and what to do."""
    if isinstance(inner, OptimizerProxy):
        return f"got {type(inner).__name__}, which has one already: pass its `inner`"
    found = f"the class {inner.__name__}" if isinstance(inner, type) else type(inner).__name__
    return f"got {found}: make one, such as torch.optim.SGD(model.parameters(), lr=0.1)"


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """The parameters of all groups of an optimizer."""
    return list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))


def optimizers_of(inner: Optimizer) -> list[Optimizer]:
    """The optimizers that a MultiOptimizer consists of, or the optimizer itself."""
    return inner.optimizers if isinstance(inner, MultiOptimizer) else [inner]


def name_of(inner: Optimizer) -> str:
    """The name of the class of torch that an optimizer is or inherits from; of its own class if there is none."""
    names = [kind.__name__ for kind in type(inner).__mro__ if kind.__module__.startswith("torch.optim.")]
    return next((name for name in names if name != "Optimizer"), type(inner).__name__)


class _States(dict[torch.Tensor, Any]):
    """The states of all parameters; one that is missing is created in its optimizer, as in torch."""

    owners: dict[torch.Tensor, Optimizer]

    def __missing__(self, p: torch.Tensor) -> Any:
        return self.owners[p].state[p]


class MultiOptimizer(Optimizer):
    """Several optimizers as one, with the parameter groups and the state that each has at the moment."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
            raise ValueError(f"`inner` must be one or several optimizers of torch, got {kinds}")
        self.optimizers = list(optimizers)
        self._num_groups = [len(optimizer.param_groups) for optimizer in optimizers]
        super().__setstate__({})  # hooks and profiling, as above
        if len(self._owners()) < sum(len(group["params"]) for group in self.param_groups):
            raise ValueError("`inner` must be optimizers with parameters of their own, got one that several have")

    __getstate__, __setstate__ = OptimizerProxy.__getstate__, OptimizerProxy.__setstate__

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _owners(self) -> dict[torch.Tensor, Optimizer]:
        return {p: owner for owner in self.optimizers for group in owner.param_groups for p in group["params"]}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The settings that all optimizers have: OneCycleLR cycles one of these in every group."""
        first, *others = (optimizer.defaults for optimizer in self.optimizers)
        return {name: value for name, value in first.items() if all(name in other for other in others)}

    @property
    def state(self) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        owners = self._owners()
        states = _States({p: owner.state[p] for p, owner in owners.items() if p in owner.state})
        states.owners = owners
        return states

    def owner(self, group: Mapping[str, Any]) -> Optimizer:
        """The optimizer that a parameter group belongs to."""
        *others, last = self.optimizers
        return next((one for one in others if any(group is own for own in one.param_groups)), last)

    def check_groups(self) -> None:
        """Raise if a group was added to one of the optimizers: its rule would not be found."""
        for optimizer, num_groups in zip(self.optimizers, self._num_groups, strict=True):
            if len(optimizer.param_groups) != num_groups:
                found = f"{num_groups} parameter groups and has {len(optimizer.param_groups)}"
                advice = "add a group to the optimizer of this library, which adds it to the last of several"
                raise RuntimeError(f"{type(optimizer).__name__} had {found}: {advice}")

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Let each optimizer make its step."""
        for optimizer in self.optimizers:
            optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the last optimizer."""
        self.optimizers[-1].add_param_group(param_group)
        self._num_groups[-1] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
