"""Meeting: where cores that are threads of one process wait for each other and show what they have brought."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import final


@final
class Meeting:
    """What ``xm.rendezvous`` does, without a collective of the device.

    Args:
        num_cores: how many threads come.
        rank: tells which of them the calling thread is.
    """

    def __init__(self, num_cores: int, rank: Callable[[], int]) -> None:
        self._num_cores = num_cores
        self._rank = rank
        self._shown = [b""] * num_cores
        self._all_are_here = threading.Barrier(num_cores)

    def rendezvous(self, tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
        """Wait for all cores, and return what each has brought, in the order of their ranks.

        Args:
            tag: the name of the meeting.
            payload: what this core brings.
            replicas: those who come; all if empty, and nothing else.
        """
        if replicas and sorted(replicas) != list(range(self._num_cores)):
            raise ValueError(f"`replicas` must be empty or all {self._num_cores} cores, got {list(replicas)} ({tag!r})")
        self._shown[self._rank()] = payload
        self._all_are_here.wait()
        found = list(self._shown)
        self._all_are_here.wait()  # nobody shows something new before all have seen this
        return found
