"""Minibatches that are read, and minibatches that optimizers run: a difference is an error in the same pass."""

import gc
import itertools
import queue
import threading

import pytest
import torch
from small_runs import sgd, train, weights_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs

SIZE = 8  # of a minibatch
MINIBATCHES = 12  # of an epoch
DATA = TensorDataset(
    torch.randn(MINIBATCHES * SIZE, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    torch.randn(MINIBATCHES * SIZE, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
)

workers = pytest.mark.parametrize("num_workers", [0, 2])


def make_sampler(**options):
    return vbs.CustomSampler(DATA, **{"trace": 2 * SIZE, "minibatch_size": SIZE, **options})


def make_optimizer(sampler, model=None):
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64) if model is None else model
    return model, vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=SIZE)


def make():
    sampler = make_sampler()
    return sampler, *make_optimizer(sampler)


def loader_of(sampler, num_workers=0, **options):
    # prefetching is 2 minibatches a worker
    return DataLoader(DATA, batch_sampler=sampler, num_workers=num_workers, **options)


def loss_of(model, minibatch):
    data, target = minibatch
    return (model(data) - target).square().mean()


def expected_weights(num_epochs=1):
    """With plain PyTorch: two minibatches a step, and twice the learning rate."""
    torch.manual_seed(0)
    model, sampler = nn.Linear(3, 1, dtype=torch.float64), make_sampler()
    optimizer = sgd(model, lr=0.2)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        minibatches = list(sampler)
        for one, other in zip(minibatches[::2], minibatches[1::2], strict=True):
            optimizer.zero_grad()
            loss_of(model, DATA[one + other]).backward()
            optimizer.step()
    return weights_of(model)


def assert_expected(model, optimizer, num_epochs=1):
    assert optimizer.samples_done == num_epochs * len(DATA)
    assert torch.allclose(weights_of(model), expected_weights(num_epochs), rtol=0, atol=1e-15)


LEFT_OUT = r"^step\(\) of LinearRuleOptimizer was not called for at least {} of the 12 minibatches of epoch {}: call it"


# ------------------------------------------------------------------------------------------------------------ mistakes


@workers
def test_loader_without_the_sampler_raises_at_the_first_step(num_workers):
    sampler, model, optimizer = make()
    before = weights_of(model)
    sampler.set_epoch(0)
    minibatch = next(iter(DataLoader(DATA, batch_size=2 * SIZE, num_workers=num_workers)))
    loss_of(model, minibatch).backward()
    with pytest.raises(RuntimeError, match=r"no loader reads this CustomSampler: .*DataLoader\(dataset, batch_sampler"):
        optimizer.step()
    assert torch.equal(weights_of(model), before) and optimizer.epoch_step == 0 and not optimizer.is_accumulating


def test_loader_without_the_stream_raises_at_the_first_step():
    stream = vbs.Stream(list(DATA), trace=2 * SIZE, minibatch_size=SIZE)
    _, optimizer = make_optimizer(stream)
    with pytest.raises(RuntimeError, match=r"no loader reads this Stream: train with DataLoader\(stream, batch_size=N"):
        optimizer.step()


def test_a_pass_that_is_not_read_raises_though_an_earlier_one_was():
    sampler, model, optimizer = make()
    for _ in optimizer.epochs(1):
        train(model, optimizer, loader_of(sampler), loss_of)
    sampler.set_epoch(1)
    with pytest.raises(RuntimeError, match="no loader reads this CustomSampler"):
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"batch_size": 2, "drop_last": True}, {"num_workers": 1}])
def test_sampler_passed_as_sampler_instead_of_batch_sampler_raises(options):
    with pytest.raises(ValueError, match=r"^the sampler yields full minibatches.*batch_sampler=sampler"):
        next(iter(DataLoader(DATA, sampler=make_sampler(), **options)))


def test_sampler_of_a_loader_that_does_not_batch_is_accepted():
    sampler, model, optimizer = make()
    train(model, optimizer, DataLoader(DATA, sampler=sampler, batch_size=None), loss_of)
    assert_expected(model, optimizer)


def pass_with_steps(is_stepped, num_workers=0, **options):
    """A pass in which only some of the minibatches have a call of ``step()``, up to its end."""
    sampler = make_sampler(**options)
    model, optimizer = make_optimizer(sampler)
    sampler.set_epoch(0)
    for number, minibatch in enumerate(loader_of(sampler, num_workers)):
        loss_of(model, minibatch).backward()
        if is_stepped(number):
            optimizer.step()
    return sampler, optimizer


@workers
@pytest.mark.parametrize(
    "is_stepped",
    [lambda number: number % 2, lambda number: number not in (4, 5), lambda number: number != 3],
    ids=["own accumulation", "a step left out", "a minibatch left out"],
)
def test_minibatches_that_are_left_out_raise_in_the_same_pass(is_stepped, num_workers):
    with pytest.raises(RuntimeError, match=LEFT_OUT.format(r"\d", 0)):
        pass_with_steps(is_stepped, num_workers)


