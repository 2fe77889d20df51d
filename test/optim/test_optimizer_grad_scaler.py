"""torch.amp.GradScaler: used as in any loop, equal to accumulating unscaled gradients and skipping full steps."""

import copy
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from small_runs import classified, network, sgd, weights_of
from torch import nn

import variable_batch_size as vbs

TRACE = [2, 4, 1, 3, 4, 2, 4]  # in minibatches
MINIBATCH = 4
DATA = classified(200, 3, num_classes=2)
POISONED = (1, 2)  # step, and index of the minibatch in it
RULES = {
    "linear": (vbs.LinearRuleOptimizer, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adascale": (vbs.AdaScaleOptimizer, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (vbs.AdamRuleOptimizer, torch.optim.AdamW, {"lr": 0.01}),
}


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()


def tokens_of(indices):
    return 1 + indices[0] % 3


def train(rule, *, scaler=None, unscales=False, weighted=False, poison=None, frozen_statistics=True, **options):
    """A run with or without a scaler; `poison` is the factor of one minibatch's loss."""
    kind, inner, settings = RULES[rule]
    model = model_of()
    if frozen_statistics:
        model[1].eval()  # otherwise statistics are local to each core
    sampler = vbs.CustomSampler(200, [MINIBATCH * n for n in TRACE], minibatch_size=MINIBATCH)
    optimizer = kind(inner(model.parameters(), **settings), sampler, ref_batchsize=4, model=model, **options)
    x, y = DATA.tensors
    updates, scales = [], []
    sampler.set_epoch(0)
    order = list(
        vbs.CustomSampler(200, [MINIBATCH * n for n in TRACE], minibatch_size=MINIBATCH, num_replicas=1, rank=0)
    )
    number = {tuple(indices): place for place, indices in enumerate(order)}
    poisoned = sum(TRACE[: POISONED[0]]) + POISONED[1]
    for indices in sampler:
        weight = tokens_of(indices) if weighted else None
        loss = nn.functional.cross_entropy(model(x[indices]), y[indices]) * (weight or 1)
        # padding minibatches are copies of another core's, so the poison reaches them, too, and must have no effect
        if poison is not None and number[tuple(indices)] == poisoned:
            loss = loss * poison
        if scaler is None:
            loss.backward()
            if unscales:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step(weight=weight)
            updates.append(optimizer.updated)
            continue
        scaler.scale(loss).backward()
        scales.append(scaler.get_scale())
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer, weight=weight)
        updates.append(optimizer.updated)
        scaler.update()
    result = {"weights": weights_of(model), "updates": updates, "scales": scales}
    result |= {"skipped": optimizer.steps_skipped, "statistics": model[1].running_mean.clone()}
    return result | {
        "noise": (optimizer.noise_scale, optimizer.gain(16)) if rule == "adascale" else None,
        "steps": optimizer.steps_done,
    }


def scaler_of(**options):
    # grows within steps
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 2, **options})


def same(one, other):
    assert (one["updates"], one["skipped"], one["steps"]) == (other["updates"], other["skipped"], other["steps"])
    torch.testing.assert_close(one["weights"], other["weights"], rtol=1e-9, atol=1e-11)
    if one["noise"] is not None:
        assert one["noise"] == pytest.approx(other["noise"], rel=1e-9)


VARIANTS = {
    "plain": {},
    "weighted": {"weighted": True},
    "clipped": {"clip_grad_norm": 0.3},
    "clipped by the user": {"unscales": True},
    "weighted, clipped": {"weighted": True, "clip_grad_norm": 0.3},
}


def of_each_rule():
    """Every rule with every variant and an inf; without one, and with a NaN, one rule with each variant."""
    for (number, rule), (place, variant) in itertools.product(enumerate(RULES), enumerate(VARIANTS)):
        for poison in (None, math.inf, math.nan):
            is_long = poison != math.inf and (place + (poison is None)) % len(RULES) != number
            yield pytest.param(rule, variant, poison, marks=pytest.mark.long if is_long else ())


