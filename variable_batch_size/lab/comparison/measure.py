"""Measures a workload: the times of its minibatches on several numbers of cores, its noise and critical batch size."""

import copy
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch

from variable_batch_size.checks import check_positive
from variable_batch_size.lab.comparison.train import Training, device_of, on_cores
from variable_batch_size.lab.comparison.verdict import Estimate, difference
from variable_batch_size.lab.comparison.workload import Workload, load_workload
from variable_batch_size.lab.planning.advise import NoiseBand
from variable_batch_size.lab.planning.profile import Measured
from variable_batch_size.lab.planning.simulate import NoiseCurve
from variable_batch_size.policies.timing import StepTimes

_DEPTHS = (1, 3)
_WARM_UP = 5
_TESTS = 10  # of each branch


def available_cores(device: str, *, threads: int) -> int:
    """The number of GPUs of this machine, or of cores with this many threads each that its CPUs allow; at least 1."""
    number = torch.cuda.device_count() if device == "cuda" else (os.cpu_count() or 1) // threads
    return max(1, number)


def measure(
    workload: str,
    *,
    cores: Sequence[int],
    minibatch_sizes: Sequence[int],
    device: str,
    threads: int,
    rule: str,
    steps: int,
    datadir: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Measured]:
    """Train for a few steps on each number of cores with each minibatch size, and yield the measured times.

    Steps of one and three minibatches per core alternate. On a busy machine ``time.process_time`` is a better clock.
    """
    if steps < 5:
        raise ValueError(f"`steps` must be at least 5, for a meaningful median, got {steps}")
    for number, size in itertools.product(cores, minibatch_sizes):
        args = (workload, datadir, device, threads, rule, number, size, steps, clock)
        accumulating, updating = on_cores(_measure_on_this_core, args, cores=number, device=device)
        if accumulating <= 0:  # checked here, because the clocks of cores other than the first don't matter
            longer = f"steps of {_DEPTHS[-1]} minibatches of {size} took no longer than those of {_DEPTHS[0]}"
            raise ValueError(f"{longer}: the machine is busy with other work, or more than {steps} `steps` are needed")
        yield Measured(1, number, size, accumulating, updating)


