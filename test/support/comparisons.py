"""Run vbs compare in tests, with workloads named ``comparisons:NAME``, and read its results."""

import csv
import dataclasses
import io
import json
import os
import signal
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import forked
import numpy as np
import torch
from torch import nn
from torch.nn.functional import l1_loss, mse_loss
from torch.utils.data import Dataset, TensorDataset

import variable_batch_size as vbs
from variable_batch_size.lab.command.main import main
from variable_batch_size.lab.comparison import compare
from variable_batch_size.lab.comparison.experiment import Results, Run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclasses.dataclass(frozen=True)
class Done:
    """The outcome of ``vbs compare``."""

    returncode: int
    stdout: str
    stderr: str


def vbs_compare(*options, check=True):
    """Run ``vbs compare`` with these options in this folder and in this process, which has imported its dependencies.

    Its runs are made in a process that is forked for the same reason: one after another unless the options set a
    number of jobs. The test of SIGTERM spawns them, as for a user.
    """
    arguments = ["compare", *map(str, options), *([] if "--jobs" in options else ["--jobs", "1"])]
    out, error = io.StringIO(), io.StringIO()
    with in_this_folder(), redirect_stdout(out), redirect_stderr(error), sigterm_as_it_is(), forked_runs():
        torch.manual_seed(0)  # a new process would not have the seed left by other tests
        code = main(arguments)
    assert not check or code == 0, error.getvalue()
    return Done(code, out.getvalue(), error.getvalue())


@contextmanager
def forked_runs():
    """Within this context, processes that make runs need not import torch, and otherwise look like new processes."""

    def serve(*args):
        forked.as_in_a_new_process()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        with forked.launches():
            spawned(*args)

    spawned = compare._serve
    with patch.object(compare, "_serve", serve), patch.object(compare, "_START_METHOD", "fork"):
        yield


@contextmanager
def in_this_folder():
    before = os.getcwd()
    os.chdir(HERE)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def sigterm_as_it_is():
    """Restore the SIGTERM handler, which the command replaces because its process usually ends."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def fork_vbs_compare(*options, folder=HERE, is_in_background=False, hold=None, after=0):
    """Start ``vbs compare`` in a forked process: in the foreground, or in the background, where SIGINT is ignored.

    With a hold, its processes begin no further run once this many have ended.
    """
    return forked.Program(
        *(_main_of_a_fork, ["compare", *map(str, options)], hold, after), folder=folder, ignores_sigint=is_in_background
    )


def _main_of_a_fork(arguments, hold, after):
    warnings.simplefilter("error")
    with (
        forked_runs(),
        nullcontext() if hold is None else _held(hold, after, Path(arguments[arguments.index("--out") + 1])),
    ):
        sys.exit(main(arguments))


@contextmanager
def _held(hold, after, directory):
    def outcome_of(work, now=compare.outcome_of):
        if num_runs(directory) >= after:
            hold.here()
        return now(work)

    with patch.object(compare, "outcome_of", outcome_of):
        yield


@contextmanager
def on_sigint(handler):
    """Within this context, SIGINT has this handler; a child process ignores it only if it is ignored here."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def wait_for_runs(number, running, directory):
    """Wait until a running comparison has completed a number of runs."""
    while num_runs(directory) < number:
        assert running.poll() is None, running.finish()
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------------ what it wrote


def num_runs(directory):
    return len(list(directory.glob("runs/*/*/*/run.json")))


def rows(directory):
    """The rows of results.csv."""
    with open(directory / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def rows_by_run(directory):
    """The rows of results.csv by trace, rule and seed."""
    return {(row["trace"], row["rule"], int(row["seed"])): row for row in rows(directory)}


def records(directory, trace, rule, seed):
    """The records of a run."""
    text = (Results(directory).run_directory(Run(trace, rule, seed)) / "steps.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


# ---------------------------------------------------------------------------------------------------------- workloads


def line():
    """A line through noisy points, as a data set that is not a TensorDataset, with a schedule."""
    return vbs.Workload(
        model=lambda: nn.Linear(4, 1),
        train=Points(240, seed=0),
        test=Points(60, seed=1),
        loss=mse_loss,
        metric=l1_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.5, weight_decay=0.01),
        minibatch_size=8,
        ref_batchsize=8,
        num_samples=480,
        schedule=lambda fraction: 1 - 0.9 * fraction,
        metric_name="error",
        unit="",
        is_higher_better=False,
    )


class Points(Dataset):
    def __init__(self, number, seed):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(number, 4, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True) + 0.1 * torch.randn(number, 1, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def troubled():
    """Diverges with the linear rule, at scales above 1, and fails for seed 1."""
    points = Points(256, seed=0)

    def model():
        if torch.initial_seed() == 1:
            raise RuntimeError("seed 1\nis not to my taste")
        return nn.Linear(4, 1)

    return vbs.Workload(
        model=model,
        train=TensorDataset(points.inputs, points.targets),
        test=TensorDataset(points.inputs, points.targets),
        loss=mse_loss,
        metric=lambda outputs, targets: 100 - mse_loss(outputs, targets),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        minibatch_size=8,
        ref_batchsize=8,
        num_samples=4096,
        metric_name="100 minus error",
        unit=" u",
    )


def deadly():
    """Kills the process that makes a run of seed 1."""

    def model():
        if torch.initial_seed() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.Linear(4, 1)

    return dataclasses.replace(line(), model=model, num_samples=64)


def own_random_data():
    """Noise on the inputs from numpy's and another generator: other runs in the process must not affect it."""
    generator = torch.Generator().manual_seed(0)

    class Noisy(Points):
        def __getitem__(self, index):
            noise = torch.randn(4, generator=generator) + np.random.standard_normal()
            return self.inputs[index] + noise, self.targets[index]

    return dataclasses.replace(line(), train=Noisy(240, seed=0), num_samples=240)
