import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import variable_batch_size as vbs
from variable_batch_size.lab.planning.plan import RULES, planned_rules


@st.composite
def schedules(draw):
    """A schedule and a number of epochs."""
    size = draw(st.integers(1, 8))
    capacity = draw(st.integers(1, 40))
    rows = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=25))
    schedule = vbs.Schedule(
        vbs.Trace.from_sequence([size * row for row in rows]),
        dataset_size=capacity * size + draw(st.integers(0, size - 1)),
        minibatch_size=size,
        num_replicas=draw(st.integers(1, 9)),
        on_end=draw(st.sampled_from(["stop", "hold", "cycle"])),
        lockstep=draw(st.booleans()),
    )
    num_epochs = schedule.num_epochs
    return schedule, draw(st.integers(1, num_epochs or 12))


# ------------------------------------------------------------------------------------------ what the schedule adds up


@settings(max_examples=100, deadline=None)
@given(schedules(), st.data())
def test_counts_over_a_range_equal_the_sum_over_steps(planned, data):
    schedule, num_epochs = planned
    num_steps = schedule.steps(num_epochs - 1).stop
    start = data.draw(st.integers(0, num_steps))
    steps = range(start, data.draw(st.integers(start, num_steps)))
    ranks = range(schedule.num_replicas)
    sizes, counts = schedule.size_counts(steps)
    assert sizes.tolist() == sorted(set(sizes.tolist()))
    assert dict(zip(sizes.tolist(), counts.tolist(), strict=True)) == Counter(schedule.batch_size(s) for s in steps)
    minibatches = [sum(len(schedule.minibatches(step, rank)) for step in steps) for rank in ranks]
    assert schedule.core_minibatches(steps).tolist() == minibatches
    idle = [sum(schedule.is_idle(step, rank) for step in steps) for rank in ranks]
    assert schedule.core_idle_steps(steps).tolist() == idle


def test_counts_beyond_the_end_raise():
    schedule = vbs.Schedule(vbs.Trace.from_sequence([32, 64]), dataset_size=100, minibatch_size=32)
    with pytest.raises(ValueError, match="trace holds 2 steps, got step 2"):
        schedule.size_counts(range(3))


# ----------------------------------------------------------------------------------------------- the plan of a schedule


@settings(max_examples=80, deadline=None)
@given(schedules(), st.integers(1, 100), st.integers(1, 10))
def test_plan_equals_a_count_over_single_steps(planned, ref_batchsize, every):
    schedule, num_epochs = planned
    plan = vbs.planning.Plan.of(schedule, num_epochs=num_epochs, ref_batchsize=ref_batchsize, checkpoint_every=every)
    epochs = [schedule.steps(epoch) for epoch in range(num_epochs)]
    steps = range(epochs[-1].stop)
    sizes = [schedule.batch_size(step) for step in steps]
    cores = range(schedule.num_replicas)
    loads = [[len(schedule.minibatches(step, rank)) for rank in cores] for step in steps]

    assert (plan.num_epochs, plan.num_steps, plan.num_samples) == (num_epochs, len(steps), sum(sizes))
    assert plan.mean_batch_size == sum(sizes) / len(steps)
    assert plan.num_minibatches == sum(map(sum, loads))
    assert plan.core_minibatches == tuple(map(sum, zip(*loads, strict=True)))
    assert plan.core_idle_steps == tuple(column.count(0) for column in zip(*loads, strict=True))
    assert plan.idle_share == sum(load.count(0) for load in loads) / (len(steps) * len(cores))
    assert plan.mean_depth == sum(map(max, loads)) / len(steps)
    assert plan.busy_share == sum(map(sum, loads)) / (len(cores) * sum(map(max, loads)))
    rounds = [max(load) if schedule.lockstep else 1 for load in loads]
    assert (plan.lockstep, plan.num_rounds) == (schedule.lockstep, sum(map(max, loads)))
    padding = [max(0, num - own) for num, load in zip(rounds, loads, strict=True) for own in load]
    assert plan.num_padding == sum(padding)

    assert [size.batch_size for size in plan.sizes] == sorted(set(sizes))
    for size in plan.sizes:
        load = loads[sizes.index(size.batch_size)]
        assert size.num_steps == sizes.count(size.batch_size)
        assert (size.num_minibatches, size.depth, size.num_idle_cores) == (sum(load), max(load), load.count(0))
        scale = size.batch_size / ref_batchsize
        assert size.factors == {"linear": scale, "root": math.sqrt(scale), "constant": 1}

    for epoch, found in zip(epochs, plan.epochs, strict=True):
        used = sum(sizes[epoch.start : epoch.stop])
        assert (found.first_step, found.num_steps, found.num_samples) == (epoch.start, len(epoch), used)
        assert found.num_left_over == schedule.dataset_size - used
    whole = [epoch for epoch in plan.epochs if not epoch.ends_with_trace]
    assert plan.num_left_over == sum(epoch.num_left_over for epoch in whole)
    assert plan.num_rows_unused == max(0, len(schedule.trace) - len(steps))

    assert [moment.step for moment in plan.moments][:: len(plan.moments) - 1 or 1] == sorted({0, len(steps) - 1})
    for moment in plan.moments:
        assert moment.samples_before == sum(sizes[: moment.step])
        assert moment.step in epochs[moment.epoch]
        assert moment.batch_size == sizes[moment.step]

    assert [position.steps_done for position in plan.checkpoints] == [*range(every, len(steps), every), len(steps)]
    for position in plan.checkpoints:
        assert position.samples_done == sum(sizes[: position.steps_done])
        assert position.steps_done == epochs[position.epoch].start + position.epoch_step
        assert 0 < position.epoch_step <= len(epochs[position.epoch])


