"""OnPlateau: grows where a learning-rate scheduler would decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from typing_extensions import Unpack

from variable_batch_size.checks import check_positive
from variable_batch_size.policies.bounds import BoundsOptions
from variable_batch_size.policies.policy import Policy
from variable_batch_size.policies.situation import Situation


@final
class OnPlateau(Policy):
    """Multiplies the batch size when a metric has stopped improving.

    The metric is what :meth:`tell` was told last, such as a validation loss; before it is told anything, the loss that
    a :class:`Log` records.

    Args:
        factor: what each growth multiplies by.
        patience: how many values in a row may be no better before it grows.
        min_delta: by what share of the best a value must be better.
        is_higher_better: whether a larger value is the better one, as of an accuracy.
        every: steps from one decision to the next.
        lead: how many steps ahead batch sizes are decided.
        bounds: as of :class:`Bounds`.

    >>> policy = OnPlateau(patience=2)
    >>> for value in (1.0, 0.9, 0.9, 0.95):
    ...     policy.tell(value)
    >>> policy.answer(Situation(cores=1, minibatch_size=32, ref_batchsize=64, batch_size=64))
    Decision(batch_size=128, reason='2 values no better than 0.9')
    """

    needs_loss = True

    def __init__(
        self,
        *,
        factor: float = 2.0,
        patience: int = 10,
        min_delta: float = 1e-4,
        is_higher_better: bool = False,
        every: int = 20,
        lead: int = 16,
        **bounds: Unpack[BoundsOptions],
    ) -> None:
        super().__init__(every=every, lead=lead, **bounds)
        check_positive(patience=patience)
        if not 1 < factor < math.inf:
            raise ValueError(f"`factor` must be above 1, got {factor!r}")
        if not 0 <= min_delta < 1:
            raise ValueError(f"`min_delta` must be a share from 0 to 1, got {min_delta!r}")
        self.factor = factor
        self.patience = patience
        self.min_delta = min_delta
        self.is_higher_better = is_higher_better
        self._best: float | None = None
        self._num_worse = 0
        self._is_told = False
        self._latest: float | None = None  # of the losses, each of which counts once

    def tell(self, value: float) -> None:
        """Take in a value of the metric, as a scheduler's ``step(metric)`` does; from now on it goes by these."""
        if not self._is_told:
            self._best, self._num_worse, self._is_told = None, 0, True
        self._take_in(float(value))

    def decide(self, situation: Situation) -> float:
        now = situation.batch_size or situation.ref_batchsize
        if not self._is_told and situation.loss is not None and situation.loss != self._latest:
            self._latest = situation.loss
            self._take_in(situation.loss)
        if self._num_worse < self.patience:
            return now
        self.why = f"{self._num_worse} values no better than {self._best:g}"
        self._num_worse = 0
        return now * self.factor

    def _take_in(self, value: float) -> None:
        if self._best is None or self._is_better(value, self._best):
            self._best, self._num_worse = value, 0
        else:
            self._num_worse += 1

    def _is_better(self, value: float, best: float) -> bool:
        if math.isnan(best):
            return not math.isnan(value)
        margin = self.min_delta * abs(best) if math.isfinite(best) else 0.0
        return value > best + margin if self.is_higher_better else value < best - margin

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self._best,
            "num_worse": self._num_worse,
            "is_told": self._is_told,
            "latest": self._latest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._num_worse = state["best"], state["num_worse"]
        self._is_told, self._latest = state["is_told"], state["latest"]