@pytest.mark.parametrize(("rule", "variant", "poison"), [*of_each_rule()])
def test_scaler_equals_a_loop_without_one_that_skips_non_finite_gradients(rule, variant, poison):
    options = VARIANTS[variant]
    scaled = train(rule, scaler=scaler_of(), poison=poison, **options)
    same(scaled, train(rule, skip_nonfinite=True, poison=poison, **options))
    assert len(set(scaled["scales"])) > 2  # the scale has changed within steps
    assert scaled["skipped"] == (poison is not None)


def on_a_core(rule, options):
    return train(rule, scaler=scaler_of(), poison=math.inf, **options)


def on_each_number_of_cores():
    """Every rule with every variant, on two cores or three; on both in the long form."""
    variants = ["plain", "weighted", "clipped", "clipped by the user"]
    for (number, rule), (place, variant) in itertools.product(enumerate(RULES), enumerate(variants)):
        for num_cores in (2, 3):
            is_long = (number + place + num_cores) % 2
            yield pytest.param(num_cores, rule, variant, marks=pytest.mark.long if is_long else ())


@pytest.mark.parametrize(("num_cores", "rule", "variant"), [*on_each_number_of_cores()])
def test_all_cores_skip_together_and_equal_one_core(on_cores, num_cores, rule, variant):
    alone = train(rule, scaler=scaler_of(), poison=math.inf, **VARIANTS[variant])
    found = on_cores(num_cores, on_a_core, rule, VARIANTS[variant])
    for result in found:
        assert (result["skipped"], result["steps"]) == (1, len(TRACE))
        torch.testing.assert_close(result["weights"], alone["weights"], rtol=1e-9, atol=1e-11)
        if rule == "adascale":
            assert result["noise"] == pytest.approx(alone["noise"], rel=1e-9)
    assert len({tuple(result["scales"]) for result in found}) > 1  # only the core with the inf has backed off


def test_scaler_with_the_inf_backs_off():
    scaled = train("linear", scaler=scaler_of(growth_interval=1000), poison=math.inf)
    place = sum(TRACE[: POISONED[0]]) + POISONED[1]
    assert set(scaled["scales"][: place + 1]) == {2.0**10}
    assert set(scaled["scales"][place + 1 :]) == {2.0**9}


@pytest.mark.parametrize("first", [True, False])
def test_buffers_of_a_skipped_step_are_restored(first):
    """Also of the first step, before which a scaler cannot be detected."""
    model = model_of()
    sampler = vbs.CustomSampler(24, [8, 8, 8], minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=4, model=model)
    scaler = scaler_of()
    model[1].running_mean.fill_(0.5)  # after the optimizer was made
    x, _ = DATA.tensors
    before = {}
    for number, _ in enumerate(sampler):
        if number % 2 == 0:
            before[number] = copy.deepcopy(dict(model.named_buffers()))
        poison = math.inf if number == (1 if first else 3) else 1.0
        scaler.scale(model(x[4 * number : 4 * number + 4]).square().mean() * poison).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.updated == (number % 2 == 1 and poison == 1.0)
        if poison != 1.0:
            for name, buffer in model.named_buffers():
                assert torch.equal(buffer, before[number - 1][name]), name
    assert optimizer.steps_skipped == 1


