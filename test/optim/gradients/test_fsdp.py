"""Sharded gradients in cases that a run with a trace does not cover."""

import random
import re
import time
from functools import partial

import forked
import pytest
import sharded_models
import torch
from sharded_models import Transformer, largest_difference

import variable_batch_size as vbs
from variable_batch_size.optim.gradients import fsdp


def parts(spread, **options):
    model, more = spread(sharded_models.model_of(Transformer))
    sampler = vbs.CustomSampler(
        dataset_size=sharded_models.NUM_SAMPLES, minibatch_size=4, **{"trace": sharded_models.SIZES, **more, **options}
    )
    return model, sampler


def run(model, sampler, optimizer, between=lambda: None, num_epochs=None):
    x, y = sharded_models.data()
    for epoch in range(num_epochs or sampler.schedule.num_epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            sharded_models.loss_of(model, x[indices], y[indices]).backward()
            if optimizer.step():
                between()


def with_an_added_group(spread):
    """The last block is added after the first step; until then it does not change."""
    model, sampler = parts(spread)
    late = list(model.blocks[1].parameters())
    first = [p for p in model.parameters() if all(p is not other for other in late)]
    optimizer = vbs.AdaScaleOptimizer(sharded_models.sgd(first), sampler, ref_batchsize=8, model=model)

    def add():
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": late})

    run(model, sampler, optimizer, add)
    return sharded_models.state_of(model), [optimizer.gain(group=group) for group in range(2)]


def with_a_moved_parameter(spread):
    """A parameter moves to the other group after the first step, and its gain with it."""
    model, sampler = parts(spread)
    *rest, last = model.parameters()
    inner = sharded_models.sgd([{"params": rest}, {"params": [last]}])
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=8, model=model)

    def move():
        if optimizer.steps_done == 1:
            inner.param_groups[1]["params"].append(inner.param_groups[0]["params"].pop(0))

    run(model, sampler, optimizer, move)
    return sharded_models.state_of(model), [optimizer.gain(group=group) for group in range(2)]


def with_another_optimizer_before(spread):
    """An earlier optimizer is abandoned in the middle of a step, before a padding minibatch, and stays alive."""
    model, sampler = parts(spread, trace=[12, 20])
    before = vbs.AdaScaleOptimizer(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8, model=model)
    x, y = sharded_models.data()
    sharded_models.loss_of(model, x[:4], y[:4]).backward()
    before._accumulator.begin_minibatch(is_padding=True, is_last=True)
    before._accumulator.zero_grad()
    model_2, sampler_2 = model, parts(sharded_models.plain)[1]
    optimizer = vbs.AdaScaleOptimizer(sharded_models.sgd(model_2.parameters()), sampler_2, ref_batchsize=8, model=model)
    run(model_2, sampler_2, optimizer)
    return sharded_models.state_of(model_2), optimizer.gain()


def along_random_traces(spread):
    found = []
    draw = random.Random(3)
    for _ in range(2):
        trace = [4 * draw.randint(1, 9) for _ in range(3)]
        model, sampler = parts(spread, trace=trace)
        inner = sharded_models.sgd(model.parameters())
        optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=8, model=model, measure_noise=True)
        run(model, sampler, optimizer)
        found.append((sharded_models.state_of(model), optimizer.gain(8)))
    return found


def dropped(spread):
    """A backward pass without step(), and an evaluation, have no effect."""
    model, sampler = parts(spread)
    optimizer = vbs.AdaScaleOptimizer(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8, model=model)
    x, y = sharded_models.data()

    def disturb():
        optimizer.zero_grad()
        sharded_models.loss_of(model, x[:4], y[:4]).backward()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x[:4])
        model.train()

    run(model, sampler, optimizer, disturb)
    return sharded_models.state_of(model), optimizer.gain()


def optimizer_of(model, sampler, kind=vbs.AdaScaleOptimizer, **options):
    return kind(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8, model=model, **options)


