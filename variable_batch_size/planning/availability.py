"""Availability: how many cores there are at which time, for as long as a simulation lasts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from variable_batch_size.checks import check_positive
from variable_batch_size.traces.recording import Recording
from variable_batch_size.traces.trace import Trace


class Span(NamedTuple):
    """A time in which the number of cores stays the same; it may be 0, and the time without end."""

    cores: int
    seconds: float


class Availability:
    """Spans of time, one after the other; after the last it begins again.

    Args:
        spans: with different numbers of cores from one to the next.
        name: where they come from.

    >>> spans = iter(Availability.of_recording(Recording.from_counts([0, 30, 60, 90], [2, 2, 3])))
    >>> [next(spans) for _ in range(3)]
    [Span(cores=2, seconds=60.0), Span(cores=3, seconds=30.0), Span(cores=2, seconds=60.0)]
    """

    def __init__(self, spans: list[Span], *, name: str) -> None:
        self.spans = _merged(spans)
        self.name = name
        if not any(span.cores for span in self.spans):
            raise ValueError(f"{name}: there must be a core at some time, got 0 at all times")

    @classmethod
    def constant(cls, cores: int) -> Availability:
        """The same number of cores for ever."""
        check_positive(cores=cores)
        return cls([Span(cores, math.inf)], name=f"{cores} cores")

    @classmethod
    def of_recording(cls, recording: Recording) -> Availability:
        """As many cores as a recording has devices."""
        counts, durations = recording.counts.tolist(), recording.durations.tolist()
        return cls([Span(*pair) for pair in zip(counts, durations, strict=True)], name=recording.places[0])

    @classmethod
    def of_market(cls, trace: Trace, *, seconds_per_row: float) -> Availability:
        """As many cores as the rows of a trace say, such as of :func:`spot_market` with one sample per device."""
        if not 0 < seconds_per_row < math.inf:
            raise ValueError(f"`seconds_per_row` must be a positive number, got {seconds_per_row!r}")
        return cls([Span(count, seconds_per_row) for count in trace.sizes.tolist()], name=trace.name)

    def __iter__(self) -> Iterator[Span]:
        first, last = self.spans[0], self.spans[-1]
        if len(self.spans) == 1:
            yield Span(first.cores, math.inf)
        elif first.cores != last.cores:
            yield from itertools.cycle(self.spans)
        else:  # where the end meets the beginning nothing changes
            yield first
            yield from itertools.cycle([*self.spans[1:-1], Span(last.cores, last.seconds + first.seconds)])


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].cores == span.cores:
            merged[-1] = Span(span.cores, merged[-1].seconds + span.seconds)
        else:
            merged.append(span)
    return merged