@pytest.mark.parametrize("kind", ["trace", "open steps"])
def test_buffers_are_restored_although_the_first_minibatches_are_left_out(kind):
    """These do not show whether a scaler is in use."""
    model, scaler, (x, _) = model_of(), scaler_of(), DATA.tensors
    trace = [8, 8] if kind == "trace" else vbs.OpenSteps()
    sampler = vbs.CustomSampler(200, trace, minibatch_size=4)
    sampler.must_be_read = False
    optimizer = vbs.Optimizer(sgd(model), sampler, rule="linear", ref_batchsize=4, model=model)
    for number in range(4):
        last = {} if kind == "trace" else {"last": number % 2 == 1}
        if number == 2:
            before = copy.deepcopy(dict(model.named_buffers()))
        loss = model(x[4 * number : 4 * number + 4]).square().mean()
        if number < 2:
            optimizer.step(**last)
            continue
        scaler.scale(loss * (math.inf if number == 3 else 1)).backward()
        scaler.step(optimizer, **last)
        scaler.update()
    assert optimizer.steps_skipped == 1
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def leaving_out(left, poisoned):
    """A run on two cores with one minibatch each in a step; core 0 leaves one out, and core 1 has an inf."""
    model, scaler, (x, y) = model_of(), scaler_of(growth_interval=1000), DATA.tensors
    sampler = vbs.CustomSampler(200, [2 * MINIBATCH] * 3, minibatch_size=MINIBATCH)
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=8, model=model)
    updates = []
    for step, indices in enumerate(sampler):
        loss = nn.functional.cross_entropy(model(x[indices]), y[indices])
        if (dist.get_rank(), step) == (0, left):
            optimizer.step()
        else:
            scaler.scale(loss * (math.inf if (dist.get_rank(), step) == (1, poisoned) else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        updates.append(optimizer.updated)
    return updates, optimizer.steps_skipped, weights_of(model)


@pytest.mark.parametrize("step", [0, 1])
def test_a_core_that_leaves_its_minibatch_out_skips_together_with_the_others(on_cores, step):
    found = on_cores(2, leaving_out, step, step)
    for updates, skipped, weights in found:
        assert (updates, skipped) == ([number != step for number in range(3)], 1)
        assert torch.equal(weights, found[0][2]) and weights.isfinite().all()


def test_without_a_scaler_no_hooks_remain_after_the_first_minibatch_on_one_core():
    model = model_of()
    sampler = vbs.CustomSampler(200, [8, 8], minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=4, model=model)
    model(DATA.tensors[0][:4]).sum().backward()
    optimizer.step()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_inf_found_by_the_scaler_counts_even_if_the_user_removes_it():
    model, scaler = model_of(), scaler_of()
    sampler = vbs.CustomSampler(200, [4], minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=4)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(DATA.tensors[0][:4]).sum() * math.inf).backward()
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad.nan_to_num_()
    scaler.step(optimizer)
    assert not optimizer.updated
    assert optimizer.steps_skipped == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_minibatch_without_gradients_counts_as_zero():
    model, scaler = model_of(), scaler_of(growth_interval=1000)
    sampler = vbs.CustomSampler(200, [8], minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=8)
    before = [p.detach().clone() for p in model.parameters()]
    assert scaler.step(scaler_warm(scaler, optimizer)) is False
    scaler._per_optimizer_states.clear()  # torch's update() raises if nothing was checked
    scaler.scale(model(DATA.tensors[0][:4]).sum()).backward()
    gradients = [p.grad / 2.0**10 for p in model.parameters()]
    assert scaler.step(optimizer) is True
    for p, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * gradient / 2)


def scaler_warm(scaler, optimizer):
    scaler.scale(torch.ones(1))  # creates its tensors
    return optimizer


@pytest.mark.parametrize("rule", ["linear", "adascale"])
@pytest.mark.parametrize("poison", [None, math.inf])
def test_bucket_views_are_unscaled_once(rule, poison):
    options = {"gradient_as_bucket_view": True, "poison": poison}
    scaled = train(rule, scaler=scaler_of(growth_interval=1000), **options)
    same(scaled, train(rule, skip_nonfinite=True, **options))


def test_bucket_views_reject_a_scale_change_within_a_step():
    with pytest.raises(RuntimeError, match=r"^with `gradient_as_bucket_view`, the scale of GradScaler must not change"):
        train("linear", scaler=scaler_of(growth_interval=3), gradient_as_bucket_view=True)
    # if each minibatch is measured, it is unscaled separately
    scaled = train("adascale", scaler=scaler_of(growth_interval=3), gradient_as_bucket_view=True)
    same(scaled, train("adascale", gradient_as_bucket_view=True))


def minibatch_without_a_scaler(optimizer, scaler, loss):
    loss.backward()
    optimizer.step()


def minibatch_that_is_left_out(optimizer, scaler, loss):
    optimizer.step()


