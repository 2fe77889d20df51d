"""Runs with a policy, in one process."""

import json
import math

import pytest
import torch
from small_runs import classified, network, sgd, weights_of
from torch import nn
from torch.utils.data import DataLoader

import variable_batch_size as vbs

MINIBATCH = 8
DATA = classified(400, 6, num_classes=3)


def run_with(trace, *, kind=vbs.AdaScaleOptimizer, minibatch_size=MINIBATCH, **options):
    """A model, its sampler and optimizer."""
    model = network(6, 8, 3)
    sampler = vbs.CustomSampler(DATA, trace=trace, minibatch_size=minibatch_size, **options)
    return model, sampler, kind(sgd(model, momentum=0.9), sampler, ref_batchsize=2 * MINIBATCH, model=model)


def train(model, sampler, optimizer, *, epochs, log=None, workers=0):
    loader = DataLoader(DATA, batch_sampler=sampler, num_workers=workers)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if log is not None:
                log.step(loss)
    return weights_of(model)


def rows_of(sampler, optimizer):
    return list(sampler.schedule.trace)[: optimizer.steps_done]


POLICIES = {
    "autoscale": lambda: vbs.Autoscale(max_batch_size=128, every=6, lead=4),
    "per core": lambda: vbs.policies.PerCore(24),
    "norm test": lambda: vbs.policies.NormTest(eta=0.3, max_batch_size=200, max_growth=1.6, every=7, lead=2),
    "critical batch": lambda: vbs.policies.CriticalBatch(cost=0.4, max_batch_size=96, every=5, lead=1),
    "on plateau": lambda: vbs.policies.OnPlateau(patience=1, factor=1.5, every=5),
    "function": lambda: lambda situation: 8 * (1 + situation.steps_done % 7),
    "by the loss": lambda: vbs.policies.FunctionPolicy(
        lambda situation: 16 if situation.loss is None else 32, every=3, lead=1
    ),
}


def with_slow_updates(model, optimizer):
    """By the clock of the policy, a minibatch takes 1 s, and an update three more."""
    seconds = [0.0]
    model.register_forward_hook(lambda *_: seconds.append(1.0))
    optimizer.inner.register_step_post_hook(lambda *_: seconds.append(3.0))
    optimizer._driver.clock = lambda: sum(seconds)


@pytest.mark.parametrize("name", POLICIES)
def test_decisions_replay_bit_for_bit(name):
    model, sampler, optimizer = run_with(POLICIES[name]())
    with_slow_updates(model, optimizer)
    with vbs.Log(optimizer, every=3, to=[]) as log:
        weights = train(model, sampler, optimizer, epochs=4, log=log)
    rows = rows_of(sampler, optimizer)
    assert name == "per core" or len(set(rows)) > 1
    replayed = run_with(rows)
    assert torch.equal(train(*replayed, epochs=4), weights)
    assert replayed[2].progress == optimizer.progress
    assert replayed[2].epoch_step == optimizer.epoch_step


def test_loader_workers_prefetch_decided_rows():
    model, sampler, optimizer = run_with(vbs.Autoscale(max_batch_size=128, every=6, lead=4))
    weights = train(model, sampler, optimizer, epochs=2, workers=2)
    assert torch.equal(train(*run_with(rows_of(sampler, optimizer)), epochs=2), weights)


def test_too_short_lead_raises_if_loader_workers_prefetch():
    made = run_with(vbs.policies.PerCore(every=2, lead=1))
    with pytest.raises(
        RuntimeError, match="step 3 was read before its batch size was decided: the policy's `lead` must be"
    ):
        train(*made, epochs=1, workers=2)


def test_sampler_without_an_optimizer_has_no_decided_rows():
    sampler = vbs.CustomSampler(DATA, trace=vbs.policies.PerCore(), minibatch_size=MINIBATCH)
    with pytest.raises(
        RuntimeError, match="no batch size is decided yet: create the optimizer before iterating over the sampler"
    ):
        next(iter(sampler))