@workers
def test_minibatches_that_are_left_out_at_the_start_raise_where_the_next_pass_begins(num_workers):
    sampler, _ = pass_with_steps(lambda number: number >= 2, num_workers)
    with pytest.raises(RuntimeError, match=LEFT_OUT.format(2, 0)):
        sampler.set_epoch(1)
    sampler.set_epoch(1)  # raised once: the run may be resumed
    assert sampler.epoch == 1


@workers
@pytest.mark.parametrize("kind", ["epochs", "checkpoint"])
def test_minibatches_that_are_left_out_at_the_start_raise_where_the_last_epoch_ends(kind, num_workers, tmp_path):
    sampler, model, optimizer = make()
    checkpoint = vbs.Checkpoint(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(RuntimeError, match=LEFT_OUT.format(2, 0)):
        for _ in optimizer.epochs(1) if kind == "epochs" else checkpoint.epochs(1):
            for number, minibatch in enumerate(loader_of(sampler, num_workers)):
                if number >= 2:
                    loss_of(model, minibatch).backward()
                    optimizer.step()


@workers
@pytest.mark.parametrize("which", [0, 2])
def test_second_optimizer_that_steps_every_third_minibatch_raises(which, num_workers):
    sampler = make_sampler()
    critic, of_critic = make_optimizer(sampler)
    _, of_generator = make_optimizer(sampler)
    sampler.set_epoch(0)
    with pytest.raises(RuntimeError, match=f"{LEFT_OUT.format('[2-8]', 0)}.* its own sampler$"):
        for number, minibatch in enumerate(loader_of(sampler, num_workers)):
            loss_of(critic, minibatch).backward()
            of_critic.step()
            if number % 3 == which:
                of_generator.step()


@workers
def test_step_twice_for_a_minibatch_raises(num_workers):
    sampler, model, optimizer = make()
    with pytest.raises(
        RuntimeError, match=r"^step\(\) was called for minibatch \d+ of epoch 0, but this pass has read only \d+"
    ):
        for minibatch in loader_of(sampler, num_workers):
            loss_of(model, minibatch).backward()
            optimizer.step()
            optimizer.step()
    # raised in minibatch 5 if workers are 4 ahead, and in minibatch 1 without workers
    assert optimizer.steps_done == (4 if num_workers else 0)


@pytest.mark.parametrize("kind", ["inner", "scaler", "one of several"])
def test_step_of_the_inner_optimizer_raises_in_a_pass(kind):
    sampler = make_sampler()
    model = nn.Linear(3, 1, dtype=torch.float64)
    inner = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    inner = inner if kind == "one of several" else sgd(model)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=SIZE)
    direct = inner[1] if kind == "one of several" else inner
    scaler = torch.amp.GradScaler("cpu")
    before = weights_of(model)
    with pytest.raises(RuntimeError, match=r"^step\(\) of SGD was called .* step\(\) of the LinearRuleOptimizer that"):
        for data, target in loader_of(sampler):
            loss = (model(data) - target).square().mean()
            (scaler.scale(loss) if kind == "scaler" else loss).backward()
            scaler.step(direct) if kind == "scaler" else direct.step()
    assert torch.equal(weights_of(model), before) and optimizer.steps_done == 0


def test_inner_optimizer_may_be_used_outside_of_a_pass_and_by_two_wrappers():
    sampler, second_sampler = make_sampler(), make_sampler()
    model, optimizer = make_optimizer(sampler)
    second = vbs.LinearRuleOptimizer(optimizer.inner, second_sampler, ref_batchsize=SIZE)
    optimizer.inner.step()  # before the first minibatch
    train(model, optimizer, (DATA[indices] for indices, _ in zip(sampler, range(4), strict=False)), loss_of)
    train(model, second, (DATA[indices] for indices in second_sampler), loss_of)
    assert (optimizer.steps_done, second.steps_done) == (2, 6)
    del optimizer
    gc.collect()  # it was in the middle of a pass
    second.inner.step()  # after the last minibatch


@workers
def test_new_optimizer_within_a_pass_raises(num_workers):
    sampler, model, optimizer = make()
    with pytest.raises(RuntimeError, match=r"^the optimizer was made, or set to epoch 0, when .*call set_epoch\(\)"):
        for number, minibatch in enumerate(loader_of(sampler, num_workers)):
            if number == 4:
                model, optimizer = make_optimizer(sampler, model)
            loss_of(model, minibatch).backward()
            optimizer.step()
    assert number == 4


def test_new_optimizer_within_a_pass_is_allowed_after_set_epoch():
    sampler, model, optimizer = make()
    sampler.set_epoch(0)
    train(model, optimizer, (DATA[indices] for indices in itertools.islice(sampler, 4)), loss_of)
    model, second = make_optimizer(sampler, model)
    second.set_epoch(0, 2)
    train(model, second, (DATA[indices] for indices in sampler), loss_of)
    assert torch.allclose(weights_of(model), expected_weights(), rtol=0, atol=1e-15)


