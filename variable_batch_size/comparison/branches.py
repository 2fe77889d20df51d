"""Branches: short runs at 1, 2, 4 … times a batch size from one state, to see which of them cost nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from variable_batch_size.checks import check_positive
from variable_batch_size.comparison.train import inner_optimizer, minibatches_of
from variable_batch_size.comparison.workload import Workload
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.rules.registry import make_rule

_SAMPLES_PER_TEST = 256


class Branch(NamedTuple):
    """How a branch ended.

    Attributes:
        batch_size: of all its steps.
        updates: how many steps it made.
        loss: the mean loss over the test data, averaged over seeds.
    """

    batch_size: int
    updates: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Branching:
    """Where branches begin, and how long they are.

    Args:
        batch_size: of the run that they branch off from, and of the first branch.
        factors: what the others multiply it by.
        samples_before: that the run trains on before.
        samples: that each branch trains on, up to whole steps of all of them.
        rule: what the batch size makes of the learning rate, by its name.
        seeds: how many runs to average over.
    """

    batch_size: int
    factors: Sequence[int]
    samples_before: int
    samples: int
    rule: str
    seeds: int

    def __post_init__(self) -> None:
        check_positive(batch_size=self.batch_size, samples_before=self.samples_before, samples=self.samples)
        check_positive(seeds=self.seeds)
        if self.samples < self.whole:  # else it might be rounded to many times as many
            raise ValueError(
                f"`samples` must be at least {self.whole}, whole steps of all batch sizes {self.sizes}, "
                f"got {self.samples}"
            )

    @property
    def sizes(self) -> list[int]:
        """The batch sizes of the branches."""
        return [self.batch_size * factor for factor in self.factors]

    @property
    def whole(self) -> int:
        """The fewest samples that are whole steps of all branches."""
        return math.lcm(*self.sizes)


def branches(workload: Workload, branching: Branching) -> list[Branch]:
    """Train, branch off, and give the loss of each branch after equally many samples.

    These are `samples`, rounded up to whole steps of all batch sizes: where each branch rounded up to its own, those of
    larger steps would have trained on more.
    """
    of_seeds = [_of_seed(workload, branching, seed) for seed in range(branching.seeds)]
    of_sizes = zip(branching.sizes, zip(*of_seeds, strict=True), strict=True)
    return [Branch(size, ends[0][0], sum(loss for _, loss in ends) / len(ends)) for size, ends in of_sizes]


def critical_batch_size(found: Sequence[Branch], *, tolerance: float) -> int:
    """The largest batch size up to which no branch has lost more than `tolerance`, as a share of the first one's loss.

    >>> critical_batch_size([Branch(32, 8, 1.0), Branch(64, 4, 1.005), Branch(128, 2, 1.2)], tolerance=0.01)
    64
    """
    first = found[0]
    if not math.isfinite(first.loss):
        raise ValueError(f"the branch of {first.batch_size} must have a loss to compare with, got {first.loss}")
    largest = first.batch_size
    for branch in found[1:]:
        if not branch.loss <= first.loss + tolerance * abs(first.loss):
            break
        largest = branch.batch_size
    return largest


def _of_seed(workload: Workload, branching: Branching, seed: int) -> list[tuple[int, float]]:
    """Updates and loss of each branch."""
    torch.manual_seed(seed)
    model = workload.model()
    run = _Run(workload, model, branching.batch_size, branching, seed)
    run.train(branching.samples_before)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(run.optimizer.inner.state_dict())
    noise = copy.deepcopy(run.optimizer.rule.state_dict())
    samples = -(-branching.samples // branching.whole) * branching.whole
    found = []
    for size in branching.sizes:
        model.load_state_dict(weights)
        # samples in an order that the run has not seen, the same for all branches
        branch = _Run(workload, model, size, branching, seed + 1_000_000)
        branch.optimizer.inner.load_state_dict(copy.deepcopy(state))
        branch.optimizer.rule.load_state_dict(copy.deepcopy(noise))
        branch.train(samples)
        found.append((branch.optimizer.steps_done, _test_loss(workload, model)))
    return found


class _Run:
    """Training at one batch size."""

    def __init__(
        self, workload: Workload, model: torch.nn.Module, batch_size: int, branching: Branching, seed: int
    ) -> None:
        self._workload, self._model = workload, model
        train: Any = workload.train
        sampler = CustomSampler(train, trace=batch_size, minibatch_size=workload.minibatch_size, seed=seed)
        inner = inner_optimizer(workload, model, None)
        self.optimizer = CustomOptimizer(
            inner, sampler, rule=make_rule(branching.rule), ref_batchsize=workload.ref_batchsize, model=model
        )

    def train(self, samples: int) -> None:
        for inputs, targets in self._minibatches():
            self._workload.loss(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if self.optimizer.samples_done >= samples:
                return

    def _minibatches(self) -> Iterator[tuple[Any, Any]]:
        return minibatches_of(self._workload, self.optimizer, torch.device("cpu"))


@torch.no_grad()
def _test_loss(workload: Workload, model: torch.nn.Module) -> float:
    model.eval()
    total = samples = 0.0
    for inputs, targets in DataLoader(workload.test, batch_size=_SAMPLES_PER_TEST):
        total += float(workload.loss(model(inputs), targets)) * len(inputs)
        samples += len(inputs)
    model.train()
    return total / samples
