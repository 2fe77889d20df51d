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
from variable_batch_size.policies.policy import Policy

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
