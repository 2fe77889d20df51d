"""Sharded gradients in the cases that a run through a trace does not meet."""

import random
import re
import time

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
    """The last block joins after the first step, until when it stays as it is."""
    model, sampler = parts(spread)
    late = list(model.blocks[1].parameters())
    first = [p for p in model.parameters() if all(p is not other for other in late)]
    optimizer = vbs.AdaScaleOptimizer(sharded_models.sgd(first), sampler, ref_batchsize=8, model=model)

    def add():
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": late})

    run(model, sampler, optimizer, add)
    return sharded_models.state_of(model), [optimizer.gain(group=group) for group in range(2)]


def with_another_optimizer_before(spread):
    """One is left in the middle of a step, before a stand-in, and stays alive."""
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
    for _ in range(3):
        trace = [4 * draw.randint(1, 9) for _ in range(3)]
        model, sampler = parts(spread, trace=trace)
        inner = sharded_models.sgd(model.parameters())
        optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=8, model=model, measure_noise=True)
        run(model, sampler, optimizer)
        found.append((sharded_models.state_of(model), optimizer.gain(8)))
    return found


def dropped(spread):
    """A backward pass that no step() takes over, and an evaluation, leave no mark."""
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
    """One block joins after two steps, the other stays as it is after four."""
    model, sampler = parts(spread)
    model.blocks[0].requires_grad_(False)
    optimizer = optimizer_of(model, sampler)

    def change():
        model.blocks[0].requires_grad_(optimizer.steps_done >= 2)
        model.blocks[1].requires_grad_(optimizer.steps_done < 4)

    run(model, sampler, optimizer, change)
    return sharded_models.state_of(model), optimizer.gain()


def evaluated_before_step(spread):
    """A forward pass between backward() and step(), after which modules keep the parameters they have gathered."""
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
    """A policy whose answers depend on the measured noise."""
    model, sampler = parts(spread, trace=sharded_models.erratic())
    optimizer = optimizer_of(model, sampler)
    sizes = []
    run(model, sampler, optimizer, lambda: sizes.append(optimizer.batch_size), num_epochs=4)
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
    """Of a step that is left in the middle nothing remains, nor of a backward pass between two steps."""
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
    """Some gradients at a time, as those of a large model are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "_MAX_HELD", 300)
        model, sampler = parts(spread)
        optimizer = optimizer_of(model, sampler)
        run(model, sampler, optimizer)
    return sharded_models.state_of(model), optimizer.gain()


CASES = {
    "added": with_an_added_group,
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
    spread = getattr(sharded_models, name)
    rounds = [len(parts(spread)[1]), len(parts(sharded_models.plain, lockstep=True)[1])]
    found = {case: function(spread) for case, function in CASES.items()}
    return {**found, "random": along_random_traces(spread), "rounds": rounds}


@pytest.fixture(scope="module")
def expected():
    return all_of_them("plain")


@pytest.fixture(scope="module")
def found(on_cores):
    return on_cores(3, all_of_them, "sharded")


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_in_one_plain_process(found, expected, name):
    state, gain = expected[name]
    for core in found:
        assert largest_difference(core[name][0], state) < 1e-5
        assert core[name][1] == pytest.approx(gain, rel=1e-4)


def test_random_traces_give_what_one_plain_process_does(found, expected):
    for core in found:
        for (state, gain), (plain, plain_gain) in zip(core["random"], expected["random"], strict=True):
            assert largest_difference(state, plain) < 1e-5
            assert gain == pytest.approx(plain_gain, rel=1e-4)


def test_the_optimizer_puts_the_sampler_into_lockstep_and_the_user_may_do_so_before(found):
    # 3, 1 and 4 minibatches on 3 cores: 1, 1 and 2 rounds
    for rank, core in enumerate(found):
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


def test_an_error_within_the_model_on_one_core_ends_all_while_the_others_wait_for_it():
    with pytest.raises(RuntimeError, match="FloatingPointError: on core 1 at") as raised, forked.launches():
        vbs.launch(fail_on_core_1, cores=2, backend="gloo")
    at = float(re.findall(r"on core 1 at ([0-9.]+)", str(raised.value))[-1])
    assert time.time() - at < 900  # half of what gloo waits for a core that does not come


def when_numbers_are_reduced(rule):
    """After how many steps of two epochs of three."""
    trace = [8, 8, sharded_models.NUM_SAMPLES - 16] * 2
    model, sampler = parts(sharded_models.sharded, trace=trace)
    optimizer = vbs.CustomOptimizer(
        sharded_models.sgd(model.parameters()), sampler, rule=vbs.make_rule(rule), ref_batchsize=8, model=model
    )
    gradients, found = optimizer._accumulator, []
    reduce = gradients._all_reduce_numbers

    def noted():
        found.append(optimizer.steps_done)
        reduce()

    gradients._all_reduce_numbers = noted
    run(model, sampler, optimizer, num_epochs=2)
    return found


@pytest.mark.parametrize(("rule", "expected"), [("linear", [0]), ("adascale", [0, 1, 2, 3, 4, 5])])
def test_numbers_are_reduced_in_the_first_step_and_where_they_are_needed(on_cores, rule, expected):
    assert on_cores(2, when_numbers_are_reduced, rule) == [expected] * 2