def minibatch_with_a_scaler(optimizer, scaler, loss):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def run_of(minibatches, **options):
    """The weights after two steps with these two minibatches."""
    model, scaler, (x, y) = model_of(), scaler_of(growth_interval=1000), DATA.tensors
    model[1].eval()
    sampler = vbs.CustomSampler(200, [8, 8], minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=8, model=model, **options)
    for indices, run_minibatch in zip(sampler, [*minibatches] * 2, strict=True):
        run_minibatch(optimizer, scaler, nn.functional.cross_entropy(model(x[indices]), y[indices]))
    return weights_of(model)


@pytest.mark.parametrize("left", [0, 1])
def test_bucket_views_are_unscaled_if_a_minibatch_is_left_out(left):
    kinds = [minibatch_that_is_left_out, minibatch_with_a_scaler]
    scaled = run_of(kinds if left == 0 else kinds[::-1], gradient_as_bucket_view=True)
    plain = [minibatch_that_is_left_out, minibatch_without_a_scaler]
    expected = run_of(plain if left == 0 else plain[::-1])
    torch.testing.assert_close(scaled, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("first", [minibatch_with_a_scaler, minibatch_without_a_scaler])
def test_bucket_views_reject_a_step_in_which_only_some_minibatches_are_scaled(first):
    kinds = [minibatch_with_a_scaler, minibatch_without_a_scaler]
    kinds = kinds if first is kinds[0] else kinds[::-1]
    with pytest.raises(RuntimeError, match=r"^with `gradient_as_bucket_view`, GradScaler must scale all minibatches"):
        run_of(kinds, gradient_as_bucket_view=True)
    run_of(kinds)  # elsewhere each has its own scale


def test_a_closure_is_refused_whose_gradients_would_stay_scaled():
    model, other, scaler, (x, _) = model_of(), nn.Linear(3, 1).double(), scaler_of(), DATA.tensors
    sampler = vbs.CustomSampler(200, [8], minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=8)
    scaler.scale(other(x[:4]).sum()).backward()
    with pytest.raises(RuntimeError, match=r"^GradScaler.step\(\) must not be called with a closure"):
        scaler.step(optimizer, lambda: scaler.scale(model(x[:4]).sum()).backward())


def test_bucket_views_reject_gradients_that_were_already_unscaled():
    with pytest.raises(RuntimeError, match=r"^with `gradient_as_bucket_view`, GradScaler.unscale_\(\) would unscale"):
        train("linear", scaler=scaler_of(growth_interval=1000), unscales=True, gradient_as_bucket_view=True)


def test_sparse_gradients_are_unscaled():
    found = []
    for scaler in (None, scaler_of(growth_interval=1)):
        torch.manual_seed(0)
        table = nn.Embedding(5, 2, sparse=True)
        sampler = vbs.CustomSampler(200, [8, 4], minibatch_size=4)
        optimizer = vbs.LinearRuleOptimizer(sgd(table), sampler, ref_batchsize=4)
        for number in range(3):
            loss = table(torch.tensor([number, number, 4])).square().sum()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        found.append(table.weight.detach())
    torch.testing.assert_close(*found)


def test_fixed_point_sums_of_scaled_gradients_equal_those_of_unscaled_ones():
    scaled = train("linear", scaler=scaler_of(), exact=True, seed_minibatches=False)
    plain = train("linear", exact=True, seed_minibatches=False)
    assert torch.equal(scaled["weights"], plain["weights"])


def sharded(growth_interval, rule, differs):
    from torch.distributed.fsdp import fully_shard

    model = network(3, 8, 2)
    fully_shard(model)
    kind, inner, settings = RULES[rule]
    sampler = vbs.CustomSampler(200, [MINIBATCH * n for n in TRACE], minibatch_size=MINIBATCH)
    optimizer = kind(inner(model.parameters(), **settings), sampler, ref_batchsize=4, model=model)
    scaler = None
    if growth_interval:
        scaler = scaler_of(init_scale=2.0 ** (10 + differs * dist.get_rank()), growth_interval=growth_interval)
    x, y = DATA.tensors
    for indices in sampler:
        loss = nn.functional.cross_entropy(model(x[indices]), y[indices])
        if scaler is None:
            loss.backward()
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        try:
            scaler.step(optimizer)
        except RuntimeError as error:
            return str(error)
        scaler.update()
    weights = [p.full_tensor().detach() for p in model.parameters()]
    return weights, optimizer.noise_scale if rule == "adascale" else None


@pytest.mark.parametrize("rule", ["linear", "adascale"])
def test_fully_shard_model_trains_as_without_a_scaler(on_cores, rule):
    plain = on_cores(2, sharded, 0, rule, False)
    scaled = on_cores(2, sharded, 2, rule, False)
    for (weights, noise), (expected, expected_noise) in zip(scaled, plain, strict=True):
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
        assert noise == (None if expected_noise is None else pytest.approx(expected_noise, rel=1e-5))


def with_sharded_scaler(is_sharded, unscales, reduces_once):
    """The weights of a run with the scaler that torch has for FSDP, or an error."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = network(3, 8, 2)
    if is_sharded:
        fully_shard(model)
    sampler = vbs.CustomSampler(200, [16, 16], minibatch_size=4)
    options = {"model": model, "reduce_scatter_once": reduces_once}
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=8, **options)
    scaler, (x, y) = ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=1), DATA.tensors
    try:
        for indices in sampler:
            scaler.scale(nn.functional.cross_entropy(model(x[indices]), y[indices])).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    except RuntimeError as error:
        return str(error)
    return [p.full_tensor().detach() if is_sharded else p.detach() for p in model.parameters()]


def with_sharded_scalers():
    cases = itertools.product([False, True], [False, True])
    return {case: with_sharded_scaler(*case, False) for case in cases}, with_sharded_scaler(True, False, True)


@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor")
def test_sharded_grad_scaler_trains_as_grad_scaler(on_cores):
    for results, message in on_cores(2, with_sharded_scalers):
        expected = results.pop((False, False))
        for weights in results.values():
            for one, other in zip(weights, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
        assert message.startswith("GradScaler needs the gradient of every minibatch")


def leaving_out_sharded(calls_scaler):
    """The error on core 0, which leaves out its minibatch of the second step."""
    from torch.distributed.fsdp import fully_shard

    model = network(3, 8, 2)
    fully_shard(model)
    sampler = vbs.CustomSampler(200, [8, 8], minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=8, model=model)
    scaler, (x, _) = scaler_of(), DATA.tensors
    for step, indices in enumerate(sampler):
        loss = model(x[indices]).square().mean()
        if step == 1 and dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"^with GradScaler and fully_shard, a minibatch must not be left"):
                scaler.step(optimizer) if calls_scaler else optimizer.step()
            (loss * 0).backward()  # the other core waits in its backward pass
            for p in model.parameters():
                p.grad = None
            return
        scaler.scale(loss).backward()
        if step == 1:
            return
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("calls_scaler", [True, False])
def test_a_minibatch_of_fully_shard_must_not_be_left_out(on_cores, calls_scaler):
    on_cores(2, leaving_out_sharded, calls_scaler)


def test_different_scales_on_the_ranks_of_fully_shard_raise(on_cores):
    for message in on_cores(2, sharded, 1000, "linear", True):
        assert message.startswith("the scale of GradScaler must be the same on all ranks of a model in fully_shard")


def test_the_optimizer_has_no_loss_scale():
    """Of apex and DeepSpeed: set here, it would change nothing."""
    model = torch.nn.Linear(2, 1)
    loader = vbs.DataLoader(torch.ones(8, 2), trace=2, minibatch_size=2)
    optimizer = vbs.Optimizer(sgd(model), loader, rule="linear", ref_batchsize=2, model=model)
    message = (
        "^`loss_scale` of the optimizer must not be set, got 128: gradients are divided by the scale of a "
        r"torch.amp.GradScaler that calls scaler.step\(optimizer\)$"
    )
    with pytest.raises(AttributeError, match=message):
        optimizer.loss_scale = 128
    assert not hasattr(optimizer, "loss_scale")
    optimizer.note = "users may set other attributes"
