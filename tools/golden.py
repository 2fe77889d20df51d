"""Check that a code change does not change any run, to the last bit: record before and after it, and compare.

    PYTHONPATH=$PWD python tools/golden.py record new.jsonl --fast    # a part, in one process: after each small change
    PYTHONPATH=$PWD python tools/golden.py record new.jsonl           # everything
    python tools/golden.py compare old.jsonl new.jsonl

`record` makes the runs of ``golden_scenarios.py`` with whichever `variable_batch_size` is importable, and writes a line
for each run and rank. For another commit, set PYTHONPATH to a worktree of it and call the same program, which uses
public names only. The runs are made in one process (``0``), on 1 to 4 gloo processes (``1`` …), on elastic cores, of
which one is killed (``elastic``), on virtual XLA cores (``xla1``, ``xla2``, ``xla4``) and on a GPU (``cuda``); see
``--cores``. A line has

- for each step: where it is; the samples of this rank's minibatches, their losses, what step() returned; collectives,
  their bytes and waits of the host so far; noise, gain, factor, lr; the gradients and settings that the inner optimizer
  was given, and the settings after it; digests of weights, buffers and the inner optimizer's state; whether it updated;
  progress; the numbers in messages;
- for the run: calls and bytes of each type of collective and waits of the host, separately for before the first
  step; log records, decisions, executed traces, checkpoints; every leaf of ``optimizer.state_dict()``; on XLA and on a
  GPU, the weights of a second run of which no step is recorded, with graphs, executions, transfers and waits.

`compare` takes two files, or two directories with files of the same names. It prints the first difference of each run:
in the first step that differs on any rank, the number that is computed first. It exits with 1 if there is any that the
tables below do not allow. A part, as ``record new.jsonl --cores 0 2 --only "*adascale*"``, is compared with the same of
a full record, except for runs that are resumed from one number of cores to the next.

Clocks of the time module are replaced, so that policies and checkpoints decide alike in every run. Two records of the
same code on the same machine are equal.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import functools
import gc
import importlib.util
import itertools
import json
import os
import platform
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import golden_scenarios
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from golden_recorder import Recorder, keep_messages, xla_counts
from golden_training import make_meshes

import variable_batch_size as vbs

PLACES = ("0", "1", "2", "3", "4", "elastic", "xla1", "xla2", "xla4", "cuda")

# prefixes of paths in the state dict that changed in the new record; None for removed leaves
RENAMED_STATE: dict[str, str | None] = {}

# patterns of leaves that only the new state dict has
NEW_STATE: tuple[str, ...] = ()

# other intended differences: pattern of the run, pattern of the path in it, reason
ALLOWED: tuple[tuple[str, str, str], ...] = ()

LIMIT = datetime.timedelta(seconds=300)  # timeout of a collective: a rank that waits longer waits for a failed one
# XLA compiles a program in a fraction of the time
QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)

Run = dict[str, Any]
Key = tuple[str, str, int]  # scenario, place and rank


# ------------------------------------------------------------------------------------------------------------- record


def record(path: Path, places: list[str], only: str, *, is_fast: bool) -> int:
    """Make and record all runs; returns the number of failed ones."""
    header = {"package": str(Path(vbs.__file__).parent), "torch": torch.__version__, "machine": platform.machine()}
    header |= {"cores": places, "only": only, "is_fast": is_fast}
    num_failed, started_at = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as directory, path.open("w") as file:
        file.write(json.dumps(header) + "\n")
        for place in places:
            names = [name for name in golden_scenarios.SCENARIOS if _is_selected(header, name, place)]
            begun_at = time.monotonic()
            for line in _lines(names, place, Path(directory)):
                file.write(json.dumps(line) + "\n")
                num_failed += "error" in line
                if "error" in line:
                    print(f"{line['scenario']} on {place} failed:\n{line['error']}", file=sys.stderr)
            print(f"{len(names)} runs on {place}: {time.monotonic() - begun_at:.0f} s", file=sys.stderr)
    print(f"{path}: {time.monotonic() - started_at:.0f} s, {num_failed} failed", file=sys.stderr)
    return num_failed


def _is_selected(header: dict[str, Any], name: str, place: str) -> bool:
    """Whether a record with this header contains a run."""
    scenario = golden_scenarios.SCENARIOS.get(name)
    return (
        place in header["cores"]
        and fnmatch.fnmatch(name, header["only"])
        and (name in golden_scenarios.FAST or not header["is_fast"])
        and (scenario is None or scenario.is_made_at(place))
    )


def _lines(names: list[str], place: str, directory: Path) -> Iterator[Run]:
    """The record of each run on each rank; as many runs at a time as there are processors for their processes."""
    if place.startswith("xla"):
        yield from _lines_on_xla(names, place, directory)
    elif place == "elastic":
        for name in names:
            yield from _lines_on_elastic_cores(name, directory)
    else:
        number = (os.cpu_count() or 1) // _num_processes(place) or 1
        parts = [names[first::number] for first in range(number)]
        with ThreadPoolExecutor(number) as threads:
            for lines in threads.map(lambda part: list(_lines_on_processes(part, place, directory)), parts):
                yield from lines


def _lines_on_processes(names: list[str], place: str, directory: Path) -> Iterator[Run]:
    while names:
        with tempfile.TemporaryDirectory() as results:
            error = _run_on_processes(names, place, directory, Path(results))
            done = [path.read_text().splitlines() for path in sorted(Path(results).glob("*.jsonl"))]
        num_done = min(map(len, done), default=0) if len(done) == _num_processes(place) else 0
        for lines in zip(*(lines[:num_done] for lines in done), strict=True):
            yield from map(json.loads, lines)
        names = names[num_done:]
        if names and error is not None:  # all ranks stopped at the scenario that failed on one of them
            yield {"scenario": names[0], "cores": place, "rank": 0, "error": error}
            names = names[1:]


def _num_processes(place: str) -> int:
    return max(1, int(place)) if place.isdecimal() else 1


def _run_on_processes(names: list[str], place: str, directory: Path, results: Path) -> str | None:
    """Make the runs in forked processes, one after another; returns the traceback of a failed one."""
    try:
        mp.start_processes(
            _work, (names, place, directory, results), nprocs=_num_processes(place), start_method="fork", join=True
        )
    except Exception as error:
        return str(error)
    return None


def _work(rank: int, names: list[str], place: str, directory: Path, results: Path) -> None:
    torch.set_num_threads(1)
    keep_messages()
    gc.collect()
    gc.freeze()  # imported modules, before there is a model: collecting after each run takes a tenth of the time
    cores, device = int(place) if place.isdecimal() else 0, torch.device("cuda" if place == "cuda" else "cpu")
    if device.type == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    if cores:
        store = f"file://{results}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=cores, timeout=LIMIT)
        make_meshes()
    with (results / f"{rank}.jsonl").open("w") as file:
        for name in names:
            made = golden_scenarios.run(name, Recorder(_folder(directory, name), device))
            if device.type == "cuda":
                quiet = Recorder(_folder(directory, f"{name}, quiet"), device, is_quiet=True)
                made["run"]["unobserved"] = golden_scenarios.run(name, quiet)
            file.write(json.dumps({"scenario": name, "cores": place, "rank": rank, **made}) + "\n")
            file.flush()
            gc.collect()  # release the wrapped models of this run before the next one
            if cores:
                dist.barrier()
    if cores:
        dist.destroy_process_group()


def _lines_on_elastic_cores(name: str, directory: Path) -> Iterator[Run]:
    cores = golden_scenarios.SCENARIOS[name].elastic
    try:
        found = vbs.launch(_run_on_elastic_core, (name, str(directory)), cores=cores, elastic=(1, cores))
    except RuntimeError as error:
        found = [{"error": str(error)}]
    yield from ({"scenario": name, "cores": "elastic", "rank": rank, **made} for rank, made in enumerate(found))


def _run_on_elastic_core(name: str, directory: str) -> Run:
    torch.set_num_threads(1)
    keep_messages()
    recorder = Recorder(_folder(Path(directory), name), torch.device("cpu"), has_own_clock=False)
    return golden_scenarios.run(name, recorder)


def _lines_on_xla(names: list[str], place: str, directory: Path) -> Iterator[Run]:
    cores, before = int(place.removeprefix("xla")), os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = QUICKLY
    try:
        found = vbs.launch(_run_on_xla, (names, cores, str(directory)), cores=cores, backend="xla") if names else []
    finally:
        os.environ.update({"XLA_FLAGS": before} if before is not None else {})
    for rank, records in enumerate(found):
        yield from ({"scenario": name, "cores": place, "rank": rank, **made} for name, made in records.items())


def _run_on_xla(names: list[str], cores: int, directory: str) -> dict[str, Run]:
    """On a core, which is a thread: each run twice, as recording starts graphs and transfers of its own."""
    import torch_xla

    keep_messages()
    device, found = torch_xla.device(), {}
    for name in names:
        try:
            folder = _folder(Path(directory), name)
            made = golden_scenarios.run(name, Recorder(folder, device, has_own_clock=False))
            before = _counts_of_all(cores)
            quiet = Recorder(_folder(Path(directory), f"{name}, quiet"), device, has_own_clock=False, is_quiet=True)
            unobserved = golden_scenarios.run(name, quiet)
            after = _counts_of_all(cores)
            counts = {counter: after[counter] - before[counter] for counter in after}
            made["run"]["unobserved"] = {**unobserved, **counts}
            found[name] = made
        except Exception:
            if cores > 1:  # the others would wait for this core
                raise
            found[name] = {"error": traceback.format_exc()}
    return found


def _counts_of_all(cores: int) -> dict[str, int]:
    """The counters of XLA when all cores are here."""
    _barrier(cores).wait(LIMIT.total_seconds())
    counts = xla_counts()
    _barrier(cores).wait(LIMIT.total_seconds())
    return counts


_making_barrier = threading.Lock()


def _barrier(cores: int) -> threading.Barrier:
    with _making_barrier:
        return _made_barrier(cores)


@functools.cache
def _made_barrier(cores: int) -> threading.Barrier:
    return threading.Barrier(cores)


def _folder(directory: Path, name: str) -> Path:
    folder = directory / name.replace(" ", "_")
    folder.mkdir(exist_ok=True)
    return folder


# ------------------------------------------------------------------------------------------------------------ compare


def compare(old_path: Path, new_path: Path, only: str = "*", ignored: tuple[str, ...] = ()) -> int:
    """Print the first difference of each run; returns the number of runs with differences that are not allowed."""
    if old_path.is_dir() or new_path.is_dir():
        names = sorted({path.name for folder in (old_path, new_path) for path in folder.glob("*.jsonl")})
        found = 0
        for name in names:
            missing = [str(folder) for folder in (old_path, new_path) if not (folder / name).exists()]
            print(f"{name}:", f"missing in {' and '.join(missing)}" if missing else "")
            found += 1 if missing else compare(old_path / name, new_path / name, only, ignored)
        return found
    (old_header, old), (new_header, new) = _read(old_path), _read(new_path)
    num_runs = num_different = num_allowed = 0
    for (name, place), keys in itertools.groupby(sorted({*old, *new}), key=lambda key: key[:2]):
        in_both = all(_is_selected(header, name, place) for header in (old_header, new_header))
        # these are resumed from the previous number of cores
        is_other = name in golden_scenarios.CHAINED and old_header["cores"] != new_header["cores"]
        if not in_both or is_other or not fnmatch.fnmatch(_title(name, place), only):
            continue
        found = [difference for key in keys for difference in _differences(old.get(key), new.get(key), key[2])]
        found = [one for one in found if not any(fnmatch.fnmatch(one.path, pattern) for pattern in ignored)]
        refused = [one for one in found if not _is_allowed(_title(name, place), one.path)]
        num_runs, num_allowed = num_runs + 1, num_allowed + len(found) - len(refused)
        if refused:
            num_different += 1
            print(f"{_title(name, place)}: {_in_words(refused)}")
    print(f"{num_runs} runs: {num_different} differ; {num_allowed} allowed differences")
    return num_different


def _read(path: Path) -> tuple[dict[str, Any], dict[Key, Run]]:
    """The header, and every run by scenario, place and rank."""
    first, *lines = path.read_text().splitlines()
    runs = map(json.loads, lines)
    return json.loads(first), {(run["scenario"], run["cores"], run["rank"]): run for run in runs}


def _title(name: str, place: str) -> str:
    return f"{name} on {place}"


class Difference:
    """A number that differs, in a step if there is one, otherwise in the complete run."""

    def __init__(self, rank: int, step: int | None, where: str, path: str, was: Any, now: Any) -> None:
        self.rank, self.step, self.where, self.path, self.was, self.now = rank, step, where, path, was, now

    @property
    def order(self) -> tuple[float, int]:
        """Errors and missing ranks first, then by step, what concerns the complete run last."""
        return (-1 if self.path in ("", "error") else float("inf") if self.step is None else self.step), self.rank

    def __str__(self) -> str:
        name = self.path.partition(".")[2] if self.step is not None else self.path
        return f"rank {self.rank}, {self.where}: {name} was {_short(self.was)}, is {_short(self.now)}"


def _in_words(differences: list[Difference]) -> str:
    """The first one, and how many others there are."""
    first = min(differences, key=lambda one: one.order)  # the first one of a rank's step, as they are in order
    steps = sorted({one.step for one in differences if one.step is not None})
    of_steps = f", in {len(steps)} steps up to step {steps[-1]}" if steps else ""
    others = f"; {len(differences) - 1} other differences{of_steps}" if len(differences) > 1 else ""
    return f"{first}{others}"


def _differences(was: Run | None, now: Run | None, rank: int) -> Iterator[Difference]:
    """All differences of a rank's run; those of the steps come first, in their order."""
    if was is None or now is None:
        there = ("missing" if was is None else "there"), ("missing" if now is None else "there")
        yield Difference(rank, None, "the run", "", *there)
        return
    for path, *values in _walk(was.get("error"), now.get("error"), "error"):
        yield Difference(rank, None, "the run", path, *values)
    pairs = itertools.zip_longest(was.get("steps", []), now.get("steps", []), fillvalue="missing")
    for number, (one, other) in enumerate(pairs):
        here = one if isinstance(one, dict) else other
        where = f"step {number} ({_place_in_words(here)})"
        for path, *values in _walk(one, other, f"steps[{number}]"):
            yield Difference(rank, number, where, path, *values)
    of_run = [{**side.get("run", {})} for side in (was, now)]
    of_run[0]["state_dict"] = _renamed(of_run[0].get("state_dict", {}))
    of_run[1]["state_dict"] = _without_new(of_run[1].get("state_dict", {}))
    for path, *values in _walk(*of_run, "run"):
        yield Difference(rank, None, "the complete run", path, *values)


