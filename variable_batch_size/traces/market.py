"""A spot market: batch sizes of devices that come and go."""

from __future__ import annotations

import numpy as np

from variable_batch_size.checks import check_positive, check_within
from variable_batch_size.traces.limits import check_num_steps
from variable_batch_size.traces.trace import Trace


def spot_market(
    *,
    num_devices: int,
    at_least: int,
    arrive: float,
    leave: float,
    samples_per_device: int,
    num_steps: int,
    seed: int,
) -> Trace:
    """A market where devices come and go, each on its own.

    At first all are present. From step to step, a device that is present leaves with probability `leave`, and one that
    is absent arrives with probability `arrive`; in the long run, each is present in arrive / (arrive + leave) of them.

    Args:
        num_devices: the most that are ever present.
        at_least: how many of them never leave.
        arrive: the probability per step that an absent device comes back.
        leave: the probability per step that a device leaves.
        samples_per_device: what each device that is present adds to the batch size.
        num_steps: the length of the trace.
        seed: chooses the market; the same one with every version of numpy.

    >>> list(spot_market(num_devices=4, at_least=1, arrive=.3, leave=.2, samples_per_device=32, num_steps=8, seed=0))
    [128, 128, 128, 128, 128, 96, 32, 32]
    """
    check_positive(
        num_devices=num_devices, at_least=at_least, samples_per_device=samples_per_device, num_steps=num_steps
    )
    check_num_steps(num_steps)
    if at_least > num_devices:
        raise ValueError(f"`at_least` must be at most the {num_devices} devices, got {at_least}")
    for name, value in (("arrive", arrive), ("leave", leave)):
        if not 0 <= value <= 1:
            raise ValueError(f"`{name}` must be a probability from 0 to 1, got {value!r}")
    check_within(2**32 - 1, seed=seed)
    draws = np.random.RandomState(seed)  # unlike newer generators, it guarantees the same numbers forever
    is_present = np.ones(num_devices - at_least, dtype=bool)
    counts = np.empty(num_steps, dtype=np.int64)
    for step in range(num_steps):
        counts[step] = at_least + np.count_nonzero(is_present)
        is_present ^= draws.random_sample(len(is_present)) < np.where(is_present, leave, arrive)
    return Trace.from_sequence(counts * samples_per_device)
