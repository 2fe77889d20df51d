"""Forked runs: resumed with another trace, minibatch size or rule."""

import json
import logging
import math
import shutil

import pytest
import torch
from torch import nn

import variable_batch_size as vbs

LONG = [8, 16, 8, 24, 8, 8, 16, 32, 8, 24, 16]  # epochs of 40 samples: 3, 3, 1, 2 and 2 steps


class Run:
    """A run that resumes from a directory and records each of its steps."""

    def __init__(
        self,
        directory,
        trace,
        *,
        kind=vbs.LinearRuleOptimizer,
        allow_changes=(),
        keep=2,
        inner=None,
        exact=False,
        **how,
    ):
        generator = torch.Generator().manual_seed(3)
        self.data = torch.randn(400, 6, generator=generator)
        self.model = nn.Linear(6, 1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        how = {"dataset_size": 40, "minibatch_size": 4, **how}
        self.sampler = vbs.CustomSampler(trace=trace, **how)
        settings = inner or {"lr": 0.01, "momentum": 0.9}
        options = {"ref_batchsize": 16, "model": self.model, "exact": exact}
        self.optimizer = kind(torch.optim.SGD(self.model.parameters(), **settings), self.sampler, **options)
        self.checkpoint = vbs.Checkpoint(
            directory, model=self.model, optimizer=self.optimizer, every_steps=1, keep=keep, allow_changes=allow_changes
        )
        self.steps = []  # epoch, samples and learning rate

    def go(self, *, until=math.inf, epochs=None, leave=()):
        """Train up to some step of the entire run; `leave` has steps after which an epoch is left."""
        epochs = self.sampler.schedule.num_epochs if epochs is None else epochs
        samples = []
        for epoch in self.checkpoint.epochs(epochs):
            for indices in self.sampler:
                samples += indices
                self.model(self.data[indices]).square().mean().backward()
                if self.optimizer.step():
                    self.steps.append((epoch, samples, self.optimizer.current_lr()))
                    samples = []
                    self.checkpoint.step()
                    if self.optimizer.steps_done >= until:
                        return self
                    if self.optimizer.steps_done in leave:
                        break
        return self

    @property
    def sizes(self):
        return [len(samples) for _, samples, _ in self.steps]

    @property
    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def samples_of(run):
    return [(epoch, samples) for epoch, samples, _ in run.steps]


def executed(directory):
    return list(vbs.Trace.read(directory / "executed.csv"))


# ------------------------------------------------------------------------------------------------------ another trace


@pytest.mark.parametrize("length", range(1, len(LONG)))
def test_longer_trace_with_the_same_beginning_gives_the_run_with_that_trace(tmp_path, length):
    expected = Run(tmp_path / "whole", LONG).go()
    for until in {max(1, length - 1), math.inf}:  # stopped, or at the end of its trace
        directory = tmp_path / str(until)
        first = Run(directory, LONG[:length]).go(until=until)
        second = Run(directory, LONG, allow_changes={"trace"}).go()
        assert first.steps + second.steps == expected.steps
        assert torch.equal(second.weights, expected.weights)
        assert executed(directory) == LONG


OTHER = [24, 24, 8, 16, 40, 8, 8, 24, 32, 16, 8, 8]


@pytest.mark.parametrize("until", range(1, len(LONG) + 1))
def test_row_r_of_another_trace_is_step_r_and_completed_steps_are_kept(tmp_path, until):
    first = Run(tmp_path, LONG).go(until=until)
    second = Run(tmp_path, OTHER, allow_changes={"trace"}).go()
    steps = first.steps + second.steps
    assert first.sizes + second.sizes == LONG[:until] + OTHER[until:] == executed(tmp_path)
    for epoch in range(steps[-1][0] + 1):
        used = [sample for number, samples, _ in steps if number == epoch for sample in samples]
        assert len(used) == len(set(used)) <= 40


@pytest.mark.parametrize("until", [1, 3, 6, 7])
def test_executed_trace_of_a_fork_replays_to_the_same_weights(tmp_path, until):
    first = Run(tmp_path / "a", LONG).go(until=until)
    second = Run(tmp_path / "a", OTHER, allow_changes={"trace"}).go()
    replayed = Run(tmp_path / "b", tmp_path / "a" / "executed.csv").go()
    assert first.steps + second.steps == replayed.steps
    assert torch.equal(second.weights, replayed.weights)


@pytest.mark.parametrize("stop", range(5, 12))
def test_forked_run_resumes_like_any_other_without_accept(tmp_path, stop):
    Run(tmp_path / "a", LONG).go(until=4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    expected = Run(tmp_path / "a", OTHER, allow_changes={"trace"}).go()
    first = Run(tmp_path / "b", OTHER, allow_changes={"trace"}).go(until=stop)
    (tmp_path / "b" / "executed.csv").unlink()
    second = Run(tmp_path / "b", OTHER).go()
    assert first.steps + second.steps == expected.steps
    assert torch.equal(second.weights, expected.weights)
    assert executed(tmp_path / "b") == executed(tmp_path / "a")


def test_run_can_be_forked_repeatedly(tmp_path):
    Run(tmp_path, LONG).go(until=3)
    Run(tmp_path, OTHER, allow_changes={"trace"}).go(until=6)
    Run(tmp_path, 16, allow_changes={"trace", "on_end"}).go(until=9, epochs=20)
    Run(tmp_path, LONG + OTHER, allow_changes={"trace", "on_end"}).go(until=14)
    assert executed(tmp_path) == LONG[:3] + OTHER[3:6] + [16] * 3 + (LONG + OTHER)[9:14]


@pytest.mark.parametrize(("on_end", "goes_on"), [("hold", [8, 8, 8]), ("cycle", [8, 16, 8])])
def test_completed_trace_may_be_held_or_cycled(tmp_path, on_end, goes_on):
    trace = [8, 16, 8]
    Run(tmp_path, trace).go()
    second = Run(tmp_path, trace, on_end=on_end, allow_changes={"on_end"}).go(until=6, epochs=10)
    assert second.sizes == goes_on
    assert second.steps[0][0] == 0, "the epoch that ended with the trace continues"


def test_epoch_that_ended_early_stays_ended(tmp_path):
    first = Run(tmp_path, LONG[:6]).go(leave={2, 4})  # the last steps of two epochs of three are left out
    assert first.sizes == [8, 16, 24, 8]
    second = Run(tmp_path, LONG, allow_changes={"trace"}).go()
    assert [epoch for epoch, *_ in second.steps] == [2, 3, 3, 4, 4]
    assert second.sizes == LONG[6:]
    assert executed(tmp_path) == first.sizes + second.sizes


def test_trace_shorter_than_the_completed_steps_raises(tmp_path):
    Run(tmp_path, LONG).go(until=5)
    message = "^trace has 3 rows, but the run has already completed 5 steps$"
    with pytest.raises(ValueError, match=message):
        Run(tmp_path, OTHER[:3], allow_changes={"trace"})


def test_cycled_trace_must_begin_with_the_completed_steps_of_the_run(tmp_path):
    Run(tmp_path, LONG).go(until=2)
    message = '^trace must begin with the 2 steps that the run has completed, because on_end="cycle" repeats them$'
    with pytest.raises(ValueError, match=message):
        Run(tmp_path, OTHER, on_end="cycle", allow_changes={"trace", "on_end"})


# ---------------------------------------------------------------------------------- another minibatch size or data set


@pytest.mark.parametrize(
    ("minibatch_size", "until"),
    [
        # each size after every third step, each step with one of the sizes
        pytest.param(size, until, marks=() if (until + place) % 3 == 0 else pytest.mark.long)
        for place, size in enumerate([1, 2, 8])
        for until in range(1, len(LONG))
    ],
)
def test_with_another_minibatch_size_the_steps_have_the_same_samples(tmp_path, minibatch_size, until):
    expected = Run(None, LONG).go()
    first = Run(tmp_path, LONG).go(until=until)
    second = Run(tmp_path, LONG, minibatch_size=minibatch_size, allow_changes={"minibatch_size"}).go()
    assert samples_of(first) + samples_of(second) == samples_of(expected)
    torch.testing.assert_close(second.weights, expected.weights)


def test_completed_steps_need_not_be_multiples_of_the_new_minibatch_size(tmp_path):
    trace = [4, 12, 8, 24, 8, 16]
    Run(tmp_path, trace).go(until=2)
    second = Run(tmp_path, [8, 8, *trace[2:]], minibatch_size=8, allow_changes={"minibatch_size", "trace"}).go()
    assert second.sizes == [8, 24, 8, 16]
    assert executed(tmp_path) == trace
    assert samples_of(second) == samples_of(Run(None, trace).go())[2:]


def test_epoch_ends_if_its_new_capacity_is_already_used(tmp_path):
    trace = [20, 16, 4, 16, 8]
    first = Run(tmp_path, trace).go(until=2)
    second = Run(tmp_path, trace, dataset_size=30, allow_changes={"dataset_size"}).go()
    assert [epoch for epoch, *_ in first.steps + second.steps] == [0, 0, 1, 1, 1]
    assert max(sample for _, samples, _ in second.steps for sample in samples) < 30


@pytest.mark.parametrize("change", [{"seed": 7}, {"shuffle": False}, {"dataset_size": 400}])
def test_another_order_applies_from_the_next_step_on(tmp_path, change):
    Run(tmp_path, LONG).go(until=4)
    second = Run(tmp_path, LONG, allow_changes=set(change), **change).go()
    assert second.sizes == LONG[4:]
    if "dataset_size" in change:
        assert {epoch for epoch, *_ in second.steps} == {1}  # everything fits now
    else:
        assert samples_of(second)[-1] == samples_of(Run(None, LONG, **change).go())[-1]


# ------------------------------------------------------------------------------------------------------- another rule


def test_another_rule_applies_from_the_next_step_on_and_momentum_is_kept(tmp_path):
    first = Run(tmp_path, LONG).go(until=4)
    second = Run(tmp_path, LONG, kind=vbs.RootRuleOptimizer, allow_changes={"rule"}).go()
    lrs = [0.01 * size / 16 for size in LONG[:4]] + [0.01 * math.sqrt(size / 16) for size in LONG[4:]]
    assert [lr for *_, lr in first.steps + second.steps] == pytest.approx(lrs)
    plain = Run(None, LONG)
    inner = torch.optim.SGD(plain.model.parameters(), lr=0.01, momentum=0.9)
    for (_, samples, _), lr in zip(first.steps + second.steps, lrs, strict=True):
        inner.param_groups[0]["lr"] = lr
        inner.zero_grad()
        plain.model(plain.data[samples]).square().mean().backward()
        inner.step()
    torch.testing.assert_close(second.weights, plain.weights)


def test_new_rule_starts_without_measurements(tmp_path):
    Run(tmp_path, LONG).go(until=4)
    second = Run(tmp_path, LONG, kind=vbs.AdaScaleOptimizer, allow_changes={"rule"})
    assert second.optimizer.noise is None
    assert second.optimizer.progress == pytest.approx(sum(LONG[:4]) / 16)
    second.go(until=8)
    noise = second.optimizer.noise
    assert noise is not None
    assert Run(tmp_path, LONG, kind=vbs.AdaScaleOptimizer).optimizer.noise == noise


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        (vbs.LinearRuleMomentumOptimizer, vbs.LinearRuleOptimizer, "rule"),
        (vbs.LinearRuleOptimizer, vbs.LinearRuleMomentumOptimizer, "rule"),
        (vbs.LinearRuleMomentumOptimizer, vbs.LinearRuleMomentumOptimizer, "minibatch_size"),
    ],
)
def test_momentum_of_summed_gradients_is_not_used_for_means(tmp_path, before, now, change):
    Run(tmp_path, LONG, kind=before).go(until=2)
    how = {"minibatch_size": 2} if change == "minibatch_size" else {}
    with pytest.raises(ValueError, match=f"^Cannot change {change} when resuming with a rule that sums gradients: "):
        Run(tmp_path, LONG, kind=now, allow_changes={"rule", "minibatch_size"}, **how)


