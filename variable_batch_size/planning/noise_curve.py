"""NoiseCurve: how the noise scale of the gradient grows as training makes progress."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from variable_batch_size.checks import refuse
from variable_batch_size.records import read_records


@dataclass(frozen=True)
class NoiseCurve:
    """Noise scales at some progress; between them its logarithm is on a line, outside of them it stays the same.

    Args:
        progress: ascending, in steps at the reference batch size.
        noise_scales: V/G² there, in samples, positive.

    >>> curve = NoiseCurve([0.0, 100.0], [10.0, 1000.0])
    >>> [round(curve(progress)) for progress in (0, 50, 100, 10_000)]
    [10, 100, 1000, 1000]
    """

    progress: Sequence[float]
    noise_scales: Sequence[float]

    def __call__(self, progress: float) -> float:
        """The noise scale at some progress."""
        return math.exp(float(np.interp(progress, self.progress, np.log(self.noise_scales))))

    @classmethod
    def constant(cls, noise_scale: float) -> NoiseCurve:
        """The same noise scale at all times."""
        if not 0 < noise_scale < math.inf:
            raise ValueError(f"`noise_scale` must be a positive number, got {noise_scale!r}")
        return cls([0.0], [noise_scale])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> NoiseCurve:
        """Take it from the log of a run, as :class:`JsonLines` writes it: the records that have a noise scale.

        Where minibatches had weights it is converted to samples, by what these have weighed on average.
        """
        found: dict[float, float] = {}
        for record in read_records(Path(path)):
            scale = record.get("noise_scale")
            if scale is not None and 0 < scale < math.inf:
                in_samples = record["samples"] / record["weight"] if "weight" in record else 1.0
                found[record["progress"]] = scale * in_samples
        if not found:
            refuse(os.fspath(path), "a log must have a record with a noise scale, as runs with AdaScale write", "none")
        progress = sorted(found)
        return cls(progress, [found[value] for value in progress])