def test_a_policy_decides_for_one_optimizer():
    model, sampler, _ = run_with(vbs.policies.PerCore())
    with pytest.raises(
        RuntimeError, match="the policy of this sampler decides for another optimizer: make a sampler for ea"
    ):
        vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=8)


def test_a_policy_that_needs_noise_is_refused_if_noise_is_not_measured():
    message = "Autoscale decides by the gradient noise, which LinearRule does not measure: use AdaScaleRule"
    with pytest.raises(ValueError, match=message):
        run_with(vbs.Autoscale(max_batch_size=64), kind=vbs.LinearRuleOptimizer)


def test_any_rule_may_measure_it():
    def measuring(inner, sampler, **options):
        return vbs.LinearRuleOptimizer(inner, sampler, measure_noise=True, **options)

    made = run_with(vbs.Autoscale(max_batch_size=128, every=6, lead=4), kind=measuring)
    with_slow_updates(made[0], made[2])
    weights = train(*made, epochs=3)
    rows = rows_of(*made[1:])
    assert len(set(rows)) > 1
    assert torch.equal(train(*run_with(rows, kind=measuring), epochs=3), weights)


def test_other_policies_need_no_noise():
    made = run_with(vbs.policies.OnPlateau(patience=1, every=4), kind=vbs.LinearRuleOptimizer)
    train(*made, epochs=1)
    assert made[2].steps_done > 0


def test_policy_class_or_other_object_raises():
    with pytest.raises(ValueError, match=r"`trace` must be an object, got the class PerCore: make one, PerCore\(…\)"):
        run_with(vbs.policies.PerCore)
    with pytest.raises(
        ValueError, match="`trace` must be a path, stages, a sequence of batch sizes or an integer, got"
    ):
        run_with(64.0)


def test_what_cannot_read_a_stream_as_it_is_decided_is_refused():
    with pytest.raises(
        ValueError, match="`is_sharded` must be False with a policy, which decides how many samples a core reads"
    ):
        vbs.Stream(range(100), trace=vbs.policies.PerCore(), minibatch_size=4, is_sharded=True)
    stream = vbs.Stream(range(100), trace=vbs.policies.PerCore(), minibatch_size=4)
    with pytest.raises(ValueError, match="a stream with a policy must be read in the main process: pass num_workers=0"):
        list(DataLoader(stream, batch_size=None, num_workers=1))


