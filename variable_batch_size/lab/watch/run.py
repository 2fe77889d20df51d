"""WatchedRun: what the files of a run show: its curves, its decisions, and whether it is still running."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from variable_batch_size.files import DECISIONS, EXECUTED, LOG
from variable_batch_size.lab.watch.series import POSITIONS, Column, Columns, Series, parsed
from variable_batch_size.lab.watch.tail import Tail
from variable_batch_size.runs.lock import LOCK, is_alive
from variable_batch_size.urls import is_url

_MOST_DECISIONS = 500
_NUM_SAMPLED = 1000
_LONGEST_ROW = 40  # bytes of a step and a batch size; longer lines are not rows
_SECONDS_BETWEEN_LOOKS = 5.0  # at the lock of a run at a URL
_SHORTEST_SILENCE = 60.0  # seconds without a record after which a run without a lock is assumed to have ended


class WatchedRun:
    """A run, by its directory or URL. :meth:`poll` reads what is new; nothing is ever written."""

    def __init__(self, directory: str) -> None:
        self.name = directory
        self.version = 0  # changes whenever what is shown changes
        self.is_remote = is_url(directory)
        self._log, self._executed, self._decided = (Tail(directory, name) for name in (LOG, EXECUTED, DECISIONS))
        self._lock = Tail(directory, LOCK)
        self._begin_log()
        self._begin_executed()
        self._begin_decisions()
        self._restarts = [0, 0, 0]
        self._state: tuple[str, str] = ("waiting", "not read yet")
        self._looked_at = -math.inf  # for its state

    def _begin_log(self) -> None:
        self._series = Series()
        self._usual_silence = 0.0  # seconds between records, recently
        self._preview: Series | None = None

    def _begin_executed(self) -> None:
        self._steps, self._num_samples = Series(), 0
        self.origin = ""  # the comment at the top of the executed trace

    def _begin_decisions(self) -> None:
        self._changes: deque[dict[str, Any]] = deque(maxlen=_MOST_DECISIONS)
        self._num_decisions = 0

    def poll(self) -> bool:
        """Read what is new, and return whether more can be read right away."""
        before = self._shown()
        if self._preview is None:
            self._preview = self._first_look()
        elif self._preview.num_records and self._log.has_more:
            self._preview.add(parsed(self._end.lines()))
        elif self._preview.num_records:  # the log was read completely
            self._preview = Series()
        for number, (tail, add, begin) in enumerate(
            (
                (self._log, self._add_log, self._begin_log),
                (self._executed, self._add_steps, self._begin_executed),
                (self._decided, self._add_decisions, self._begin_decisions),
            )
        ):
            lines = tail.lines()
            if tail.num_restarts != self._restarts[number]:
                self._restarts[number] = tail.num_restarts
                begin()
                self.version += 1
            if lines:
                add(lines)
        if not self.is_remote or time.monotonic() - self._looked_at > _SECONDS_BETWEEN_LOOKS:
            self._state, self._looked_at = self._found_state(), time.monotonic()
        self.version += before != self._shown()
        return any(tail.has_more for tail in (self._log, self._executed, self._decided))

    def _shown(self) -> tuple[object, ...]:
        """Changes with what is shown; while a long log is being read, only with each percent of it."""
        preview = self._preview.num_records if self._preview is not None else 0
        records = preview if self._log.has_more else self._series.num_records
        return (records, self._num_samples, self._num_decisions, int(100 * self._log.share), self._state)

    def _first_look(self) -> Series:
        """A sample of a long log, which takes a while to read; from now on, also what is appended to it."""
        series, self._end = Series(), Tail(self.name, LOG)
        if self._log.is_long():
            self._end.skip()
            series.add(parsed(self._log.sample(_NUM_SAMPLED)))
        return series

    def _add_log(self, lines: Sequence[bytes]) -> None:
        self._series.add(parsed(lines))
        self._usual_silence = float(np.diff(self._series.columns()["seconds"][-20:]).max(initial=0.0))

    def _add_steps(self, lines: Sequence[bytes]) -> None:
        rows = []
        for line in lines:
            step, _, size = line.partition(b",")
            if step.isdigit() and size.strip().isdigit() and len(line) < _LONGEST_ROW:
                rows.append((int(step) + 1, int(size)))
            elif line.startswith(b"# executed from"):
                self.origin = line[2:].decode(errors="replace")
        if rows:
            steps, sizes = np.array(rows, dtype=np.float64).T
            samples = self._num_samples + np.cumsum(sizes)
            self._num_samples = int(samples[-1])
            self._steps.append({"step": steps, "samples": samples, "batch_size": sizes})

    def _add_decisions(self, lines: Sequence[bytes]) -> None:
        for record in parsed(lines):
            self._num_decisions += 1
            last = self._changes[-1] if self._changes else {}
            if any(record.get(name) != last.get(name) for name in ("batch_size", "cores")):
                self._changes.append(record)

    def _found_state(self) -> tuple[str, str]:
        """The state in a word, and the reason for it, which may be empty."""
        lock = self._lock.text()
        if lock is not None:
            alive = is_alive(lock, seconds_since_renewal=self._lock.age(), is_remote=self.is_remote)
            return ("running", "") if alive else ("died", "its process has ended without releasing the run")
        silent = min(self._log.age(), self._executed.age(), self._decided.age())
        if math.isinf(silent):
            return "waiting", "there are no files yet"
        if self._executed.age() < math.inf:  # a run with a checkpoint holds a lock while it trains
            return "stopped", "it has ended, or was stopped and saved"
        if silent < max(_SHORTEST_SILENCE, 5 * self._usual_silence):
            return "running", ""
        return "stopped", f"no record for {silent / 60:,.0f} min: it has ended or died"

    def as_dict(self, goal: Mapping[str, float]) -> dict[str, Any]:
        """What the page shows, for JSON."""
        preview = self._preview if self._log.has_more else None
        series = preview if preview is not None and preview.num_records else self._series
        columns = series.columns()
        state, why = self._state
        return {
            "name": self.name,
            "state": state,
            "why": next((tail.error for tail in (self._log, self._executed, self._decided) if tail.error), why),
            "num_records": self._series.num_records,
            "read": round(self._log.share, 3),
            "latest": _plain(series.latest),
            "log": {name: _rounded(values, name) for name, values in columns.items() if np.isfinite(values).any()},
            "steps": self._executed_columns(columns),
            "decisions": [_plain(record) for record in self._changes],
            "num_decisions": self._num_decisions,
            "seconds_left": seconds_left(columns, goal) if state == "running" else None,
        }

    def _executed_columns(self, log: Columns) -> dict[str, list[float | None]]:
        """The batch sizes of all steps, over every axis in the log; after the latest save, they come from the log."""
        found = self._steps.columns()
        steps = found["step"]
        if not len(steps):
            return {}
        since = log["step"] > steps[-1]
        shown = {name: np.append(found[name], log[name][since]) for name in ("step", "samples", "batch_size")}
        for name in set(POSITIONS) - shown.keys():
            known = np.isfinite(log[name])
            if known.any():
                shown[name] = _between(shown["step"], log["step"][known], log[name][known])
        return {name: _rounded(values, name) for name, values in shown.items()}


def _between(steps: Column, known: Column, values: Column) -> Column:
    """Values at some steps, interpolated linearly between the known ones, from 0 at the start."""
    return np.asarray(np.interp(steps, np.append(0.0, known), np.append(0.0, values)))


def seconds_left(columns: Columns, goal: Mapping[str, float]) -> float | None:
    """The seconds until a goal, such as {"samples": 10_000}, at the rate of the latest tenth of the run."""
    for name, end in goal.items():
        done, seconds = columns[name], columns["seconds"]
        if len(done) < 2 or not np.isfinite(done[-1]):
            continue
        first = -max(2, len(done) // 10)
        made, took = done[-1] - done[first], seconds[-1] - seconds[first]
        if made > 0 and took > 0:
            return float(max(0.0, end - done[-1]) * took / made)
    return None


def _rounded(values: Any, name: str) -> list[float | None]:
    digits = 12 if name in POSITIONS else 6
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a record, and the beginnings of its strings."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, str):
            found[name] = value[:400]
        elif isinstance(value, int | float):
            found[name] = value if -math.inf < value < math.inf else None
    return found
