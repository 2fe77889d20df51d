"""Minibatch weights: validation, sums, and no synchronization."""

import logging

import numpy as np
import pytest
import torch
from accumulators import BucketViewAccumulator, ExactBucketAccumulator, ExactTracedAccumulator
from threaded_cores import run_on
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.optim.gradients.accumulator import StepGradient, StepPlan
from variable_batch_size.optim.gradients.buckets import BucketAccumulator
from variable_batch_size.optim.gradients.traced import TracedAccumulator
from variable_batch_size.optim.token_weights import TokenWeights


def make(trace=(2, 2, 2, 2), *, rule=None, device="cpu", lr=1.0, **options):
    """A weight of 0 with a given gradient; minibatches of one sample."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64, device=device))
    sampler = vbs.CustomSampler(dataset_size=64, trace=list(trace), minibatch_size=1, shuffle=False)
    inner = torch.optim.SGD([p], lr=lr, momentum=0.5, weight_decay=0.1)
    optimizer = vbs.CustomOptimizer(inner, sampler, rule=rule or vbs.rules.LinearRule(), ref_batchsize=2, **options)
    return p, optimizer


def step(p, optimizer, gradient, **how):
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    p.grad.add_(gradient)
    optimizer.step(**how)
    return optimizer.updated


def load(optimizer, state):
    optimizer.load_state_dict(state)
    optimizer.sampler.set_epoch(optimizer.epoch, optimizer.epoch_step)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (-1, r"^`weight` must be finite and at least 0, got -1\.0$"),
        (float("nan"), r"^`weight` must be finite and at least 0, got nan$"),
        (float("inf"), r"^`weight` must be finite and at least 0, got inf$"),
        (torch.tensor(-3), r"^`weight` must be finite and at least 0, got -3\.0$"),
        (np.float32("nan"), r"^`weight` must be finite and at least 0, got nan$"),
        (torch.ones(2), r"^`weight` must be one number, got a value of the shape \(2,\)$"),
        (torch.ones(0), r"^`weight` must be one number, got a value of the shape \(0,\)$"),
        (torch.ones(2, device="meta"), r"^`weight` must be one number, got a value of the shape \(2,\)$"),
        (np.ones((1, 3)), r"^`weight` must be one number, got a value of the shape \(1, 3\)$"),
        ("5", r"^`weight` must be one number, got '5'$"),
        ([5], r"^`weight` must be one number, got \[5\]$"),
        pytest.param(10**400, r"^`weight` must be one number, got 1000", id="too large"),
        (1j, r"^`weight` must be one number, got 1j$"),
        (
            torch.tensor(7, dtype=torch.bfloat16),
            r"^`weight` must have a dtype that represents large integers, .*, got torch\.bfloat16: sum a mask",
        ),
        (
            torch.tensor(7, dtype=torch.float16, device="meta"),
            r"^`weight` must have a dtype that represents large integers",
        ),
        (torch.tensor(7j), r"^`weight` must have a dtype that represents large integers, .*, got torch\.complex64: "),
    ],
)
def test_invalid_weight_raises_and_changes_nothing(wrong, message):
    p, optimizer = make()
    with pytest.raises(ValueError, match=message):
        step(p, optimizer, 1.0, weight=wrong)
    optimizer.zero_grad()
    step(p, optimizer, 1.0)  # it is not even decided whether there are weights
    step(p, optimizer, 3.0)
    assert p.item() == -2.0


@pytest.mark.parametrize("weight", [3, np.int64(3), np.array([3]), np.array([[3.0]]), torch.tensor([3])])
def test_any_single_number_is_a_weight(weight):
    checked = TokenWeights(torch.device("cpu")).checked(weight)
    assert checked == 3
    assert type(checked) is float


def test_weights_on_a_device_are_summed_there_in_double_precision():
    weights = TokenWeights(torch.device("meta"))
    checked = weights.checked(torch.ones(1, dtype=torch.int32, device="meta"))
    assert (checked.device.type, checked.dtype, checked.shape) == ("meta", torch.float64, ())
    weights.add(torch.ones(()))  # summed elsewhere
    assert (weights.unread.device.type, weights.unread.dtype) == ("meta", torch.float64)


@pytest.mark.parametrize("loads", [False, True])
def test_either_all_minibatches_of_a_run_have_a_weight_or_none(loads):
    for first, then, message in (
        ({"weight": 2}, {}, r"got none after some had one$"),
        ({}, {"weight": 2}, r"got one after some had none$"),
    ):
        p, optimizer = make()
        for _ in range(2):
            step(p, optimizer, 1.0, **first)
        if loads:
            state = optimizer.state_dict()
            p, optimizer = make()
            load(optimizer, state)
        with pytest.raises(
            ValueError, match=r"^`weight` must be passed for all minibatches of a run or for none, " + message
        ):
            step(p, optimizer, 1.0, **then)
        step(p, optimizer, 1.0, **first)


def test_positional_weight_is_not_taken_for_a_closure():
    _, optimizer = make()
    message = r"^`closure` must be a function, got 16: pass a weight as step\(weight=…\)$"
    with pytest.raises(ValueError, match=message):
        optimizer.step(16)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"skip_nonfinite": True}, {"measure_noise": True}]
)
def test_zero_weight_step_changes_nothing_and_is_logged(caplog, options):
    p, optimizer = make(**options)
    step(p, optimizer, 4.0, weight=1)
    step(p, optimizer, 4.0, weight=3)
    before = p.item()
    with caplog.at_level(logging.WARNING):
        assert not step(p, optimizer, 0.0, weight=0)
        assert not step(p, optimizer, 0.0, weight=0.0)
    # neither momentum nor weight decay has moved it
    assert p.item() == before == -2.0
    assert "step 2/4: all minibatches have the weight 0, the update is skipped (1 so far)" in caplog.text
    assert (optimizer.steps_done, optimizer.steps_skipped, optimizer.weight_done) == (2, 1, 4.0)


def test_zero_weight_step_is_skipped_if_the_device_is_read(monkeypatch):
    p, optimizer = make(skip_nonfinite=True)
    monkeypatch.setattr(StepGradient, "weighs_nothing", False)  # as on a device
    step(p, optimizer, 0.0, weight=0)
    assert not step(p, optimizer, 0.0, weight=0)
    assert optimizer.steps_skipped == 1


def test_nan_weight_on_a_device_does_not_give_a_zero_gradient():
    for kind in (
        BucketAccumulator,
        BucketViewAccumulator,
        ExactBucketAccumulator,
        TracedAccumulator,
        ExactTracedAccumulator,
    ):

        def run(core, kind=kind):
            p = nn.Parameter(torch.zeros(1))
            gradients = kind(torch.optim.SGD([p], lr=1.0), core)
            p.grad = torch.ones(1) if p.grad is None else p.grad.fill_(1.0)
            gradients.accumulate(StepPlan(2), torch.tensor(float("nan") if core.rank else 2.0))
            gradients.reduce(StepPlan(2))
            return p.grad.item()

        assert all(np.isnan(value) for value in run_on(2, run))


def test_failed_step_does_not_count(monkeypatch):
    p, optimizer = make()
    step(p, optimizer, 1.0, weight=2)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer.inner, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(p, optimizer, 1.0, weight=2)
    assert optimizer.weight_done == 0
    for gradient in (1.0, 3.0):
        step(p, optimizer, gradient, weight=4)
    assert optimizer.weight_done == 8
    assert p.item() == -0.5


@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator, ExactBucketAccumulator])
@pytest.mark.parametrize("without", [(0,), (1,), (2,), (0, 2), (0, 1), (1, 2)])
def test_weights_on_only_some_cores_raise_on_all(kind, without):
    """The last core is idle."""

    def run(core):
        p = nn.Parameter(torch.zeros(1))
        gradients = kind(torch.optim.SGD([p], lr=1.0), core)
        if p.grad is None:
            p.grad = torch.zeros(1)
        p.grad.add_(1.0)
        gradients.accumulate(StepPlan(2), None if core.rank in without else 0 if core.rank else 3)
        try:
            gradients.reduce(StepPlan(2, is_idle=core.rank == 2))
        except ValueError as error:
            return str(error)

    message = (
        f"`weight` must be passed on all ranks or on none, but {len(without)} of 3 passed none. An idle rank passes"
    )
    assert all(found.startswith(message) for found in run_on(3, run))


@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator, ExactBucketAccumulator])
def test_weights_on_only_some_cores_raise_after_loading_the_initial_state(kind):
    def run(core):
        p = nn.Parameter(torch.zeros(1))
        gradients = kind(torch.optim.SGD([p], lr=1.0), core)

        def step(weight):
            p.grad = torch.ones(1) if p.grad is None else p.grad.add_(1.0)
            gradients.accumulate(StepPlan(2), weight)
            gradients.reduce(StepPlan(2))
            gradients.reset()

        state = gradients.state_dict()
        step(weight=None)
        gradients.load_state_dict(state)
        with pytest.raises(ValueError, match=r"^`weight` must be passed on all ranks or on none, but 1 of 2 passed"):
            step(weight=3 if core.rank else None)

    run_on(2, run)


@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator])
def test_core_without_weights_is_detected_next_to_one_with_many(kind):
    def run(core):
        p = nn.Parameter(torch.zeros(1))
        gradients = kind(torch.optim.SGD([p], lr=1.0), core)
        for number in range(100):
            p.grad = torch.zeros(1) if p.grad is None else p.grad
            gradients.accumulate(StepPlan(200, is_last=number == 99), None if core.rank else 1)
        with pytest.raises(ValueError, match=r"^`weight` must be passed on all ranks or on none, but 1 of 2 passed"):
            gradients.reduce(StepPlan(200))

    run_on(2, run)


@pytest.mark.parametrize("kind", [BucketAccumulator, BucketViewAccumulator, ExactBucketAccumulator])
@pytest.mark.parametrize("weights", [None, [0, 0, 0], [5, 0, 7]])
def test_cores_that_agree_on_weights_continue(kind, weights):
    def run(core):
        p = nn.Parameter(torch.zeros(1))
        gradients = kind(torch.optim.SGD([p], lr=1.0), core)
        found = []
        for _ in range(3):
            if p.grad is None:
                p.grad = torch.zeros(1)
            p.grad.add_(1.0)
            gradients.accumulate(StepPlan(2), weights and weights[core.rank])
            gradients.reduce(StepPlan(2, is_idle=core.rank == 2))
            found.append(p.grad.item())
            gradients.reset()
        return found

    expected = 1.0 if weights is None else 2 / 5 if any(weights) else 0.0  # the third core is idle
    assert run_on(3, run) == [pytest.approx([expected] * 3)] * 3


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize(
    "weight_of", [lambda: torch.ones((), device="meta"), lambda: torch.ones(1, device="meta").long()]
)
def test_weights_do_not_synchronize_with_the_device(options, weight_of):
    """On the meta device, reading a value raises."""
    p, optimizer = make([2, 1, 3, 2], device="meta", **options)
    for _ in range(8):
        step(p, optimizer, 1.0, weight=weight_of())
    assert optimizer.steps_done == 4
    with pytest.raises((RuntimeError, NotImplementedError)):
        optimizer.weight_done  # noqa: B018 (reading it is what waits)


# ------------------------------------------------------------------------------------------------- logs and checkpoints


def logged(optimizer, p, minibatches, every=1):
    records = []
    log = vbs.Log(optimizer, every=every, to=[records.append])
    for loss, count in minibatches:
        step(p, optimizer, 1.0, weight=count)
        log.step(torch.tensor(loss))
    return records


def test_record_has_the_weighted_mean_since_the_previous_one():
    p, optimizer = make()
    records = logged(optimizer, p, [(8.0, 4), (4.0, 8), (0.0, 0), (3.0, 1), (6.0, 2), (1.0, 1), (9.0, 8), (0.0, 1)], 2)
    assert [(record["loss"], record["weight"]) for record in records] == [(15 / 13, 13.0), (16 / 12, 25.0)]


def test_record_without_weight_has_no_loss():
    p, optimizer = make()
    records = logged(optimizer, p, [(0.0, 0), (0.0, 0), (4.0, 1), (4.0, 1)])
    assert np.isnan(records[0]["loss"])
    assert (records[1]["loss"], records[1]["weight"]) == (4.0, 2.0)


def test_record_without_weights_has_no_weight():
    p, optimizer = make()
    records = []
    log = vbs.Log(optimizer, every=1, to=[records.append])
    for loss in (1.0, 3.0):
        step(p, optimizer, 1.0)
        log.step(torch.tensor(loss))
    assert records[0]["loss"] == 2.0
    assert "weight" not in records[0]


def test_resumed_log_averages_only_its_own_steps_and_counts_all():
    p, optimizer = make()
    for _ in range(2):
        step(p, optimizer, 1.0, weight=10)
    state = optimizer.state_dict()
    p, optimizer = make()
    records = []
    log = vbs.Log(optimizer, every=1, to=[records.append])
    load(optimizer, state)
    for _ in range(2):
        step(p, optimizer, 1.0, weight=3)
        log.step(torch.tensor(6.0))
    log.write(accuracy=0.5)
    assert [(record.get("loss"), record["weight"]) for record in records] == [(2.0, 26.0), (None, 26.0)]


def test_loading_an_earlier_state_resets_the_weight():
    p, optimizer = make()
    records = []
    log = vbs.Log(optimizer, every=1, to=[records.append])
    state = None
    for weight in (1, 5):
        for _ in range(2):
            step(p, optimizer, 1.0, weight=weight)
            log.step(torch.tensor(10.0))
        state = state or optimizer.state_dict()
    load(optimizer, state)
    assert optimizer.weight_done == 2
    for _ in range(2):
        step(p, optimizer, 1.0, weight=4)
        log.step(torch.tensor(10.0))
    assert [(record["loss"], record["weight"]) for record in records] == [(10.0, 2.0), (2.0, 12.0), (2.5, 10.0)]


def test_log_requires_the_summed_loss_with_weights():
    p, optimizer = make()
    log = vbs.Log(optimizer, every=1, to=[])
    step(p, optimizer, 1.0, weight=3)
    with pytest.raises(ValueError, match=r"^`loss` must be the sum over a minibatch, got the shape \(2,\)$"):
        log.step(torch.ones(2))


def test_sinks_show_the_weight(tmp_path):
    p, optimizer = make()
    sinks = [vbs.JsonLines(tmp_path / "log.jsonl"), vbs.TensorBoard(tmp_path / "board")]
    log = vbs.Log(optimizer, every=1, to=sinks)
    for _ in range(2):
        step(p, optimizer, 1.0, weight=3)
        log.step(torch.tensor(6.0))
    log.close()
    assert '"weight": 6.0, "loss": 2.0' in (tmp_path / "log.jsonl").read_text()
    assert b"steps/weight" in b"".join(path.read_bytes() for path in (tmp_path / "board" / "steps").iterdir())


@pytest.mark.parametrize("rule", [vbs.rules.LinearRule, vbs.rules.AdaScaleRule])
def test_resumed_run_restores_noise_and_weight(tmp_path, rule):
    def session(records, num_steps):
        p, optimizer = make(rule=rule(), lr=0.1, measure_noise=True)
        model = nn.Module()
        model.weight = p
        checkpoint = vbs.Checkpoint(tmp_path / rule.__name__, model=model, optimizer=optimizer, every_steps=1)
        log = vbs.Log(optimizer, every=1, to=[records.append])
        for _ in checkpoint.epochs(1):
            for number in range(2 * optimizer.steps_done, 2 * (optimizer.steps_done + num_steps)):
                step(p, optimizer, float(number % 5), weight=number % 3 + 1)
                log.step(torch.tensor(float(number)))
                checkpoint.step()
            if num_steps < 4:
                break
        return optimizer

    records, resumed = [], []
    optimizer = session(records, 2)
    other = session(resumed, 0)
    assert (other.noise, other.weight_done, other.gain()) == (optimizer.noise, optimizer.weight_done, optimizer.gain())
    assert records[-1]["noise_scale"] == optimizer.noise_scale == other.noise_scale
    assert other.noise is not None
