"""MinibatchSeeder: random numbers of a minibatch depend on seed, epoch and index, not on the core."""

import contextlib
import copy
import gc
import io
import random
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_runs import sgd
from threaded_cores import run_on
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import variable_batch_size as vbs
from variable_batch_size.data.cursor import Cursor
from variable_batch_size.optim.seeding import MinibatchSeeder

MINIBATCH = 2
SIZES = [MINIBATCH * n for n in (3, 1, 5, 2, 4, 1, 6, 2)]
NUM_SAMPLES = 24  # 12 minibatches: epochs of 4, 3 and 1 steps


class Drawing(nn.Module):
    """Records the random numbers drawn during training."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.drawn = []

    def forward(self, x):
        drawn = torch.rand(2)
        if self.training:
            self.drawn.append(drawn.tolist())
        return (x * self.weight).sum() * drawn.sum()


class Augmented(Dataset):
    """Samples drawn from every generator of this process."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), random.random(), float(np.random.rand()), random.gauss(0, 1)])


class Core:
    """One core's pass through a trace, without the other cores, which do not affect random numbers."""

    def __init__(self, *, rank=0, num_replicas=1, model=None, seed=0, is_on=True):
        self.model = Drawing()
        self.sampler = vbs.CustomSampler(
            dataset_size=NUM_SAMPLES,
            trace=SIZES,
            minibatch_size=MINIBATCH,
            num_replicas=num_replicas,
            rank=rank,
            seed=seed,
        )
        self.position = Cursor(self.sampler.schedule, rank)
        self.seeds = MinibatchSeeder(
            is_on, self.sampler, self.position, self.model.weight, self.model if model is None else None
        )
        self.seeds.watch(True)
        self._on_request = lambda is_first: self.seeds.on_request(is_first=is_first)
        self._runs = self.sampler.new_count()
        self.sampler.attach(self)

    def _follow(self):
        self._runs = self.sampler.new_count()

    def draws(self, epoch, *, first_step=0, between=lambda model: None, disturb=lambda: None, num_workers=0):
        """The random numbers of each minibatch of an epoch in the data set, the loop and the model, by index."""
        self.sampler.set_epoch(epoch, first_step)
        self.position.move(epoch, first_step)
        self.seeds.set()
        found = {}
        loader = DataLoader(Augmented(), batch_sampler=self.sampler, num_workers=num_workers)
        for x in loader:
            in_loop = [torch.rand(()).item(), random.random(), float(np.random.rand())]
            disturb()
            self.model(x)
            in_data = None if num_workers else x.tolist()
            found.setdefault(self.position.next_minibatch, []).append((in_data, in_loop, self.model.drawn[-1]))
            self.position.advance()
            self.seeds.set()
            if not self.position.is_accumulating:
                between(self.model)
        return found


def whole_run():
    return {epoch: Core().draws(epoch) for epoch in range(3)}


def test_all_minibatches_and_epochs_have_different_random_numbers():
    drawn = Counter()
    for of_epoch in whole_run().values():
        for ((data, in_loop, in_model),) in of_epoch.values():
            drawn.update([str(data[0]), str(data[1]), *map(str, in_loop), str(in_model)])
    assert set(drawn.values()) == {1}
    assert whole_run() == whole_run()


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 5])
def test_minibatch_has_the_same_random_numbers_on_any_core(num_replicas):
    torch.manual_seed(num_replicas)
    expected = whole_run()
    for epoch in expected:
        found = {}
        for rank in range(num_replicas):
            for number, draws in Core(rank=rank, num_replicas=num_replicas).draws(epoch).items():
                found.setdefault(number, []).extend(draws)
        for number, draws in found.items():  # more than one with a padding minibatch
            assert draws == expected[epoch][number] * len(draws)
        assert found.keys() == expected[epoch].keys()


@pytest.mark.parametrize("first_step", [1, 2, 3])
def test_epoch_started_in_its_middle_has_the_same_random_numbers(first_step):
    whole = Core().draws(0)
    torch.rand(17)
    late = Core().draws(0, first_step=first_step)
    assert late == {number: draws for number, draws in whole.items() if number in late}
    assert len(late) == sum(SIZES[first_step:4]) // MINIBATCH


def evaluate(model):
    """As users do: a new loader, and random numbers in other data and in a model."""
    model.eval()
    with torch.no_grad():
        for x in DataLoader(Augmented(), batch_size=8, shuffle=True):
            model(x)
    model.train()


