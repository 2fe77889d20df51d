"""The inner optimizer's hyperparameters of one step: set by the rule, then restored."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.optim.proxy import MultiOptimizer
from variable_batch_size.rules.adam import corrected_for_bias
from variable_batch_size.rules.rule import Rule, Step


class Preconditioner:
    """Holds √v̂ + ε for each parameter that the inner optimizer has updated.

    Args:
        inner: Adam, or an optimizer of its family.

    Attributes:
        divisors: of each parameter that has a second moment.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self.divisors: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def refresh(self, *, has_updated: bool = True) -> None:
        """After an update, or after another state was loaded: recompute the divisors."""
        for group in self._inner.param_groups:
            beta, eps = group["betas"][1], group["eps"]
            for p in group["params"]:
                state = self._inner.state.get(p, {})
                if "exp_avg_sq" not in state:
                    if has_updated and p.grad is not None:
                        raise RuntimeError(
                            f"`inner` must keep the second moment of each gradient in its state `exp_avg_sq`, as Adam "
                            f"does, but {type(self._inner).__name__} has none"
                        )
                    self.divisors.pop(p, None)  # of the state before the one that was loaded
                    continue
                num_updates = state["step"]
                # read from the host if it is there; a step count on the device stays there
                if not isinstance(num_updates, torch.Tensor) or num_updates.device.type == "cpu":
                    num_updates = float(num_updates)
                second_moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
                root = (second_moment / (1 - beta**num_updates)).sqrt_().add_(eps)
                if p in self.divisors and self.divisors[p].dtype == root.dtype:
                    self.divisors[p].copy_(root)
                else:
                    self.divisors[p] = root


class _History(NamedTuple):
    """Of a parameter: its number of updates, and the products of their betas."""

    num_updates: int
    first: float
    second: float


def is_decoupled(inner: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer decays the weights of a group separately from the gradient, as AdamW does.

    Its group has a flag for that. Earlier versions of torch and optimizers outside of it have none: there the name of
    the class decides.
    """
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    return _is_adamw(type(inner.owner(group) if isinstance(inner, MultiOptimizer) else inner).__mro__)


@functools.cache
def _is_adamw(bases: tuple[type, ...]) -> bool:
    return any("AdamW" in base.__name__ for base in bases)


class BetaHistory:
    """The products of the betas of past updates, for rules that change betas from step to step.

    Args:
        inner: Adam, or an optimizer of its family.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._histories: dict[torch.Tensor, _History] = {}

    def variants(self, group: Mapping[str, Any], settings: Mapping[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
        """The parameters of a group by their history, each with settings that correct Adam's bias for it.

        Parameters that have a gradient are counted as updated.
        """
        by_history: dict[_History, list[Any]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_history.setdefault(self._after_update(p, group, settings["betas"]), []).append(p)
        decay = {"weight_decay": group["weight_decay"]} if "weight_decay" in group else {}
        found = []
        for history, parameters in by_history.items():
            self._histories.update(dict.fromkeys(parameters, history))
            corrected = corrected_for_bias(
                {**decay, **settings},
                num_updates=history.num_updates,
                products=(history.first, history.second),
                is_decoupled=is_decoupled(self._inner, group),
            )
            found.append((parameters, corrected))
        return found or [(group["params"], dict(settings))]

    def _after_update(self, p: torch.Tensor, group: Mapping[str, Any], betas: tuple[float, float]) -> _History:
        past = self._histories.get(p)
        if past is None:  # updates before this run used the betas of the group
            num_updates = int(self._inner.state.get(p, {}).get("step", 0))
            past = _History(num_updates, *(beta**num_updates for beta in group["betas"]))
        return _History(past.num_updates + 1, past.first * betas[0], past.second * betas[1])

    def state_dict(self) -> dict[int, dict[str, float]]:
        """The histories, by the index of the parameter."""
        numbered = enumerate(p for group in self._inner.param_groups for p in group["params"])
        return {number: self._histories[p]._asdict() for number, p in numbered if p in self._histories}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        parameters = [p for group in self._inner.param_groups for p in group["params"]]
        self._histories = {parameters[number]: _History(**history) for number, history in state.items()}


Group = dict[str, Any]


class StepHyperparameters:
    """Gives the parameter groups the settings that a rule returns for one step, and restores them afterwards.

        with hyperparameters.applied(rule, step, factors) as lrs:
            inner.step()

    Args:
        inner: the optimizer that has the groups.
        communicator: which returns numbers in a form that may change without another compilation.

    Attributes:
        beta_history: of betas that vary; part of the state of a run.
    """

    def __init__(self, inner: Optimizer, communicator: Communicator) -> None:
        self._inner = inner
        self._communicator = communicator
        self.beta_history = BetaHistory(inner)
        self._groups: list[Group] = []  # the inner optimizer's list of groups, and its content before
        self._found: list[Group] = []
        self._lrs: list[float] = []
        self._before: list[tuple[Group, Group]] = []  # groups, and the values that were replaced
        self._parts: list[tuple[Group, Group, Group]] = []  # groups, a part of each, and the values of that part only

    def applied(self, rule: Rule, step: Step, factors: Sequence[float]) -> StepHyperparameters:
        """Apply the settings of a step; they are restored at the end of ``with``, whose value is the learning rates."""
        self._groups = self._inner.param_groups
        self._found, self._lrs = list(self._groups), []
        try:
            applied: list[Group] = []
            for number, (group, factor) in enumerate(zip(self._found, factors, strict=True)):
                applied += self._apply(group, rule.rule_for_group(number)[0], step, factor)
            self._groups[:] = applied
        except BaseException:
            self._restore()
            raise
        return self

    def __enter__(self) -> list[float]:
        return self._lrs

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _apply(self, group: Group, rule: Rule, step: Step, factor: float) -> list[Group]:
        """The group with its settings of the step; in several parts where these are not the same for all parameters."""
        # rules read that weight decay is decoupled from the group, which not every AdamW has
        is_flagged = not is_decoupled(self._inner, group) or "decoupled_weight_decay" in group
        settings = rule.settings(group if is_flagged else {**group, "decoupled_weight_decay": True}, step, factor)
        self._lrs.append(float(settings["lr"] if "lr" in settings else group["lr"]))
        if "betas" in settings:
            variants = self.beta_history.variants(group, settings)
            if len(variants) > 1:
                values_of_parts = [{**self._traced(values), "params": params} for params, values in variants]
                parts = [(group, group | values, values) for values in values_of_parts]
                self._parts += parts
                return [part for _, part, _ in parts]
            settings = variants[0][1]
        values = self._traced(settings)
        self._before.append((group, {name: group[name] for name in values}))
        group.update(values)
        return [group]

    def _traced(self, settings: Group) -> Group:
        """The settings in a form in which they may change without another compilation."""
        communicator = self._communicator
        values = dict(settings)
        for name, value in settings.items():
            if isinstance(value, float):
                values[name] = communicator.traced_scalar(value)
            elif name == "betas":
                values[name] = tuple(map(communicator.traced_beta, value))
        return values

    def _restore(self) -> None:
        self._groups[:] = self._found
        for group, values in self._before:
            group.update(values)
        for group, part, values in self._parts:  # keep what the optimizer has written there, such as a step count
            group.update({name: value for name, value in part.items() if name not in values})
        self._before, self._parts = [], []
