"""The inner optimizer's hyperparameters of one step: set by the rule, then restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.optim.proxy import MultiOptimizer
from variable_batch_size.rules.adam import corrected_for_bias
from variable_batch_size.rules.rule import Rule, Step


class Preconditioner:
    """Keeps √v̂ + ε for each parameter that the inner optimizer has updated.

    Args:
        inner: Adam, or an optimizer of its kind.

    Attributes:
        divisors: for each parameter that has a second moment.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self.divisors: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def refresh(self, *, has_updated: bool = True) -> None:
        """After an update, or when another state was loaded: let the divisors be those of the state as it is now."""
        for group in self._inner.param_groups:
            beta, eps = group["betas"][1], group["eps"]
            for p in group["params"]:
                state = self._inner.state.get(p, {})
                if "exp_avg_sq" not in state:
                    if has_updated and p.grad is not None:
                        raise RuntimeError(
                            f"`inner` must keep the second moment of each gradient as Adam does, in its state "
                            f"`exp_avg_sq`, but {type(self._inner).__name__} has none"
                        )
                    self.divisors.pop(p, None)  # of a state that another one was loaded in place of
                    continue
                num_updates = state["step"]
                # read from the host if it is there; one that is on the device stays there
                if not isinstance(num_updates, torch.Tensor) or num_updates.device.type == "cpu":
                    num_updates = float(num_updates)
                second_moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
                root = (second_moment / (1 - beta**num_updates)).sqrt_().add_(eps)
                if p in self.divisors and self.divisors[p].dtype == root.dtype:
                    self.divisors[p].copy_(root)
                else:
                    self.divisors[p] = root


class _History(NamedTuple):
    """Of a parameter: how many updates it has had, and the products of their betas."""

    num_updates: int
    first: float
    second: float


def is_decoupled(inner: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer decays the weights of a group apart from the gradient, as AdamW does.

    Where its group does not say so, as in earlier versions of torch and outside of it, the name of its class does.
    """
    owner = inner.owner(group) if isinstance(inner, MultiOptimizer) else inner
    is_named_so = any("AdamW" in kind.__name__ for kind in type(owner).__mro__)
    return bool(group.get("decoupled_weight_decay", is_named_so))


class BetaHistory:
    """Remembers the betas of past updates, for rules that change them from step to step.

    Args:
        inner: Adam, or an optimizer of its kind.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._histories: dict[torch.Tensor, _History] = {}

    def variants(self, group: Mapping[str, Any], settings: Mapping[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
        """The parameters of a group that have the same past, and settings with which Adam's bias is corrected for them.

        The update of those that have a gradient is then taken as made.
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
        if past is None:  # what the inner optimizer has done without us was done with the betas of the group
            num_updates = int(self._inner.state.get(p, {}).get("step", 0))
            past = _History(num_updates, *(beta**num_updates for beta in group["betas"]))
        return _History(past.num_updates + 1, past.first * betas[0], past.second * betas[1])

    def state_dict(self) -> dict[int, dict[str, float]]:
        """The histories by the number of the parameter."""
        numbered = enumerate(p for group in self._inner.param_groups for p in group["params"])
        return {number: self._histories[p]._asdict() for number, p in numbered if p in self._histories}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        parameters = [p for group in self._inner.param_groups for p in group["params"]]
        self._histories = {parameters[number]: _History(**history) for number, history in state.items()}


Group = dict[str, Any]


class StepHyperparameters:
    """Gives the parameter groups what a rule wants them to have in one step.

    Args:
        inner: the optimizer whose groups they are.
        communicator: knows in which form numbers may change without compiling again.

    Attributes:
        adam_bias: what is remembered of betas that vary; part of the state of a run.
    """

    def __init__(self, inner: Optimizer, communicator: Communicator) -> None:
        self._inner = inner
        self._communicator = communicator
        self.adam_bias = BetaHistory(inner)

    @contextmanager
    def of_step(self, rule: Rule, step: Step, factors: Sequence[float]) -> Iterator[list[float]]:
        """Within, the groups have the settings that the rule gives this step; yields their learning rates."""
        groups = self._inner.param_groups
        found = list(groups)
        changed: list[tuple[Group, Group]] = []  # groups, and their values before
        split: list[tuple[Group, Group, Group]] = []  # groups, a part of them, and what was given to that alone
        try:
            parts: list[Group] = []
            lrs = []
            for number, (group, factor) in enumerate(zip(found, factors, strict=True)):
                settings = rule.rule_for_group(number)[0].settings(self._as_rules_see(group), step, factor)
                lrs.append(float(settings.get("lr", group["lr"])))
                variants = [(params, self._varying(values)) for params, values in self._variants(group, settings)]
                if len(variants) == 1:
                    values = variants[0][1]
                    changed.append((group, {name: group[name] for name in values}))
                    group.update(values)
                    parts.append(group)
                else:
                    own = [{**values, "params": params} for params, values in variants]
                    split += [(group, group | values, values) for values in own]
                    parts += [part for _, part, _ in split[-len(own) :]]
            groups[:] = parts
            yield lrs
        finally:
            groups[:] = found
            for group, values in changed:
                group.update(values)
            for group, part, values in split:  # what the optimizer has noted there, such as a count of its own
                group.update({name: value for name, value in part.items() if name not in values})

    def _as_rules_see(self, group: Group) -> Group:
        """The group, which says if its weight decay is decoupled also where AdamW does not."""
        return {**group, "decoupled_weight_decay": True} if is_decoupled(self._inner, group) else group

    def _variants(self, group: Group, settings: Group) -> list[tuple[list[Any], Group]]:
        """The parameters of the group and their settings; several where these are not the same for all."""
        return self.adam_bias.variants(group, settings) if "betas" in settings else [(group["params"], settings)]

    def _varying(self, settings: Group) -> Group:
        """The settings in a form in which they may change without compiling again."""
        traced_scalar, share = self._communicator.traced_scalar, self._communicator.traced_beta
        values = {name: traced_scalar(value) if isinstance(value, float) else value for name, value in settings.items()}
        return values | {name: tuple(map(share, settings[name])) for name in ("betas",) if name in settings}
