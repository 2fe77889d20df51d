"""The inner optimizer's hyperparameters of one step: set by the rule, then restored."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.optim.probe import corrects_bias_as_adam
from variable_batch_size.optim.proxy import MultiOptimizer, optimizers_of
from variable_batch_size.optim.wrappers import is_zero
from variable_batch_size.rules.adam import corrected_for_bias
from variable_batch_size.rules.numbers import Number
from variable_batch_size.rules.rule import Rule, Step

_TINY = 0.1
_KEY = -1  # of our hooks; those of torch count from 0

Group = dict[str, Any]


class Preconditioner:
    """Holds √v̂ + ε for each parameter that the inner optimizer has updated often enough.

    After a few updates v̂ is the mean of a few squares, and its inverse has no finite mean or variance: some elements
    would make most of the norms. For the same reason, elements whose √v̂ + ε is below a tenth of the root mean square
    of their tensor, such as those without a gradient so far, are left out by a divisor of infinity.

    Args:
        inner: Adam, or an optimizer of its family.
        min_updates: how many updates a parameter needs before its second moments are used.

    Attributes:
        divisors: of each parameter that has second moments.
    """

    def __init__(self, inner: Optimizer, min_updates: int = 1) -> None:
        self._inner, self._min_updates = inner, min_updates
        self.divisors: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def refresh(self, *, has_updated: bool = True) -> None:
        """After an update, or after another state was loaded: recompute the divisors."""
        for group in self._inner.param_groups:
            updated: dict[Any, list[tuple[torch.Tensor, Any]]] = {}  # by the device that has the numbers of updates
            for p in group["params"]:
                num_updates = self._num_updates(p, has_updated=has_updated)
                is_on_host = isinstance(num_updates, float)
                if num_updates is None or (is_on_host and num_updates < self._min_updates):
                    self.divisors.pop(p, None)  # of the state before the one that was loaded
                else:
                    updated.setdefault(None if is_on_host else num_updates.device, []).append((p, num_updates))
            for device, pairs in updated.items():
                parameters, n = map(list, zip(*pairs, strict=True))
                states = [self._inner.state[p] for p in parameters]
                moments = [state.get("max_exp_avg_sq", state["exp_avg_sq"]) for state in states]
                settings = (group["betas"][1], group["eps"], self._min_updates)
                self._copy(parameters, divisors_of(moments, n if device is None else torch.stack(n), *settings))

    def _num_updates(self, p: torch.Tensor, *, has_updated: bool) -> Any:
        """The updates of a parameter: a float, or a tensor on an accelerator, never read; None before the first."""
        state = self._inner.state.get(p, {})
        if "exp_avg_sq" not in state or "step" not in state:
            if has_updated and p.grad is not None:
                raise RuntimeError(
                    f"`inner` must keep the second moment of each gradient in its state `exp_avg_sq`, and the "
                    f"number of updates in `step`, as Adam does, but {type(self._inner).__name__} has only "
                    f"{sorted(state)}"
                )
            return None
        step = state["step"]
        return step if isinstance(step, torch.Tensor) and step.device.type != "cpu" else float(step)

    def _copy(self, parameters: list[torch.Tensor], divisors: Sequence[torch.Tensor]) -> None:
        for p, divisor in zip(parameters, divisors, strict=True):
            if p not in self.divisors or self.divisors[p].dtype != divisor.dtype:
                self.divisors[p] = torch.empty_like(divisor)
        torch._foreach_copy_([self.divisors[p] for p in parameters], list(divisors))


def divisors_of(
    moments: list[torch.Tensor], num_updates: list[float] | torch.Tensor, beta: float, eps: float, min_updates: int
) -> Sequence[torch.Tensor]:
    """√v̂ + ε of second moments v, and infinity for elements that are left out, in few operations for all tensors.

    Args:
        num_updates: of each tensor; a vector on its device if the host does not know them.
    """
    if isinstance(num_updates, torch.Tensor):
        roots = torch._foreach_div(moments, (1 - beta**num_updates).unbind())
    else:
        roots = torch._foreach_div(moments, [1 - beta**n for n in num_updates])
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, eps)
    limits = torch._foreach_norm(roots)
    torch._foreach_mul_(limits, [_TINY / math.sqrt(root.numel() or 1) for root in roots])
    if isinstance(num_updates, torch.Tensor):
        limits = torch.stack(limits).masked_fill_(num_updates < min_updates, math.inf).unbind()
    for root, limit in zip(roots, limits, strict=True):
        root.masked_fill_(root < limit, math.inf)
    return roots


class _History(NamedTuple):
    num_updates: int = 0  # of a parameter
    first: float = 1.0  # the product of their betas
    second: float = 1.0


_KEYS = ("num_updates_of_products", "beta1_product", "beta2_product")
"""The keys of the history in a parameter's state; the values are numbers, which every way of saving a state accepts."""


