"""The command vbs recommend: its output, its page, that it resumes, and what it refuses."""

import re
import shlex

import pytest
from comparisons import forked_runs

from variable_batch_size.experimental.recommend import branching
from variable_batch_size.lab.command.main import main

SOURCE = """
import concurrent.futures
import torch
from torch.utils.data import TensorDataset
import variable_batch_size as vbs


def made(lr=0.01, factor=1.0, optimizer=torch.optim.SGD, schedule=None):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(576, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True) + 0.5 * torch.randn(576, 1, generator=generator)
    return vbs.Workload(
        model=lambda: torch.nn.Linear(4, 1),
        train=TensorDataset(inputs[:512], targets[:512]),
        test=TensorDataset(inputs[512:], targets[512:]),
        loss=lambda outputs, targets: factor * (outputs - targets).square().mean(),
        metric=lambda outputs, targets: (outputs - targets).square().mean(),
        optimizer=lambda parameters: optimizer(parameters, lr=lr),
        minibatch_size=8,
        ref_batchsize=8,
        num_samples=2560,
        is_higher_better=False,
        schedule=schedule,
    )


def fragile():
    # four times the learning rate diverges at the start, and is fine later
    return made(lr=0.4, schedule=lambda fraction: 1.0 if fraction < 0.1 else 0.01)


def diverging():
    return made(lr=1e9)


def huge():
    return made(lr=1e-24, factor=1e22)


def steep():
    return made(lr=0.3)  # about half of the largest that converges


def adam():
    return made(optimizer=torch.optim.Adam)


def executor():
    return concurrent.futures.ThreadPoolExecutor(1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recommend")
    (folder / "mine.py").write_text(SOURCE)
    (folder / "same.csv").write_text("step,batchsize\n" + "".join(f"{step},8\n" for step in range(320)))
    (folder / "late.csv").write_text(
        "step,batchsize\n" + "".join(f"{step},{8 if step < 96 else 32}\n" for step in range(160))
    )
    return folder


@pytest.fixture
def recommend(folder, tmp_path, monkeypatch, capsys):
    """Runs the command in a folder with workloads and traces; returns its exit code, output and errors."""
    monkeypatch.chdir(folder)

    def run(text, *, function="made", out=tmp_path / "out", jobs="--jobs 1"):
        common = f"--budget 0.2 --seeds 2 {jobs} --out {out}"
        code = main(["recommend", f"mine.py:{function}", *shlex.split(f"{common} {text}")])
        return (code, *capsys.readouterr())

    return run


def test_a_rule_that_fails_at_the_start_of_a_trace_that_starts_large_is_not_recommended(recommend):
    code, output, errors = recommend("--sizes 8:32", function="fragile")  # samples for two states
    assert code == 0, errors
    assert re.findall(r"^([\d,]+) +32 ", output, re.MULTILINE) == ["0", "1,280"]
    assert re.search(r"^Use (constant|root|adascale)", output, re.MULTILINE)
    assert re.search(r"A new model fails with (.* and )?linear, unless there is a warm-up", output)


def test_the_output_says_what_to_use_how_sure_that_is_and_what_it_cost(recommend, tmp_path):
    code, output, errors = recommend("--sizes 8:32 --tuned-samples 1K")
    assert code == 0, errors
    assert re.match(r"after samples +batch size +exponent \(90% interval\) +best rule +lead +stopped early\n", output)
    assert re.search(
        r"^Use (constant|root|linear|adascale)(: it is clearly ahead|, undecided between)", output, re.MULTILINE
    )
    for line in (
        r"The exponent of S over the whole trace is \d",
        r"Batch sizes that take at most 20 % more samples to the same loss: ",
        r"State ref_batchsize=8, ",
        r"(No|A) jump of the batch size raises the loss",
        r"Expected loss at the end: -?\d+\.\d{4}, [+-]\d\.\d{4} ± \d+\.\d{4} \(90% interval\) against a constant ",
        r"This took [\d,]+ samples and .*, \d+% of the 38,400 samples and about .* of a full comparison\.",
        r"A second opinion, from the literature and not from these runs: .* 2,560 samples 11, from 8, chosen for 1,000",
    ):
        assert re.search(f"^{line}", output, re.MULTILINE), line
    rule = re.search(r"^Use (\w+)", output, re.MULTILINE)[1]
    assert f'optimizer = vbs.Optimizer(inner, loader, rule="{rule}", ref_batchsize=8' in output
    share = int(re.search(r"(\d+)% of the 38,400", output)[1])
    assert share <= 20
    assert "after 0 samples, at batch size 32: " in errors
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"Use {rule}" in page
    assert "vbs recommend mine.py:made" in page


def words(output):
    """The output without times."""
    return re.sub(r"This took .*", "", output).rpartition("\n/")[0]


def test_processes_and_executors_find_the_same_and_the_same_command_resumes(recommend, monkeypatch, tmp_path):
    _, here, _ = recommend("--sizes 8:32")
    with forked_runs():
        _, in_processes, _ = recommend("--sizes 8:32", out=tmp_path / "processes", jobs="--jobs 2")
    code, on_executor, errors = recommend("--sizes 8:32", out=tmp_path / "executor", jobs="--executor mine.py:executor")
    assert code == 0, errors
    assert words(here) == words(in_processes) == words(on_executor)
    monkeypatch.setattr(branching, "run_leg", None)
    code, again, _ = recommend("--sizes 8:32")
    assert (code, again) == (0, here)
    code, _, errors = recommend("--sizes 8:32 --lr 0.02")
    assert code == 1
    assert "has branches with another lr, None instead of 0.02: choose another --out" in errors


def test_a_trace_is_followed_from_where_it_varies(recommend):
    code, output, errors = recommend("--trace late.csv --budget 0.5")
    assert code == 0, errors
    states = [line.split()[:2] for line in output.splitlines()[1:] if re.match(r"[\d,]+ ", line)]
    assert states == [["256", "32"], ["1,280", "32"]]


def test_adam_has_its_own_rules(recommend):
    code, output, errors = recommend("--sizes 8:32", function="adam")
    assert code == 0, errors
    assert re.search(r"^Use (constant|root|linear|adam|adamscale|surge)[:,]", output, re.MULTILINE)


def test_a_rule_whose_losses_explode_is_not_recommended_although_they_differ_much(recommend):
    code, output, errors = recommend("--sizes 8:32 --first-seed 5", function="steep")
    assert code == 0, errors
    assert re.search(r"^Use (constant|root|adascale)", output, re.MULTILINE), output


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        ("--sizes 8:32", "diverging", "the training at the reference batch size 8 must lower the test loss, got "),
        ("--sizes 8:32", "huge", "the gradient noise of adascale at 32, .* is nan: the squared norms"),
        ("--sizes 8:8", "made", "the trace must have batch sizes other than the reference 8 within 2,560"),
        ("--trace same.csv", "made", "the trace must have batch sizes other than the reference 8 within"),
        ("--sizes 8:512", "made", "a branch at batch size 512 must have at least 2,048 samples, .*, got 128: train on"),
        ("--sizes 16:32", "made", "--sizes must start with the reference batch size 8, got '16:32'"),
        ("--sizes 32:8", "made", "--sizes must be two batch sizes in ascending order, as in 128:4096, got '32:8'"),
        ("--sizes many", "made", "--sizes must be two batch sizes in ascending order, .*, got 'many'"),
        ("--sizes 8:1024", "made", "1024"),
        ("--sizes 8:32 --seeds 1", "made", "--seeds must be at least 2, because a single .*, got 1"),
        ("--sizes 8:32 --first-seed -1", "made", "--first-seed must not be negative, got -1"),
        ("--sizes 8:32 --budget 0", "made", "`budget` must be a positive number, got 0.0"),
        ("--trace late.csv --samples 1M", "made", "late.csv has only 2816 samples, got --samples 1000000"),
        ("--sizes 8:32 --executor mine.py:executor", "made", "--jobs has no effect with --executor"),
    ],
)
def test_bad_input_is_refused_with_a_clear_sentence(text, function, message, recommend):
    code, output, errors = recommend(text, function=function)
    assert (code, output) == (1, "")
    assert re.search(f"^vbs: .*{message}", errors.replace("\r", "\n"), re.MULTILINE), errors
