"""Sinks for the records of a run: the console, JSON lines, TensorBoard, Prometheus, a progress bar."""

import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from variable_batch_size.checks import check_within, import_extra
from variable_batch_size.files import write_text
from variable_batch_size.runs.remote import RemoteDirectory
from variable_batch_size.urls import is_url, local_path

_AXES = {"step": "steps", "samples": "samples"}  # the x-axes of plots, and the folder of each


class JsonLines:
    """Appends each record to a file as one line of JSON; non-finite numbers become null.

    A run that resumes from a checkpoint repeats some steps: the first record drops lines of the same file that it and
    later records replace, and a line that a crash left incomplete.

    Args:
        path: of the file; its directory is created if necessary. A URL such as ``"s3://bucket/run/log.jsonl"`` is
            uploaded to twice a minute and when the sink is closed.
        open_per_record: close the file after each record, for a sink with few records that is never closed.
    """

    def __init__(self, path: str | os.PathLike[str], *, open_per_record: bool = False) -> None:
        self._remote: RemoteDirectory | None = None
        self.path = local_path(path)
        if is_url(path):
            directory, _, name = str(path).rpartition("/")
            self._remote = RemoteDirectory(directory, upload_at_exit=True)
            self.path = self._remote.folder / name
        self._open_per_record, self._has_begun = open_per_record, False
        self._file: IO[str] | None = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._has_begun:
                if self._remote is not None and self.path.name in self._remote.names():
                    self._remote.download(self.path)
                if self.path.exists():
                    lines = self.path.read_text(encoding="utf-8").splitlines()
                    write_text(self.path, "".join(f"{line}\n" for line in lines if _is_before(line, record)))
                self._has_begun = True
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps({name: _finite_or_none(value) for name, value in record.items()}) + "\n")
        self._file.flush()
        if self._remote is not None:
            self._remote.maybe_upload()
        if self._open_per_record:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            if self._remote is not None:
                self._remote.upload()