def is_decoupled(inner: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer decays the weights of a group separately from the gradient, as AdamW does."""
    if "decoupled_weight_decay" in group:  # not in earlier versions of torch and in optimizers of other libraries
        return bool(group["decoupled_weight_decay"])
    return _is_adamw(type(_owner_of(inner, group)).__mro__)


def _owner_of(inner: Optimizer, group: Mapping[str, Any]) -> Optimizer:
    return inner.owner(group) if isinstance(inner, MultiOptimizer) else inner


@functools.cache
def _is_adamw(bases: tuple[type, ...]) -> bool:
    return any("AdamW" in base.__name__ for base in bases)


class BetaHistory:
    """The products of the betas of past updates, for rules that change betas from step to step.

    They are part of the inner optimizer's state of each parameter. If that state is cleared, copied, saved, or replaced
    by an earlier one, so are they. Updates that are not in the products, such as those of another rule, had the betas
    of the group.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        # what commit() stores: the states of an optimizer, a parameter, and its history
        self.pending: list[tuple[Any, torch.Tensor, _History]] = []
        self._is_adam: dict[type[Optimizer], bool] = {}
        self._stored_in: dict[torch.Tensor, Any] = {}

    def is_for(self, group: Mapping[str, Any]) -> bool:
        """Whether the optimizer of a group corrects its bias as Adam does, as far as that can be tested."""
        owner = _owner_of(self._inner, group)
        if type(owner) not in self._is_adam:
            self._is_adam[type(owner)] = "eps" in group and corrects_bias_as_adam(owner, group) is not False
        return self._is_adam[type(owner)]

    def variants(self, group: Mapping[str, Any], settings: Mapping[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
        """The parameters of a group by their history, each with settings that correct Adam's bias for it.

        Parameters that have a gradient are about to be updated.
        """
        by_history: dict[_History, list[Any]] = {}
        owner: Any = _owner_of(self._inner, group)
        zero = owner if is_zero(owner) else None
        states, parameters = (zero.optim if zero else owner).state, group["params"]
        if zero:  # which updates some of them on this rank
            own = {p for part in zero.optim.param_groups for p in part["params"]}
            parameters = [p for p in parameters if p in own]
        for p in parameters:
            if p.grad is not None:
                by_history.setdefault(self._history(states.get(p), p, group), []).append(p)
        if zero and len(by_history) > 1:
            raise RuntimeError(
                "betas that vary need the same number of updates of all parameters in a ZeroRedundancyOptimizer, but "
                "some had no gradient in a step: freeze them, or use a rule that keeps the betas, such as RootRule"
            )
        found, (beta1, beta2), decoupled = [], settings["betas"], is_decoupled(self._inner, group)
        used = {name: group[name] for name in ("lr", "eps", "weight_decay") if name in group} | dict(settings)
        for past, parameters in by_history.items():
            history = _History(past.num_updates + 1, past.first * beta1, past.second * beta2)
            number, *products = history
            self.pending += [(states, p, history) for p in parameters]
            corrected = corrected_for_bias(used, num_updates=number, products=products, is_decoupled=decoupled)
            found.append((group["params"] if zero else parameters, corrected))
        return found or [(group["params"], dict(settings))]

    def _history(self, state: Any, p: torch.Tensor, group: Mapping[str, Any]) -> _History:
        if not state:
            return _History()
        past = _History(*(state[key] for key in _KEYS)) if _KEYS[0] in state else _History()
        step = state["step"]
        if isinstance(step, torch.Tensor) and step.device.type != "cpu" and self._stored_in.get(p) is state:
            return past  # reading the count would wait for the device
        num_updates, (beta1, beta2) = int(step), group["betas"]
        if num_updates < past.num_updates:
            past = _History()
        number = num_updates - past.num_updates
        return _History(num_updates, past.first * beta1**number, past.second * beta2**number)

    def commit(self) -> None:
        for states, p, history in self.pending:
            if state := states.get(p):
                state.update(zip(_KEYS, history, strict=True))
                self._stored_in[p] = state


class _Applied(NamedTuple):
    group: Group
    used: Group  # the same, or a part of it with some of its parameters
    before: Group  # the values of the group that were replaced
    values: Group  # by these


class StepHyperparameters:
    """Applies the settings that a rule returns for one step to the parameter groups, and restores them afterwards.

    What the optimizer itself changes in its step is kept, as a setting at the reference batch size. Its hooks after
    the step run with the settings restored, so that a scheduler may step there.
    """

    def __init__(self, inner: Optimizer, communicator: Communicator) -> None:
        self._inner, self._optimizers, self._communicator = inner, optimizers_of(inner), communicator
        self.beta_history = BetaHistory(inner)
        self._lr_tensors: dict[int, torch.Tensor] = {}  # by the number of the group
        if communicator.is_one_program:  # now: results of a graph are ordered by the age of their tensors
            devices = [group["params"][0].device for group in inner.param_groups if group["params"]]
            self._lr_tensors = {number: self._new_lr(device) for number, device in enumerate(devices)}
        self._lrs: list[Number] = []  # of all groups in this step
        # of each optimizer: its list of groups, their order before the step, and what was applied
        self._applied: dict[Optimizer, tuple[list[Group], list[Group], list[_Applied]]] = {}

    def __getstate__(self) -> dict[str, Any]:  # torch cannot pickle a tensor on XLA that requires a gradient
        return {**self.__dict__, "_lr_tensors": {number: lr.device for number, lr in self._lr_tensors.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lr_tensors = {number: self._new_lr(device) for number, device in state["_lr_tensors"].items()}

    def applied(self, rule: Rule, step: Step, factors: Sequence[Number]) -> "StepHyperparameters":
        """Apply the settings of a step; they are restored at the end of ``with``, whose value is the learning rates."""
        if isinstance(self._inner, MultiOptimizer):
            self._inner.check_groups()
        self._lrs, self._depth = [], 0
        pairs = list(zip(self._inner.param_groups, factors, strict=True))
        try:
            for optimizer in self._optimizers:
                groups: list[Group] = optimizer.param_groups
                applied: list[_Applied] = []
                self._applied[optimizer] = groups, list(groups), applied
                number = len(self._lrs)
                for group, factor in pairs[number : number + len(groups)]:
                    applied += self._apply(optimizer, group, rule.rule_for_group(len(self._lrs))[0], step, factor)
                groups[:] = [one.used for one in applied]
                if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper of another library may lack them
                    optimizer._optimizer_step_pre_hooks[_KEY] = self._before_step
                    optimizer._optimizer_step_post_hooks[_KEY] = self._after_step
                    optimizer._optimizer_step_post_hooks.move_to_end(_KEY, last=False)  # type: ignore[attr-defined]
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __enter__(self) -> list[Number]:
        return self._lrs

    def __exit__(self, kind: type[BaseException] | None = None, *exception: object) -> None:
        if kind is None and self.beta_history.pending:
            self.beta_history.commit()
        self.beta_history.pending = []
        for optimizer in list(self._applied):  # whose step() has called no hooks
            self._restore(optimizer)
        for optimizer in self._optimizers:
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):
                optimizer._optimizer_step_pre_hooks.pop(_KEY, None)
                optimizer._optimizer_step_post_hooks.pop(_KEY, None)

    def _before_step(self, *_: object) -> None:
        self._depth += 1  # torch calls hooks again where step() of a class calls step() of its base class

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._depth -= 1
        if not self._depth and optimizer in self._applied:
            self._restore(optimizer)

    def _restore(self, optimizer: Optimizer) -> None:
        groups, found, applied = self._applied.pop(optimizer)
        groups[:] = found
        for group, used, before, values in applied:
            if used is not group:
                own = {name: value for name, value in used.items() if name not in values}  # such as a step count
                group.update(own)
            for name, value in values.items():
                if name != "params" and used[name] is not value:
                    group[name] = _unscaled(used[name], value, before[name])
                elif used is group:
                    group[name] = before[name]

    def _apply(self, optimizer: Optimizer, group: Group, rule: Rule, step: Step, factor: Number) -> list[_Applied]:
        """The group with its settings of the step; in several parts where these are not the same for all parameters."""
        # rules look in the group for the flag that weight decay is decoupled, which not every AdamW sets
        is_unflagged = "decoupled_weight_decay" not in group and _is_adamw(type(optimizer).__mro__)
        flagged = {**group, "decoupled_weight_decay": True} if is_unflagged else group
        settings = rule.merged_settings(flagged, step, factor)
        self._lrs.append(settings["lr"] if isinstance(factor, torch.Tensor) else float(settings["lr"]))
        if "betas" in settings and (rule.corrects_bias or self.beta_history.is_for(group)):
            variants = self.beta_history.variants(group, settings)
            if len(variants) > 1:
                values_of_parts = [{**self._traced(values), "params": params} for params, values in variants]
                return [_Applied(group, group | values, dict(group), values) for values in values_of_parts]
            settings = variants[0][1]
        values = self._traced(settings)
        if isinstance(factor, torch.Tensor):
            values["lr"] = self._in_place(len(self._lrs) - 1, settings["lr"])
        before = {name: group[name] for name in values}
        group.update(values)
        return [_Applied(group, group, before, values)]

    def _in_place(self, group: int, lr: torch.Tensor) -> torch.Tensor:
        """A learning rate that was computed on the device, always in the same tensor, as fused optimizers take it."""
        if group not in self._lr_tensors:
            self._lr_tensors[group] = self._new_lr(lr.device)
        return self._lr_tensors[group].copy_(lr.view(()))

    def _new_lr(self, device: torch.device) -> torch.Tensor:
        dtype, is_traced = torch.float64 if device.type == "cpu" else torch.float32, self._communicator.is_one_program
        own = torch.zeros((), dtype=dtype, device="cpu" if is_traced else device)  # else it would be part of a graph
        return own.to(device).requires_grad_(is_traced)  # SGD reads a tensor that needs no gradient

    def _traced(self, settings: Mapping[str, Any]) -> Group:
        """The settings in a form in which they may change without a recompilation."""
        communicator, values = self._communicator, dict(settings)
        for name, value in settings.items():
            if isinstance(value, float):
                values[name] = communicator.traced_scalar(value)
            elif name == "betas":
                values[name] = tuple(map(communicator.traced_beta, value))
        return values


def _unscaled(changed: Any, value: Any, before: Any) -> Any:
    """A setting that the optimizer has changed in its step, relative to the value that it had there."""
    if isinstance(value, torch.Tensor):
        return torch.where(value == 0, changed, changed * (before / value))
    return changed * (before / value) if isinstance(value, float) and value else changed
