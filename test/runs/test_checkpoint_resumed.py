"""Resuming from a checkpoint: restored state, messages, and agreement of several cores."""

import contextlib
import json
import logging
import os
import re
import signal
import time

import forked
import pytest
import torch
import torch.distributed as dist
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.runs import state_file

LOGGER = "variable_batch_size.runs.checkpoint"


class Stopped(Exception):
    """Simulates a lost machine."""


class Run:
    """A run of up to three epochs of two steps each, unless a trace is given."""

    def __init__(
        self,
        directory,
        *,
        trace=(20,) * 6,
        process_group=None,
        seed=0,
        model=None,
        kind=vbs.LinearRuleOptimizer,
        **options,
    ):
        self.model = nn.Linear(6, 1) if model is None else model
        trace = list(trace) if isinstance(trace, tuple) else trace
        self.sampler = vbs.CustomSampler(
            dataset_size=40, trace=trace, minibatch_size=4, seed=seed, process_group=process_group
        )
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = kind(inner, self.sampler, ref_batchsize=16)
        self.checkpoint = vbs.Checkpoint(directory, model=self.model, optimizer=self.optimizer, **options)

    def steps(self):
        """The steps of an epoch, one by one; yields their total number so far."""
        for indices in self.sampler:
            self.model(torch.ones(len(indices), 6)).sum().backward()
            if self.optimizer.step():
                yield self.optimizer.steps_done

    def go(self, epochs=3, *, after_step=lambda steps_done: None):
        for _ in self.checkpoint.epochs(epochs):
            for steps_done in self.steps():
                after_step(steps_done)
                self.checkpoint.step()


def stopped_after(number, directory, **options):
    """A directory with the checkpoints of a run that was killed after some steps."""

    def stop(steps_done):
        if steps_done > number:
            raise Stopped

    with pytest.raises(Stopped):
        Run(directory, every_steps=1, **options).go(after_step=stop)
    return directory


def names_in(directory):
    return [path.name for path in state_file.checkpoints(directory)]


# ------------------------------------------------------------------------------------------------------- one process


def test_run_resumes_from_the_latest_checkpoint_and_logs_the_position(tmp_path, caplog):
    stopped_after(5, tmp_path, keep=3)
    assert names_in(tmp_path) == [f"step-00000000{number}.pt" for number in (3, 4, 5)]
    with caplog.at_level(logging.INFO):
        run = Run(tmp_path)
    said = f"resumed from {tmp_path}/step-000000005.pt: epoch 2, step 5 of 6"
    assert caplog.record_tuples == [(LOGGER, logging.INFO, said)]
    assert (run.optimizer.steps_done, run.checkpoint.directory) == (5, tmp_path)


def test_resuming_a_fork_logs_the_changes_and_the_step(tmp_path, caplog):
    stopped_after(2, tmp_path, keep=3)
    Run(tmp_path, seed=7, allow_changes={"seed"}).go(epochs=2)
    path = f"{tmp_path}/step-000000002.pt"
    said = (
        f"resuming from {path} with changed settings: seed was 0 and is 7",
        f"resumed from {path}: epoch 0, step 2 of 6",
    )
    assert caplog.record_tuples == [(LOGGER, logging.WARNING, line) for line in said]
    (tmp_path / "executed.csv").unlink()  # it is rebuilt from the checkpoint
    Run(tmp_path, seed=7).go()
    rows = (tmp_path / "executed.csv").read_text().splitlines()
    assert rows[-5:] == ["# from here on: seed was 0 and is 7", "2,20", "3,20", "4,20", "5,20"]