def test_an_evaluation_between_two_steps_changes_nothing():
    assert Core().draws(0, between=evaluate) == Core().draws(0)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_evaluation_changes_nothing_if_loader_workers_prefetch_to_the_end_of_the_epoch():
    draws = [Core().draws(0, between=between, num_workers=1) for between in (evaluate, lambda model: None)]
    assert draws[0] == draws[1]


def test_without_model_the_model_draws_after_the_loop():
    def draw():
        torch.rand(3)

    assert Core().draws(0, disturb=draw) == Core().draws(0)
    assert Core(model=False).draws(0, disturb=draw) != Core(model=False).draws(0)
    assert Core(model=False).draws(0) == Core(model=False).draws(0)


def test_another_seed_of_the_sampler_gives_different_random_numbers():
    assert Core(seed=1).draws(0) != Core(seed=0).draws(0)
    assert Core(seed=-(10**30)).draws(0) != Core(seed=0).draws(0)


def test_a_model_that_runs_twice_in_a_minibatch_draws_twice():
    core = Core()
    for _ in range(2):
        core.model(torch.zeros(2))
    first, second = core.model.drawn
    assert first != second


def test_recomputation_in_the_backward_pass_repeats_the_random_numbers():
    core = Core()
    x = torch.ones(2)
    for _ in range(3):
        torch.rand(1)
        checkpoint(core.model, x, use_reentrant=False).backward()
        first, again = core.model.drawn[-2:]
        assert first == again
        core.position.advance()
        core.seeds.set()
    assert len({str(drawn) for drawn in core.model.drawn}) == 3


def test_generators_are_not_seeded_when_disabled():
    states = [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]
    core = Core(is_on=False)
    core.seeds.set()
    for _ in core.sampler:
        pass
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == [random.getstate(), str(np.random.get_state())]
    assert not core.model._forward_pre_hooks


def optimizer_of(**options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=SIZES, minibatch_size=MINIBATCH)
    return model, vbs.LinearRuleOptimizer(sgd(model, lr=0.01), sampler, ref_batchsize=4, model=model, **options)


@pytest.mark.parametrize(
    ("options", "is_on"),
    [
        ({}, False),
        ({"exact": True}, True),
        ({"exact": True, "seed_minibatches": False}, False),
        ({"seed_minibatches": True}, True),
    ],
)
def test_exact_runs_are_seeded_by_default(options, is_on):
    drawn = set()
    for seed in range(3):
        torch.manual_seed(seed)
        model, optimizer = optimizer_of(**options)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        drawn.add(torch.rand(1).item())
    assert len(drawn) == (1 if is_on else 3)
    assert optimizer.seeds_minibatches == is_on


class Stopped(Exception):
    pass


def masks_of(directory, *, stop_after=None, disturb=lambda: None):
    """The dropout masks of every minibatch of a run, to its end or until it is stopped."""
    torch.manual_seed(0)
    model, optimizer = optimizer_of(seed_minibatches=True)
    masks = []
    model[1].register_forward_hook(lambda module, args, output: masks.append((output == 0).tolist()))
    saved = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=1)
    with contextlib.suppress(Stopped):
        for _ in saved.epochs(3):
            for _ in DataLoader(Augmented(), batch_sampler=optimizer.sampler):
                disturb()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                saved.step()
                if optimizer.steps_done == stop_after:
                    raise Stopped
    return masks


@pytest.mark.parametrize("stop_after", [1, 3, 4, 5])
def test_resumed_run_draws_as_if_never_stopped(tmp_path, stop_after):
    whole = masks_of(None)
    parts = masks_of(tmp_path, stop_after=stop_after) + masks_of(tmp_path)
    assert parts == whole
    assert len({str(mask) for mask in whole}) > 10


def test_with_model_the_random_numbers_of_the_model_do_not_depend_on_the_loop():
    assert masks_of(None, disturb=lambda: torch.rand(3)) == masks_of(None)


def test_cores_in_threads_have_the_seeds_of_their_own_position():
    """The seeds, not the draws: threads share the generators."""
    found = run_on(3, lambda core: Core(rank=core.rank, num_replicas=3).seeds._seeds())
    assert len(set(found)) == 3


