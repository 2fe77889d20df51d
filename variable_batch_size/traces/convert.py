"""Turns a recording of devices that came and went into a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import check_one_of, check_positive
from variable_batch_size.traces.csv import MOST_STEPS
from variable_batch_size.traces.recording import Recording
from variable_batch_size.traces.trace import Trace

WhenEmpty = Literal["skip", "hold", "error"]
WHEN_EMPTY: tuple[WhenEmpty, ...] = get_args(WhenEmpty)

Rounding = Literal["down", "nearest", "up"]
ROUNDING: tuple[Rounding, ...] = get_args(Rounding)

_CLOSE = 1e-6  # a smaller part of a minibatch, or of a step, is a floating-point error
_ROUNDING_ERRORS = 8 * np.finfo(np.float64).eps  # of a sum, as a share of it


@dataclass(frozen=True)
class Conversion:
    """A trace made from a recording, and what was lost or added on the way.

    Args:
        trace: the trace.
        seconds_per_step: how long each step takes.
        seconds_recorded: the length of the recording.
        seconds_empty: how much of it had no device.
        seconds_left: its end, which is too short for a whole step.
        samples_before_rounding: what the devices would have run in the steps of the trace, not rounded yet.
        recorded_rate: the recording's mean samples per second, over its whole length.
        num_steps_rounded: how many steps rounding changed.
    """

    trace: Trace
    seconds_per_step: float
    seconds_recorded: float
    seconds_empty: float
    seconds_left: float
    samples_before_rounding: float
    recorded_rate: float
    num_steps_rounded: int

    @property
    def samples(self) -> int:
        """The samples of the trace."""
        return int(self.trace.sizes.sum())

    @property
    def rate(self) -> float:
        """The trace's mean samples per second, over the time it took the recorded devices, gaps included."""
        return self.samples / (self.seconds_recorded - self.seconds_left)


def convert_recording(
    recording: Recording,
    *,
    samples_per_device: int,
    minibatch_size: int,
    seconds_per_step: float,
    when_empty: WhenEmpty,
    rounding: Rounding,
) -> Conversion:
    """Make a trace from the steps that the recorded devices would have taken.

    A step takes T seconds; its batch size is the time-weighted mean of the devices over these seconds, times
    `samples_per_device`, rounded to whole minibatches:

        B(k) = minibatch_size · round(samples_per_device / minibatch_size · ∫ devices(t) dt / T),   kT ≤ t < (k + 1)T

    so that, apart from rounding, the trace has as many samples per second as the recording.

    Args:
        recording: how many devices there were, and when.
        samples_per_device: what each device runs in a step.
        minibatch_size: samples that a device runs at once.
        seconds_per_step: T, as measured or as :func:`step_seconds` estimates it.
        when_empty: what to do while there is no device: ``"skip"`` that time, since training stands still; ``"hold"``
            the last number of devices; or raise an ``"error"``.
        rounding: to whole minibatches, ``"down"``, ``"nearest"`` (halves up) or ``"up"``.

    >>> recording = Recording.from_counts([0, 30, 60, 90], [2, 0, 3])
    >>> options = dict(samples_per_device=32, minibatch_size=32, seconds_per_step=15, rounding="down")
    >>> list(convert_recording(recording, when_empty="skip", **options).trace)
    [64, 64, 96, 96]
    >>> list(convert_recording(recording, when_empty="hold", **options).trace)
    [64, 64, 64, 64, 96, 96]
    """
    check_positive(samples_per_device=samples_per_device, minibatch_size=minibatch_size)
    if not 0 < seconds_per_step < math.inf:
        raise ValueError(f"`seconds_per_step` must be a positive number, got {seconds_per_step!r}")
    check_one_of(WHEN_EMPTY, when_empty=when_empty)
    check_one_of(ROUNDING, rounding=rounding)
    used, counts = _without_gaps(recording, when_empty)
    durations = recording.durations[used]
    times = np.concatenate(([0.0], np.cumsum(durations)))
    num_steps = times[-1] / seconds_per_step + _CLOSE
    if not 1 <= num_steps < MOST_STEPS + 1:
        raise ValueError(
            f"{recording.places[-1]}: {times[-1]:g} seconds with devices must make from 1 to {MOST_STEPS} steps of "
            f"{seconds_per_step:g} seconds, got {math.floor(num_steps):g}"
        )
    edges = np.arange(math.floor(num_steps) + 1) * seconds_per_step
    device_seconds = np.interp(edges, times, np.concatenate(([0.0], np.cumsum(counts * durations))))
    minibatches = np.diff(device_seconds) / seconds_per_step * samples_per_device / minibatch_size
    # a step is the difference of two sums, whose errors are those of the whole recording
    close = max(_CLOSE, _ROUNDING_ERRORS * float(minibatches.sum()))
    rounded = _round(minibatches, rounding, close)
    if rounded.min() < 1 or rounded.max() * minibatch_size > 2**53:
        step = int((rounded < 1).argmax() if rounded.min() < 1 else rounded.argmax())
        row = int(used[np.searchsorted(times, edges[step], side="right") - 1])
        raise ValueError(
            f"{recording.places[row]}: a step must have at least one minibatch of {minibatch_size} and at most 2**53 "
            f"samples, got {minibatches[step] * minibatch_size:g} samples, rounded {rounding} (`rounding`)"
        )
    return Conversion(
        trace=Trace.from_sequence(rounded.astype(np.int64) * minibatch_size),
        seconds_per_step=seconds_per_step,
        seconds_recorded=recording.seconds,
        seconds_empty=recording.seconds_empty,
        seconds_left=max(0.0, float(times[-1] - edges[-1])),
        samples_before_rounding=float(minibatches.sum()) * minibatch_size,
        recorded_rate=recording.mean_devices * samples_per_device / seconds_per_step,
        num_steps_rounded=int(np.count_nonzero(np.abs(rounded - minibatches) > close)),
    )


