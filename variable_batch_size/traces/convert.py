"""Converts a recording of available devices to a trace."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import check_one_of, check_positive, check_positive_number, refuse
from variable_batch_size.traces.recording import Recording
from variable_batch_size.traces.trace import MOST_STEPS, Trace

WhenEmpty = Literal["skip", "hold", "error"]
WHEN_EMPTY: tuple[WhenEmpty, ...] = get_args(WhenEmpty)
Rounding = Literal["down", "nearest", "up"]
ROUNDING: tuple[Rounding, ...] = get_args(Rounding)

_CLOSE = 1e-6  # smaller fractions of a minibatch or step are floating-point errors
_ROUNDING_ERRORS = 8 * np.finfo(np.float64).eps  # relative error of a sum


@dataclass(frozen=True)
class Conversion:
    """A trace made from a recording, and the effects of rounding and gaps.

    Args:
        trace: the trace.
        seconds_per_step: the duration of a step.
        seconds_recorded: the length of the recording.
        seconds_empty: the time without any device.
        seconds_left: the remainder at the end, shorter than a step.
        samples_before_rounding: the samples of the trace before rounding to minibatches.
        recorded_rate: mean samples per second over the whole recording.
        num_steps_rounded: number of steps changed by rounding.
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
        """The trace's mean samples per second of recorded time, including gaps."""
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
    """Make a trace of the steps that the recorded devices would have made.

    A step takes T seconds. Its batch size is the mean number of devices in these seconds, times `samples_per_device`,
    rounded to a multiple of the minibatch size. Apart from rounding, the trace has as many samples per second as the
    recording.

    Args:
        recording: the number of devices over time.
        samples_per_device: samples of each device in a step.
        minibatch_size: samples per forward and backward pass of one device.
        seconds_per_step: T, measured or estimated by :func:`step_seconds`.
        when_empty: without any device, ``"skip"`` the time, ``"hold"`` the last number of devices, or raise an
            ``"error"``.
        rounding: to minibatches, ``"down"``, ``"nearest"`` (halves up) or ``"up"``.

    >>> recording = Recording.from_counts([0, 30, 60, 90], [2, 0, 3])
    >>> options = dict(samples_per_device=32, minibatch_size=32, seconds_per_step=15, rounding="down")
    >>> list(convert_recording(recording, when_empty="skip", **options).trace)
    [64, 64, 96, 96]
    >>> list(convert_recording(recording, when_empty="hold", **options).trace)
    [64, 64, 64, 64, 96, 96]
    """
    check_positive(samples_per_device=samples_per_device, minibatch_size=minibatch_size)
    check_positive_number(seconds_per_step=seconds_per_step)
    check_one_of(WHEN_EMPTY, when_empty=when_empty)
    check_one_of(ROUNDING, rounding=rounding)
    used, counts = _without_gaps(recording, when_empty)
    durations = recording.durations[used]
    times = np.concatenate(([0.0], np.cumsum(durations)))
    num_steps = times[-1] / seconds_per_step + _CLOSE
    if not 1 <= num_steps < MOST_STEPS + 1:
        rule = f"{times[-1]:g} seconds with devices must make 1 to {MOST_STEPS} steps of {seconds_per_step:g} seconds"
        refuse(recording.places[-1], rule, f"{math.floor(num_steps):g}")
    edges = np.arange(math.floor(num_steps) + 1) * seconds_per_step
    device_seconds = np.interp(edges, times, np.concatenate(([0.0], np.cumsum(counts * durations))))
    minibatches = np.diff(device_seconds) / seconds_per_step * samples_per_device / minibatch_size
    # a step is the difference of two sums over the whole recording, with their errors
    close = max(_CLOSE, _ROUNDING_ERRORS * float(minibatches.sum()))
    # values close to an integer are rounded to it in any direction
    offset = 0.5 if rounding == "nearest" else 0.0
    rounded = np.ceil(minibatches - close) if rounding == "up" else np.floor(minibatches + offset + close)
    if rounded.min() < 1 or rounded.max() * minibatch_size > 2**53:
        step = int((rounded < 1).argmax() if rounded.min() < 1 else rounded.argmax())
        row = int(used[np.searchsorted(times, edges[step], side="right") - 1])
        rule = f"a step must have at least one minibatch of {minibatch_size} and at most 2**53 samples"
        found = f"{minibatches[step] * minibatch_size:g} samples, rounded {rounding} (`rounding`)"
        refuse(recording.places[row], rule, found)
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
    """Estimate the duration of a step: the minibatches of a device one after another, then an all-reduce.

    >>> step_seconds(samples_per_device=128, minibatch_size=32, seconds_per_minibatch=0.25, seconds_per_allreduce=0.5)
    1.5
    """
    check_positive(samples_per_device=samples_per_device, minibatch_size=minibatch_size)
    for name, value in (("minibatch", seconds_per_minibatch), ("allreduce", seconds_per_allreduce)):
        if not 0 <= value < math.inf:
            raise ValueError(f"`seconds_per_{name}` must be a number of seconds, got {value!r}")
    return -(-samples_per_device // minibatch_size) * seconds_per_minibatch + seconds_per_allreduce


def _without_gaps(recording: Recording, when_empty: WhenEmpty) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows of a recording to use, and their counts with zeros dropped or replaced."""
    has_devices = recording.counts > 0
    rows = np.arange(len(has_devices))
    if has_devices.all():
        return rows, recording.counts
    gap = int(has_devices.argmin())
    if when_empty == "error":
        raise ValueError(f"{recording.places[gap]}: no devices available (`when_empty` is 'error')")
    if when_empty == "skip":
        if not has_devices.any():
            raise ValueError(f"{recording.places[gap]}: the recording has no devices at any time")
        return rows[has_devices], recording.counts[has_devices]
    if gap == 0:
        raise ValueError(f"{recording.places[gap]}: no devices at the start, so there is no number to hold")
    return rows, recording.counts[np.maximum.accumulate(np.where(has_devices, rows, 0))]