RESUMED = """
import logging, sys
import torch
import variable_batch_size as vbs

def run(trace, **options):
    model = torch.nn.Linear(6, 1)
    sampler = vbs.CustomSampler(dataset_size=40, trace=trace, minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=16, **options)
    checkpoint = vbs.Checkpoint("runs/a", model=model, optimizer=optimizer, allow_changes={"trace", "on_end"})
    for _ in checkpoint.epochs(1 if not optimizer.steps_done else 2):
        for indices in sampler:
            model(torch.ones(len(indices), 6)).sum().backward()
            optimizer.step()

if __name__ == "__main__":
    note = lambda text: print(text, file=sys.stderr, flush=True)
    note("begin")
    run([20] * 6)
    note("resume, without a configuration of logging")
    run([20] * 6, log_steps=1)
    note("on two processes")
    vbs.launch(run, ([20] * 6,), cores=2, backend="gloo")
    note("with logging")
    logging.basicConfig(level=logging.INFO, format="LOG %(levelname)s %(module)s %(message)s")
    run([20] * 6)
    note("with logging that has no level, without an end")
    logging.getLogger().setLevel(logging.WARNING)
    run(20)
    note("with errors alone")
    logging.getLogger("variable_batch_size").setLevel(logging.ERROR)
    run(20)
"""