def streamed(trace, directory=None, *, stop_after=None, **options):
    """Weights and rows of a run over all samples in order."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    stream = vbs.Stream(list(DATA), trace=trace, minibatch_size=MINIBATCH, **options)
    optimizer = vbs.AdaScaleOptimizer(sgd(model, momentum=0.9), stream, ref_batchsize=2 * MINIBATCH, model=model)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=1)
    for _ in checkpoint.epochs(2 if "dataset_size" in options else 1):
        for x, y in DataLoader(stream, batch_size=None):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            checkpoint.step()
            if stop_after == optimizer.steps_done and not optimizer.is_accumulating:
                return None
    return weights_of(model), list(stream.schedule.trace)[: optimizer.steps_done]


def streams():
    """Every policy with one pass over all samples or two passes over 300; with both in the long form."""
    for number, name in enumerate(POLICIES):
        for place, options in enumerate(({}, {"dataset_size": 300})):
            yield pytest.param(name, options, marks=pytest.mark.long if (number + place) % 2 else ())


@pytest.mark.parametrize(("name", "options"), [*streams()])
def test_stream_with_a_policy_replays_bit_for_bit(name, options):
    weights, rows = streamed(POLICIES[name](), **options)
    assert len(rows) > 10
    assert 400 - 200 < sum(rows) <= (600 if options else 400)  # the last row may not have had enough samples
    replayed, again = streamed(rows, **options)
    assert again == rows
    assert torch.equal(replayed, weights)


def test_stopped_stream_resumes_with_its_decisions(tmp_path):
    weights, rows = streamed(POLICIES["function"]())
    streamed(POLICIES["function"](), tmp_path, stop_after=8)
    again, rows_again = streamed(POLICIES["function"](), tmp_path)
    assert rows_again == rows
    assert torch.equal(again, weights)


@pytest.mark.parametrize(
    "name",
    [
        *("autoscale", "critical batch", "function"),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("per core", "norm test", "on plateau", "by the loss")
        ),
    ],
)
def test_a_run_continues_with_another_minibatch_size(tmp_path, name):
    allow_changes = {"minibatch_size"}
    saved_run(tmp_path, POLICIES[name](), epochs=4, stop_after=15)
    saved_run(tmp_path, POLICIES[name](), epochs=4, stop_after=25, allow_changes=allow_changes, minibatch_size=24)
    saved_run(tmp_path, POLICIES[name](), epochs=4, allow_changes=allow_changes, minibatch_size=4)
    rows = list(vbs.Trace.read(tmp_path / "executed.csv"))
    assert all(row % MINIBATCH == 0 for row in rows[:15])
    assert all(row % 24 == 0 for row in rows[15:25])
    assert all(row % 4 == 0 for row in rows[25:])
    assert 4 * 400 * 0.7 < sum(rows) <= 4 * 400


def test_bounds_that_do_not_fit_the_data_set_raise_at_the_start():
    with pytest.raises(
        ValueError, match="no batch size satisfies all bounds on 1 cores with minibatches of 8: at least 500 in"
    ):
        run_with(vbs.policies.PerCore(min_batch_size=500))


def test_every_decision_is_reported_with_its_reason():
    model, sampler, optimizer = run_with(vbs.Autoscale(max_batch_size=128, every=6, lead=4))
    with_slow_updates(model, optimizer)
    seen = []
    optimizer.on_decision(seen.append)
    assert [record["why"] for record in seen] == ["first decision"]
    train(model, sampler, optimizer, epochs=2)
    assert [record["step"] for record in seen[:4]] == [0, 6, 12, 18]
    assert [record["from_step"] for record in seen[:4]] == [0, 10, 16, 22]
    assert seen[1]["why"].startswith("goodput +")  # by the time of the updates
    rows = rows_of(sampler, optimizer)
    for record in seen:
        assert rows[record["from_step"] : record["from_step"] + 1] in ([], [record["batch_size"]])
    assert seen[0]["noise_scale"] is None
    assert seen[-1]["noise_scale"] > 0
    assert seen[-1]["seconds_accumulating"] == pytest.approx(1.0)
    assert seen[-1]["seconds_updating"] == pytest.approx(4.0)


def seconds_to(progress, *, per_update, times_updates):
    """The time of a run with one minibatch a step at first; a minibatch takes 1 s by its clock, and an update more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()
    policy = vbs.Autoscale(max_batch_size=64, every=6, lead=4)
    sampler = vbs.CustomSampler(DATA, trace=policy, minibatch_size=MINIBATCH)
    inner = sgd(model, lr=0.05)
    options = {"ref_batchsize": MINIBATCH, "model": model, "measure_noise": "norm layers", "smoothing": 0.99}
    optimizer = vbs.Optimizer(inner, sampler, rule="adascale", **options)
    clock, seen = [0.0], []
    inner.register_step_post_hook(lambda *_: clock.append(clock.pop() + per_update))
    optimizer._driver.clock, optimizer._driver._times_updates = lambda: clock[0], times_updates
    optimizer.on_decision(seen.append)
    for _ in optimizer.epochs(progress=progress):
        for indices in sampler:
            x, y = DATA[indices]
            clock[0] += 1.0
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return clock[0], seen


@pytest.mark.parametrize("per_update", [0.05, 3.0])
def test_one_core_with_one_minibatch_decides_without_a_trial_and_is_no_later(per_update):
    seconds, seen = seconds_to(100, per_update=per_update, times_updates=True)
    assert not any("trying" in record["why"] for record in seen)
    assert [seen[-1][f"seconds_{part}"] for part in ("accumulating", "updating")] == pytest.approx([1, 1 + per_update])
    seconds_with_trial, seen = seconds_to(100, per_update=per_update, times_updates=False)
    assert "times unknown, trying 2 minibatches per core after 1" in [record["why"] for record in seen]
    assert seconds <= seconds_with_trial


