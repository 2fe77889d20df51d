"""Accelerate, except for its loader and scheduler: the weights are those of a hand-written loop."""

from itertools import chain, islice, repeat

import accelerate_runs
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate_runs import TRACE, Session, by_accelerate, by_own_loop, prepared, stopped_and_resumed
from torch.testing import assert_close
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from variable_batch_size.integrations.accelerate import UpdateCountingOptimizer, prepare, shard

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


AT_ONCE, MODEL_FIRST = "all at once", "the model first, the loader not at all"


@pytest.mark.parametrize(
    ("rule", "way"),
    [
        *(("adascale", AT_ONCE), ("linear", MODEL_FIRST)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("linear", AT_ONCE), ("adascale", MODEL_FIRST))),
    ],
)
def test_run_equals_that_of_a_hand_written_loop(rule, way):
    found, expected = by_accelerate(rule, model_first=way == MODEL_FIRST), by_own_loop(rule)
    assert_close(found["weights"], expected["weights"], **TOLERANCE)
    assert found["steps"] == found["scheduler"] == expected["scheduler"] == len(TRACE)


@pytest.mark.parametrize("num_steps", [pytest.param(4, marks=pytest.mark.long), 6])  # 4 of the linear rule, below
def test_run_resumes_from_the_accelerators_state(tmp_path, num_steps):
    found, expected = stopped_and_resumed(tmp_path, "adascale", num_steps), by_own_loop("adascale")
    assert_close(found["weights"], expected["weights"], **TOLERANCE)
    assert found["steps"] == found["scheduler"] == len(TRACE)


def test_random_states_are_restored(tmp_path):
    found = stopped_and_resumed(tmp_path, "linear", 4, dropout=0.3)
    assert_close(found["weights"], by_accelerate("linear", dropout=0.3)["weights"], **TOLERANCE)


def test_a_token_budget_is_assigned_once():
    lengths = [1 + 3 * number % 7 for number in range(64)]

    def run(*, is_prepared):
        session = Session("linear")
        budget = vbs.TokenBudget(lengths, [16, 32, 48], tokens=16, on_end="cycle")
        loader = DataLoader(accelerate_runs.dataset(), batch_sampler=budget)
        inner = torch.optim.SGD(session.model.parameters(), lr=0.1)
        model, optimizer = session.model, vbs.LinearRuleOptimizer(inner, budget, ref_batchsize=32)
        if is_prepared:
            model, optimizer, loader = prepare(Accelerator(cpu=True), model, optimizer, loader)
        for _ in optimizer.epochs(1):
            for data, target in loader:
                torch.nn.functional.cross_entropy(model(data), target, reduction="sum").backward()
                optimizer.step(weight=len(data))
        return session.found()["weights"], optimizer.weight_done

    assert_close(run(is_prepared=True), run(is_prepared=False), **TOLERANCE)


def test_open_steps_resume_within_an_epoch(tmp_path):
    def train(*, stop_at=None, is_resumed=False, is_prepared=True):
        torch.manual_seed(0)
        accelerator, data = Accelerator(cpu=True), accelerate_runs.dataset()
        model = torch.nn.Linear(6, 3)
        loader = vbs.DataLoader(data, vbs.OpenSteps(), minibatch_size=4)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = vbs.Optimizer(inner, loader, rule="adascale", ref_batchsize=8, model=model)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 3, gamma=0.5)
        if is_prepared:
            model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)
        if is_resumed:
            accelerator.load_state(str(tmp_path))
        for _ in optimizer.epochs(2):
            read = iter(loader)
            while own := list(islice(read, 1 + optimizer.steps_done % 3)):
                for data, target in optimizer.minibatches(own):
                    accelerator.backward(torch.nn.functional.cross_entropy(model(data), target))
                    optimizer.step()
                scheduler.step()
                if optimizer.steps_done == stop_at:
                    accelerator.save_state(str(tmp_path))
                    return None
        return [p.detach().clone() for p in model.parameters()], optimizer.steps_done, inner.param_groups[0]["lr"]

    train(stop_at=5)
    expected = train(is_prepared=False)
    assert_close(train(is_resumed=True), expected, **TOLERANCE)
    assert_close(train(), expected, **TOLERANCE)


def test_different_run_does_not_resume(tmp_path, monkeypatch):
    accelerator, _ = prepared("linear")
    accelerator.save_state(str(tmp_path))
    monkeypatch.setattr(accelerate_runs, "TRACE", [*TRACE[:-1], 16])
    accelerator, _ = prepared("linear")
    with pytest.raises(ValueError, match=r"^the checkpoint was saved by another run: trace was"):
        accelerator.load_state(str(tmp_path))


