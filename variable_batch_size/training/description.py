"""What a run is, in words and numbers: what must be the same on all cores, and when it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.optim import Optimizer

from variable_batch_size.rules.rule import Rule
from variable_batch_size.training.dealer import Dealer, Description
from variable_batch_size.training.together import Together


def description_of(sampler: Dealer, rule: Rule, inner: Optimizer, ref_batchsize: int) -> Description:
    """What the samples of a step and the meaning of the state depend on; the number of cores is not among it."""
    schedule = sampler.schedule
    return {
        "trace": schedule.description,
        "on_end": schedule.on_end,
        "minibatch_size": schedule.minibatch_size,
        **sampler.description,
        "rule": " and ".join(type(one).__name__ for one in getattr(rule, "rules", [rule])),
        "settings of the rule": settings_of_rule(rule),
        "ref_batchsize": ref_batchsize,
        # that of ZeroRedundancyOptimizer is the one whose state it has in parts
        "optimizer": inner.name if isinstance(inner, Together) else type(getattr(inner, "optim", inner)).__name__,
    }


def settings_of(inner: Optimizer) -> str:
    """The numbers among the settings of an optimizer's groups, and how many parameters of which sizes they have."""
    groups = []
    for group in inner.param_groups:
        values = {
            name: value.item() if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value
            for name, value in group.items()
            if name != "params"
        }
        numbers = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, tuple))}
        groups.append(f"{numbers}, shapes {shapes_of(group['params'])}")
    return "; ".join(groups)


def differences(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """In what a run is not the one that was saved, each in words.

    >>> differences({"seed": 0, "rule": "LinearRule"}, {"seed": 3, "rule": "LinearRule"})
    ['seed was 0 and is 3']
    """
    # what a run did not note that was saved by an older version cannot be compared
    return [
        f"{name} was {saved[name]} and is {now[name]}" for name in now if name in saved and saved[name] != now[name]
    ]


def settings_of_rule(rule: Rule) -> str:
    """The numbers among the settings of a rule."""
    found = [
        str({name: value for name, value in vars(one).items() if isinstance(value, (bool, int, float, str))})
        for one in getattr(rule, "rules", [rule])
    ]
    return " and ".join(found)


def shapes_of(tensors: Iterable[torch.Tensor]) -> str:
    """The shape and dtype of each."""
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