def test_log_has_the_times_and_passes_the_loss_to_the_policy():
    losses = []

    def decide(situation):
        losses.append(situation.loss)
        return 16

    model, sampler, optimizer = run_with(vbs.policies.FunctionPolicy(decide, every=6, lead=2))
    records = []
    with vbs.Log(optimizer, every=2, to=[records.append]) as log:
        train(model, sampler, optimizer, epochs=1, log=log)
    assert losses[0] is None
    assert losses[1] == records[1]["loss"]  # that of step 4, because the decision after step 6 comes before its record
    assert losses[2] == records[4]["loss"]
    assert {"seconds_accumulating", "seconds_updating"} <= records[0].keys()
    assert math.isnan(records[0]["seconds_updating"])


def test_policy_receives_the_noise_in_samples_also_with_token_weights():
    told = []

    def train_and_listen(**weight):
        _, sampler, optimizer = run_with(vbs.policies.FunctionPolicy(lambda situation: 16, every=6, lead=2))
        optimizer.on_decision(lambda record: told.append(record["noise_scale"]))
        generator = torch.Generator().manual_seed(2)
        for _ in optimizer.epochs(1):
            for _ in sampler:
                for p in optimizer.parameters():
                    p.grad = 1 + torch.randn(p.shape, generator=generator, dtype=p.dtype)
                    p.grad *= weight.get("weight", 1)
                optimizer.step(**weight)

    train_and_listen()
    train_and_listen(weight=100 * MINIBATCH)
    plain, weighted = told[: len(told) // 2], told[len(told) // 2 :]
    assert plain[0] is None
    assert weighted[0] is None
    assert weighted[1:] == pytest.approx(plain[1:])


def saved_run(directory, trace, *, epochs, stop_after=None, minibatch_size=MINIBATCH, **options):
    model, sampler, optimizer = run_with(trace, minibatch_size=minibatch_size)
    log = vbs.Log(optimizer, every=14, to=[])
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=5, **options)
    loader = DataLoader(DATA, batch_sampler=sampler)
    for _ in checkpoint.epochs(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            log.step(loss)
            checkpoint.step()
            if optimizer.steps_done == stop_after:
                return None
    return weights_of(model)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """The directory and the weights of a run with each policy."""
    runs = {}
    for name in ("per core", "function", "critical batch", "by the loss"):  # independent of time
        directory = tmp_path_factory.mktemp("whole")
        runs[name] = directory, saved_run(directory, POLICIES[name](), epochs=3)
    return runs


def stops():
    """Each policy is stopped once, in the long form three times."""
    chosen = {("per core", 30), ("function", 5), ("critical batch", 30), ("by the loss", 17)}
    for name in ("per core", "function", "critical batch", "by the loss"):
        for stop_after in (5, 17, 30):
            marks = () if (name, stop_after) in chosen else pytest.mark.long
            yield pytest.param(name, stop_after, marks=marks)


@pytest.mark.parametrize(("name", "stop_after"), [*stops()])
def test_stopped_run_resumes_as_if_never_stopped(tmp_path, name, stop_after, never_stopped):
    directory, whole = never_stopped[name]
    saved_run(tmp_path, POLICIES[name](), epochs=3, stop_after=stop_after)
    assert torch.equal(saved_run(tmp_path, POLICIES[name](), epochs=3), whole)
    traces = [vbs.Trace.read(one / "executed.csv") for one in (directory, tmp_path)]
    assert traces[0] == traces[1]
    decisions = [(one / "decisions.jsonl").read_text().splitlines() for one in (directory, tmp_path)]
    told = [
        [{**json.loads(line), "seconds_accumulating": 0, "seconds_updating": 0} for line in part] for part in decisions
    ]
    assert told[0] == told[1]


def test_executed_csv_is_the_trace_and_replays_bit_for_bit(tmp_path):
    policy = vbs.Autoscale(max_batch_size=128, every=6, lead=4)
    weights = saved_run(tmp_path / "live", policy, epochs=3)
    executed = tmp_path / "live" / "executed.csv"
    assert executed.read_text().startswith("# executed from Autoscale: trace decided by Autoscale(every=6, lead=4, ")
    assert torch.equal(saved_run(tmp_path / "replayed", executed, epochs=3), weights)
    described = json.loads((tmp_path / "live" / "run.json").read_text())
    settings = {"every": 6, "lead": 4, "max_batch_size": 128, "max_growth": 2.0, "threshold": 1.05}
    assert (described["policy"], described["trace"]) == ({"name": "Autoscale", "settings": settings}, None)


@pytest.mark.parametrize("lead", [1, 30])  # its end may already be decided
def test_epoch_that_ended_early_is_marked_in_executed_csv(tmp_path, lead):
    model, sampler, optimizer = run_with(vbs.policies.PerCore(16, every=1, lead=lead))
    checkpoint = vbs.Checkpoint(tmp_path, model=model, optimizer=optimizer)
    for epoch in checkpoint.epochs(2):
        for x, y in DataLoader(DATA, batch_sampler=sampler):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if epoch == 0 and optimizer.epoch_step == 3:
                break
    assert optimizer.steps_done == 3 + 25
    text = (tmp_path / "executed.csv").read_text()
    assert "\n# epoch 0 was left after 3 steps: in a replay, epochs begin elsewhere\n3,16\n" in text


def test_state_without_decisions_raises():
    live, fixed = run_with(vbs.policies.PerCore())[2], run_with([16] * 20)[2]
    with pytest.raises(ValueError, match="the state is that of a run with a trace, but this run has a policy"):
        live.load_state_dict(fixed.state_dict())


def test_a_run_may_be_forked_from_a_trace_to_a_policy_and_back(tmp_path):
    saved_run(tmp_path, [16] * 60, epochs=2, stop_after=10)
    allow_changes = {"trace", "on_end"}
    saved_run(tmp_path, vbs.policies.PerCore(24, every=4, lead=2), epochs=2, stop_after=20, allow_changes=allow_changes)
    saved_run(tmp_path, [40] * 60, epochs=2, allow_changes=allow_changes)
    rows = list(vbs.Trace.read(tmp_path / "executed.csv"))
    assert rows[:10] == [16] * 10
    assert rows[10:20] == [24] * 10
    assert set(rows[20:]) == {40}
    assert sum(rows) <= 800


def test_run_with_an_epoch_that_ended_early_may_resume_with_a_policy(tmp_path):
    for trace, stop_after in (([16] * 60, 8), (vbs.policies.PerCore(24, every=4, lead=2), None)):
        model, sampler, optimizer = run_with(trace)
        options = {"every_steps": 1, "allow_changes": {"trace", "on_end"}}
        checkpoint = vbs.Checkpoint(tmp_path, model=model, optimizer=optimizer, **options)
        for epoch in checkpoint.epochs(2):
            for x, y in DataLoader(DATA, batch_sampler=sampler):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                checkpoint.step()
                if (epoch == 0 and optimizer.epoch_step == 5) or optimizer.steps_done == stop_after:
                    break
            if optimizer.steps_done == stop_after:
                break
    assert list(vbs.Trace.read(tmp_path / "executed.csv")) == [16] * 8 + [24] * ((400 - 3 * 16) // 24)


def test_different_policy_does_not_resume(tmp_path):
    saved_run(tmp_path, vbs.policies.PerCore(16), epochs=2, stop_after=5)
    with pytest.raises(
        ValueError, match=r"was saved by another run: trace was decided by PerCore\(.*samples=16.* and is "
    ):
        saved_run(tmp_path, vbs.policies.PerCore(24), epochs=2)


def test_steps_of_epochs_of_one_step_are_timed():
    seconds = []
    times = {}
    for size in (400, 200):  # one and two steps in an epoch; the first of two starts the loader, and is not timed
        made = run_with(vbs.policies.PerCore(size, every=2, lead=1))
        made[2]._driver.clock = lambda: float(len(seconds))
        made[2].register_step_pre_hook(lambda *_: seconds.append(1))
        train(*made, epochs=8)
        ((_, depth, *_, found),) = made[2]._driver._timing.times.state_dict()["rows"]
        times[size] = {depth: found}
    assert times == {400: {50: [50.0] * 7}, 200: {25: [25.0] * 8}}
