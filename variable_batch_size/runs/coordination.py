"""RankCoordinator: agreement of all ranks on saving and stopping at the same step."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple

import torch

from variable_batch_size.cores import devices, signals
from variable_batch_size.cores.communicator import Communicator

_SECONDS_BETWEEN_QUESTIONS = 1.0
_MOST_MINIBATCHES_BETWEEN_QUESTIONS = 1_000_000


class Decision(NamedTuple):
    """The same on all cores.

    Attributes:
        is_late: whether it is time to save, by core 0's clock.
        is_told: whether any core was told to stop.
    """

    is_late: bool
    is_told: bool


class RankCoordinator:
    """Lets the cores of a run decide together about saving and stopping.

    The clock is that of core 0, and SIGTERM may reach one core first; so the cores tell each other about once a second,
    in a sum of three integers at the end of a step. Core 0 says after how many minibatches they do so next, from the
    time that the latest ones took; a larger batch in between makes that later by one step at the most.

    Args:
        communicator: of the cores.
        device: on which sums are made.
        every_seconds: from one save to the time for the next; None for no such time.
    """

    def __init__(self, communicator: Communicator, device: torch.device, *, every_seconds: float | None) -> None:
        if every_seconds is not None and not every_seconds > 0:
            raise ValueError(f"`every_seconds` must be positive, got {every_seconds!r}")
        self.every_seconds = every_seconds
        self._communicator = communicator
        self._device = device
        self._minibatches = 0  # that core 0 has run since the latest question
        self._ask_after = 1
        self._saved_at = self._asked_at = time.monotonic()

    def after_minibatches(self, number: int) -> Decision:
        """Ask if it is due, at the end of a step in which core 0 has run `number` minibatches."""
        self._minibatches += number
        return self.ask() if self._minibatches >= self._ask_after else Decision(False, False)

    def ask(self) -> Decision:
        """Ask now. Every core must call it."""
        now = time.monotonic()
        is_late = self.every_seconds is not None and now - self._saved_at >= self.every_seconds
        if self._communicator.num_replicas == 1:
            return Decision(is_late, signals.was_told())
        is_first = self._communicator.rank == 0
        num_late, num_told, self._ask_after = self.sums(
            [is_first * is_late, signals.was_told(), is_first * self._minibatches_in_a_while(now - self._asked_at)]
        )
        self._minibatches = 0
        self._asked_at = time.monotonic()
        return Decision(num_late > 0, num_told > 0)

    def _minibatches_in_a_while(self, seconds: float) -> int:
        """How many minibatches fit between two questions, if the latest ones took `seconds`."""
        number = self._minibatches * _SECONDS_BETWEEN_QUESTIONS / max(seconds, 1e-9)
        return round(min(max(number, 1), _MOST_MINIBATCHES_BETWEEN_QUESTIONS))

    def note_saved(self) -> None:
        """From now on the time to the next save counts."""
        self._saved_at = time.monotonic()

    def sums(self, numbers: list[int]) -> list[int]:
        """Each number's sum over all cores. Every core must call it; none goes on before the last has come."""
        return [int(number) for number in self.total(torch.tensor(numbers, dtype=torch.int64))]

    def rows_of_all_cores(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Bytes that each core has, as tables with a row for each core. Every core must call it."""
        table = torch.zeros(self._communicator.num_replicas, sum(map(len, own.values())), dtype=torch.int32)
        table[self._communicator.rank] = torch.cat(list(own.values()))
        table = self.total(table).to(torch.uint8)
        ends = itertools.accumulate(map(len, own.values()))
        return {name: table[:, end - len(own[name]) : end].clone() for name, end in zip(own, ends, strict=True)}

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's sum over all cores, on the host, which changes none of the random numbers to come."""
        with devices.preserve_rng(self._device):
            return self._communicator.total(tensor.to(self._device))