def test_skipping_minibatches_that_the_optimizer_counts_raises():
    accelerator, session = prepared("linear", model_first=True)
    session.loader = accelerator.skip_first_batches(session.loader, 3)
    with pytest.raises(RuntimeError, match="not called for at least 3 of the 16 minibatches of epoch 0"):
        session.train(accelerator.backward)


def test_saving_within_a_step_warns(tmp_path, caplog):
    accelerator, session = prepared("linear")
    session.train(accelerator.backward, stop_at=1)
    accelerator.save_state(str(tmp_path))
    assert "within a step" not in caplog.text
    next(session.optimizer.epochs(2))
    data, target = next(iter(session.loader))
    accelerator.backward(torch.nn.functional.cross_entropy(session.model(data), target))
    session.optimizer.step()
    accelerator.save_state(str(tmp_path))
    assert "the optimizer was saved within a step" in caplog.text


def test_mixed_precision_of_the_accelerator_is_used():
    found = by_accelerate("linear", accelerator={"mixed_precision": "bf16"})["weights"]
    expected = by_own_loop("linear")["weights"]
    assert_close(found, expected, rtol=0, atol=0.05)
    assert any((found[name] != expected[name]).any() for name in found)


def test_other_loaders_are_prepared_by_the_accelerator():
    accelerator = Accelerator(cpu=True)
    session = Session("linear")
    other = DataLoader(accelerate_runs.dataset(), batch_size=8)
    _, found = prepare(accelerator, session.optimizer, other)
    assert len(list(found)) == 8


def test_accumulation_that_is_set_twice_is_refused():
    with pytest.raises(ValueError, match="`gradient_accumulation_steps` must be 1, got 4: the trace determines"):
        prepared("linear", accelerator={"gradient_accumulation_steps": 4})


def test_gradient_accumulation_steps_must_be_1_even_without_prepare():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    with pytest.raises(RuntimeError, match="Accelerate's `gradient_accumulation_steps` must be 1, got 4"):
        Session("linear").train(accelerator.backward)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer", "was given an optimizer of this library, or its inner one"),
        ("loader", "was given a loader that is already sharded by its sampler or stream"),
    ],
)
def test_objects_prepared_by_the_accelerator_raise_at_the_first_step(name, message):
    accelerator, session = Accelerator(cpu=True), Session("linear")
    own = session.optimizer
    setattr(session, name, accelerator.prepare(getattr(session, name)))
    with pytest.raises(RuntimeError, match=rf"^accelerator\.prepare\(\) {message}: use prepare"):
        for _ in own.epochs(2):
            for data, target in session.loader:
                accelerator.backward(torch.nn.functional.cross_entropy(session.model(data), target))
                session.optimizer.step()
    assert own.steps_done == 0


def test_inner_optimizer_or_stream_loader_prepared_by_the_accelerator_raises():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    stream = vbs.Stream([torch.zeros(1)] * 8, trace=[4], minibatch_size=2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.LinearRuleOptimizer(accelerator.prepare(inner), stream, ref_batchsize=4)
    with pytest.raises(RuntimeError, match="or its inner one"):
        optimizer.step()
    optimizer = vbs.LinearRuleOptimizer(inner, stream, ref_batchsize=4)
    for x in accelerator.prepare(DataLoader(stream, batch_size=None)):
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match="was given a loader that is already sharded by its sampler or stream"):
            optimizer.step()
        break


def test_loader_without_the_sampler_raises():
    accelerator, session = prepared("linear")
    session.loader = DataLoader(accelerate_runs.dataset(), batch_size=4)
    with pytest.raises(RuntimeError, match=r"no loader reads this CustomSampler: train with DataLoader\("):
        session.train(accelerator.backward)


def test_scheduler_of_another_optimizer_raises():
    session = Session("linear")
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(session.model.parameters(), lr=1.0), 1)
    with pytest.raises(ValueError, match="StepLR schedules a different optimizer than the one passed to prepare"):
        prepare(Accelerator(cpu=True), session.optimizer, other)


def with_two_inner_optimizers():
    model = torch.nn.Linear(2, 1)
    inner = [torch.optim.SGD([model.weight], lr=1.0), torch.optim.Adam([model.bias], lr=1.0)]
    sampler = vbs.CustomSampler(dataset_size=8, trace=4, minibatch_size=2)
    return model, vbs.ConstantOptimizer(inner, sampler), torch.optim.lr_scheduler.ExponentialLR(inner[0], 0.5)