def frozen_for_a_while(spread):
    """One block is unfrozen after two steps, the other is frozen after four."""
    model, sampler = parts(spread)
    model.blocks[0].requires_grad_(False)
    optimizer = optimizer_of(model, sampler)

    def change():
        model.blocks[0].requires_grad_(optimizer.steps_done >= 2)
        model.blocks[1].requires_grad_(optimizer.steps_done < 4)

    run(model, sampler, optimizer, change)
    return sharded_models.state_of(model), optimizer.gain()


def evaluated_before_step(spread):
    """A forward pass between backward() and step(), which leaves modules unsharded."""
    model, sampler = parts(spread)
    inner = sharded_models.sgd(model.parameters())
    x, y = sharded_models.data()
    with torch.no_grad():
        model(x[:4])
    if hasattr(model, "set_reshard_after_backward"):
        model.set_reshard_after_backward(False)
        model.set_is_last_backward(False)
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=8, model=model)
    for indices in sampler:
        sharded_models.loss_of(model, x[indices], y[indices]).backward()
        with torch.no_grad():
            model(x[:4])
        optimizer.step()
    return sharded_models.state_of(model), optimizer.gain()


def with_two_optimizers(spread):
    model, sampler = parts(spread)
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == is_so] for is_so in (True, False))
    inner = [sharded_models.sgd(matrices), sharded_models.adamw(rest)]
    rules = [vbs.rules.LinearRule(), vbs.rules.AdamRule()]
    optimizer = vbs.CustomOptimizer(inner, sampler, ref_batchsize=8, rule=rules, model=model, measure_noise=True)
    run(model, sampler, optimizer)
    return sharded_models.state_of(model), optimizer.gain()


def decided(spread):
    """A policy whose decisions depend on the measured noise."""
    model, sampler = parts(spread, trace=sharded_models.erratic())
    optimizer = optimizer_of(model, sampler)
    sizes = []
    run(model, sampler, optimizer, lambda: sizes.append(optimizer.batch_size), num_epochs=2)
    return sharded_models.state_of(model), [*sizes, optimizer.gain()]


class Samples(torch.utils.data.IterableDataset):
    def __iter__(self):
        x, y = sharded_models.data()
        return iter(zip([*x, *x], [*y, *y], strict=True))


def streamed(spread):
    model, more = spread(sharded_models.model_of(Transformer))
    stream = vbs.Stream(Samples(), trace=sharded_models.SIZES, minibatch_size=4, **more)
    optimizer = optimizer_of(model, stream)
    for x, y in torch.utils.data.DataLoader(stream, batch_size=None):
        sharded_models.loss_of(model, x, y).backward()
        optimizer.step()
    return sharded_models.state_of(model), optimizer.gain()


class Dropping(Transformer):
    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = torch.nn.functional.dropout(block(x), 0.3)
        return self.head(self.norm(x)).mean(1)


def seeded(spread):
    model, more = spread(sharded_models.model_of(Dropping))
    sampler = vbs.CustomSampler(
        dataset_size=sharded_models.NUM_SAMPLES, minibatch_size=4, trace=sharded_models.SIZES, **more
    )
    torch.manual_seed(torch.distributed.get_rank() if more or torch.distributed.is_initialized() else 0)
    optimizer = optimizer_of(model, sampler, seed_minibatches=True)
    run(model, sampler, optimizer)
    return sharded_models.state_of(model), optimizer.gain()


def reduced_once(spread):
    """An abandoned step has no effect, and neither has a backward pass between two steps."""
    model, sampler = parts(spread)
    optimizer = optimizer_of(model, sampler, clip_grad_norm=0.3, reduce_scatter_once=True)
    x, y = sharded_models.data()
    for epoch, stops in ((0, True), (0, False), (1, False)):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            optimizer.zero_grad()
            sharded_models.loss_of(model, x[indices], y[indices]).backward()
            if not optimizer.is_accumulating:
                optimizer.zero_grad()
                sharded_models.loss_of(model, x[indices], y[indices]).backward()
            optimizer.step()
            if stops and optimizer.steps_done == 2 and optimizer.is_accumulating:
                break
    return sharded_models.state_of(model), optimizer.gain()