class Masked(nn.Module):
    """Returns its dropout mask, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        mask = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        return self.linear(x) * mask, mask


def pickled(model):
    """As torch.save(model) and torch.load do, in a process without this package."""
    file = io.BytesIO()
    torch.save(model, file)
    assert b"variable_batch_size" not in file.getvalue()
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def seeded(model, **options):
    sampler = vbs.CustomSampler(dataset_size=64, trace=[4] * 16, minibatch_size=4, **options)
    return vbs.ConstantOptimizer(sgd(model), sampler, model=model, seed_minibatches=True)


def masks_of_both(model, other, optimizer):
    """The masks of all minibatches, each of which both models run."""
    found = []
    for _ in optimizer.sampler:
        output, mask = model(torch.ones(1, 4))
        output.sum().backward()
        with torch.no_grad():
            found.append((mask.tolist(), other(torch.ones(1, 4))[1].tolist()))
        optimizer.step()
    return found


@pytest.mark.parametrize("is_in_pass", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: AveragedModel(model).module, copy.copy, pickled])
def test_copy_of_the_model_draws_its_own_masks(copied, is_in_pass):
    model, alone = Masked(), Masked()
    expected = [mask for mask, _ in masks_of_both(alone, Masked(), seeded(alone))]
    optimizer = seeded(model)
    if is_in_pass:
        optimizer.set_epoch(0)
    assert bool(model._forward_pre_hooks) == is_in_pass
    teacher = copied(model)
    found = masks_of_both(model, teacher, optimizer)
    assert len({str(mask) for _, mask in found}) > 6  # of 16 with 4 elements
    assert sum(one == other for one, other in found) < 6
    assert [mask for mask, _ in found] == expected
    assert not model._forward_pre_hooks  # after the pass
    if copied is not pickled:
        assert not teacher._forward_pre_hooks


def test_model_of_a_second_optimizer_is_seeded_once_in_a_minibatch():
    model = Masked()
    first, second = seeded(model), seeded(model)
    first.set_epoch(0)
    found = masks_of_both(model, model, second)
    assert sum(one == other for one, other in found) < 6
    assert first.steps_done == 0


def test_hooks_of_an_optimizer_that_is_gone_remove_themselves():
    model = Masked()
    optimizer = seeded(model)
    optimizer.set_epoch(0)
    del optimizer
    gc.collect()
    model(torch.ones(1, 4))
    assert not model._forward_pre_hooks


def test_model_can_be_scripted_before_and_after_a_pass():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sampler = vbs.CustomSampler(dataset_size=16, trace=[4] * 4, minibatch_size=4)
    optimizer = vbs.ConstantOptimizer(sgd(model), sampler, model=model, seed_minibatches=True, skip_nonfinite=True)
    torch.jit.script(model)
    for number, _ in enumerate(sampler):
        if number == 1:
            with pytest.raises(RuntimeError, match=r"^a model cannot be scripted in the middle of a pass"):
                torch.jit.script(model)
        model(torch.ones(4, 4)).sum().backward()
        optimizer.step()
    torch.jit.script(model)


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_model_of_a_process_group_can_be_averaged(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = Masked()
        optimizer = seeded(model, process_group=dist.new_group([0]))
        optimizer.set_epoch(0)
        assert masks_of_both(model, AveragedModel(model), optimizer)
    finally:
        dist.destroy_process_group()


def trained(wrap=lambda model: model, *, is_evaluated, is_one_of_two=False):
    """The masks of a model, and the random numbers of the loop."""
    torch.manual_seed(0)
    model, other = Masked(), Masked()
    optimizers, called = [seeded(model)], [wrap(model)]
    sampler = optimizers[0].sampler
    if is_one_of_two:
        optimizers.append(vbs.ConstantOptimizer(sgd(other), sampler, model=other, seed_minibatches=True))
        called.append(other)
    drawn = []
    for _ in sampler:
        numbers, outputs = [torch.rand(1).item()], [one(torch.ones(1, 4)) for one in called]
        drawn.append(numbers + [mask.tolist() for _, mask in outputs])
        sum(output.sum() for output, _ in outputs).backward()
        for optimizer in optimizers:
            optimizer.step()
        if is_evaluated:
            called[0].eval()
            torch.rand(1)
            with torch.no_grad():
                called[0](torch.ones(1, 4))
            called[0].train()
    return drawn


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("wrap", [lambda model: model, compiled, compiled_in_place])
def test_evaluation_of_a_compiled_model_changes_nothing(wrap):
    assert trained(wrap, is_evaluated=True) == trained(is_evaluated=False)


def test_evaluation_of_one_of_two_models_on_a_sampler_changes_nothing():
    assert trained(is_evaluated=True, is_one_of_two=True) == trained(is_evaluated=False, is_one_of_two=True)
