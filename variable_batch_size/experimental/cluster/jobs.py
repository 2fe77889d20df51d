"""JOBS.toml: the jobs of a pool and its settings."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from variable_batch_size.checks import (
    check_not_negative_number,
    check_one_of,
    check_positive,
    check_positive_number,
    did_you_mean,
    import_extra,
    refuse,
)
from variable_batch_size.experimental.cluster.allocation import ALLOCATIONS, check_power
from variable_batch_size.urls import is_url, local_path


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A ``[[job]]`` of the file."""

    name: str
    script: str  # a Python script that calls vbs.launch and has a vbs.Checkpoint
    checkpoint: str  # the directory or URL of that checkpoint
    args: tuple[str, ...] = ()  # of the script; {checkpoint}, {cores} and {name} are replaced
    min_cores: int = 1
    max_cores: int | None = None  # None for all cores of the pool
    arrives: float = 0.0  # seconds after the start of the pool
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, cores: int) -> list[str]:
        """The command line of a core, after the interpreter."""
        values = {"checkpoint": self.checkpoint, "cores": cores, "name": self.name}
        pattern = re.compile(r"\{(checkpoint|cores|name)\}")
        return [self.script, *(pattern.sub(lambda found: str(values[found[1]]), one) for one in self.args)]


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """The ``[pool]`` of the file."""

    policy: str = "goodput"  # or fifo, equal, shortest
    power: float = -1.0  # the exponent of the speed-ups
    interval_seconds: float = 30.0  # between decisions; a job that arrives or ends causes one too
    horizon_seconds: float = 600.0  # within which a restart must pay off
    failures: int = 3  # errors in a row, without a new checkpoint, after which a job is given up; of kills, ten times
    backoff_seconds: float = 2.0  # after the first failure, then twice as long each time
    price_per_core_hour: float | None = None  # with `worth_per_core_hour`, suggests the size of the pool
    worth_per_core_hour: float | None = None  # the worth of what a job does in an hour on one core
    max_nodes: int = 16  # of a suggestion
    request_nodes: bool = False  # whether to pass the suggestion to Ray's autoscaler


def read_cluster(path: str | os.PathLike[str]) -> tuple[PoolSpec, list[JobSpec]]:
    """Read the file; scripts and checkpoints are relative to its directory."""
    name = os.fspath(path)
    toml = import_extra("tomllib" if sys.version_info >= (3, 11) else "tomli", "reading TOML needs tomli", "cluster")
    try:
        found = toml.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: the file must be TOML: {error}") from None
    _check_names(found, ("pool", "job"), name)
    pool = _made(PoolSpec, found.get("pool", {}), f"{name}: [pool]")
    jobs = found.get("job", [])
    if not isinstance(jobs, list) or not jobs:
        refuse(name, "the file must have a [[job]]", "none")
    specs = [_job(values, f"{name}: [[job]] {number}", Path(path).parent) for number, values in enumerate(jobs, 1)]
    _check_pool(pool, f"{name}: [pool]")
    for key in ("name", "checkpoint"):
        seen: dict[str, str] = {}
        for spec in specs:
            value = getattr(spec, key)
            if value in seen:
                raise ValueError(
                    f"{name}: each job must have its own {key}, but {spec.name} and {seen[value]} have {value}"
                )
            seen[value] = spec.name
    return pool, specs


def _check_names(values: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known)
            raise ValueError(f"{place} must have only the names {', '.join(known)}, got {key!r}{hint}")


def _made(kind: Any, values: Any, place: str) -> Any:
    if not isinstance(values, dict):
        refuse(place, "must be a table", repr(values))
    _check_names(values, tuple(one.name for one in fields(kind)), place)
    for one in fields(kind):
        if one.name in values and isinstance(values[one.name], str) != (one.type is str):
            rule = "must be a string" if one.type is str else "must not be a string"
            refuse(f"{place}: {one.name}", rule, repr(values[one.name]))
    try:
        return kind(**values)
    except TypeError as error:
        missing = re.findall(r"'(\w+)'", str(error))
        raise ValueError(f"{place} must have {' and '.join(missing)}") from None


def _job(values: Any, place: str, folder: Path) -> JobSpec:
    spec = _made(JobSpec, values, place)
    if not re.fullmatch(r"[\w.-]+", spec.name):
        refuse(f"{place}: name", "must have only letters, digits, '.', '_' and '-'", repr(spec.name))
    with _at(place):
        check_positive(min_cores=spec.min_cores, **({} if spec.max_cores is None else {"max_cores": spec.max_cores}))
        check_not_negative_number(arrives=spec.arrives)
    if spec.max_cores is not None and spec.max_cores < spec.min_cores:
        refuse(f"{place}: max_cores", f"must be at least min_cores, which is {spec.min_cores}", spec.max_cores)
    if not isinstance(spec.args, list | tuple) or not all(isinstance(one, str) for one in spec.args):
        refuse(f"{place}: args", "must be a list of strings", repr(spec.args))
    if not isinstance(spec.environment, dict) or not all(isinstance(one, str) for one in spec.environment.values()):
        refuse(f"{place}: environment", "must be a table of strings", repr(spec.environment))
    script = (folder / spec.script).resolve()
    if not script.is_file():
        refuse(f"{place}: script", "must be an existing file", script)
    if not spec.checkpoint:
        refuse(f"{place}: checkpoint", "must be a directory or URL", "''")
    with _at(f"{place}: checkpoint"):
        is_remote = is_url(spec.checkpoint)
    where = spec.checkpoint.rstrip("/") if is_remote else str((folder / local_path(spec.checkpoint)).resolve())
    return JobSpec(**{**vars(spec), "script": str(script), "checkpoint": where, "args": tuple(spec.args)})


def _check_pool(pool: PoolSpec, place: str) -> None:
    with _at(place):
        check_one_of(ALLOCATIONS, policy=pool.policy)
        check_positive_number(
            interval_seconds=pool.interval_seconds,
            horizon_seconds=pool.horizon_seconds,
            backoff_seconds=pool.backoff_seconds,
        )
        check_positive(failures=pool.failures, max_nodes=pool.max_nodes)
        check_power(pool.power)
        if not isinstance(pool.request_nodes, bool):  # in the words of TOML
            raise ValueError(f"`request_nodes` must be true or false, got {pool.request_nodes!r}")
        prices = {key: getattr(pool, key) for key in ("price_per_core_hour", "worth_per_core_hour")}
        if any(price is not None for price in prices.values()):
            check_positive_number(**prices)


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Prefix an error with a place."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from None