def test_plan_by_hand():
    trace = vbs.Trace.from_sequence([64, 96, 32, 256, 128, 128])
    schedule = vbs.Schedule(trace, dataset_size=310, minibatch_size=32, num_replicas=4)
    plan = vbs.planning.Plan.of(schedule, ref_batchsize=128, checkpoint_every=2)
    # epochs of up to 288 samples: 64 + 96 + 32, 256, 128 + 128
    assert [epoch.num_left_over for epoch in plan.epochs] == [118, 54, 54]
    assert [epoch.ends_with_trace for epoch in plan.epochs] == [False, False, True]
    assert (plan.num_epochs, plan.num_steps, plan.num_samples, plan.num_left_over) == (3, 6, 704, 172)
    # minibatches of the steps on each core: [1,1,1,2,1,1], [1,1,0,2,1,1], [0,1,0,2,1,1], [0,0,0,2,1,1]
    assert plan.core_minibatches == (7, 6, 5, 4)
    assert plan.core_idle_steps == (0, 1, 2, 3)
    assert plan.idle_share == 6 / 24
    assert plan.busy_share == 22 / 28
    assert plan.mean_depth == 7 / 6
    assert [(size.batch_size, size.num_steps) for size in plan.sizes] == [(32, 1), (64, 1), (96, 1), (128, 2), (256, 1)]
    assert [moment.factors["root"] for moment in plan.moments][3] == math.sqrt(2)
    assert [tuple(position) for position in plan.checkpoints] == [(0, 2, 2, 160), (1, 1, 4, 448), (2, 2, 6, 704)]


def test_full_last_epoch_does_not_end_with_the_trace():
    schedule = vbs.Schedule(vbs.Trace.from_sequence([64, 32, 96]), dataset_size=100, minibatch_size=32)
    plan = vbs.planning.Plan.of(schedule)
    assert [epoch.ends_with_trace for epoch in plan.epochs] == [False, False]
    assert plan.num_left_over == 4 + 4


def test_report_of_the_constant_run_of_smith_et_al():
    trace = vbs.traces.constant_trace(128, num_steps=78_125)
    plan = vbs.planning.Plan.of(vbs.Schedule(trace, dataset_size=50_000, minibatch_size=128, num_replicas=8))
    # 390 steps of 128 fit into an epoch and leave 80 samples, so that the updates reach into epoch 200
    assert (plan.num_steps, plan.num_samples) == (78_125, 10_000_000)
    assert (plan.num_epochs, plan.num_left_over) == (201, 200 * 80)
    assert plan.epochs[-1].num_samples == 10_000_000 - 200 * 390 * 128


def test_plan_of_billions_of_steps():
    schedule = vbs.Schedule(vbs.Trace.constant(32), dataset_size=10**10, minibatch_size=32, num_replicas=256)
    plan = vbs.planning.Plan.of(schedule, num_epochs=1000)
    assert plan.num_steps == 1000 * 10**10 // 32
    assert plan.core_minibatches == (plan.num_steps, *[0] * 255)


def test_rules_that_measure_noise_are_planned_at_a_noise_scale():
    rules = planned_rules(["adascale", "adamscale", "surge"], noise_scale=1000)
    assert list(rules) == ["adascale@1000", "adamscale@1000", "surge@1000"]
    for size in (32, 128, 2048):
        gain = (1000 / 128 + 1) / (1000 / size + 1)
        found = [rule.factor(vbs.rules.Step(size, 32, 128)) for rule in rules.values()]
        assert found == pytest.approx([gain, math.sqrt(gain), gain / math.sqrt(size / 128)])
    with pytest.raises(ValueError, match="`noise_scale` must be a positive number, got 0"):
        planned_rules(["surge"], noise_scale=0)
    message = "^the rule surge depends on the gradient noise: pass --noise-scale to plan it$"
    with pytest.raises(ValueError, match=message):
        planned_rules(["root", "surge"])