def test_scheduler_of_one_of_several_inner_optimizers_is_allowed():
    model, optimizer, scheduler = with_two_inner_optimizers()
    model, optimizer, scheduler = prepare(Accelerator(cpu=True), model, optimizer, scheduler)
    for _ in optimizer.epochs(1):
        for _ in optimizer.sampler:
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 1.0]  # after two updates


def test_an_optimizer_of_this_library_must_be_there():
    with pytest.raises(ValueError, match="pass exactly one optimizer of this library to prepare\\(\\), got 0"):
        prepare(Accelerator(cpu=True), torch.nn.Linear(2, 2))


def test_state_of_another_optimizer_raises():
    optimizer = UpdateCountingOptimizer(Session("linear").optimizer)
    for state in ({}, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).state_dict()):
        with pytest.raises(ValueError, match=r"^the state has no 'variable_batch_size', so it was not saved by this"):
            optimizer.load_state_dict(state)


# ----------------------------------------------------------------------------------------------------------------- fp16


def scaled(rule="adascale", **options):
    """A session with the scaler of "fp16", which Accelerate has on accelerators only, and without autocast."""
    accelerator, session = Accelerator(cpu=True), Session(rule)
    accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=3, **options)
    things = prepare(accelerator, session.model, session.optimizer, session.loader, session.scheduler)
    session.model, session.optimizer, session.loader, session.scheduler = things
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    return accelerator, session


def test_loss_scales_of_the_accelerator_do_not_change_the_result(tmp_path):
    expected = by_own_loop("adascale")
    accelerator, session = scaled(init_scale=2.0**10)
    session.train(accelerator.backward, stop_at=4)
    accelerator.save_state(str(tmp_path))
    saved = accelerator.scaler.get_scale()
    assert saved > 2.0**10
    assert_close(session.train(accelerator.backward).found()["weights"], expected["weights"], **TOLERANCE)
    accelerator, session = scaled(init_scale=2.0**10)
    accelerator.load_state(str(tmp_path))
    assert accelerator.scaler.get_scale() == saved
    found = session.train(accelerator.backward).found()
    assert_close(found["weights"], expected["weights"], **TOLERANCE)
    assert found["steps"] == found["scheduler"] == len(TRACE)


def test_overflow_of_the_accelerators_loss_scale_skips_the_step_and_its_scheduler():
    accelerator, session = scaled()
    factors = chain([float("inf")], repeat(1.0))
    found = session.train(lambda loss: accelerator.backward(loss * next(factors))).found()
    assert session.optimizer.steps_skipped == 1
    assert (found["steps"], found["scheduler"]) == (len(TRACE), len(TRACE) - 1)


def test_clipping_by_the_accelerator_clips_the_unscaled_gradient_of_a_minibatch():
    accelerator, session = scaled("linear", init_scale=2.0**10)

    def backward(loss):
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(session.model.parameters(), 0.1)

    plain = Session("linear")
    for _ in plain.optimizer.epochs(2):
        for data, target in plain.loader:
            torch.nn.functional.cross_entropy(plain.model(data), target).backward()
            torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1)
            if plain.optimizer.step():
                plain.scheduler.step()
    assert_close(session.train(backward).found()["weights"], plain.found()["weights"], **TOLERANCE)


def test_open_steps_raise_with_a_loss_scale():
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(6, 3)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    loader = vbs.DataLoader(accelerate_runs.dataset(), vbs.OpenSteps(), minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=8, model=model)
    with pytest.raises(ValueError, match=r'^`mixed_precision` must be "no" or "bf16" with OpenSteps, got "fp16"'):
        prepare(accelerator, model, optimizer, loader)


def test_a_closure_raises_with_a_loss_scale():
    accelerator, session = scaled()
    session.optimizer.set_epoch(0)
    minibatches = iter(session.loader)
    accelerator.backward(session.model(next(minibatches)[0]).sum())
    session.optimizer.step()
    next(minibatches)
    with pytest.raises(RuntimeError, match=r"^with fp16, accelerator.backward\(\) must precede step\(\): don't pass a"):
        session.optimizer.step(lambda: None)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("FSDP", r"^FSDP reduces gradients by itself and is not supported with Accelerate: use FSDP2"),
        ("DEEPSPEED", r"^DEEPSPEED reduces gradients by itself and is not supported"),
    ],
)
def test_other_ways_to_shard_raise(kind, message):
    accelerator, session = Accelerator(cpu=True), Session("linear")
    accelerator.state.distributed_type = DistributedType[kind]
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(ValueError, match=message):
        prepare(accelerator, session.model, session.optimizer)
    with pytest.raises(ValueError, match=r"^`accelerator` must have FullyShardedDataParallelPlugin\(fsdp_version=2\)"):
        shard(accelerator, session.model, session.optimizer.inner)
