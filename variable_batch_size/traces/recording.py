"""Recording: the number of available devices over time, read from CSV tables, event logs and JSON; and as a trace."""

import csv
import io
import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain, islice
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import check_one_of, check_positive, check_positive_number, refuse
from variable_batch_size.traces import zoo
from variable_batch_size.traces.trace import MOST_STEPS, Trace
from variable_batch_size.urls import read_bytes

WhenEmpty = Literal["skip", "hold", "error"]
WHEN_EMPTY: tuple[WhenEmpty, ...] = get_args(WhenEmpty)
Rounding = Literal["down", "nearest", "up"]
ROUNDING: tuple[Rounding, ...] = get_args(Rounding)
TimeUnit = Literal["ms", "s", "min", "h"]
TIME_UNITS: Mapping[TimeUnit, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

_Cells = tuple[str, str, str]  # a place in a file, and the texts of a time and a number of devices
_Row = tuple[str, float, int]  # a place in a file, the time in seconds, and the number of devices from then on
_Event = tuple[str, float, str, list[str]]  # a place in a file, milliseconds, what happened, and to which nodes
_LATEST = 1e15  # seconds
_MOST_DEVICES = 10**9
_CLOSE = 1e-6  # smaller fractions of a minibatch or step are floating-point errors
_ROUNDING_ERRORS = 8 * np.finfo(np.float64).eps  # relative error of a sum
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"[+-]?[0-9]+(?:\.0*)?")
_QUOTED_OR_COMMENT = re.compile(r"""(?:^|(?<=[,\n]))[ \t]*("[^"]*(?:""[^"]*)*")[ \t]*|\#[^\n]*""")
_EVENTS = ("add", "remove")
_EVENT_IN_JSON = re.compile(r'\s*\[\s*[^\s,\[]+\s*,\s*"')  # the beginning of [milliseconds, "event", …
_JOB = ("submit_time", "duration", "worker_num", "gpu_request")
_STRUCTURES = 'the file must be [{"time": t, "cores": n}, …] or {"metadata": {"gap_seconds": g}, "data": [counts]}'
_NUMBERS = (int, float)  # of JSON, without bool


