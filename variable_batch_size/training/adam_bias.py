"""What Adam's betas have been in the updates of each parameter, for the correction of its bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from variable_batch_size.rules.adam import corrected_for_bias
from variable_batch_size.training.together import Together


class _History(NamedTuple):
    """Of a parameter: how many updates it has had, and the products of their betas."""

    num_updates: int
    first: float
    second: float


def is_decoupled(inner: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer decays the weights of a group apart from the gradient, as AdamW does.

    Where its group does not say so, as in earlier versions of torch and outside of it, the name of its class does.
    """
    owner = inner.owner(group) if isinstance(inner, Together) else inner
    is_named_so = any("AdamW" in kind.__name__ for kind in type(owner).__mro__)
    return bool(group.get("decoupled_weight_decay", is_named_so))


class AdamBias:
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
