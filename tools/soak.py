"""Stop, kill and starve runs at random, and check that each ends like an uninterrupted run.

PYTHONPATH=test/support python tools/soak.py --stops 1000 --seconds 20000 --directory DIRECTORY  # may be restarted

A run has sessions: in one process, under vbs.launch or under torchrun, with or without loader workers, each with a
disturbance except the last one. Half of the runs keep their number of cores, half change it from session to session.
They must end with the weights of the uninterrupted run to the last bit, or within 1e-5 if they change cores and are not
exact. Every step must have its samples. Each session must end in time, with the expected exit code, and leave no
process running.
"""

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import stoppable_run
import torch
from disturbances import AT_ANY_TIME, ENDED, IN_TRAINING, MEANING, RAISED, STOPPED, TERMINATED, happens
from session_process import Place, SessionProcess
from stoppable_run import NUM_STEPS, SIZES, Settings

import variable_batch_size as vbs
from variable_batch_size.files import write_text
from variable_batch_size.runs import state_file

LARGEST_DIFFERENCE = 1e-5
MOST_CORES = 4
MOST_DISTURBANCES = 8  # of a run

SLOW = {"seconds_per_minibatch": 0.02}
SETTINGS = [
    Settings(**SLOW),
    Settings(**SLOW, num_workers=2, every_steps=3),
    Settings(**SLOW, num_workers=1, keeps_workers=True, rule="momentum", every_steps=2),
    # the same only on the same cores: each core draws from its own generators
    Settings(**SLOW, dropout=0.5, noise=True, rule="adascale", every_steps=2),
    Settings(**SLOW, dropout=0.5, num_workers=2, rule="adamscale", every_steps=4),
    # the same on any cores, including dropout
    Settings(**SLOW, dropout=0.5, noise=True, rule="adascale", options={"exact": True}, every_steps=2),
    Settings(**SLOW, dropout=0.5, num_workers=1, rule="adamscale", options={"exact": True, "clip_grad_norm": 1.0}),
]
SETTINGS_ON_ANY_CORES = [*SETTINGS[:3], *SETTINGS[5:]]


class Broken(Exception):
    """A promise was broken."""


def check(is_kept, promise, session=None):
    if not is_kept:
        raise Broken(promise + (f"\n{session.output}" if session else ""))


def samples_by_step(place, names):
    """The samples of each step over all cores, from the latest session that made the step."""
    found = {}
    for name in names:
        of_session = {}
        for path in place.diary.glob(f"{name}-*.jsonl"):
            for entry in stoppable_run.read_diary(path):
                if "step" in entry:
                    of_session.setdefault(tuple(entry["step"]), []).extend(entry["samples"])
        found |= {step: sorted(samples) for step, samples in of_session.items()}
    return found


class Run:
    """One run with repeated disturbances.

    Args:
        root: a directory for it.
        undisturbed: a directory for uninterrupted runs; existing ones are reused.
        rng: decides everything.
        tally: the counts to update.
        most_cores: the maximum number of cores of a session.
    """

    _ways_of_one_core = ("forked", "forked", "forked", "alone", "launch")

    def __init__(self, root, preserve_rng, rng, tally, *, most_cores):
        self.place = Place(root)
        self._undisturbed = preserve_rng
        self._rng = rng
        self._tally = tally
        self._changes_cores = rng.random() < 0.5
        self._settings = rng.choice(SETTINGS_ON_ANY_CORES if self._changes_cores else SETTINGS)
        self._most_cores = most_cores
        self._cores = rng.randint(1, most_cores)
        self._names = []

    def go(self, most_disturbances):
        for _ in range(self._rng.randint(1, min(MOST_DISTURBANCES, most_disturbances))):
            self._session(is_disturbed=True)
            if self.place.weights.exists():
                break
        if not self.place.weights.exists():
            self._session(is_disturbed=False)
        self._check_result()

    def _session(self, *, is_disturbed):
        if self._changes_cores and self._names:
            self._change_cores()
        self._names.append(str(len(self._names)))
        session = SessionProcess(
            self.place, self._settings, launcher=self._launcher(), cores=self._cores, name=self._names[-1]
        )
        self._tally["sessions"] += 1
        self._tally[f"sessions, cores: {self._cores}"] += 1
        self._tally[f"sessions, launcher: {session.launcher}"] += 1
        self._tally[f"sessions, loader workers for each core: {self._settings.num_workers}"] += 1
        try:
            if is_disturbed:
                self._disturb(session)
            else:
                code = session.finish()
                check(code == 0, f"the last session ended with {code}", session)
            left = session.left_behind()
            check(not left, f"processes were left behind: {left}", session)
        finally:
            session.destroy()
        for path in state_file.checkpoints(self.place.checkpoints):
            state_file.load(path)

    def _change_cores(self):
        before = self._cores
        self._cores = self._rng.randint(1, self._most_cores)
        self._tally["changes of the number of cores"] += self._cores != before

    def _launcher(self):
        return self._rng.choice(["launch", "launch", "torchrun"] if self._cores > 1 else self._ways_of_one_core)

    def _disturb(self, session):
        is_in_training = self._rng.random() < 0.75
        disturbance = self._rng.choice(IN_TRAINING if is_in_training else AT_ANY_TIME)
        has_happened = happens(disturbance, session, self._rng, is_in_training=is_in_training)
        code = session.finish()
        outcome = MEANING.get(code)
        steps_done = session.steps_done()
        if has_happened:
            disturbance.mend(session, self._rng)
            self._tally[f"{disturbance.name}|{outcome}"] += 1
            allowed = disturbance.outcomes | {ENDED}
            if session.launcher == "torchrun" and STOPPED in allowed:
                allowed |= {RAISED}  # its own code
            if not is_in_training or steps_done == NUM_STEPS:
                allowed |= {TERMINATED, RAISED}  # no handler is installed yet, or any more
        else:
            allowed = {ENDED}
        check(outcome in allowed, f"{disturbance.name} on {self._cores} cores: code {code}", session)
        if has_happened and STOPPED in disturbance.outcomes and steps_done and outcome != TERMINATED:
            check(self._steps_saved() == steps_done, f"of {steps_done} steps {self._steps_saved()} were saved", session)

    def _steps_saved(self):
        paths = state_file.checkpoints(self.place.checkpoints)
        return state_file.load(paths[-1])["optimizer"]["variable_batch_size"]["steps_done"] if paths else 0

    def _check_result(self):
        index = SETTINGS.index(self._settings)
        is_exact = self._settings.options.get("exact", False)
        whole = self._whole(index, 1 if self._changes_cores or is_exact else self._cores)
        weights, expected = self.place.read_weights(), whole.read_weights()
        if is_exact:
            check(stoppable_run.same_parameters(weights, expected), "exact weights are not the same to the last bit")
            self._tally["exact runs on changing cores" if self._changes_cores else "exact runs"] += 1
        elif self._changes_cores:
            difference = stoppable_run.largest_difference(weights, expected)
            check(difference < LARGEST_DIFFERENCE, f"the weights differ by {difference}")
            self._tally["largest difference"] = max(self._tally["largest difference"], difference)
            self._tally["runs on changing cores"] += 1
        else:
            check(stoppable_run.same(weights, expected), "the weights are not the same to the last bit")
            self._tally["runs on the same cores"] += 1
        samples = samples_by_step(self.place, self._names)
        check(samples == samples_by_step(self._whole(index, 1), ["0"]), "steps have lost or repeated samples")
        check(tuple(vbs.Trace.read(self.place.checkpoints / "executed.csv")) == SIZES[:NUM_STEPS], "executed.csv")
        check(not list(self.place.checkpoints.glob("*.tmp")), "an unfinished file is left")

    def _whole(self, index, cores):
        place = Place(self._undisturbed / f"{index}-{cores}")
        if not place.weights.exists():
            settings = dataclasses.replace(SETTINGS[index], seconds_per_minibatch=0.0)
            session = SessionProcess(place, settings, launcher="launch" if cores > 1 else "forked", cores=cores)
            code = session.finish()
            check(code == 0, f"an undisturbed run ended with {code}", session)
        return place


