"""RankCoordinator: all ranks save and stop after the same step."""

import itertools
import time
from typing import NamedTuple

import torch

from variable_batch_size.cores import devices, signals
from variable_batch_size.cores.communicator import Communicator

_POLL_SECONDS = 1.0
_MAX_MINIBATCHES_BETWEEN_POLLS = 1_000_000


class CheckpointSignal(NamedTuple):
    """The result of a poll, the same on all ranks."""

    save_due: bool  # by the clock of rank 0
    stop_requested: bool  # on any rank


class RankCoordinator:
    """Polls all ranks about once a second, with an all-reduce of three integers at the end of a step.

    Time is measured by the clock of rank 0, and SIGTERM may reach one rank first. Rank 0 determines the number of
    minibatches until the next poll from the duration of the latest ones; a larger batch delays it by at most one step.
    """

    def __init__(self, communicator: Communicator, device: torch.device, *, every_seconds: float | None) -> None:
        if every_seconds is not None and not every_seconds > 0:
            raise ValueError(f"`every_seconds` must be positive, got {every_seconds!r}")
        self.every_seconds, self._communicator, self._device = every_seconds, communicator, device
        self._minibatches = 0  # run by rank 0 since the last poll
        self._poll_after = 1
        self._saved_at = self._polled_at = time.monotonic()

    def after_minibatches(self, number: int) -> CheckpointSignal:
        """Poll if it is time, at the end of a step in which rank 0 has run `number` minibatches."""
        self._minibatches += number
        return self.poll() if self._minibatches >= self._poll_after else CheckpointSignal(False, False)

    def poll(self) -> CheckpointSignal:
        """Poll now. Every rank must call it."""
        now = time.monotonic()
        save_due = self.every_seconds is not None and now - self._saved_at >= self.every_seconds
        if self._communicator.num_replicas == 1:
            return CheckpointSignal(save_due, signals.was_told())
        is_first = self._communicator.rank == 0
        per_poll = self._minibatches * _POLL_SECONDS / max(now - self._polled_at, 1e-9)
        poll_after = round(min(max(per_poll, 1), _MAX_MINIBATCHES_BETWEEN_POLLS))
        numbers = [is_first * save_due, signals.was_told(), is_first * poll_after]
        num_due, num_stops, self._poll_after = self.all_reduce(numbers)
        self._minibatches, self._polled_at = 0, time.monotonic()
        return CheckpointSignal(num_due > 0, num_stops > 0)

    def mark_saved(self) -> None:
        """Restart the time until the next save."""
        self._saved_at = time.monotonic()

    def all_reduce(self, numbers: list[int]) -> list[int]:
        """All-reduce integers. Every rank must call it, and it returns once all have."""
        return [int(number) for number in self._total(torch.tensor(numbers, dtype=torch.int64))]

    def gather_rows(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather byte tensors into tables with one row per rank. Every rank must call it."""
        table = torch.zeros(self._communicator.num_replicas, sum(map(len, own.values())), dtype=torch.int32)
        table[self._communicator.rank] = torch.cat(list(own.values()))
        table = self._total(table).to(torch.uint8)
        ends = itertools.accumulate(map(len, own.values()))
        return {name: table[:, end - len(own[name]) : end].clone() for name, end in zip(own, ends, strict=True)}

    def _total(self, tensor: torch.Tensor) -> torch.Tensor:
        with devices.preserve_rng(self._device):
            return self._communicator.total(tensor.to(self._device))