def measured_in_lots(spread):
    """Gradients are measured in groups, as for a large model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "_MAX_HELD", 300)
        model, sampler = parts(spread)
        optimizer = optimizer_of(model, sampler)
        run(model, sampler, optimizer)
    return sharded_models.state_of(model), optimizer.gain()


CASES = {
    "added": with_an_added_group,
    "moved": with_a_moved_parameter,
    "before": with_another_optimizer_before,
    "dropped": dropped,
    "frozen": frozen_for_a_while,
    "evaluated": evaluated_before_step,
    "two optimizers": with_two_optimizers,
    "decided": decided,
    "streamed": streamed,
    "seeded": seeded,
    "reduced once": reduced_once,
    "in lots": measured_in_lots,
}


def all_of_them(name):
    return {case: function(getattr(sharded_models, name)) for case, function in CASES.items()}


def random_and_rounds(name):
    spread = getattr(sharded_models, name)
    rounds = [len(parts(spread)[1]), len(parts(sharded_models.plain, lockstep=True)[1])]
    return {"random": along_random_traces(spread), "rounds": rounds}


@pytest.fixture(scope="module")
def expected():
    return all_of_them("plain")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def found(on_cores, request):
    return on_cores(request.param, all_of_them, "sharded")


@pytest.fixture(scope="module")
def found_on_three(on_cores):
    return on_cores(3, random_and_rounds, "sharded")


@pytest.mark.parametrize("name", CASES)
def test_fully_shard_equals_one_plain_process(found, expected, name):
    state, gain = expected[name]
    for core in found:
        assert largest_difference(core[name][0], state) < 1e-5
        assert core[name][1] == pytest.approx(gain, rel=1e-4)


def test_random_traces_equal_one_plain_process(found_on_three):
    expected = along_random_traces(sharded_models.plain)
    for core in found_on_three:
        for (state, gain), (plain, plain_gain) in zip(core["random"], expected, strict=True):
            assert largest_difference(state, plain) < 1e-5
            assert gain == pytest.approx(plain_gain, rel=1e-4)


def test_optimizer_or_user_switches_the_sampler_to_lockstep(found_on_three):
    # 3, 1 and 4 minibatches on 3 cores: 1, 1 and 2 rounds
    for rank, core in enumerate(found_on_three):
        assert core["rounds"] == [[4, 3, 3][rank], 4]


def fail_on_core_1():
    model, sampler = parts(sharded_models.sharded)
    optimizer = vbs.LinearRuleOptimizer(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8)
    x, y = sharded_models.data()

    def fail(block, args):
        if sampler.rank == 1 and optimizer.steps_done == 1:
            raise FloatingPointError(f"on core 1 at {time.time()}")

    model.blocks[1].register_forward_pre_hook(fail)
    for indices in sampler:
        sharded_models.loss_of(model, x[indices], y[indices]).backward()
        optimizer.step()


def test_error_in_the_model_on_one_core_ends_all_waiting_cores():
    with pytest.raises(RuntimeError, match="FloatingPointError: on core 1 at") as raised, forked.launches():
        vbs.launch(fail_on_core_1, cores=2, backend="gloo")
    at = float(re.findall(r"on core 1 at ([0-9.]+)", str(raised.value))[-1])
    assert time.time() - at < 900  # half of gloo's timeout for a missing core


class TwoHeads(torch.nn.Module):
    """Two layers of the same shape, of which a minibatch uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)])

    def forward(self, x, number):
        return self.heads[number](x)


