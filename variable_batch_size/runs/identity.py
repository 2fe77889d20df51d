"""What makes a run the same run when it goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from variable_batch_size.training.optimizer import CustomOptimizer

Identity = dict[str, str | int | bool]


def identity_of(optimizer: CustomOptimizer) -> Identity:
    """What must be the same, because the samples of a step or the meaning of the state depend on it.

    The number of cores need not.
    """
    sampler = optimizer.sampler
    schedule = sampler.schedule
    sizes = schedule.trace.sizes
    digest = hashlib.sha256(sizes.astype("<i8").tobytes()).hexdigest()[:16]
    length = f"always {sizes[0]}" if schedule.trace.is_endless else f"{len(sizes)} steps, sha256 {digest}"
    return {
        "trace": length,
        "on_end": schedule.on_end,
        "dataset_size": schedule.dataset_size,
        "minibatch_size": schedule.minibatch_size,
        "seed": sampler.seed,
        "shuffle": sampler.shuffle,
        "rule": type(optimizer.rule).__name__,
        "ref_batchsize": optimizer.ref_batchsize,
        "optimizer": type(optimizer.inner).__name__,
    }


def differences(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """What is not the same, each in words.

    >>> differences({"seed": 0, "rule": "LinearRule"}, {"seed": 3, "rule": "LinearRule"})
    ['seed was 0 and is 3']
    """
    return [f"{name} was {saved.get(name)} and is {now[name]}" for name in now if saved.get(name) != now[name]]
