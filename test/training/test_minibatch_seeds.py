"""MinibatchSeeder: what a minibatch draws depends on the seed, the epoch and its number, whichever core runs it."""

import contextlib
import random
from collections import Counter

import numpy as np
import pytest
import torch
from threaded_cores import run_on
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import variable_batch_size as vbs
from variable_batch_size.data.cursor import Cursor
from variable_batch_size.optim.seeding import MinibatchSeeder

MINIBATCH = 2
SIZES = [MINIBATCH * n for n in (3, 1, 5, 2, 4, 1, 6, 2)]
NUM_SAMPLES = 24  # 12 minibatches: epochs of 4, 3 and 1 steps


class Drawing(nn.Module):
    """Tells what it has drawn while training."""

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
    """Samples of what every generator of this process draws."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), random.random(), float(np.random.rand()), random.gauss(0, 1)])


class Core:
    """One core's way through a trace, without the other cores, which no draw depends on."""

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

    def draws(self, epoch, *, first_step=0, between=lambda model: None, disturb=lambda: None, num_workers=0):
        """What each minibatch of an epoch has drawn in the data set, the loop and the model, by its number."""
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


def test_no_two_minibatches_and_no_two_epochs_draw_the_same():
    drawn = Counter()
    for of_epoch in whole_run().values():
        for ((data, in_loop, in_model),) in of_epoch.values():
            drawn.update([str(data[0]), str(data[1]), *map(str, in_loop), str(in_model)])
    assert set(drawn.values()) == {1}
    assert whole_run() == whole_run()


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 5])
def test_a_minibatch_draws_the_same_on_any_core(num_replicas):
    torch.manual_seed(num_replicas)
    expected = whole_run()
    for epoch in expected:
        found = {}
        for rank in range(num_replicas):
            for number, draws in Core(rank=rank, num_replicas=num_replicas).draws(epoch).items():
                found.setdefault(number, []).extend(draws)
        for number, draws in found.items():  # more than one where a stand-in is among them
            assert draws == expected[epoch][number] * len(draws)
        assert found.keys() == expected[epoch].keys()


@pytest.mark.parametrize("first_step", [1, 2, 3])
def test_an_epoch_that_is_entered_in_its_middle_draws_as_if_it_had_been_gone_through(first_step):
    whole = Core().draws(0)
    torch.rand(17)
    late = Core().draws(0, first_step=first_step)
    assert late == {number: draws for number, draws in whole.items() if number in late}
    assert len(late) == sum(SIZES[first_step:4]) // MINIBATCH


def evaluate(model):
    """As users do: a new loader, other data that draw, a model that draws."""
    model.eval()
    with torch.no_grad():
        for x in DataLoader(Augmented(), batch_size=8, shuffle=True):
            model(x)
    model.train()


def test_an_evaluation_between_two_steps_changes_nothing():
    assert Core().draws(0, between=evaluate) == Core().draws(0)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_so_it_is_where_loader_workers_are_ahead_of_the_loop_to_the_end_of_the_epoch():
    draws = [Core().draws(0, between=between, num_workers=1) for between in (evaluate, lambda model: None)]
    assert draws[0] == draws[1]


def test_without_the_model_what_the_model_draws_follows_what_the_loop_has_drawn():
    def draw():
        torch.rand(3)

    assert Core().draws(0, disturb=draw) == Core().draws(0)
    assert Core(model=False).draws(0, disturb=draw) != Core(model=False).draws(0)
    assert Core(model=False).draws(0) == Core(model=False).draws(0)


def test_another_seed_of_the_sampler_draws_something_else():
    assert Core(seed=1).draws(0) != Core(seed=0).draws(0)
    assert Core(seed=-(10**30)).draws(0) != Core(seed=0).draws(0)


def test_a_model_that_runs_twice_in_a_minibatch_draws_twice():
    core = Core()
    for _ in range(2):
        core.model(torch.zeros(2))
    first, second = core.model.drawn
    assert first != second


def test_what_is_computed_once_more_in_the_backward_pass_draws_what_it_drew_before():
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


def test_nothing_is_set_when_it_is_off():
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
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4, model=model, **options)


@pytest.mark.parametrize(
    ("options", "is_on"),
    [
        ({}, False),
        ({"exact": True}, True),
        ({"exact": True, "seed_minibatches": False}, False),
        ({"seed_minibatches": True}, True),
    ],
)
def test_exact_runs_are_seeded_unless_they_are_told_not_to_be(options, is_on):
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
    """The dropout of every minibatch of a run, to its end or until it is stopped."""
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
def test_a_run_that_goes_on_from_a_checkpoint_draws_as_if_never_stopped(tmp_path, stop_after):
    whole = masks_of(None)
    parts = masks_of(tmp_path, stop_after=stop_after) + masks_of(tmp_path)
    assert parts == whole
    assert len({str(mask) for mask in whole}) > 10


def test_what_the_model_of_an_optimizer_draws_does_not_follow_what_the_loop_has_drawn():
    assert masks_of(None, disturb=lambda: torch.rand(3)) == masks_of(None)


def test_threads_that_are_cores_have_seeds_of_their_own_position():
    """The seeds, not the draws: threads share the generators."""
    found = run_on(3, lambda core: Core(rank=core.rank, num_replicas=3).seeds._seeds())
    assert len(set(found)) == 3
