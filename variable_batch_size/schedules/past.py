"""Past: the rows of a trace that a run has passed, and where its epochs began."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from variable_batch_size.schedules.batch_sizes import Integers


class Past(NamedTuple):
    """What a run has behind it, which stays as it was if the run goes on with another trace.

    Args:
        sizes: the batch sizes of the rows passed, in short: one for all rows in a row that have it.
        counts: how many rows each of them has.
        starts: the first row of each epoch that has begun, the present one last.
        has_ended: whether the trace has no rows behind these.
    """

    sizes: Integers
    counts: Integers
    starts: tuple[int, ...]
    has_ended: bool

    @property
    def num_rows(self) -> int:
        """How many rows were passed; those of an epoch that was left early are among them."""
        return int(self.counts.sum())

    def rows(self) -> Integers:
        """The batch sizes of all rows passed."""
        return np.repeat(self.sizes, self.counts)

    def without_last_epoch(self) -> Past:
        """The same rows, with the last epoch as part of the one before."""
        return self._replace(starts=self.starts[:-1])