def test_factors_during_and_after_a_warm_up():
    schedule = vbs.Schedule(vbs.Trace.from_sequence([32, 128, 32, 128, 32]), dataset_size=400, minibatch_size=32)
    plan = vbs.planning.Plan.of(schedule, rules=planned_rules(["legw:128"]))  # 4 steps at 32
    assert [moment.factors["legw:128"] for moment in plan.moments] == [0.25, 1.0, 0.75, 2.0, 1.0]
    assert {size.batch_size: size.factors["legw:128"] for size in plan.sizes} == {32: 1.0, 128: 2.0}


@pytest.mark.parametrize("name", vbs.rules.RULES)
def test_every_rule_can_be_planned(name):
    schedule = vbs.Schedule(vbs.Trace.from_sequence([32, 64]), dataset_size=300, minibatch_size=32)
    rules = planned_rules(["legw:1" if name == "legw" else name], noise_scale=1000)
    plan = vbs.planning.Plan.of(schedule, rules=rules, ref_batchsize=32)
    assert plan.rules[0].startswith(name)
    assert plan.moments[0].factors[plan.rules[0]] == 1.0


def test_custom_rule_can_be_planned():
    class Capped(vbs.Rule):
        def factor(self, step):
            return min(step.scale, 2.0)

    schedule = vbs.Schedule(vbs.Trace.from_sequence([32, 64, 128]), dataset_size=300, minibatch_size=32)
    plan = vbs.planning.Plan.of(schedule, rules={"capped": Capped()})
    assert [moment.factors for moment in plan.moments] == [{"capped": 1.0}, {"capped": 2.0}, {"capped": 2.0}]


def test_plan_is_json_serializable():
    schedule = vbs.Schedule(vbs.Trace.from_sequence([32, 64]), dataset_size=300, minibatch_size=32)
    plan = json.loads(json.dumps(vbs.planning.Plan.of(schedule, checkpoint_every=1).as_dict()))
    assert plan["num_steps"] == 2
    assert plan["sizes"][1]["factors"] == {"linear": 2.0, "root": math.sqrt(2), "constant": 1.0}
    assert plan["epochs"][0]["num_left_over"] == 300 - 96
    assert plan["checkpoints"][1] == {"epoch": 0, "epoch_step": 2, "steps_done": 2, "samples_done": 96}


def test_plan_counts_tokens():
    schedule = vbs.Schedule(vbs.Trace.from_sequence([32, 64]), dataset_size=300, minibatch_size=32)
    plan = vbs.planning.Plan.of(schedule, tokens_per_sample=4096).as_dict()
    assert (plan["tokens_per_sample"], plan["num_tokens"]) == (4096, 96 * 4096)
    plan = vbs.planning.Plan.of(schedule).as_dict()
    assert (plan["tokens_per_sample"], plan["num_tokens"]) == (None, None)


@pytest.mark.parametrize(
    ("trace", "options", "message"),
    [
        ([32], {"tokens_per_sample": 0}, "`tokens_per_sample` must be a positive integer, got 0"),
        ([32], {"num_epochs": 2}, "trace holds 1 epoch of 300 samples, got epoch 1"),
        ([32], {"num_epochs": 0}, "`num_epochs` must be a positive integer, got 0"),
        (32, {}, "trace is endless: the number of epochs must be given"),
        ([32], {"ref_batchsize": 0}, "`ref_batchsize` must be a positive integer, got 0"),
        ([32], {"checkpoint_every": 0}, "`checkpoint_every` must be a positive integer, got 0"),
    ],
)
def test_invalid_arguments_are_rejected(trace, options, message):
    schedule = vbs.Schedule(vbs.Trace.of(trace), dataset_size=300, minibatch_size=32)
    with pytest.raises(ValueError, match=message):
        vbs.planning.Plan.of(schedule, **options)


# ------------------------------------------------------------------------------------------- a plan equals the real run