def test_resuming_is_shown_once_with_and_without_a_configuration_of_logging(tmp_path):
    (tmp_path / "script.py").write_text(RESUMED)
    done = forked.run_script(tmp_path / "script.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "[Gloo]" not in line and "with changed settings" not in line]
    end = "resumed from runs/a/step-000000004.pt: epoch 2, step 4"
    assert lines == [
        "begin",
        "resume, without a configuration of logging",
        "resumed from runs/a/step-000000002.pt: epoch 1, step 2 of 6",
        "epoch 1, step 1/2: batch size 20, learning rate 0.0125, 60 samples in all",
        "epoch 1, step 2/2: batch size 20, learning rate 0.0125, 80 samples in all",
        "on two processes",
        f"{end} of 6",
        "with logging",
        f"LOG INFO checkpoint {end} of 6",
        "with logging that has no level, without an end",
        f"LOG WARNING checkpoint {end}",
        "with errors alone",
    ]


def test_keys_of_a_checkpoint_are_stable(tmp_path):
    Run(tmp_path).checkpoint.save()
    where = ["epoch", "epoch_step", "past", "steps_of_epochs"]
    parts = ["metrics", "model", "optimizer", "parts", "random", "schedulers"]
    which = ["changes", "format", "run", "sums_gradients", "version"]
    assert sorted(state_file.load(tmp_path / "step-000000000.pt")) == sorted(where + parts + which)


def test_two_checkpoints_are_kept_by_default(tmp_path):
    stopped_after(5, tmp_path)
    assert names_in(tmp_path) == ["step-000000004.pt", "step-000000005.pt"]


def test_overdue_save_between_two_epochs_resumes_with_the_same_random_numbers(tmp_path):
    def drawn():
        run = Run(tmp_path, every_seconds=0.001, keep=100)
        for _ in run.checkpoint.epochs(3):
            yield torch.rand(1)
            for _ in run.steps():  # without checkpoint.step(), so that only the end of an epoch saves
                pass
            time.sleep(0.002)

    torch.manual_seed(1)
    expected = list(drawn())
    assert names_in(tmp_path) == [f"step-00000000{number}.pt" for number in (2, 4, 6)]
    (tmp_path / "step-000000006.pt").unlink()
    (tmp_path / "step-000000004.pt").unlink()
    torch.manual_seed(2)
    assert list(drawn()) == expected[1:]


def test_run_resumes_within_an_epoch_with_the_same_random_numbers(tmp_path):
    def drawn(directory, *, seed, until=6):
        torch.manual_seed(seed)
        found = []

        def draw(steps_done):
            if steps_done > until:
                raise Stopped
            found.append(float(torch.rand(1)))

        with contextlib.suppress(Stopped):
            Run(directory, every_steps=1).go(after_step=draw)
        return found

    expected = drawn(tmp_path / "whole", seed=1)
    assert drawn(tmp_path / "parts", seed=1, until=3) == expected[:3]
    assert drawn(tmp_path / "parts", seed=2) == expected[3:]


def test_decisions_are_written_next_to_the_checkpoints(tmp_path):
    Run(tmp_path, trace=lambda situation: 8).go(epochs=1)
    first, *_ = (tmp_path / "decisions.jsonl").read_text().splitlines()
    assert json.loads(first)["step"] == 0


def test_executed_trace_identifies_its_run(tmp_path):
    comment = vbs.Trace.read(stopped_after(1, tmp_path) / "executed.csv").comment
    assert re.match(r"executed from trace: trace 6 steps, sha256 \w{16}, on_end stop, minibatch_size 4, ", comment)


def test_a_model_may_have_one_parameter(tmp_path):
    stopped_after(1, tmp_path, model=nn.Linear(6, 1, bias=False))
    assert Run(tmp_path, model=nn.Linear(6, 1, bias=False)).optimizer.steps_done == 1


def test_metrics_continue_from_their_sums(tmp_path):
    first, second = (vbs.Metrics("seen", device="cpu") for _ in range(2))
    first.add(seen=3)
    Run(tmp_path, metrics=[first]).checkpoint.save()
    Run(tmp_path, metrics=[second])
    assert second.read() == {"seen": 3}


def test_measurements_of_a_rule_are_restored_unless_the_rule_changed(tmp_path):
    stopped_after(1, tmp_path)
    another = Run(tmp_path, kind=vbs.AdaScaleOptimizer, allow_changes={"rule"})
    assert another.optimizer.noise is None
    another.go()
    assert another.optimizer.noise is not None
    assert Run(tmp_path, kind=vbs.AdaScaleOptimizer).optimizer.noise == another.optimizer.noise


# --------------------------------------------------------------------------------------------------------- two cores


def error_of(directory):
    try:
        Run(directory)
    except RuntimeError as error:
        return str(error)
    return None


def of_two_cores(directory):
    """The results of two cores in directories prepared by one process."""
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    found = {
        name: error_of(directory / name if rank == 0 else directory / "nothing") for name in ("many", "none", "first")
    }
    found["steps"] = Run(directory / "many").optimizer.steps_done
    Run(directory / f"of {rank}", process_group=groups[rank]).checkpoint.save()

    told = Run(directory / "told", trace=(4,) * 10)  # one minibatch in each step

    def tell(steps_done):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        told.go(epochs=1, after_step=tell)
    except SystemExit as stop:
        found["stop"] = stop.code, told.optimizer.steps_done
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Checkpoints of a run after several steps, after the first, and before it."""
    directory = tmp_path_factory.mktemp("cores")
    stopped_after(5, directory / "many", keep=3)
    stopped_after(1, directory / "first")
    Run(directory / "none").checkpoint.save()
    return directory


@pytest.fixture(scope="module")
def cores(on_cores, prepared):
    return on_cores(2, of_two_cores, prepared)


@pytest.mark.parametrize(("name", "file"), [("many", 5), ("first", 1), ("none", 0)])
def test_cores_that_find_different_checkpoints_raise_and_name_them(cores, prepared, name, file):
    directories, files = (prepared / name, prepared / "nothing"), (f"step-{file:09d}.pt", "none")
    for rank, (directory, file) in enumerate(zip(directories, files, strict=True)):
        assert cores[rank][name] == (
            f"ranks found different checkpoints in {directory} (rank {rank}: {file}): "
            "all machines must share this directory"
        )


def test_two_cores_resume_from_the_checkpoint_of_one(cores):
    assert [core["steps"] for core in cores] == [5, 5]


def test_run_on_a_process_group_is_saved_by_its_first_process(cores, prepared):
    assert [names_in(prepared / f"of {rank}") for rank in range(len(cores))] == [["step-000000000.pt"]] * 2


def test_all_cores_stop_after_the_step_in_which_one_received_the_signal(cores):
    assert [core["stop"] for core in cores] == [(vbs.EXIT_STOPPED, 1)] * 2
