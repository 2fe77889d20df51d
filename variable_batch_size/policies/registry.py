"""The policies by name: for comparisons, simulations and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from variable_batch_size.checks import check_one_of
from variable_batch_size.policies.autoscale import Autoscale
from variable_batch_size.policies.critical_batch import CriticalBatch
from variable_batch_size.policies.norm_test import NormTest
from variable_batch_size.policies.on_plateau import OnPlateau
from variable_batch_size.policies.per_core import PerCore
from variable_batch_size.policies.policy import FunctionPolicy, Policy
from variable_batch_size.policies.situation import Situation

POLICIES: Mapping[str, type[Policy]] = {
    "autoscale": Autoscale,
    "per_core": PerCore,
    "norm_test": NormTest,
    "critical_batch": CriticalBatch,
    "on_plateau": OnPlateau,
}


def make_policy(name: str, **settings: Any) -> Policy:
    """A new policy by its name, with the settings that it takes.

    >>> make_policy("autoscale", max_batch_size=1024).bounds.max_batch_size
    1024
    """
    check_one_of(POLICIES, policy=name)
    return POLICIES[name](**settings)


def parse_policy(text: str) -> Policy:
    """A policy as a command line gives it: its name, then settings; or a number, for always that batch size.

    >>> parse_policy("norm_test:eta=0.5,max_batch_size=1024").bounds.max_batch_size
    1024
    >>> parse_policy("512").answer(Situation(cores=3, minibatch_size=32, ref_batchsize=128)).batch_size
    512
    """
    name, _, settings = text.partition(":")
    if name.isdecimal() and not settings:
        return FunctionPolicy(_Always(int(name)))
    try:
        return make_policy(name, **dict(map(_setting, settings.split(",") if settings else ())))
    except TypeError as error:  # a setting that there is not, or one that is missing
        reason = str(error).partition("() ")[2] or str(error)
        raise ValueError(f"`policy` {name} {reason}, got {text!r}") from None


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), int(value) if value.strip().lstrip("-").isdecimal() else float(value)
    except ValueError:
        raise ValueError(f"a setting of a policy must be name=number, got {text!r}") from None


class _Always:
    """The same batch size in every situation; one that would have to be another is refused."""

    def __init__(self, size: int) -> None:
        self.__qualname__ = f"always {size}"
        self._size = size

    def __call__(self, situation: Situation) -> float:
        if not self._size or self._size % situation.minibatch_size:
            raise ValueError(
                f"`policy` must be a multiple of {situation.minibatch_size} (the minibatch size), got {self._size}"
            )
        if situation.capacity is not None and self._size > situation.capacity:
            raise ValueError(
                f"`policy` must be at most {situation.capacity} (the samples of an epoch), got {self._size}"
            )
        return self._size