@dataclass(frozen=True)
class Recording:
    """The number of available devices over time.

    >>> recording = Recording.from_counts([0, 30, 90], [2, 4])
    >>> recording.seconds, recording.mean_devices
    (90.0, 3.3333333333333335)
    """

    times: npt.NDArray[np.float64]  # seconds since the start, ascending, one more than counts
    counts: npt.NDArray[np.int64]  # ``counts[i]`` is the number of devices from ``times[i]`` to ``times[i + 1]``
    places: Sequence[str]  # the source of each count, such as ``spot.csv:17``

    @classmethod
    def from_counts(cls, times: Sequence[float], counts: Sequence[int]) -> "Recording":
        """A recording with ``counts[i]`` devices from ``times[i]`` to ``times[i + 1]``, in seconds."""
        if len(times) != len(counts) + 1 or not len(counts):
            raise ValueError(f"`times` must have one more element than `counts`, got {len(times)} and {len(counts)}")
        places = (f"recording[{index}]" for index in range(len(times)))
        return cls._of(zip(places, map(float, times), (*counts, 0), strict=True))

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        time_column: str | None = None,
        count_column: str | None = None,
        time_unit: TimeUnit | None = None,
    ) -> "Recording":
        """Read a file, at a path, a URL or in the zoo (``zoo:NAME``), in a format that is detected from the content.

        - CSV: a header, then rows of a time and the number of devices until the next row's time. The last row only
          gives the end of the recording. Times are numbers or dates such as ``2026-03-01T12:00:00Z``.
        - Events: rows ``milliseconds,add|remove,node``, or lines ``[milliseconds, "event", {"nodes": [names]}]`` as
          published with Parcae, of which only those with ``"add"`` and ``"remove"`` change the devices. The last event
          only gives the end of the recording.
        - Jobs: CSV with the columns ``submit_time``, ``duration``, in seconds, ``worker_num`` and ``gpu_request``, as
          published by Alibaba. The devices are those in use if each job starts at once; with a column ``job_type``,
          only jobs of the type Spot count.
        - JSON records: ``[{"time": t, "cores": n}, …]``, with the meaning of the rows of a CSV file.
        - JSON counts: ``{"metadata": {"gap_seconds": g}, "data": [counts]}``, each count for g seconds.

        In tables, quoted cells, blank lines and ``#`` comments are allowed. A ValueError has file, line and
        value of the first invalid row.

        Args:
            path: the file.
            time_column: the name of the time column in a CSV file, by default the first of two named columns; or of the
                field in JSON records, by default ``time``.
            count_column: the name of the count column or field; by default the other one of two.
            time_unit: of numeric times in these files: ``"ms"``, ``"s"``, ``"min"`` or ``"h"``; seconds if None.
        """
        if time_unit is not None:
            check_one_of(TIME_UNITS, time_unit=time_unit)
        source = os.fspath(path)
        with io.TextIOWrapper(io.BytesIO(zoo.read(path)), encoding="utf-8-sig", errors="replace") as file:
            text = file.read()
        first = text.lstrip()[:1]
        if first == "{":
            format, rows = "JSON counts", _json_rows(source, text)
        elif first != "[" and any(
            cell.lower() in _EVENTS for _, cells in islice(_table(source, text), 2) for cell in cells[1:2]
        ):
            format, rows = "events", _event_rows(_events_in_table(source, text))
        elif _EVENT_IN_JSON.match(text):
            format, rows = "events", _event_rows(_events_in_json(source, text))
        elif first != "[" and set(_JOB) <= set(next(_table(source, text), (1, []))[1]):
            format, rows = "jobs", _job_rows(source, text)
        else:
            if (time_column is None) != (count_column is None):
                raise ValueError("pass both `time_column` and `count_column` or neither")
            names = None if time_column is None or count_column is None else (time_column, count_column)
            cells_of = _record_cells if first == "[" else _table_cells
            return cls._of(_count_rows(cells_of(source, text, names), TIME_UNITS[time_unit or "s"]))
        for name, value in {"time_column": time_column, "count_column": count_column, "time_unit": time_unit}.items():
            if value is not None:
                raise ValueError(f"{source}: `{name}` is for CSV files and JSON records, got {value!r} for {format}")
        return cls._of(rows)

    @classmethod
    def _of(cls, rows: Iterable[_Row]) -> "Recording":
        """The recording of these rows, in seconds since the first; the last row only gives its end."""
        checked: list[_Row] = []
        for place, time, count in rows:
            if not abs(time) <= _LATEST:
                refuse(place, f"a time must be a number within {_LATEST:g} seconds", time)
            if checked and time - checked[0][1] <= (before := checked[-1][1]) - checked[0][1]:
                refuse(place, "a time must be later than the previous one", f"{time:.15g} s after {before:.15g} s")
            if not 0 <= count <= _MOST_DEVICES:
                refuse(place, f"the number of devices must be from 0 to {_MOST_DEVICES}", count)
            checked.append((place, time, count))
        places, times, counts = zip(*checked, strict=True)
        if len(times) < 2:
            refuse(places[0], "a recording needs two different times", "one")
        return cls(np.array(times) - times[0], np.array(counts[:-1], dtype=np.int64), places[:-1])

    @property
    def durations(self) -> npt.NDArray[np.float64]:
        """Of each count, in seconds."""
        return np.diff(self.times)

    @property
    def seconds(self) -> float:
        """The length of the recording."""
        return float(self.times[-1])

    @property
    def seconds_empty(self) -> float:
        """The time without any device."""
        return float(self.durations[self.counts == 0].sum())

    @property
    def mean_devices(self) -> float:
        """The mean number of devices over time."""
        return float(self.counts @ self.durations) / self.seconds