def test_new_optimizer_that_is_set_to_the_same_epoch_begins_another_pass():
    sampler, _, optimizer = make()
    optimizer.set_epoch(0)
    for _ in itertools.islice(sampler, 2):
        optimizer.step()
    model, second = make_optimizer(sampler)
    second.set_epoch(0)
    train(model, second, (DATA[indices] for indices in sampler), loss_of)
    assert_expected(model, second)


# ------------------------------------------------------------------------------------------------------ what is allowed


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_passes_one_after_another(options):
    sampler, model, optimizer = make()
    loader = loader_of(sampler, **options)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train(model, optimizer, loader, loss_of)
    assert_expected(model, optimizer, 3)


def read_at_once(minibatches):
    return list(minibatches)


def read_one_ahead(minibatches):
    iterator = iter(minibatches)
    latest = next(iterator)
    for upcoming in iterator:
        yield latest
        latest = upcoming
    yield latest


def read_in_pieces(minibatches):
    iterator = iter(minibatches)
    while piece := list(itertools.islice(iterator, 5)):
        yield from piece


def read_in_a_thread(minibatches):
    items = queue.Queue(maxsize=4)

    def fill():
        for minibatch in minibatches:
            items.put(minibatch)
        items.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    yield from iter(items.get, None)
    thread.join()


@workers
@pytest.mark.parametrize("read", [read_at_once, read_one_ahead, read_in_pieces, read_in_a_thread])
def test_loops_may_read_ahead(read, num_workers):
    sampler, model, optimizer = make()
    for _ in optimizer.epochs(2):
        train(model, optimizer, read(loader_of(sampler, num_workers)), loss_of)
    assert_expected(model, optimizer, 2)


@workers
@pytest.mark.parametrize("read", [iter, read_one_ahead, read_in_pieces])
def test_passes_may_be_left_early(read, num_workers):
    # starting workers takes long
    for last in (3,) if num_workers else range(MINIBATCHES - 1):
        for is_before_step in (False, True):
            sampler, _, optimizer = make()
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for number, _ in enumerate(read(sampler if num_workers == 0 else loader_of(sampler, 2))):
                    if is_before_step and number == last:
                        break
                    optimizer.step()
                    if number == last:
                        break


def test_an_optimizer_may_stop_within_a_pass_or_leave_passes_to_another():
    sampler, _, optimizer = make()
    _, other = make_optimizer(sampler)
    for epoch in optimizer.epochs(4):
        for number, _ in enumerate(sampler):
            optimizer.step()
            if epoch % 2 and number < 6:
                other.step()
    assert (optimizer.steps_done, other.steps_done) == (24, 6)


def test_pass_that_is_only_read_is_allowed():
    sampler, model, optimizer = make()
    assert len(list(loader_of(sampler))) == MINIBATCHES
    for _ in optimizer.epochs(1):
        train(model, optimizer, loader_of(sampler), loss_of)
    assert_expected(model, optimizer)


def test_optimizer_may_be_made_after_the_first_minibatch_was_read():
    sampler = make_sampler()
    minibatches = iter(loader_of(sampler))
    first = next(minibatches)
    model, optimizer = make_optimizer(sampler)
    train(model, optimizer, itertools.chain([first], minibatches), loss_of)
    assert_expected(model, optimizer)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_padding_counts_as_any_other_minibatch(rank):
    sampler = make_sampler(num_replicas=3, rank=rank, trace=[SIZE, 4 * SIZE, 2 * SIZE])
    assert len(list(sampler)) == len(sampler) == 4 - (rank > 0)


@workers
def test_stream_counts_what_is_read(num_workers):
    stream = vbs.Stream(list(DATA), trace=2 * SIZE, minibatch_size=SIZE, dataset_size=len(DATA))
    model, optimizer = make_optimizer(stream)
    for _ in optimizer.epochs(2):
        train(model, optimizer, DataLoader(stream, batch_size=None, num_workers=num_workers), loss_of)
    assert optimizer.samples_done == 2 * len(DATA)


@pytest.mark.parametrize("is_stepped", [lambda number: number % 2, lambda number: number != 3])
def test_minibatches_of_a_stream_that_are_left_out_raise_in_the_same_pass(is_stepped):
    stream = vbs.Stream(list(DATA), trace=2 * SIZE, minibatch_size=SIZE, dataset_size=len(DATA))
    _, optimizer = make_optimizer(stream)
    with pytest.raises(RuntimeError, match=LEFT_OUT.format(r"\d", 0)):
        for number, _ in enumerate(DataLoader(stream, batch_size=None)):
            if is_stepped(number):
                optimizer.step()


def test_sampler_need_not_be_read_where_the_loop_says_so():
    sampler = make_sampler()
    sampler.must_be_read = False
    model, optimizer = make_optimizer(sampler)
    for _ in optimizer.epochs(1):
        train(model, optimizer, (DATA[indices] for indices in list(make_sampler())), loss_of)
    assert_expected(model, optimizer)
    with pytest.raises(RuntimeError, match="epoch 0 has 6 steps and all are done"):
        optimizer.step()
