"""The reference script, on scikit-learn's digits: learns, logs, goes on, and says when it has missed its target."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import variable_train_mnist

import variable_batch_size as vbs
from variable_batch_size.runs import state_file

SCRIPT = Path(__file__).parents[1] / "variable_train_mnist.py"
NO_DATA = ["--datadir", "there/is/nothing/here"]


def run(*flags, launcher=()):
    """The exit code, and what the script printed."""
    command = [sys.executable, *launcher, str(SCRIPT), *NO_DATA, *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "accuracy" in done.stdout, done.stderr
    return done.returncode, done.stdout


def accuracy(output):
    return float(re.search(r"Test accuracy: ([0-9.]+) %", output)[1])


def test_it_reaches_its_target_on_digits_and_misses_one_that_cannot_be_reached(tmp_path):
    flags = ["--backend", "none", "--num_epochs", 12, "--lr", 0.02, "--logdir", tmp_path, "--checkpoint_dir", tmp_path]
    code, output = run(*flags, "--target_accuracy", 90.0)
    assert code == 0, output
    assert "No MNIST in there/is/nothing/here (--download gets it): training on scikit-learn's digits." in output
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum("accuracy" in record for record in records) == 12
    assert records[-1]["accuracy"] == pytest.approx(accuracy(output), abs=0.01)
    assert len(vbs.Trace.read(tmp_path / "executed.csv")) == records[-1]["step"]

    code, again = run(*flags, "--target_accuracy", 100.1)  # it has ended, so this tests and nothing else
    assert code == variable_train_mnist.EXIT_MISSED == 21
    assert accuracy(again) == accuracy(output)
    assert "is below the target of 100.10 %." in again


def test_a_missed_target_is_no_failure_that_torchrun_would_restart(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "10")
    assert variable_train_mnist.exit_code_of_a_miss() == 0
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert variable_train_mnist.exit_code_of_a_miss() == variable_train_mnist.EXIT_MISSED


BRIEFLY = ["--num_epochs", 3, "--lr", 0.05, "--target_accuracy", 30, "--log_steps", 10]


@pytest.fixture(scope="module")
def alone():
    return accuracy(run(*BRIEFLY, "--backend", "none")[1])


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], ["--num_workers", 1]),
        pytest.param([], ["--num_cores", 8, "--backend", "xla", "--metrics_debug"], marks=pytest.mark.xla),
    ],
    ids=["torchrun", "xla"],
)
def test_the_accuracy_is_the_same_on_any_kind_of_cores(alone, launcher, flags):
    code, output = run(*BRIEFLY, *flags, launcher=launcher)
    assert code == 0, output
    assert accuracy(output) == pytest.approx(alone, abs=0.6)  # two of 357 samples on the edge


def test_the_flags_are_those_that_people_know():
    flags = vars(variable_train_mnist.parse_flags([]))
    expected = {
        "batch_size": 32,
        "momentum": 0.5,
        "lr": 0.01,
        "num_cores": 8,
        "num_epochs": 5,
        "target_accuracy": 97.0,
        "ref_batchsize": 128,
        "rule": "linear",
        "fake_data": False,
        "drop_last": False,
        "metrics_debug": False,
        "checkpoint_dir": None,
        "logdir": None,
        "trace": None,
    }
    assert expected.items() <= flags.items()
    assert {"datadir", "num_workers", "log_steps", "download"} <= flags.keys()


def weights_of(directory, *flags):
    """The bytes of the weights after a run, as its last checkpoint has them."""
    code, output = run(*BRIEFLY, "--exact", "--rule", "adascale", "--checkpoint_dir", directory, *flags)
    assert code == 0, output
    state = state_file.load(state_file.checkpoints(directory)[-1])
    assert state["run"]["exact"]
    assert "exact True" in (directory / "executed.csv").read_text().splitlines()[0]
    return {name: value.numpy().tobytes() for name, value in state["model"].items()}


def test_exact_runs_have_the_same_weights_to_the_last_bit_in_one_process_and_on_two_cores(tmp_path):
    alone = weights_of(tmp_path / "alone", "--backend", "none", "--logdir", tmp_path)
    assert weights_of(tmp_path / "gloo", "--backend", "gloo", "--num_cores", 2, "--num_workers", 1) == alone
    record = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert record["exact"] == 1
