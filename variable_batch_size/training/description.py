"""What a run is, in words and numbers: what must be the same on all cores, and when it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.optim import Optimizer

from variable_batch_size.rules.rule import Rule
from variable_batch_size.training.sampler import CustomSampler


def description_of(
    sampler: CustomSampler, rule: Rule, inner: Optimizer, ref_batchsize: int
) -> dict[str, str | int | bool]:
    """What the samples of a step and the meaning of the state depend on; the number of cores is not among it."""
    schedule = sampler.schedule
    return {
        "trace": schedule.description,
        "on_end": schedule.on_end,
        "dataset_size": schedule.dataset_size,
        "minibatch_size": schedule.minibatch_size,
        "seed": sampler.seed,
        "shuffle": sampler.shuffle,
        "rule": type(rule).__name__,
        "ref_batchsize": ref_batchsize,
        "optimizer": type(inner).__name__,
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
    return [f"{name} was {saved.get(name)} and is {now[name]}" for name in now if saved.get(name) != now[name]]


def settings_of_rule(rule: Rule) -> str:
    """The numbers among the settings of a rule."""
    return str({name: value for name, value in vars(rule).items() if isinstance(value, (bool, int, float, str))})


def shapes_of(tensors: Iterable[torch.Tensor]) -> str:
    """The shape and dtype of each."""
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