def _table(source: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """First line and cells of each row of a CSV text, without comments and blank lines."""
    # without comments and spaces next to quotes, which the csv module would treat as content
    lines = re.findall(r"[^\n]*\n|[^\n]+", _QUOTED_OR_COMMENT.sub(lambda found: found[1] or "", text))
    reader = csv.reader(lines, strict=True)
    while reader.line_num < len(lines):
        line = reader.line_num + 1
        try:
            cells = [cell.strip() for cell in next(reader)]
        except csv.Error as error:
            refuse(f"{source}:{line}", f"a row must be CSV ({error})", repr(lines[line - 1].strip())[:80])
        if any(cells) or len(cells) > 1:
            yield line, cells


def read_timed(path: str | os.PathLike[str]) -> Iterator[tuple[str, float, str]]:
    """Place, time in seconds and text of each row of a CSV file with a column of times, then one of other values."""
    return _timed(_table_cells(os.fspath(path), read_bytes(path).decode("utf-8-sig", errors="replace"), None), 1.0)


def _timed(rows: Iterable[_Cells], unit: float) -> Iterator[tuple[str, float, str]]:
    """Rows with their times in seconds, which are all numbers or all dates."""
    has_dates: bool | None = None
    for place, time, value in rows:
        has_dates = not _NUMBER.fullmatch(time) if has_dates is None else has_dates
        yield place, _date(place, time) if has_dates else _number(place, time) * unit, value


def _count_rows(rows: Iterable[_Cells], unit: float) -> Iterator[_Row]:
    """The rows of a table of times and counts."""
    for place, seconds, count in _timed(rows, unit):
        if not _WHOLE.fullmatch(count) or len(count) > 40:
            refuse(place, "the number of devices must be an integer", repr(count)[:80])
        yield place, seconds, int(count.split(".")[0])


def _table_cells(source: str, text: str, names: tuple[str, str] | None) -> Iterator[_Cells]:
    """The times and counts of a CSV text with a header."""
    table = _table(source, text)
    line, header = next(table, (1, []))
    columns = _columns(f"{source}:{line}", header, names)
    header_line = line
    for line, cells in table:
        if len(cells) != len(header):
            refuse(f"{source}:{line}", f"a row must have {len(header)} values", len(cells))
        time, count = (cells[column] for column in columns)
        yield f"{source}:{line}", time, count
    if line == header_line:
        refuse(f"{source}:{line + 1}", "expected a row below the header", "nothing")


def _columns(place: str, header: list[str], names: tuple[str, str] | None) -> list[int]:
    named = [name for name in header if name]
    if not header:
        refuse(place, "the file must have a header with column names", "an empty file")
    if all(map(_NUMBER.fullmatch, named)):
        refuse(place, "the first row must be a header with column names", repr(",".join(header))[:80])
    if names is None and len(named) != 2:
        refuse(place, "pass `time_column` and `count_column` unless exactly two columns are named", repr(named)[:80])
    for name in names or named:
        if header.count(name) != 1:
            refuse(place, f"the header must name the column {name!r} once", repr(header)[:80])
    return [header.index(name) for name in names or named]


def _record_cells(source: str, text: str, names: tuple[str, str] | None) -> Iterator[_Cells]:
    """The times and counts of a list of JSON records, as text."""
    records = _parsed_json(source, text)
    if not records or not all(isinstance(record, dict) for record in records):
        refuse(f"{source}:1", _STRUCTURES, repr(text.strip()[:60]))
    if names is None:
        others = [name for name in records[0] if name != "time"]
        if len(others) != 1 or "time" not in records[0]:
            rule = "pass `time_column` and `count_column` unless records have the field 'time' and one other"
            refuse(f"{source}:1", rule, repr(list(records[0]))[:80])
        names = ("time", others[0])
    for place, record in zip(_places_of_records(source, text), records, strict=True):
        for name in names:
            if name not in record:
                refuse(place, f"a record must have the field {name!r}", repr(list(record))[:80])
        time, count = (str(record[name]) for name in names)
        yield place, time, count


def _places_of_records(source: str, text: str) -> Iterator[str]:
    """The line of each record in a valid list of them."""
    decoder, between = json.JSONDecoder(parse_int=float), re.compile(r"[\s,\[]*")
    position, line = 0, 1
    while text[(start := between.match(text, position).end())] != "]":  # type: ignore[union-attr]
        line += text.count("\n", position, start)
        yield f"{source}:{line}"
        _, end = decoder.raw_decode(text, start)
        line, position = line + text.count("\n", start, end), end


def _events_in_table(source: str, text: str) -> Iterator[_Event]:
    """The events of a table of ``milliseconds,add|remove,node``, with or without a header."""
    for number, (line, cells) in enumerate(_table(source, text)):
        if number == 0 and not any(_NUMBER.fullmatch(cell) or cell.lower() in _EVENTS for cell in cells):
            continue  # a header
        place = f"{source}:{line}"
        if len(cells) != 3:
            refuse(place, "a row must be milliseconds,add|remove,node", repr(",".join(cells))[:80])
        event = cells[1].lower()
        if event not in _EVENTS:
            refuse(place, "an event must be add or remove", repr(cells[1])[:80])
        yield place, _number(place, cells[0]), event, [cells[2]]


def _events_in_json(source: str, text: str) -> Iterator[_Event]:
    """The events of lines ``[milliseconds, "event", {"nodes": [names]}]``."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{source}:{number}"
        match _parsed_json(source, line, first_line=number):
            case [int() | float() as time, str() as event, {"nodes": list() as nodes}] if not isinstance(time, bool):
                yield place, float(time), event, list(map(str, nodes))
            case _:
                refuse(place, 'a line must be [milliseconds, "event", {"nodes": [names]}]', repr(line)[:80])


def _event_rows(events: Iterable[_Event]) -> Iterator[_Row]:
    """The number of nodes after the events of each time."""
    present = set[str]()
    time, place = -math.inf, ""
    for place_of_event, milliseconds, event, nodes in events:
        before, place_before = time, place
        time, place = milliseconds * TIME_UNITS["ms"], place_of_event
        if time < before:
            refuse(place, "a time must not be earlier than the previous one", f"{time:.15g} s after {before:.15g} s")
        if time > before > -math.inf:
            yield place_before, before, len(present)
        for node in nodes if event in _EVENTS else ():
            if (node in present) == (event == "add"):
                rule = "an added node must be absent" if event == "add" else "a removed node must be present"
                refuse(place, rule, repr(node)[:80])
            present ^= {node}
    yield place, time, len(present)


def _job_rows(source: str, text: str) -> Iterator[_Row]:
    """The rows of a table of jobs: the devices in use after each start and end."""
    table = _table(source, text)
    line, header = next(table)
    changes: dict[float, int] = {}
    places: dict[float, str] = {}
    for line, cells in table:
        place = f"{source}:{line}"
        if len(cells) != len(header):
            refuse(place, f"a row must have {len(header)} values", len(cells))
        job = dict(zip(header, cells, strict=True))
        if job.get("job_type", "Spot") != "Spot":
            continue
        begin, seconds, workers, each = (_number(place, job[name]) for name in _JOB)
        devices = workers * each
        if devices % 1 or not 0 <= devices <= _MOST_DEVICES or seconds <= 0:
            refuse(
                place, "a job must have a positive duration and a whole number of devices", repr(",".join(cells))[:80]
            )
        for time, change in ((begin, int(devices)), (begin + seconds, -int(devices))):
            changes[time] = changes.get(time, 0) + change
            places.setdefault(time, place)
    if not changes:
        refuse(f"{source}:{line + 1}", "expected a job below the header", "nothing")
    count = 0
    for time in sorted(changes):
        count += changes[time]
        yield places[time], time, count


def _number(place: str, text: str) -> float:
    if not _NUMBER.fullmatch(text):
        refuse(place, "a time must be a number", repr(text)[:80])
    return float(text)


def _date(place: str, text: str) -> float:
    """Seconds since 1970; UTC without a time zone."""
    try:
        # fromisoformat accepts Z from Python 3.11 on
        date = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        refuse(place, "times must be all numbers, or all dates like 2026-03-01T12:00:00Z", repr(text)[:80])


def _parsed_json(source: str, text: str, first_line: int = 1) -> Any:
    try:
        # int() rejects thousands of digits, without naming a line
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 20 else math.inf)
    except json.JSONDecodeError as error:
        place = f"{source}:{first_line - 1 + error.lineno}"
        refuse(place, f"the file must be JSON ({error.msg})", repr(text[error.pos :][:20]))
    except RecursionError:
        refuse(f"{source}:{first_line}", "the file must be JSON", "JSON that is nested too deeply")


def _json_rows(source: str, text: str) -> Iterator[_Row]:
    """The rows of JSON counts with a gap."""
    content = _parsed_json(source, text)
    try:
        gap, counts = content["metadata"]["gap_seconds"], content["data"]
    except (KeyError, TypeError):
        gap = counts = None
    if gap is None or not isinstance(counts, list) or not counts:
        refuse(f"{source}:1", _STRUCTURES, repr(text.strip()[:60]))
    line_ends = [found.end() for found in re.finditer("\n", text)]

    def line_of(position: int) -> str:
        return f"{source}:{bisect_right(line_ends, position) + 1}"

    def after(key: str) -> int:
        return max((found.end() for found in re.finditer(rf'"{key}"\s*:[\s\[]*', text)), default=0)

    if type(gap) not in _NUMBERS or not 0 < gap <= _LATEST:
        refuse(line_of(after("gap_seconds")), "gap_seconds must be a positive number", repr(gap)[:80])
    position = after("data")
    # a comma precedes each count: all counts before an invalid one are plain numbers
    positions = chain((position,), (found.end() for found in re.compile(r",\s*").finditer(text, position)))
    for index, count in enumerate(counts):
        position = next(positions, position)
        place = f"{line_of(position)}: data[{index}]"
        if type(count) not in _NUMBERS or count % 1:
            refuse(place, "the number of devices must be an integer", repr(count)[:80])
        yield place, index * gap, int(count)
    yield place, len(counts) * gap, 0


@dataclass(frozen=True)
class Conversion:
    """A trace made from a recording, and the effects of rounding and gaps."""

    trace: Trace  # the trace
    seconds_per_step: float  # the duration of a step
    seconds_recorded: float  # the length of the recording
    seconds_empty: float  # the time without any device
    seconds_left: float  # the remainder at the end, shorter than a step
    samples_before_rounding: float  # the samples of the trace before rounding to minibatches
    recorded_rate: float  # mean samples per second over the whole recording
    num_steps_rounded: int  # number of steps changed by rounding

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
