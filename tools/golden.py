"""Check that a code change does not change any run, to the last bit.

    PYTHONPATH=$PWD python tools/golden.py record new.jsonl
    python tools/golden.py compare old.jsonl new.jsonl

`record` makes the runs of ``golden_scenarios.py`` with whichever `variable_batch_size` is importable, in one process
and on 1 to 4 gloo processes, and writes a line for each run and rank. For another commit, set PYTHONPATH to a worktree
of it and call the same program: it uses public names alone, wherever they are, and old or new names of options
(``golden_recorder.py``). A line has

- for each step: digests of weights, buffers, the inner optimizer's state, the gradients and settings that it was given,
  samples and losses of this rank; lr, factor, gain, gradient norm, weight, progress, noise scale; whether it updated;
  and collectives, their bytes and waits of the host so far;
- for the run: calls and bytes of each type of collective and waits of the host, separately for before the first
  step; batch sizes, XLA graphs, and every leaf of ``optimizer.state_dict()``.

`compare` prints the first difference of each run and exits with 1 if there is any that the tables below do not allow.
During development, record a part: ``record new.jsonl --cores 0 2 --only "*adascale*"`` is compared with the same part
of a full record, except for runs that are resumed from one number of cores to the next.

Clocks of the time module are replaced, so that policies and checkpoints decide alike in every run. Two records of the
same code on the same machine are equal. On XLA, where torch_xla is installed, the marked scenarios run on 1, 2 and 4
virtual cores as well.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import gc
import importlib.util
import itertools
import json
import logging
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden_scenarios
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from golden_recorder import Recorder

import variable_batch_size as vbs

# prefixes of paths in the state dict that changed in the new record; None for removed leaves
RENAMED_STATE: dict[str, str | None] = {}

# patterns of leaves that only the new state dict has
NEW_STATE: tuple[str, ...] = ()

# other intended differences: pattern of the run, pattern of the path in it, reason
ALLOWED: tuple[tuple[str, str, str], ...] = (
    ("*", "run.setup*", "the option loss_scale is gone, so ranks compare one number less before the first step"),
    ("fully_shard*", "*counts*", "loss scales are no longer sent, which saves bytes and waits"),
    ("fully_shard*", "run.collectives*", "the same"),
    ("fully_shard*", "run.waits*", "the same"),
)

LIMIT = datetime.timedelta(seconds=300)  # timeout of a collective: a rank that waits longer waits for a failed one


# ------------------------------------------------------------------------------------------------------------- record


def record(path: Path, cores: list[int], only: str) -> int:
    """Make and record all runs; returns the number of failed ones."""
    names = [name for name in golden_scenarios.SCENARIOS if fnmatch.fnmatch(name, only)]
    num_failed, started_at = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as directory, path.open("w") as file:
        made_of = {"package": str(Path(vbs.__file__).parent), "torch": torch.__version__, "machine": platform.machine()}
        file.write(json.dumps({**made_of, "cores": cores, "only": only}) + "\n")
        on_xla = ["xla 1", "xla 2", "xla 4"] if importlib.util.find_spec("torch_xla") else []
        for where in [*cores, *on_xla]:
            chosen = [name for name in names if _is_made(name, where)]
            begun_at = time.monotonic()
            for line in _lines(chosen, where, Path(directory)):
                file.write(json.dumps(line) + "\n")
                num_failed += "error" in line
                if "error" in line:
                    print(f"{line['scenario']} on {where} failed:\n{line['error']}", file=sys.stderr)
            print(f"{len(chosen)} runs on {where} cores: {time.monotonic() - begun_at:.0f} s", file=sys.stderr)
    print(f"{path}: {time.monotonic() - started_at:.0f} s, {num_failed} failed", file=sys.stderr)
    return num_failed


def _is_made(name: str, where: int | str) -> bool:
    scenario = golden_scenarios.SCENARIOS[name]
    return scenario.on_xla if isinstance(where, str) else where in scenario.cores


def _lines(names: list[str], where: int | str, directory: Path) -> Iterator[dict[str, Any]]:
    if not names:
        return
    if isinstance(where, str):
        found = vbs.launch(_run_on_xla, (names, str(directory)), cores=int(where.split()[1]), backend="xla")
        for rank, records in enumerate(found):
            yield from ({"scenario": name, "cores": where, "rank": rank, **made} for name, made in records.items())
        return
    while names:
        with tempfile.TemporaryDirectory() as results:
            error = _run_on_processes(names, where, directory, Path(results))
            done = [
                path.read_text().splitlines() for path in sorted(Path(results).iterdir()) if path.suffix == ".jsonl"
            ]
        num_done = min(map(len, done), default=0) if len(done) == max(where, 1) else 0
        for lines in zip(*(lines[:num_done] for lines in done), strict=True):
            yield from map(json.loads, lines)
        names = names[num_done:]
        if names and error is not None:  # all ranks stopped at the scenario that failed on one of them
            yield {"scenario": names[0], "cores": where, "rank": 0, "error": error}
            names = names[1:]


def _run_on_processes(names: list[str], cores: int, directory: Path, results: Path) -> str | None:
    """Make the runs in forked processes, one after another; returns the traceback of a failed one."""
    try:
        mp.start_processes(
            _work, (names, cores, directory, results), nprocs=max(cores, 1), start_method="fork", join=True
        )
    except Exception as error:
        return str(error)
    return None


def _work(rank: int, names: list[str], cores: int, directory: Path, results: Path) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    gc.collect()
    gc.freeze()  # imported modules, before there is a model: collecting after each run takes a tenth of the time
    if cores:
        store = f"file://{results}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=cores, timeout=LIMIT)
        golden_scenarios.make_meshes()
    with (results / f"{rank}.jsonl").open("w") as file:
        for name in names:
            made = golden_scenarios.run(name, Recorder(_folder(directory, name), torch.device("cpu")))
            file.write(json.dumps({"scenario": name, "cores": cores, "rank": rank, **made}) + "\n")
            file.flush()
            gc.collect()  # release the wrapped models of this run before the next one
            if cores:
                dist.barrier()
    if cores:
        dist.destroy_process_group()


def _run_on_xla(names: list[str], directory: str) -> dict[str, Any]:
    import torch_xla

    logging.disable(logging.WARNING)
    device = torch_xla.device()
    return {name: golden_scenarios.run(name, Recorder(_folder(Path(directory), name), device)) for name in names}


def _folder(directory: Path, name: str) -> Path:
    folder = directory / name.replace(" ", "_")
    folder.mkdir(exist_ok=True)
    return folder


# ------------------------------------------------------------------------------------------------------------ compare


def compare(old_path: Path, new_path: Path, only: str) -> int:
    """Print the first difference of each run; returns the number of runs with differences that are not allowed."""
    (old_header, old), (new_header, new) = _read(old_path), _read(new_path)
    keys = sorted(key for key in {*old, *new} if fnmatch.fnmatch(_name(*key[:2]), only))
    for header in (old_header, new_header):  # a record may contain only some runs
        keys = [key for key in keys if fnmatch.fnmatch(key[0], header["only"])]
        keys = [key for key in keys if not key[1].isdecimal() or int(key[1]) in header["cores"]]
    if old_header["cores"] != new_header["cores"]:  # these are resumed from the previous number of cores
        keys = [key for key in keys if not key[0].startswith(golden_scenarios.CHAINED)]
    num_different = num_allowed = 0
    for key, runs in itertools.groupby(keys, key=lambda key: key[:2]):
        name = _name(*key)
        found = [(rank, path, was, now) for *_, rank in runs for path, was, now in _differences(old, new, (*key, rank))]
        refused = [difference for difference in found if not _is_allowed(name, difference[1])]
        num_allowed += len(found) - len(refused)
        if refused:
            num_different += 1
            rank, path, was, now = refused[0]
            print(f"{name}, rank {rank}: {path} was {_short(was)}, is {_short(now)} ({len(refused)} differences)")
    print(f"{len({key[:2] for key in keys})} runs: {num_different} differ; {num_allowed} allowed differences")
    return num_different


def _read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, str, int], dict[str, Any]]]:
    """The header, and every run by scenario, cores and rank."""
    first, *lines = path.read_text().splitlines()
    runs = map(json.loads, lines)
    header = {"cores": list(golden_scenarios.ALL_CORES), "only": "*"} | json.loads(first)
    return header, {(run["scenario"], str(run["cores"]), run["rank"]): run for run in runs}


def _name(scenario: str, cores: int | str) -> str:
    return f"{scenario} on {cores} cores"


def _differences(old: Any, new: Any, key: tuple[str, str, int]) -> Iterator[tuple[str, Any, Any]]:
    """Path, old and new value; the steps come first, in their order."""
    if key not in old or key not in new:
        yield "the run", "there" if key in old else "missing", "there" if key in new else "missing"
        return
    was, now = ({"error": None, "steps": [], "run": {}} | side[key] for side in (old, new))
    was["run"] = was["run"] | {"state_dict": _renamed(was["run"].get("state_dict", {}))}
    now["run"] = now["run"] | {
        "state_dict": {
            path: value
            for path, value in now["run"].get("state_dict", {}).items()
            if not any(fnmatch.fnmatch(path, pattern) for pattern in NEW_STATE)
        }
    }
    for part in ("error", "steps", "run"):
        yield from _walk(was[part], now[part], part)


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    for before, after in RENAMED_STATE.items():
        state = {
            path if not path.startswith(before) else (after or "") + path.removeprefix(before): value
            for path, value in state.items()
            if not (after is None and path.startswith(before))
        }
    return state


def _walk(was: Any, now: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*was, *(name for name in now if name not in was)]:
            yield from _walk(was.get(name, "missing"), now.get(name, "missing"), f"{path}.{name}")
    elif isinstance(was, list) and isinstance(now, list):
        for number, (one, other) in enumerate(itertools.zip_longest(was, now, fillvalue="missing")):
            yield from _walk(one, other, f"{path}[{number}]")
    elif json.dumps(was) != json.dumps(now):  # NaN is equal to NaN here
        yield path, was, now


def _is_allowed(name: str, path: str) -> bool:
    return any(fnmatch.fnmatch(name, run) and fnmatch.fnmatch(path, place) for run, place, _ in ALLOWED)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:97]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="make the runs and write what they did")
    recording.add_argument("path", type=Path)
    recording.add_argument("--cores", type=int, nargs="*", default=list(golden_scenarios.ALL_CORES))
    recording.add_argument("--only", default="*", help="a pattern of scenarios' names")
    comparing = commands.add_parser("compare", help="print the first difference of each run")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--only", default="*", help='a pattern of runs, as "adascale* on [02] cores"')
    given = parser.parse_args()
    if given.command == "record":
        sys.exit(bool(record(given.path, given.cores, given.only)))
    sys.exit(bool(compare(given.old, given.new, given.only)))


if __name__ == "__main__":
    main()