def num_disturbances(tally):
    return sum(count for name, count in tally.items() if "|" in name)


def soak(directory, *, stops, seconds, seed, most_cores=MOST_CORES, say=print):
    """Disturb runs until `stops` disturbances have happened or `seconds` have passed, and update the counts.

    Results of an earlier soak in the directory count, too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    book = directory / "tally.json"
    tally = Counter(json.loads(book.read_text()) if book.exists() else {})
    end = time.monotonic() + seconds
    while num_disturbances(tally) < stops and time.monotonic() < end:
        number = tally["runs"]
        root = directory / f"run-{number}"
        shutil.rmtree(root, ignore_errors=True)  # of an interrupted soak
        rng = random.Random(f"{seed}, run {number}")
        done = Counter(tally)
        try:
            run = Run(root, directory / "undisturbed", rng, done, most_cores=most_cores)
            run.go(stops - num_disturbances(done))
            shutil.rmtree(root)
        except (Broken, AssertionError) as error:
            done["broken promises"] += 1
            say(f"run {number}, in {root}: {error}")
        done["runs"] += 1
        tally = done
        write_text(book, json.dumps(tally))
        say(f"{number + 1} runs, {num_disturbances(tally)} disturbances, {tally['broken promises']} broken promises")
    return tally


def table(tally):
    """The counts as a Markdown table."""
    names = [disturbance.name for disturbance in IN_TRAINING]
    outcomes = sorted({name.split("|")[1] for name in tally if "|" in name})
    lines = [f"| what happened | times | {' | '.join(outcomes)} |", "|---|" + "---:|" * (1 + len(outcomes))]
    for name in names:
        counts = [tally[f"{name}|{outcome}"] for outcome in outcomes]
        lines.append(f"| {name} | {sum(counts)} | {' | '.join(str(count or '') for count in counts)} |")
    seen = {"broken promises": 0, **{name: count for name, count in tally.items() if "|" not in name}}
    lines += ["", "| seen | |", "|---|---:|", *(f"| {name} | {seen[name]:.6g} |" for name in sorted(seen))]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stops", type=int, default=1000, help="disturbances in all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no run begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most_cores", type=int, default=MOST_CORES)
    parser.add_argument("--directory", type=Path, help="to resume there when started again; a temporary one by default")
    flags = parser.parse_args()
    torch.set_num_threads(1)  # also so that forked processes can have their own threads
    with tempfile.TemporaryDirectory() as temporary:
        tally = soak(
            flags.directory or Path(temporary),
            stops=flags.stops,
            seconds=flags.seconds,
            seed=flags.seed,
            most_cores=flags.most_cores,
        )
    print(table(tally))
    sys.exit(tally["broken promises"] > 0)


if __name__ == "__main__":
    main()
