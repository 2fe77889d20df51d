"""Arrivals: what each core has in a gradient of a model in `fully_shard`, seen before it is reduced."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from variable_batch_size.cores.groups import Ranks
from variable_batch_size.cores.meshes import dimensions_of
from variable_batch_size.training.fully_sharded import (
    can_keep_unreduced,
    forget_unreduced,
    has_unreduced,
    outermost,
    refuse_left_out,
    sharding_modules,
    with_whole_parameters,
)

See = Callable[[torch.nn.Parameter, torch.Tensor, torch.Tensor], torch.Tensor]


class Arrivals:
    """Has a hook on each whole parameter, which may change a core's gradient, and says when a model reduces.

    Args:
        cores: the ranks of the cores among all processes.
        see: called with a parameter, its whole one and the gradient of that; returns what is to be reduced.

    Attributes:
        is_reducing: whether the backward pass of the next forward pass reduces.
    """

    def __init__(self, cores: Ranks, see: See) -> None:
        self._cores = set(cores)
        self._see = weakref.WeakMethod(see)
        self._modules: list[Any] = []
        self.is_reducing = True

    def watch(self, parameters: list[torch.nn.Parameter]) -> torch.device | None:
        """Have hooks instead of those of another optimizer; the device that whole parameters are on.

        Every core must call it.
        """
        self._modules = sharding_modules(parameters)
        self._let_reduce()
        own, device = set(parameters), None
        for p, whole in with_whole_parameters(self._modules):
            device = whole.device
            self._check_cores(p, whole)
            if p in own:
                self._hook(p, whole)
                own.remove(p)
        refuse_left_out(own)
        return device

    def _hook(self, p: torch.nn.Parameter, whole: torch.nn.Parameter) -> None:
        hooks = whole._backward_hooks or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
            del hooks[key]
        needs_gradient = whole.requires_grad
        whole.requires_grad_(True)  # also of what is frozen, which may not be so for ever
        whole.register_hook(_Hook(self._see, p, whole))  # type: ignore[no-untyped-call]
        whole.requires_grad_(needs_gradient)

    def _let_reduce(self) -> None:
        """See that the mean over all cores is taken, whatever another way to accumulate has set."""
        for module in outermost(self._modules):
            module.register_forward_pre_hook(_Switch(self))
        for module in self._modules:
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(None)  # its own; any number may make it multiply: not on gloo

    def switch(self, module: Any) -> None:
        """Before a forward pass."""
        module.set_is_last_backward(True)
        module.set_requires_gradient_sync(self.is_reducing)

    def give_back_whole(self) -> None:
        """Before an update: let modules gather their parameters anew, if they have kept whole ones."""
        for module in self._modules:
            module.reshard()

    def forget(self) -> None:
        """Drop what was not reduced yet."""
        forget_unreduced(self._modules)

    def check_that_it_can_keep(self) -> None:
        """Raise if what is not reduced yet could not be dropped."""
        if not can_keep_unreduced(self._modules):
            raise ValueError(
                f"`reduce_once` must be False with torch {torch.__version__}, whose fully_shard is another"
            )

    def check_that_it_has_reduced(self) -> None:
        """Raise if something is left that should have been reduced."""
        if has_unreduced(self._modules):
            raise RuntimeError(
                "fully_shard has not reduced the gradients: leave set_requires_gradient_sync alone between forward and "
                "backward pass, and pass `reduce_once=True` to reduce once a step"
            )

    def _check_cores(self, p: torch.nn.Parameter, whole: torch.nn.Parameter) -> None:
        over_cores, of_whole = (
            [len(dimension.ranks) for dimension in dimensions_of(tensor) if self._cores.issuperset(dimension.ranks)]
            for tensor in (p, whole)
        )
        if math.prod(over_cores) != len(self._cores) or of_whole:
            raise ValueError(
                f"fully_shard must be over the {len(self._cores)} cores that the sampler deals different samples: make "
                'both with the same mesh, as fully_shard(model, mesh=mesh["data"]) and process_group=mesh["data"]'
            )


class _Hook:
    """Shows a gradient that has arrived to the gradients of an optimizer, as long as these are there."""

    def __init__(self, see: weakref.WeakMethod[See], p: torch.nn.Parameter, whole: torch.nn.Parameter) -> None:
        self._see, self._p, self._whole = see, weakref.ref(p), weakref.ref(whole)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        see, p, whole = self._see(), self._p(), self._whole()
        return gradient if see is None or p is None or whole is None else see(p, whole, gradient)


class _Switch:
    """Loops that accumulate by themselves switch the reduction off for all but the last of some minibatches."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = weakref.ref(arrivals)

    def __call__(self, module: Any, args: Any) -> None:
        arrivals = self._arrivals()
        if arrivals is not None:
            arrivals.switch(module)
