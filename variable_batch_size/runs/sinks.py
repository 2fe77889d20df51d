"""Where the records of a run go: JSON lines, TensorBoard, a progress bar."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from variable_batch_size.runs.remote import Uploads, is_address, local_path

_AXES = ("step", "samples")
"""What a record is drawn against; with the epoch, its position."""


class JsonLines:
    """Appends each record to a file as one line of JSON; a number that is not finite becomes null.

    A run that goes on from a checkpoint does some steps again: when the first record comes, lines of the same file that
    it and later ones replace are dropped, and so is what a crash has left of a line.

    Args:
        path: of the file; its directory is made if need be. An address such as ``"s3://bucket/run/log.jsonl"`` is
            uploaded to twice a minute and when the sink is closed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._uploads = Uploads(str(path).rpartition("/")[0]) if is_address(path) else None
        self.path = local_path(path) if self._uploads is None else self._uploads.folder / str(path).rpartition("/")[2]
        self._has_begun = False
        self._file: IO[str] | None = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._has_begun:
                if self._uploads is not None:
                    self._uploads.fetch(self.path)
                self._drop_what_is_done_again(record)
                self._has_begun = True
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps({name: _finite_or_none(value) for name, value in record.items()}) + "\n")
        self._file.flush()
        if self._uploads is not None:
            self._uploads.soon()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            if self._uploads is not None:
                self._uploads.now()

    def _drop_what_is_done_again(self, first: Mapping[str, Any]) -> None:
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text(encoding="utf-8").splitlines() if _stays(line, first)]
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)


class ClosedAfterEach:
    """A sink whose file is closed after each record, for the few of a run that nobody ends."""

    def __init__(self, sink: JsonLines) -> None:
        self._sink = sink

    def __call__(self, record: Mapping[str, Any]) -> None:
        self._sink(record)
        self._sink.close()


def _stays(line: str, first: Mapping[str, Any]) -> bool:
    """Whether a line was written before the first record of a run that goes on, or is somebody else's."""
    try:
        old = json.loads(line)
    except ValueError:
        return False
    if not isinstance(old, dict) or "step" not in old:
        return True
    return (old["step"], old.keys() == first.keys()) < (first["step"], True)


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Writes every number of a record for TensorBoard twice: as ``steps/loss`` and as ``samples/loss``, against each.

    A number that is not finite is left out.
    Where a run goes on from a checkpoint, TensorBoard is told which points are void, because they are made again.

    Args:
        directory: for the event files, made if need be; or an address of objects, uploaded to twice a minute and when
            the sink is closed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = str(directory) if is_address(directory) else local_path(directory)
        self._uploads = [Uploads(_under(self.directory, axis)) for axis in _AXES] if is_address(directory) else []
        self._writers: list[Any] = []

    def __call__(self, record: Mapping[str, Any]) -> None:
        if not self._writers:
            self._open(record)
        for axis, writer in zip(_AXES, self._writers, strict=True):
            for name, value in record.items():
                if name not in _AXES and _finite_or_none(value) is not None:
                    writer.add_scalar(f"{_folder(axis)}/{name}", value, record[axis])
        for uploads in self._uploads:
            uploads.soon()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        for uploads in self._uploads if self._writers else []:
            uploads.now()
        self._writers = []

    def _open(self, first: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        for number, axis in enumerate(_AXES):
            directory = self._uploads[number].folder if self._uploads else Path(self.directory) / _folder(axis)
            there = self._uploads[number].has_any if self._uploads else directory.exists() and any(directory.iterdir())
            # each axis has files of its own, for what is void is said by one number
            purge_step = first[axis] + 1 if there else None
            # tensorboardX names files by the second, and would not see that of another session
            suffix = f".{time.time_ns()}" if self._uploads else ""
            self._writers.append(SummaryWriter(str(directory), purge_step=purge_step, filename_suffix=suffix))


def _under(directory: str | Path, axis: str) -> str:
    return f"{str(directory).rstrip('/')}/{_folder(axis)}"


def _folder(axis: str) -> str:
    return {"step": "steps", "samples": "samples"}[axis]


class ProgressBar:
    """Shows how far a run is, with the numbers of the latest record behind.

    Args:
        num_steps: steps in the whole run, those of earlier sessions included.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._bar: Any = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=self.num_steps, unit="step", dynamic_ncols=True)
        self._bar.n = record["step"]
        shown = {name: value for name, value in record.items() if name not in ("step", "samples", "graphs")}
        self._bar.set_postfix(**{name: f"{value:.4g}" for name, value in shown.items()})

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