def with_two_heads(head_of, is_sharded=True, **options):
    """The weights after two steps of two rounds, or the error and its step; `head_of` returns a minibatch's layer."""
    model = torch.distributed.fsdp.fully_shard(TwoHeads()) if is_sharded else TwoHeads()
    sampler = vbs.CustomSampler(dataset_size=32, trace=[16, 16], minibatch_size=4, shuffle=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.Optimizer(inner, sampler, rule="linear", ref_batchsize=16, model=model, **options)
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    try:
        for indices in sampler:
            model(x[indices], head_of(indices[0] // 4)).square().mean().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error), optimizer.steps_done
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def by_round(number):
    return number // 2 % 2


def by_core_from_the_second_step_on(number):
    return number % 2 if number >= 4 else 0


def by_core_and_round(number):
    return (number + number // 2) % 2


def test_layers_may_differ_between_rounds_but_not_between_cores_in_a_round(on_cores):
    expected = with_two_heads(by_round, is_sharded=False)
    for found in on_cores(2, with_two_heads, by_round):
        torch.testing.assert_close(found, expected)
    for message, steps_done in on_cores(2, with_two_heads, by_core_from_the_second_step_on):
        assert message.startswith("Ranks disagree on which parameters have gradients, which fully_shard then mixes up.")
        assert steps_done == 1
    expected = with_two_heads(by_core_and_round, is_sharded=False)
    for found in on_cores(2, partial(with_two_heads, reduce_scatter_once=True), by_core_and_round):
        torch.testing.assert_close(found, expected)


def loaded_after_a_difference():
    """The message at the next epoch after ranks differed where that is read late, and the epoch after loading."""
    model, sampler = parts(sharded_models.sharded)
    optimizer = vbs.LinearRuleOptimizer(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8, model=model)
    state = optimizer.state_dict()
    optimizer._accumulator._unread = torch.ones(fsdp.NUM_CHECKS), [0] * fsdp.NUM_CHECKS  # as on an accelerator
    with pytest.raises(RuntimeError) as raised:
        optimizer.set_epoch(1)
    optimizer.load_state_dict(state)
    optimizer.set_epoch(1)
    return str(raised.value), optimizer.epoch


def test_a_state_may_be_loaded_after_ranks_differed(on_cores):
    for message, epoch in on_cores(2, loaded_after_a_difference):
        assert message.startswith("Ranks disagree on which parameters have gradients")
        assert epoch == 1


def num_sums(rule):
    """How many times the ranks sum numbers in each step."""
    model, sampler = parts(sharded_models.sharded, trace=[8, 8, sharded_models.NUM_SAMPLES - 16])
    optimizer = vbs.CustomOptimizer(
        sharded_models.sgd(model.parameters()), sampler, rule=vbs.rules.make_rule(rule), ref_batchsize=8, model=model
    )
    everyone, found = optimizer._accumulator._everyone, []
    add = everyone.sum

    def noted(tensors):
        found.append(optimizer.steps_done)
        add(tensors)

    everyone.sum = noted
    run(model, sampler, optimizer, num_epochs=1)
    return [found.count(step) for step in range(optimizer.steps_done)]


def test_norms_are_summed_with_the_other_numbers(on_cores):
    for counts in on_cores(2, num_sums, "adascale"):
        assert len(counts) > 2
        assert set(counts) == {1}


def with_minibatches_left_out(spread, rule="linear", **options):
    """Minibatches with certain samples are left out, after a forward pass whose activations are not finite."""
    model, sampler = parts(spread, trace=[8, 16, 12, 8])
    optimizer = vbs.CustomOptimizer(
        sharded_models.sgd(model.parameters()),
        sampler,
        rule=vbs.rules.make_rule(rule),
        ref_batchsize=8,
        model=model,
        **options,
    )
    x, y = sharded_models.data()
    bad: list[int] = []
    model.blocks[0].register_forward_hook(lambda block, args, output: output * (torch.inf if bad else 1.0))
    for indices in sampler:
        bad[:] = {3, 17, 30}.intersection(indices)
        loss = sharded_models.loss_of(model, x[indices], y[indices])
        if loss.isfinite():
            loss.backward()
        optimizer.step()
    return sharded_models.state_of(model)


def left_out_in_all_ways():
    rules_and_options = [("linear", {}), ("linear", {"reduce_scatter_once": True}), ("adascale", {})]
    return [with_minibatches_left_out(sharded_models.sharded, rule, **more) for rule, more in rules_and_options]


def test_minibatches_left_out_on_one_core_count_as_zeros(on_cores):
    expected = [with_minibatches_left_out(sharded_models.plain, rule) for rule in ("linear", "linear", "adascale")]
    for found in on_cores(2, left_out_in_all_ways):
        for state, plain in zip(found, expected, strict=True):
            assert largest_difference(state, plain) < 1e-6


def leave_out_without_a_forward_pass():
    model, sampler = parts(sharded_models.sharded)
    optimizer = vbs.LinearRuleOptimizer(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8)
    x, y = sharded_models.data()
    for number, indices in enumerate(sampler):
        if number != 1 or sampler.rank == 0:
            sharded_models.loss_of(model, x[indices], y[indices]).backward()
        optimizer.step()


def test_a_minibatch_left_out_without_a_forward_pass_raises_at_once():
    with pytest.raises(RuntimeError, match="without a forward pass of the fully_shard model"), forked.launches():
        vbs.launch(leave_out_without_a_forward_pass, cores=2, backend="gloo")


def sum_of_bfloat16():
    """The gradient of a step whose four rounds, on both cores, have these gradients."""
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    sampler = vbs.CustomSampler(dataset_size=8, trace=[8], minibatch_size=1)
    torch.distributed.fsdp.fully_shard(model)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    inner.register_step_pre_hook(lambda *_: found.append(model.weight.grad.full_tensor().item()))
    optimizer = vbs.ConstantOptimizer(inner, sampler, ref_batchsize=8, model=model)
    for _, value in zip(sampler, [256.0, 1.0, 1.0, 2.0], strict=True):
        (model(torch.ones(1, 1).bfloat16()) * value).sum().backward()
        optimizer.step()
    return found


def test_rounds_of_bfloat16_gradients_are_summed_in_float32(on_cores):
    assert on_cores(2, sum_of_bfloat16) == [[65.0], [65.0]]


def message_about_divide_factor():
    model, sampler = parts(sharded_models.sharded)
    optimizer = vbs.LinearRuleOptimizer(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8)
    if not hasattr(model, "set_gradient_divide_factor"):  # since torch 2.8
        return None
    model.set_gradient_divide_factor(4.0)
    with pytest.raises(RuntimeError) as raised:
        run(model, sampler, optimizer)
    return str(raised.value)


def test_divide_factor_set_after_the_optimizer_raises(on_cores):
    for message in on_cores(2, message_about_divide_factor):
        assert message is None or message.startswith(
            "set_gradient_divide_factor(4.0) was called after the optimizer was made"
        )


def message_about_an_added_group():
    model, sampler = parts(sharded_models.sharded, trace=[16])
    *first, late = model.parameters()
    inner = sharded_models.sgd(first)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=8, model=model, reduce_scatter_once=True)
    x, y = sharded_models.data()
    indices = next(iter(sampler))
    sharded_models.loss_of(model, x[indices], y[indices]).backward()
    assert not optimizer.step()
    with pytest.raises(RuntimeError, match="has summed gradients of this step for the added parameters") as raised:
        optimizer.add_param_group({"params": [late]})
    assert len(optimizer.param_groups) == 1
    return str(raised.value)


def test_a_group_added_within_a_step_that_reduces_once_raises(on_cores):
    for message in on_cores(2, message_about_an_added_group):
        assert "after step() has returned True, or pass `reduce_scatter_once=False`" in message