def _is_before(line: str, first: Mapping[str, Any]) -> bool:
    """Whether a line precedes the first record of a resumed run, or is not from a log."""
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
    """Writes each number of a record for TensorBoard twice: ``steps/loss`` over steps, ``samples/loss`` over samples.

    Non-finite numbers are skipped. When a run resumes from a checkpoint, the points that it repeats are purged. The
    directory may be a URL, uploaded to twice a minute and when the sink is closed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._tensorboard = import_extra("tensorboardX", "vbs.TensorBoard needs tensorboardX", "tensorboard")
        self.directory = str(directory) if is_url(directory) else local_path(directory)
        urls = [f"{str(directory).rstrip('/')}/{folder}" for folder in _AXES.values()] if is_url(directory) else []
        self._remotes = [RemoteDirectory(url, upload_at_exit=True) for url in urls]
        self._writers: list[Any] = []

    def __call__(self, record: Mapping[str, Any]) -> None:
        if not self._writers:
            self._open(record)
        for (axis, folder), writer in zip(_AXES.items(), self._writers, strict=True):
            summaries = []
            for name, value in record.items():
                if isinstance(value, list):
                    numbered = {f"core {place}": number for place, number in enumerate(value)}
                    writer.add_scalars(f"{folder}/{name}", numbered, record[axis])
                elif name not in _AXES and _finite_or_none(value) is not None:
                    summaries.append(self._tensorboard.summary.scalar(f"{folder}/{name}", value))
            if summaries:  # in one event: each is sent to a thread of its own
                for other in summaries[1:]:
                    summaries[0].MergeFrom(other)
                writer.file_writer.add_summary(summaries[0], record[axis])
        for remote in self._remotes:
            remote.maybe_upload()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        for remote in self._remotes if self._writers else []:
            remote.upload()
        self._writers = []

    def _open(self, first: Mapping[str, Any]) -> None:
        # each axis has its own files, as purge_step is one number
        for number, (axis, folder) in enumerate(_AXES.items()):
            remote = self._remotes[number] if self._remotes else None
            directory = Path(self.directory) / folder if remote is None else remote.folder
            resumes = (directory.exists() and any(directory.iterdir())) if remote is None else bool(remote.names())
            # tensorboardX names files by the second, and would not see the remote file of another session
            suffix = "" if remote is None else f".{time.time_ns()}"
            purge_step = first[axis] + 1 if resumes else None
            options = {"purge_step": purge_step, "filename_suffix": suffix}
            self._writers.append(self._tensorboard.SummaryWriter(str(directory), **options))


class Prometheus:
    """Serves the numbers of the latest record to Prometheus, as gauges such as ``vbs_loss`` and ``vbs_batch_size``.

    Core 0 serves them at ``http://ADDRESS:PORT/metrics``, from the first record until the sink is closed.

    Args:
        port: the port on which it listens; 0 for a free one, which is then in the attribute `port`.
        address: the address on which it listens: by default on this machine only, ``"0.0.0.0"`` for all addresses.
        labels: of all gauges, such as ``{"run": "a"}``.
    """

    def __init__(self, port: int, *, address: str = "127.0.0.1", labels: Mapping[str, str] | None = None) -> None:
        self._client = import_extra("prometheus_client", "Prometheus needs prometheus_client", "prometheus")
        check_within(65535, port=port)
        self.port, self.address, self._labels = port, address, dict(labels or {})
        self._gauges: dict[str, Any] = {}
        self._registry = self._client.CollectorRegistry()  # of its own: another run in this process may have the same
        self._server: Any = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        if self._server is None:
            try:
                self._server, _ = self._client.start_http_server(self.port, self.address, self._registry)
            except OSError as error:
                raise OSError(f"Prometheus cannot listen on {self.address}:{self.port}: {error}") from error
            self.port = self._server.server_port
        for name, value in record.items():
            if isinstance(value, int | float):
                self._gauge(re.sub(r"\W", "_", f"vbs_{name}"), name).set(value)

    def _gauge(self, name: str, meaning: str) -> Any:
        if name not in self._gauges:
            gauge = self._client.Gauge(
                name, f"{meaning} of the latest record", list(self._labels), registry=self._registry
            )
            self._gauges[name] = gauge.labels(**self._labels) if self._labels else gauge
        return self._gauges[name]

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


_DETAILS = {"progress", "factor", "gradient_norm", "idle_share", "cores", "graphs", "exact", "late_gain"}
_INTERVALS = {"gain": ("gain_low", "gain_high"), "noise_scale": ("noise_scale_low", "noise_scale_high")}
_DETAILS |= {"scale", "cosine", "norm_layers_noise_scale", "norm_layers_slope", *sum(_INTERVALS.values(), start=())}


class Console:
    """Prints each record as a line, with rounded numbers.

    >>> Console()({"epoch": 0, "step": 40, "samples": 5120, "loss": 0.531249, "batch_size": 128, "lr": 0.02})
    epoch 0  step 40  samples 5,120  loss 0.5312  batch size 128  lr 0.02

    Args:
        everything: print all numbers of a record; otherwise, omit details and numbers that follow from others.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self.everything = everything

    def __call__(self, record: Mapping[str, Any]) -> None:
        shown = {name: value for name, value in record.items() if self.everything or name not in _DETAILS}
        line = "  ".join(f"{name.replace('_', ' ')} {_rounded(value)}" for name, value in shown.items())
        print(line, flush=True)  # noqa: T201


def _rounded(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_rounded, value))
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or 1000 <= abs(value) < math.inf else f"{value:.4g}"


class ProgressBar:
    """Shows the progress of a run of `num_steps` steps, with earlier sessions, and the numbers of the latest record."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._bar: Any = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=self.num_steps, unit="step", dynamic_ncols=True)
        self._bar.n = record["step"]
        numbers = {name: value for name, value in record.items() if not isinstance(value, list)}
        shown = {name: f"{value:.4g}" for name, value in numbers.items() if name not in ("step", "samples", "graphs")}
        for name, (low, high) in _INTERVALS.items():
            if {name, low, high} <= shown.keys():
                shown[name] += f" ({shown.pop(low)} to {shown.pop(high)})"
        self._bar.set_postfix(**shown)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