def step_seconds(
    *, samples_per_device: int, minibatch_size: int, seconds_per_minibatch: float, seconds_per_allreduce: float
) -> float:
    """How long a step takes in which each device runs its minibatches one after another, and all then all-reduce.

    T = ⌈samples_per_device / minibatch_size⌉ · seconds_per_minibatch + seconds_per_allreduce

    >>> step_seconds(samples_per_device=128, minibatch_size=32, seconds_per_minibatch=0.25, seconds_per_allreduce=0.5)
    1.5
    """
    check_positive(samples_per_device=samples_per_device, minibatch_size=minibatch_size)
    for name, value in (
        ("seconds_per_minibatch", seconds_per_minibatch),
        ("seconds_per_allreduce", seconds_per_allreduce),
    ):
        if not 0 <= value < math.inf:
            raise ValueError(f"`{name}` must be a number of seconds, got {value!r}")
    return -(-samples_per_device // minibatch_size) * seconds_per_minibatch + seconds_per_allreduce


def _without_gaps(recording: Recording, when_empty: WhenEmpty) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which counts of a recording to use, and their values once zeros are left out or replaced."""
    has_devices = recording.counts > 0
    rows = np.arange(len(has_devices))
    if has_devices.all():
        return rows, recording.counts
    gap = int(has_devices.argmin())
    if when_empty == "error":
        raise ValueError(f"{recording.places[gap]}: no device is left (`when_empty`), got 0")
    if when_empty == "skip":
        if not has_devices.any():
            raise ValueError(f"{recording.places[gap]}: there must be a device at some time, got 0 at all times")
        return rows[has_devices], recording.counts[has_devices]
    if gap == 0:
        raise ValueError(
            f"{recording.places[gap]}: no device is there and none was before to hold (`when_empty`), got 0"
        )
    return rows, recording.counts[np.maximum.accumulate(np.where(has_devices, rows, 0))]


def _round(values: npt.NDArray[np.float64], rounding: Rounding, close: float) -> npt.NDArray[np.float64]:
    """Round to whole numbers; what is whole up to a floating-point error stays so, whatever the direction."""
    if rounding == "down":
        return np.floor(values + close)
    if rounding == "up":
        return np.ceil(values - close)
    return np.floor(values + 0.5 + close)