def _place_in_words(step: Run) -> str:
    if "at" not in step:
        return "?"
    epoch, epoch_step, steps_done, _ = step["at"]
    size = f", batch size {step['batch_size']}" if "batch_size" in step else ", the state before it"
    return f"optimizer {step['optimizer']}, epoch {epoch}, {epoch_step} steps of it and {steps_done} in all{size}"


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    for before, after in RENAMED_STATE.items():
        state = {
            path if not path.startswith(before) else (after or "") + path.removeprefix(before): value
            for path, value in state.items()
            if not (after is None and path.startswith(before))
        }
    return state


def _without_new(state: dict[str, Any]) -> dict[str, Any]:
    is_new = {path: any(fnmatch.fnmatch(path, pattern) for pattern in NEW_STATE) for path in state}
    return {path: value for path, value in state.items() if not is_new[path]}


def _walk(was: Any, now: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*was, *(name for name in now if name not in was)]:
            yield from _walk(was.get(name, "missing"), now.get(name, "missing"), f"{path}.{name}")
    elif isinstance(was, list) and isinstance(now, list):
        for number, (one, other) in enumerate(itertools.zip_longest(was, now, fillvalue="missing")):
            yield from _walk(one, other, f"{path}[{number}]")
    elif json.dumps(was) != json.dumps(now):  # NaN is equal to NaN here
        yield path, was, now


