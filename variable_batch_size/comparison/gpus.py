"""Which GPUs each of several processes trains on, so that they spread over all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def environments(jobs: int, cores: int) -> list[dict[str, str]]:
    """What each of `jobs` processes has in its environment, each with `cores` cores that train on GPUs 0, 1, 2 …"""
    gpus = _visible()
    return [{_VARIABLE: ",".join(in_turn(gpus, job * cores))} for job in range(jobs)] if gpus else []


def in_turn(gpus: Sequence[str], first: int) -> list[str]:
    """All GPUs, those from number `first` on in front: core i of a process that sees them so trains on the i-th.

    >>> in_turn(["0", "1", "2"], 4)
    ['1', '2', '0']
    """
    start = first % len(gpus)
    return [*gpus[start:], *gpus[:start]]


def _visible() -> list[str]:
    """The names of the GPUs that this process may use."""
    named = os.environ.get(_VARIABLE)
    if named:
        return named.split(",")
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