# ----------------------------------------------------------------------------------------- what is logged and refused


def test_changes_are_logged_with_old_and_new_values(tmp_path, caplog):
    Run(tmp_path, LONG).go(until=3)
    with caplog.at_level(logging.WARNING):
        Run(tmp_path, LONG, seed=5, minibatch_size=2, allow_changes={"trace", "seed", "minibatch_size"}).go(until=4)
    said = "minibatch_size was 4 and is 2; seed was 0 and is 5"
    assert f"step-000000003.pt with changed settings: {said}" in caplog.text
    assert (tmp_path / "executed.csv").read_text().splitlines()[4:] == ["2,8", f"# from here on: {said}", "3,24"]
    described = json.loads((tmp_path / "run.json").read_text())
    assert described["changes"] == [{"steps_done": 3, "settings": {"minibatch_size": [4, 2], "seed": [0, 5]}}]
    assert (described["settings"]["seed"], described["policy"]) == (5, None)
    assert described["trace"] == described["settings"]["trace"]
    caplog.clear()
    Run(tmp_path, LONG, seed=5, minibatch_size=2, allow_changes={"trace", "seed", "minibatch_size"})
    assert "changed settings" not in caplog.text


def test_changes_that_are_not_accepted_raise(tmp_path):
    Run(tmp_path, LONG).go(until=3)
    with pytest.raises(
        ValueError,
        match=r"step-000000003\.pt was saved by another run: seed was 0 and is 5; use another directory, or `allow_",
    ):
        Run(tmp_path, OTHER, seed=5, allow_changes={"trace"})


def test_exact_run_resumes_with_the_same_number_of_threads(tmp_path, monkeypatch):
    for exact in (False, True):
        Run(tmp_path / str(exact), LONG, exact=exact).go(until=3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    Run(tmp_path / "False", LONG)  # has nothing to lose
    with pytest.raises(ValueError, match=r"step-000000003\.pt was saved by another run: threads was 1 and is 7; use"):
        Run(tmp_path / "True", LONG, exact=True)
    Run(tmp_path / "True", LONG, exact=True, allow_changes={"threads"})


@pytest.mark.parametrize(
    ("allow_changes", "message"),
    [
        (
            {"batch_size"},
            "`allow_changes` must be one of 'trace', 'on_end', 'dataset_size', 'minibatch_size', 'seed', 'shuffle', "
            "'rule', 'ref_batchsize', 'exact', 'seed_minibatches', 'threads', got 'batch_size' "
            r"\(did you mean 'minibatch_size'\?\)",
        ),
        ({"optimizer"}, "`allow_changes` must be one of .*, got 'optimizer'"),
        ("trace", "`allow_changes` must be a set of names, got the str 'trace'"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(tmp_path, allow_changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Run(tmp_path, LONG, allow_changes=allow_changes)