def _is_allowed(title: str, path: str) -> bool:
    return any(fnmatch.fnmatch(title, run) and fnmatch.fnmatch(path, place) for run, place, _ in ALLOWED)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:97]}..."


def _usual_places() -> list[str]:
    has_xla = importlib.util.find_spec("torch_xla") is not None
    return [*PLACES[:6], *(["xla1", "xla2"] if has_xla else []), *(["cuda"] if torch.cuda.is_available() else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="make the runs and write what they did")
    recording.add_argument("path", type=Path)
    recording.add_argument("--cores", nargs="*", choices=PLACES, help="where to make them")
    recording.add_argument("--only", default="*", help="a pattern of scenarios' names")
    recording.add_argument("--fast", action="store_true", help="a part of the runs, in one process")
    comparing = commands.add_parser("compare", help="print the first difference of each run")
    comparing.add_argument("old", type=Path, help="a record, or a directory of records")
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--only", default="*", help='a pattern of runs, as "adascale* on [02]"')
    comparing.add_argument("--ignore", nargs="*", default=[], help='patterns of paths, as "run.state_dict*" "*.waits"')
    given = parser.parse_args()
    if given.command == "record":
        places = given.cores or (["0"] if given.fast else _usual_places())
        sys.exit(bool(record(given.path, places, given.only, is_fast=given.fast)))
    sys.exit(bool(compare(given.old, given.new, given.only, tuple(given.ignore))))


if __name__ == "__main__":
    main()