def run_for_real(rule, num_epochs, every, options):
    """Train on the current cores and record what each core does."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    dataset = TensorDataset(torch.randn(options["dataset_size"], 4), torch.arange(options["dataset_size"]))
    sampler = vbs.CustomSampler(**options)
    model = torch.nn.Linear(4, 1)
    make = {"linear": vbs.LinearRuleOptimizer, "root": vbs.RootRuleOptimizer, "constant": vbs.ConstantOptimizer}[rule]
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.25), sampler, ref_batchsize=48)
    seen = {"steps": [], "positions": [], "samples": [], "yielded": []}
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        samples, run = [], 0
        seen["yielded"].append(len(sampler))
        for data, index in DataLoader(dataset, batch_sampler=sampler):
            model(data).square().mean().backward()
            optimizer.step()
            has_updated = optimizer.updated
            run += not optimizer.is_idle
            samples += [] if optimizer.is_idle else index.tolist()
            if has_updated:
                seen["steps"].append((epoch, optimizer.batch_size, optimizer.current_lr() / 0.25, run))
                run = 0
                if optimizer.steps_done % every == 0:
                    state = optimizer.state_dict()["variable_batch_size"]
                    names = ("epoch", "epoch_step", "steps_done", "samples_done")
                    seen["positions"].append(tuple(state[name] for name in names))
        seen["samples"].append(samples)
    return seen


TRACE = [32, 64, 16, 160, 48, 48, 96, 112, 16, 128, 80, 32]


@pytest.mark.parametrize(
    ("rule", "cores", "on_end", "num_epochs"),
    [
        ("linear", 1, "stop", None),
        ("root", 1, "hold", 7),
        ("constant", 1, "cycle", 9),
        ("linear", 2, "stop", None),
    ],
)
def test_plan_equals_a_real_run(on_cores, rule, cores, on_end, num_epochs):
    every = 3
    options = {"dataset_size": 215, "minibatch_size": 16, "trace": TRACE, "on_end": on_end}
    schedule = vbs.Schedule(vbs.Trace.of(TRACE), dataset_size=215, minibatch_size=16, num_replicas=cores, on_end=on_end)
    rules = {rule: RULES[rule]}
    plan = vbs.planning.Plan.of(schedule, num_epochs=num_epochs, rules=rules, ref_batchsize=48, checkpoint_every=every)
    args = (rule, plan.num_epochs, every, options)
    ran = [run_for_real(*args)] if cores == 1 else on_cores(cores, run_for_real, *args)

    steps = ran[0]["steps"]
    sizes = [size for _, size, _, _ in steps]
    loads = np.array([[load for *_, load in core["steps"]] for core in ran])
    assert plan.num_cores == len(ran)
    assert plan.num_steps == len(steps)
    assert plan.num_samples == sum(sizes)
    assert plan.mean_batch_size == np.mean(sizes)
    assert plan.num_minibatches == loads.sum()
    assert plan.core_minibatches == tuple(loads.sum(axis=1))
    assert plan.core_idle_steps == tuple((loads == 0).sum(axis=1))
    assert plan.idle_share == (loads == 0).mean()
    assert plan.mean_depth == loads.max(axis=0).mean()
    assert plan.busy_share == loads.sum() / (cores * loads.max(axis=0).sum())
    for rank, core in enumerate(ran):
        assert sum(core["yielded"]) == plan.core_minibatches[rank] + plan.core_idle_steps[rank]

    for size in plan.sizes:
        first = sizes.index(size.batch_size)
        assert size.num_steps == sizes.count(size.batch_size)
        assert size.num_minibatches == loads[:, first].sum()
        assert size.depth == loads[:, first].max()
        assert size.num_idle_cores == np.count_nonzero(loads[:, first] == 0)
        assert size.factors[rule] == pytest.approx(steps[first][2], rel=1e-12)
    assert sum(size.num_steps for size in plan.sizes) == len(steps)

    for epoch in plan.epochs:
        used = [sample for core in ran for sample in core["samples"][epoch.epoch]]
        assert epoch.num_samples == len(used) == len(set(used))
        assert epoch.num_left_over == 215 - len(used)
        assert epoch.num_steps == [e for e, *_ in steps].count(epoch.epoch)
        assert steps[epoch.first_step][0] == epoch.epoch
        assert epoch.first_step == 0 or steps[epoch.first_step - 1][0] == epoch.epoch - 1

    for moment in plan.moments:
        epoch, size, factor, _ = steps[moment.step]
        assert (moment.epoch, moment.batch_size, moment.samples_before) == (epoch, size, sum(sizes[: moment.step]))
        assert moment.factors[rule] == pytest.approx(factor, rel=1e-12)
        assert (moment.depth, moment.num_idle_cores) == (
            loads[:, moment.step].max(),
            (loads[:, moment.step] == 0).sum(),
        )

    positions = [tuple(position) for position in plan.checkpoints if position.steps_done % every == 0]
    assert positions == ran[0]["positions"]


def test_plan_of_data_without_a_length_is_rejected():
    schedule = vbs.Schedule(vbs.Trace.of([64]), dataset_size=None, minibatch_size=32)
    with pytest.raises(ValueError, match=r"^the schedule of a plan must have a `dataset_size`, got None$"):
        vbs.planning.Plan.of(schedule)
