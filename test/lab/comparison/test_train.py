"""A run of vbs compare equals a plain PyTorch loop."""

import dataclasses
from types import SimpleNamespace

import comparisons
import pytest
import torch
from comparisons import records, rows, rows_by_run, vbs_compare

import variable_batch_size as vbs
from variable_batch_size.lab.comparison.train import Training
from variable_batch_size.lab.comparison.workload import load_workload


def big_batches(workload, trace, *, seed):
    """The samples of each step of a trace, as one batch."""
    sampler = vbs.CustomSampler(
        workload.train, trace=trace, minibatch_size=workload.minibatch_size, num_replicas=1, rank=0, seed=seed
    )
    for epoch in range(sampler.schedule.num_epochs):
        sampler.set_epoch(epoch)
        indices = [index for minibatch in sampler for index in minibatch]
        for step in sampler.schedule.steps(epoch):
            size = sampler.schedule.batch_size(step)
            yield stacked(workload.train[index] for index in indices[:size])
            indices = indices[size:]


def stacked(pairs):
    return [torch.stack(part) for part in zip(*pairs, strict=True)]


def plain_curves(workload, trace, *, seed, factor):
    """Loss, test loss and metric after each step of a trace in plain PyTorch, with one large batch per step."""
    torch.manual_seed(seed)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    lr = optimizer.param_groups[0]["lr"]
    test_inputs, test_targets = stacked(workload.test)
    found, samples = {"loss": [], "test_loss": [], "metric": []}, 0
    for inputs, targets in big_batches(workload, trace, seed=seed):
        fraction = min(1.0, samples / workload.num_samples)
        scale = len(inputs) / workload.ref_batchsize
        optimizer.param_groups[0]["lr"] = lr * factor(scale) * workload.schedule(fraction)
        optimizer.zero_grad()
        loss = workload.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        samples += len(inputs)
        with torch.no_grad():
            outputs = model(test_inputs)
        found["loss"].append(loss.item())
        found["test_loss"].append(workload.loss(outputs, test_targets).item())
        found["metric"].append(workload.metric(outputs, test_targets).item())
    return found


@pytest.mark.parametrize(("rule", "cores", "factor"), [("linear", 2, lambda s: s), ("root", 1, lambda s: s**0.5)])
def test_curve_equals_that_of_a_plain_pytorch_loop(tmp_path, rule, cores, factor):
    trace, out = tmp_path / "jumps.csv", tmp_path / "results"
    vbs.Trace.from_sequence([8, 24, 16, 40, 8, 8, 64, 16, 32, 24] * 2).write(trace)
    seeds = range(2 if cores == 1 else 1)
    options = ["--traces", trace, "--seeds", len(seeds), "--rules", rule, "--cores", cores, "--tests", 480]
    vbs_compare("--workload", "comparisons:line", *options, "--out", out)  # tests after every step
    for seed in seeds:
        expected = plain_curves(comparisons.line(), trace, seed=seed, factor=factor)
        found = records(out, "jumps", rule, seed)
        for name, values in expected.items():
            assert [record[name] for record in found if name in record] == pytest.approx(values, rel=1e-5)
        row = rows_by_run(out)["jumps", rule, seed]
        assert float(row["final_metric"]) == pytest.approx(expected["metric"][-1], rel=1e-5)
        assert float(row["best_metric"]) == pytest.approx(min(expected["metric"]), rel=1e-5)


def test_rules_with_a_parameter_are_compared_under_their_full_name(tmp_path):
    vbs.Trace.from_sequence([8, 32] * 15).write(tmp_path / "jumps.csv")
    options = ["--workload", "comparisons:line", "--traces", tmp_path / "jumps.csv", "--seeds", 1]
    vbs_compare(*options, "--rules", "legw:64,surge", "--ref-batchsize", 8, "--out", tmp_path / "results")
    assert rows_by_run(tmp_path / "results")["jumps", "legw:64", 0]["status"] == "done"
    found = [record["factor"] for record in records(tmp_path / "results", "jumps", "legw:64", 0) if "factor" in record]
    # a warm-up of 8 steps, at scales 1 and 4
    assert found[:10] == pytest.approx([0.125, 0.5, 0.375, 1.0, 0.625, 1.5, 0.875, 2.0, 1.0, 2.0])
    steps = [record for record in records(tmp_path / "results", "jumps", "surge", 0) if "gain" in record]
    assert [step["factor"] for step in steps] == pytest.approx(
        [step["gain"] / (step["batch_size"] / 8) ** 0.5 for step in steps]
    )