def _measure_on_this_core(
    name: str, datadir: str | None, device: str, threads: int, rule: str, cores: int, size: int, steps: int, clock: Any
) -> tuple[float, float]:
    """The times of an accumulating and of an updating minibatch."""
    torch.set_num_threads(threads)
    workload, trace = load_workload(name, datadir), [size * cores * depth for depth in _DEPTHS]
    # skip_nonfinite waits for the device in every step; otherwise the end of a step could not be timed
    options = {"ref_batchsize": trace[0], "skip_nonfinite": True}
    sampler = {"trace": trace, "minibatch_size": size, "on_end": "cycle"}
    training = Training(workload, workload.model().to(device_of(device)), rule, sampler, **options)
    optimizer, times, steps_done, began = training.optimizer, StepTimes(), 0, clock()
    for _ in training.losses():
        if optimizer.steps_done == steps_done:
            continue
        now, steps_done = clock(), optimizer.steps_done
        if steps_done > _WARM_UP * len(_DEPTHS):
            times.add(cores, optimizer.batch_size // trace[0], now - began)
        if steps_done >= (_WARM_UP + steps) * len(_DEPTHS):
            break
        began = clock()
    found = times.seconds(cores)
    assert found is not None
    return found


def measure_noise(
    workload: str,
    *,
    rule: str,
    steps: int,
    seeds: int,
    device: str = "cpu",
    threads: int = 1,
    datadir: str | None = None,
) -> NoiseBand:
    """Train for some steps with each of several seeds, and average the noise scale at 10 points of the training."""
    check_positive(steps=steps)
    if seeds < 2:
        raise ValueError(f"`seeds` must be at least 2, because a single seed gives no interval, got {seeds}")
    runs = [
        on_cores(_noise_on_this_core, (workload, datadir, device, threads, rule, steps, seed), cores=1, device=device)
        for seed in range(seeds)
    ]
    return noise_band(runs)


def noise_band(seeds: Sequence[Sequence[tuple[float, float]]]) -> NoiseBand:
    """The mean of noise scales over seeds, given as a list of progress and noise scale at the same steps for each.

    As noise scales are positive, means and 95 % intervals are computed from their logarithms. Points where the noise
    scale of a seed is not known yet, or not finite, are left out.
    """
    points = []
    for of_seeds in zip(*seeds, strict=True):
        if all(0 < scale < math.inf for _, scale in of_seeds):
            found = difference([math.log(scale) for _, scale in of_seeds])
            assert found is not None and found.error is not None
            ends = (math.exp(found.mean + sign * found.error) for sign in (-1, 0, 1))
            points.append((fmean(progress for progress, _ in of_seeds), *ends))
    if not points:
        raise ValueError(f"the noise scale of {len(seeds)} seeds is not finite at any step: measure more steps")
    progress, *scales = zip(*points, strict=True)
    return NoiseBand(*(NoiseCurve(progress, curve) for curve in scales))


def _noise_on_this_core(
    name: str, datadir: str | None, device: str, threads: int, rule: str, steps: int, seed: int
) -> list[tuple[float, float]]:
    """Progress and noise scale after each tenth of the steps."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    workload = load_workload(name, datadir)
    # at least two minibatches, because one gives no estimate
    minibatches = max(2, -(-workload.ref_batchsize // workload.minibatch_size))
    sampler = {"trace": minibatches * workload.minibatch_size, "seed": seed}
    training = Training(workload, workload.model().to(device_of(device)), rule, sampler, measure_noise=True)
    optimizer, found, due = training.optimizer, [], {-(-steps * k // 10) for k in range(1, 11)}
    for _ in training.losses():
        if not optimizer.is_accumulating and optimizer.steps_done in due:
            scale = optimizer.noise_scale_in_samples
            found.append((optimizer.progress, math.nan if scale is None else scale))
            if optimizer.steps_done >= steps:
                break
    return found


Curve = Sequence[tuple[int, float]]  # samples since the branches began, ascending from 0, and the test loss


class Branch(NamedTuple):
    """The batch size of a branch, its number of updates, and its curve with each seed."""

    batch_size: int
    updates: int
    curves: tuple[Curve, ...]

    @property
    def losses(self) -> list[float]:
        """The test loss at the end, with each seed."""
        return [curve[-1][1] for curve in self.curves]

    def cost(self, first: "Branch") -> Estimate | None:
        """The logarithm of the samples for the same loss, relative to another branch with the same seeds.

        The mean over seeds, with its 95 % interval if there are several; None if a run of this branch has diverged or
        has not lowered the loss. For each seed, the loss is the lowest that both branches have reached, so the result
        does not depend on how low a loss can get.
        """
        ratios = [_ratio(mine, theirs) for mine, theirs in zip(self.curves, first.curves, strict=True)]
        return None if math.inf in ratios else difference(list(map(math.log, ratios)))


def _ratio(mine: Curve, theirs: Curve) -> float:
    """The samples of one curve to the lowest loss that both have reached, divided by the samples of the other."""
    lowest = [min(loss for _, loss in curve if not math.isnan(loss)) for curve in (mine, theirs)]
    if not math.isfinite(mine[-1][1]) or lowest[0] >= mine[0][1]:
        return math.inf
    return _samples_to(max(lowest), mine) / _samples_to(max(lowest), theirs)


def _samples_to(loss: float, curve: Curve) -> float:
    """The samples after which a curve first reaches a loss below its initial one, by linear interpolation."""
    for (samples, before), (next_samples, after) in itertools.pairwise(curve):
        if after <= loss:
            if not math.isfinite(before):
                return next_samples
            return samples + (next_samples - samples) * (before - loss) / (before - after)
    raise AssertionError("every requested loss was reached")


def branches(
    workload: Workload, sizes: Sequence[int], *, samples_before: int, samples: int, rule: str, seeds: int
) -> list[Branch]:
    """Train at the first of some batch sizes, branch off at each, and test the losses over equally many samples.

    This number is rounded up to a multiple of all batch sizes. All branches train with each of several seeds.
    """
    check_positive(samples_before=samples_before, samples=samples, seeds=seeds)
    multiple = math.lcm(*sizes)
    if samples < multiple:  # rounding up would multiply the work
        raise ValueError(f"`samples` must be at least {multiple}, a multiple of all batch sizes {sizes}, got {samples}")
    rounded_up = -(-samples // multiple) * multiple
    curves = [_branch_curves(workload, sizes, samples_before, rounded_up, rule, seed) for seed in range(seeds)]
    of_sizes = zip(sizes, zip(*curves, strict=True), strict=True)
    return [Branch(size, rounded_up // size, of_size) for size, of_size in of_sizes]


def _branch_curves(
    workload: Workload, sizes: Sequence[int], samples_before: int, samples: int, rule: str, seed: int
) -> list[Curve]:
    """The curve of each branch."""
    torch.manual_seed(seed)
    model = workload.model()
    run = Training(workload, model, rule, {"trace": sizes[0], "seed": seed})
    next(loss for loss in run.losses() if run.optimizer.samples_done >= samples_before)
    start, states = run.test()[0], [copy.deepcopy(part.state_dict()) for part in run.parts]
    found: list[Curve] = []
    for size in sizes:
        # the same order of samples for all branches, different from that of the run before
        branch = Training(workload, model, rule, {"trace": size, "seed": seed + 1_000_000})
        for part, state in zip(branch.parts, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        found.append([(0, start), *_tested(branch, samples)])
    return found


def _tested(training: Training, samples: int) -> Iterator[tuple[int, float]]:
    """Train on some samples, and test the loss after the first step that reaches each tenth of them."""
    for done in training.train_on(samples, stops=_TESTS):
        yield done, training.test()[0]


class CriticalBatchSize(NamedTuple):
    """Bounds of the largest batch size that does not need many more samples for the same loss, as found by branches."""

    at_least: int | None  # up to this one, no branch needs many more samples
    below: int | None  # the smallest one that does
    undecided: tuple[int, ...]  # those in between, or above `at_least`, whose interval contains the tolerance

    def __str__(self) -> str:
        sizes = ", ".join(f"{size:,}" for size in self.undecided)
        doubt = f"{sizes} undecided: use more --seeds" if sizes else ""
        if self.at_least is None and self.below is None:
            return f"not found ({doubt})"
        if self.at_least is None:
            return f"below {self.below:,} ({doubt or 'start from a smaller --batch-size to find it'})"
        if self.below is None:
            return f"at least {self.at_least:,} ({doubt or 'the largest one tried'})"
        return f"at least {self.at_least:,} and below {self.below:,}" + (f" ({doubt})" if doubt else "")


def critical_batch_size(found: Sequence[Branch], *, tolerance: float) -> CriticalBatchSize:
    """Bounds of the largest batch size up to which no branch needs more than 1 + tolerance times the first's samples.

    A branch needs more if the 95 % interval of its factor of samples to the same loss is above 1 + tolerance, or if it
    has diverged or not lowered the loss. It does not if the interval is below. The others are compared with the first
    branch, which is therefore never the answer.
    """
    first, *others = found
    for curve in first.curves:
        if not math.isfinite(curve[-1][1]) or min(loss for _, loss in curve) >= curve[0][1]:
            lowers = f"must lower the test loss, got {curve[0][1]:.4g} before and {curve[-1][1]:.4g} after"
            raise ValueError(f"the first branch, with batch size {first.batch_size}, {lowers} {curve[-1][0]:,} samples")
    at_least, below = None, None
    undecided: list[int] = []
    for branch in others:
        cost, most = branch.cost(first), math.log1p(tolerance)
        if cost is None or (cost.error is not None and cost.mean - cost.error > most):
            below = branch.batch_size
            break
        if undecided or cost.error is None or cost.mean + cost.error > most:
            undecided.append(branch.batch_size)
        else:
            at_least = branch.batch_size
    return CriticalBatchSize(at_least, below, tuple(undecided))