@pytest.mark.xla
def test_on_xla_cores_the_curve_is_the_same(xla_launcher, tmp_path):
    vbs.Trace.from_sequence([8, 24, 40, 16, 32] * 2).write(tmp_path / "jumps.csv")
    options = ["--workload", "comparisons:line", "--traces", tmp_path / "jumps.csv"]
    options += ["--seeds", 1, "--rules", "adascale"]
    vbs_compare(*options, "--out", tmp_path / "cpu")
    xla_launcher.call(vbs_compare, *options, "--out", tmp_path / "xla", "--device", "xla", "--cores", 2)
    for here, there in zip(rows(tmp_path / "cpu"), rows(tmp_path / "xla"), strict=True):
        assert here["status"] == there["status"] == "done"
        assert float(here["final_metric"]) == pytest.approx(float(there["final_metric"]), rel=1e-5)
        assert float(here["progress"]) == pytest.approx(float(there["progress"]), rel=1e-5)


def test_until_progress_other_rules_make_the_updates_of_adascale(tmp_path):
    options = ["--samples", 960, "--seeds", 1, "--rules", "linear,adascale", "--until", "progress"]
    vbs_compare("--workload", "comparisons:line", *options, "--out", tmp_path)
    found = rows_by_run(tmp_path)
    for trace in ("ramp", "spot"):
        adascale, linear = found[trace, "adascale", 0], found[trace, "linear", 0]
        assert float(adascale["progress"]) >= 120  # the updates of the baseline
        assert int(adascale["updates"]) == int(linear["updates"]) < 120
        assert int(adascale["samples"]) > 960
        lrs = [r["lr"] / r["factor"] for r in records(tmp_path, trace, "linear", 0) if "lr" in r]
        assert lrs[0] == pytest.approx(0.02)  # the schedule is stretched over all updates: 1 − 0.9 · fraction
        assert lrs[-1] == pytest.approx(0.02 * (1 - 0.9 * (1 - 1 / int(linear["updates"]))), rel=1e-6)


def test_exact_runs_are_bitwise_equal_on_two_cores(tmp_path):
    trace = tmp_path / "jumps.csv"
    vbs.Trace.from_sequence([8, 24, 16, 40, 8, 8, 64, 16, 32, 24] * 2).write(trace)
    options = ["--workload", "comparisons:line", "--traces", trace, "--seeds", 1, "--rules", "adascale", "--exact"]
    found = []
    for cores in (1, 2):
        out = tmp_path / f"{cores} cores"
        vbs_compare(*options, "--cores", cores, "--out", out, "--log-steps", 1)
        steps = [record for record in records(out, "jumps", "adascale", 0) if "loss" in record]
        assert all(record["exact"] == 1 for record in steps)
        found.append([(record["gradient_norm"], record["gain"], record["lr"]) for record in steps])
    assert found[0] == found[1]
    assert len(found[0]) == 20


class Pairs(torch.utils.data.Dataset):
    """The same samples, one by one."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


@pytest.mark.parametrize(("rank", "num_replicas"), [(0, 1), (1, 3)])
def test_tensors_are_tested_in_slices_with_the_same_result(rank, num_replicas):
    workload = load_workload("digits", None)
    torch.manual_seed(0)
    model = workload.model()
    found = []
    for test in (workload.test, Pairs(workload.test)):
        training = Training(dataclasses.replace(workload, test=test), model, "linear", {"trace": 16, "seed": 0})
        training.sampler = SimpleNamespace(rank=rank, num_replicas=num_replicas)
        found.append(training.test())
    assert found[0] == found[1]
