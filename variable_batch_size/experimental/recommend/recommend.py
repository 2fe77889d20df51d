"""recommend: which rule to use with a trace, decided by short branches of one training.

Branches start from several states of a training at the reference batch size B0. With each rule, they train on the same
samples, at a large batch size that the trace has from there on. Two numbers count for each branch:

- its rate r: how far it moves in the direction of the branches at B0 with other seeds, relative to how far those move.
  Where this is lost in noise, r is the learning-rate factor divided by S;
- Δ: its test loss minus that of a branch at B0. Soon after a jump, Δ is high for rules with a large learning rate, but
  most of it does not last: over the pairs of reproduce/recommended.py, it hardly correlates with the loss at the end.

If M of the N samples of a trace are at other batch sizes, a rule with the rate r gets as far as the training at B0 with
n' = N − M + r · M samples. If L(n) = c + a/n is the loss of that training, the predicted loss at the end is

    L(n') + Δ/10 · n/N,   n samples into the training.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from variable_batch_size.experimental.recommend.branching import InThisProcess, Leg, Legs, Ran, Source, arm_of
from variable_batch_size.lab.comparison.compare import LocalProcesses, OnExecutor, environments, locked
from variable_batch_size.lab.comparison.measure import Branch, CriticalBatchSize, critical_batch_size
from variable_batch_size.lab.comparison.verdict import Estimate, difference
from variable_batch_size.rules.registry import make_rule
from variable_batch_size.traces.trace import Trace

REFERENCE = "reference"  # the branch at the reference batch size
STATES = (0.0, 0.1, 0.5)  # fractions of the training
EXPONENTS = (0.0, 0.5, 1.0)
_RESOLUTION = 0.25  # of an exponent from branches, determined on the pairs of reproduce/recommended.py
LEVEL = 0.9  # of the reported intervals
LAW = 0.383  # B_opt ∝ D^0.383 (Bergsma et al. 2025, "Power lines")
_SEEDS_OF_COMPARISON = 3
_TRUNK_SEED = 1_000_000  # not the seed of any branch
_LASTING = 0.1  # the fraction of a jump's effect on the loss that lasts
_MODEL_ERROR = 1.25  # of the predicted loss at the end, relative to how much the second half of the training lowers it
_QUANTILE = 0.75  # of the batch sizes after a state: rules differ, and fail, at large ones
_EXPECTED = 0.25  # the expected relative difference between nominal and measured rates
_NORMAL = 1.645  # the 90 % interval of a normal distribution, in standard deviations
_LEAST_PROGRESS = 0.01  # relative to the reference batch size; below it, L(n) is not valid
_MIN_UPDATES = 4  # of a branch
_SHARE_OF_SIZES = 0.2  # of the samples of all branches, for the critical batch size
_TOLERANCE = 0.2
_MOST_SEEDS = 100  # beyond which rules count as equal


def candidates(optimizer: str, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rules for an optimizer, given its class name and parameter groups, without duplicates in effect.

    >>> candidates("SGD", [{"lr": 0.1, "momentum": 0.9}])
    ['constant', 'root', 'linear', 'linear_momentum', 'adascale']
    >>> candidates("Muon", [{"lr": 0.1, "momentum": 0.95, "weight_decay": 0.1}])
    ['constant', 'root', 'linear', 'muon', 'surge']
    """

    def fits(name: str) -> bool:
        try:
            make_rule(name).check(optimizer, groups)
        except ValueError:
            return False
        return True

    found = ["constant", "root", "linear"]
    if fits("linear_momentum"):
        return [*found, *(["linear_momentum"] if any(group.get("momentum") for group in groups) else []), "adascale"]
    found += [name for name in ("adam", "adamscale") if fits(name)]
    if fits("muon") and any(group.get("weight_decay") for group in groups):
        found.append("muon")
    return [*found, "surge"]


class Segment(NamedTuple):
    """The part of a training after one of the states, up to the next."""

    begin: int  # samples
    end: int
    num_varied: int  # samples at batch sizes other than the reference
    batch_size: int  # that three quarters of these do not exceed


def segments_of(
    sizes: npt.ArrayLike, *, ref_batchsize: int, num_samples: int, states: Sequence[float] = STATES
) -> list[Segment]:
    """The parts of a trace between states, each with a batch size that three quarters of its samples do not exceed.

    Samples at the reference batch size do not count. From twice that size on, the size is rounded to a multiple of it.

    >>> segments_of([32, 32, 64, 128], ref_batchsize=32, num_samples=256, states=(0, 0.25))
    [Segment(begin=0, end=64, num_varied=0, batch_size=32), Segment(begin=64, end=256, num_varied=192, batch_size=128)]
    """
    steps = np.asarray(sizes)
    ends = steps.cumsum()
    bounds = [*(round(fraction * num_samples) for fraction in states), num_samples]
    order, found = np.argsort(steps, kind="stable"), []
    for begin, end in itertools.pairwise(bounds):
        inside = np.where(steps == ref_batchsize, 0, np.clip(ends, begin, end) - np.clip(ends - steps, begin, end))
        size, num_varied = ref_batchsize, int(inside.sum())
        if num_varied:
            size = int(steps[order][np.searchsorted(inside[order].cumsum(), _QUANTILE * num_varied)])
        if size >= 2 * ref_batchsize:
            size = round(size / ref_batchsize) * ref_batchsize
        found.append(Segment(begin, end, num_varied, size))
    return found


def best_exponent(losses: Mapping[float, float]) -> float:
    """The minimum of the quadratic through losses by exponent, within their range; non-finite losses are left out.

    Without a minimum there, or with fewer than three losses, it is the exponent of the lowest loss.

    >>> round(best_exponent({0.0: 1.0, 0.5: 0.5, 1.0: 0.5}), 6)
    0.75
    """
    finite = {exponent: loss for exponent, loss in losses.items() if math.isfinite(loss)}
    if not finite:
        raise ValueError("every exponent has diverged")
    best = min(finite, key=lambda exponent: finite[exponent])
    if len(finite) < 3:
        return best
    square, slope, _ = np.polyfit(list(finite), list(finite.values()), 2)
    if not square > 1e-12 * max(map(abs, finite.values())):
        return best
    return min(max(float(-slope / (2 * square)), min(finite)), max(finite))


def exponent_over_seeds(seeds: Iterable[Mapping[float, float]]) -> Estimate | None:
    """The mean of the best exponents of all seeds, with its 90 % interval, at least as wide as the fit can resolve.

    Seeds with which every exponent has diverged are left out; None if there are no others.
    """
    usable = [losses for losses in seeds if any(map(math.isfinite, losses.values()))]
    found = difference([best_exponent(losses) for losses in usable], level=LEVEL)
    return found if found is None or found.error is None else found._replace(error=max(found.error, _RESOLUTION))


def clearly_behind(losses: Mapping[str, Sequence[float]]) -> set[str]:
    """The arms whose losses, paired by seed, are clearly above those of the best, or that diverge with more seeds."""
    best = best_of(losses)

    def is_behind(arm: str) -> bool:
        if _num_diverged(losses[arm]) > _num_diverged(losses[best]):
            return True
        gap = _gap(losses[arm], losses[best])
        return gap is not None and gap.mean > 0 and gap.is_clear

    return {arm for arm in losses if arm != best and is_behind(arm)}


def best_of(losses: Mapping[str, Sequence[float]]) -> str:
    """The arm that diverges with the fewest seeds; among equals, the one with the lowest mean of its finite losses."""

    def rank(arm: str) -> tuple[int, float]:
        finite = [loss for loss in losses[arm] if math.isfinite(loss)]
        return _num_diverged(losses[arm]), fmean(finite) if finite else math.inf

    return min(losses, key=rank)


def _num_diverged(losses: Sequence[float]) -> int:
    return sum(not math.isfinite(loss) for loss in losses)


def _gap(mine: Sequence[float], theirs: Sequence[float], *, level: float = 0.95) -> Estimate | None:
    pairs = zip(mine, theirs, strict=True)
    return difference([a - b for a, b in pairs if math.isfinite(a) and math.isfinite(b)], level=level)


Losses = dict[str, list[float]]  # of each arm, with each seed


class State(NamedTuple):
    """The result of the branches from a state: the predicted losses of all arms after each of several lengths."""

    segment: Segment
    rungs: tuple[tuple[int, Losses], ...]  # ascending; each has the arms that were not stopped before
    curves: tuple[tuple[tuple[int, float], ...], ...] = ()  # of the best arm with each seed, from 0
    references: tuple[float, ...] = ()  # the test losses of the reference branches at their ends

    @property
    def best(self) -> str:
        return best_of({arm: found for arm, found in self.rungs[-1][1].items() if arm != REFERENCE})

    def leads(self, arm: str) -> list[float]:
        """The predicted losses of an arm, minus those at the reference batch size.

        An arm that was stopped stays as far behind the best one as it was.
        """
        at_stop = next(losses for _, losses in reversed(self.rungs) if arm in losses)
        at_end, best = self.rungs[-1][1], self.best
        columns = zip(at_end[best], at_end[REFERENCE], at_stop[arm], at_stop[best], strict=True)
        return [ahead - reference + loss - then for ahead, reference, loss, then in columns]

    @property
    def exponent(self) -> Estimate | None:
        """The best one by the latest losses that all three exponents have; None if no seed has a finite loss."""
        arms = {arm_of(exponent): exponent for exponent in EXPONENTS}
        losses = next((found for _, found in reversed(self.rungs) if arms.keys() <= found.keys()), self.rungs[0][1])
        seeds = [{arms[arm]: loss for arm, loss in zip(arms, column, strict=True)} for column in _columns(losses, arms)]
        return exponent_over_seeds(seeds)

    @property
    def stopped(self) -> dict[str, int]:
        """The arms that were stopped, and after how many samples."""
        kept = self.rungs[-1][1]
        found = {arm: end for end, losses in self.rungs for arm in losses}
        return {arm: end for arm, end in found.items() if arm not in kept}


def _columns(losses: Losses, arms: Iterable[str]) -> list[tuple[float, ...]]:
    return list(zip(*(losses[arm] for arm in arms), strict=True))


def halving(
    arms: Sequence[str],
    run: Callable[[Sequence[str], int, int], Losses],
    *,
    first: int,
    seeds: int,
    most: int,
    end: int,
) -> list[tuple[int, Losses]]:
    """Run arms and the reference, and keep doubling their samples, without the arms that are clearly behind.

    Args:
        arms: the arms to choose from.
        run: continues arms from one number of samples to another, and returns their losses.
        first: samples before the first decision.
        seeds: the number of seeds of each arm.
        most: the most samples of all arms and seeds together; those before the first decision are always run.
        end: the most samples of a branch.
    """
    rungs: list[tuple[int, Losses]] = []
    alive, begin, until, used = list(arms), 0, first, 0
    while True:
        losses = run([*alive, REFERENCE], begin, until)
        rungs.append((until, losses))
        used += (len(alive) + 1) * seeds * (until - begin)
        behind = clearly_behind({arm: losses[arm] for arm in alive})
        alive = [arm for arm in alive if arm not in behind and _num_diverged(losses[arm]) < seeds]
        if len(alive) < 2 or 2 * until > end or used + (len(alive) + 1) * seeds * until > most:
            return rungs
        begin, until = until, 2 * until


@dataclass(frozen=True)
class Plan:
    """What to branch: which rules, where, and with how many samples at most."""

    rules: tuple[str, ...]
    segments: tuple[Segment, ...]
    first_size: int  # the largest batch size of the first few updates
    largest: int  # batch size of the trace
    ref_batchsize: int
    minibatch_size: int
    num_samples: int  # of the training
    seeds: int
    budget: float  # as a fraction of the samples of a full comparison
    first_seed: int = 0

    def __post_init__(self) -> None:
        if not self.branched:
            stays = f"within {self.num_samples:,} samples, or all rules do the same"
            raise ValueError(f"the trace must have batch sizes other than the reference {self.ref_batchsize} {stays}")
        for segment in self.branched:
            least, most = _MIN_UPDATES * self._multiple(segment), self._first(segment, len(self.branched))
            if most < least:
                needs = f"a branch at batch size {segment.batch_size} must have at least {least:,} samples"
                why = f"{_MIN_UPDATES} common multiples with the reference batch size {self.ref_batchsize}"
                hint = "train on more --samples, use a larger --budget or fewer --seeds, or smaller batch sizes"
                raise ValueError(f"{needs}, {why}, got {max(0, most):,}: {hint}")

    @property
    def branch_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def comparison(self) -> int:
        """The samples of a full comparison: all rules and the reference, with three seeds."""
        return (len(self.rules) + 1) * _SEEDS_OF_COMPARISON * self.num_samples

    @property
    def trunk(self) -> int:
        """The samples of the training from which branches start; at least up to the second state, to know its slope."""
        varied = [segment.begin for segment in self.segments if segment.num_varied]
        return max(self.segments[1].begin, *varied)

    @property
    def samples(self) -> float:
        """The samples of all branches together."""
        return self.budget * self.comparison - self.trunk

    @property
    def starts_large(self) -> bool:
        """Whether the first updates have at least twice the reference batch size, where a new model may need less."""
        return self.first_size >= 2 * self.ref_batchsize

    @property
    def branched(self) -> list[Segment]:
        """The segments to branch in: all where the trace varies, or all but one if there are too few samples for that.

        The one left out has the fewest samples at other batch sizes. If the trace starts at a large batch size, it is
        not the start, unless only one other is left: a rule that fails there is lost, however good it is later.
        """
        found = [segment for segment in self.segments if segment.num_varied]
        is_short = [self._first(one, len(found)) < _MIN_UPDATES * self._multiple(one) for one in found]
        if not any(is_short) or len(found) < 2 or found[0].begin:
            return found
        least = min(found[1:] if self.starts_large and len(found) > 2 else found, key=lambda one: one.num_varied)
        return [segment for segment in found if segment is not least]

    @property
    def most(self) -> int:
        """The samples of all branches from a state."""
        return self._most(len(self.branched))

    def _most(self, num_states: int) -> int:
        return int(self.samples * (1 - _SHARE_OF_SIZES) / num_states)

    def first(self, segment: Segment) -> int:
        """The samples of a branch before the first decision."""
        return self._first(segment, len(self.branched)) // self._multiple(segment) * self._multiple(segment)

    def _first(self, segment: Segment, num_states: int) -> int:
        # half of all samples before the first decision
        each = self._most(num_states) // (2 * self.seeds * (len(self.rules) + 1))
        return min(each, segment.end - segment.begin)

    def half(self, segment: Segment, end: int) -> int:
        """About half of the samples of a branch."""
        return end // 2 // self._multiple(segment) * self._multiple(segment)

    def _multiple(self, segment: Segment) -> int:
        return math.lcm(segment.batch_size, self.ref_batchsize)

    def weight(self, segment: Segment) -> float:
        """The weight of a prediction from a segment: its share of the samples that vary."""
        return segment.num_varied / sum(one.num_varied for one in self.branched)

    def predicted(self, segment: Segment, *, rate: float, lead: float, loss_at: Callable[[float], float]) -> float:
        """The loss at the end minus that at the reference batch size, if all samples that vary were as in a segment."""
        num_varied = sum(one.num_varied for one in self.segments)
        samples = max(self.num_samples - (1 - rate) * num_varied, _LEAST_PROGRESS * self.num_samples)
        fade = _LASTING * (segment.begin + segment.end) / 2 / self.num_samples
        return loss_at(samples) - loss_at(self.num_samples) + lead * fade

    @property
    def sizes(self) -> list[int]:
        """The batch sizes for the critical one: the reference, the largest, and one in the middle."""
        ratio = max(self.largest // self.ref_batchsize, 1)
        middle = self.ref_batchsize * 2 ** round(math.log2(ratio) / 2)
        return sorted({self.ref_batchsize, middle, self.ref_batchsize * ratio})

    @property
    def samples_of_sizes(self) -> int:
        """The samples of each branch for the critical batch size; 0 for none."""
        multiple = math.lcm(*self.sizes)
        each = self.samples * _SHARE_OF_SIZES / (len(self.sizes) * self.seeds)
        most = min(int(each), self.num_samples - self.trunk) // multiple
        return most * multiple if len(self.sizes) > 1 and most >= _MIN_UPDATES else 0


def extrapolated(trunk: Iterable[tuple[int, float]]) -> Callable[[float], float]:
    """The test loss after n samples, c + a/n with a ≥ 0, fitted to the trunk from a fifth of its samples on.

    >>> loss_at = extrapolated([(0, 9.0), (100, 4.0), (200, 2.5)])
    >>> round(loss_at(300), 6)
    2.0
    """
    points = list(trunk)
    used = [(1 / n, loss) for n, loss in points if n >= points[-1][0] / 5 and n > 0]
    slope, floor = np.polyfit([inverse for inverse, _ in used], [loss for _, loss in used], 1)
    if slope < 0:
        slope, floor = 0.0, used[-1][1]
    return lambda samples: float(floor + slope / samples)


def shrunk_rates(moved: Sequence[float], reference: Sequence[float], nominal: float) -> list[float]:
    """How far an arm has moved relative to the reference, with each seed, shrunk towards the nominal rate.

    The rate is expected within a quarter of the nominal one, the learning-rate factor over S. So a measured rate with
    the standard error e has the weight p²/(p² + e²), p = nominal/4, and the nominal rate has the rest.

    >>> [round(rate, 3) for rate in shrunk_rates([0.5, 0.6, 0.7], [1.0, 1.0, 1.0], 1.0)]  # e = 0.058
    [0.525, 0.62, 0.715]
    """
    whole, known = fmean(reference), [one for one in moved if math.isfinite(one)]
    if whole <= 0 or len(known) < 2:
        return [nominal] * len(moved)
    error_of_whole = statistics.stdev(reference) / math.sqrt(len(reference)) / whole
    error = math.hypot(statistics.stdev(known) / math.sqrt(len(known)), error_of_whole * fmean(known)) / whole
    weight = 1 / (1 + (error / (_EXPECTED * nominal)) ** 2)
    return [nominal + weight * ((one if math.isfinite(one) else nominal * whole) / whole - nominal) for one in moved]


class Recommendation(NamedTuple):
    """The result of the branches."""

    plan: Plan
    source: Source
    states: tuple[State, ...]
    trunk: tuple[tuple[int, float], ...]  # samples and test loss of the training
    critical: CriticalBatchSize | str  # or why there is none
    samples: int
    seconds: float

    def leads(self, rule: str) -> list[float]:
        """The predicted leads at the end of the training, with each seed."""
        weights = [self.plan.weight(state.segment) for state in self.states]  # their sum is 1
        columns = zip(*(state.leads(rule) for state in self.states), strict=True)
        return [sum(weight * lead for weight, lead in zip(weights, column, strict=True)) for column in columns]

    @property
    def rule(self) -> str:
        """The best rule; or the usual one for the optimizer, if that is not clearly behind.

        If a large batch size at the start was not tried, it is the most careful rule that is not clearly behind.
        """
        leads = {rule: self.leads(rule) for rule in self.plan.rules}
        behind = clearly_behind(leads)
        if self.is_start_untried and self.plan.starts_large:
            return next(rule for rule in leads if rule not in behind)
        usual = "linear" if "adascale" in leads else "root"
        return best_of(leads) if usual not in leads or usual in behind else usual

    @property
    def level_with(self) -> dict[str, Estimate | None]:
        """The rules that are not clearly behind the best one, and their paired differences from the recommended one."""
        leads = {rule: self.leads(rule) for rule in self.plan.rules}
        behind = clearly_behind(leads)
        return {rule: _gap(leads[rule], leads[self.rule]) for rule in leads if rule not in behind and rule != self.rule}

    @property
    def exponent(self) -> Estimate | None:
        """The best exponent over all states."""
        leads = {exponent: self.leads(arm_of(exponent)) for exponent in EXPONENTS}
        seeds = [dict(zip(leads, column, strict=True)) for column in zip(*leads.values(), strict=True)]
        return exponent_over_seeds(seeds)

    @property
    def lead(self) -> Estimate:
        """The predicted loss at the end minus that at the reference batch size, with its 90 % interval.

        It compares means over three trainings each. The interval is the root of the sum of three squares: the interval
        over the seeds of the branches, the random variation of a training, and the error of the prediction. The latter
        is 5/4 of what the second half of the training lowers the loss by, which was right for 90 % of the pairs of
        reproduce/recommended.py.
        """
        found = difference([lead for lead in self.leads(self.rule) if math.isfinite(lead)], level=LEVEL)
        assert found is not None
        chance = _NORMAL * statistics.stdev(self.states[-1].references) * math.sqrt(2 / _SEEDS_OF_COMPARISON)
        loss_at, end = extrapolated(self.trunk), self.plan.num_samples
        error = math.hypot(found.error or 0.0, chance, _MODEL_ERROR * (loss_at(end / 2) - loss_at(end)))
        return found._replace(error=error)

    @property
    def reference_loss(self) -> float:
        """The loss at the end at the reference batch size, extrapolated."""
        return extrapolated(self.trunk)(self.plan.num_samples)

    @property
    def steps_to_recover(self) -> dict[int, int]:
        """The updates after which the loss has recovered, by the samples of each state where a jump raises it."""
        found = {}
        for state in self.states:
            rises = difference([curve[1][1] - curve[0][1] for curve in state.curves if math.isfinite(curve[1][1])])
            if rises is not None and rises.mean > 0 and rises.is_clear:
                means = [
                    (points[0][0], fmean(loss for _, loss in points)) for points in zip(*state.curves, strict=False)
                ]
                back = next((n for n, loss in means[1:] if loss <= means[0][1]), means[-1][0])
                found[state.segment.begin] = max(2, back // state.segment.batch_size)
        return found

    @property
    def is_start_untried(self) -> bool:
        """Whether the batch size varies from the start, and no branch has tried that."""
        return bool(self.plan.segments[0].num_varied) and self.states[0].segment.begin > 0

    @property
    def failed_at_start(self) -> list[str]:
        """The rules that diverge or fall behind the unscaled learning rate with a new model."""
        if self.states[0].segment.begin:
            return []
        return [rule for rule in self.plan.rules if _num_diverged(self.states[0].leads(rule)) == self.plan.seeds]

    @property
    def more_samples(self) -> dict[str, int | None]:
        """The further samples that would separate each undecided rule from the recommended one; None if too many."""
        per_seed = 2 * sum(state.rungs[-1][0] for state in self.states)
        found: dict[str, int | None] = {}
        for rule, gap in self.level_with.items():
            needed = math.inf
            if gap is not None and gap.error is not None and gap.mean:
                needed = math.ceil(self.plan.seeds * (gap.error / gap.mean) ** 2)
            found[rule] = (int(needed) - self.plan.seeds) * per_seed if needed <= _MOST_SEEDS else None
        return found


def plan_of(
    trace: Trace, source: Source, rules: Sequence[str], *, seeds: int, budget: float, first_seed: int = 0
) -> Plan:
    """The branches for a trace."""
    segments = segments_of(trace.sizes, ref_batchsize=source.ref_batchsize, num_samples=source.num_samples)
    used = trace.sizes[trace.sizes.cumsum() - trace.sizes < source.num_samples]
    given = (source.ref_batchsize, source.minibatch_size, source.num_samples, seeds, budget, first_seed)
    return Plan(tuple(rules), tuple(segments), int(used[:_MIN_UPDATES].max()), int(used.max()), *given)


def recommend_into(
    directory: Path, source: Source, plan: Plan, *, jobs: int, executor: str | None = None
) -> Recommendation:
    """Recommend, with files in a directory, from which an interrupted call resumes.

    Branches train in local processes, in this one if `jobs` is 1, or on an executor.
    """
    environment = environments(jobs, 1) if source.device == "cuda" else []
    makers: Any = InThisProcess() if jobs == 1 else LocalProcesses(jobs, environments=environment)
    if executor is not None:
        makers = OnExecutor(executor)
    most = plan.trunk + int(plan.samples)
    with (
        locked(directory, "vbs recommend"),
        tqdm(total=most, unit="sample", unit_scale=True, dynamic_ncols=True) as bar,
        makers,
    ):

        def on_end(leg: Leg, ran: Ran) -> None:
            bar.update(leg.samples)

        legs = Legs(source, directory / "branches", makers, on_end=on_end)
        return recommend(source, plan, legs, lambda line: bar.write(line, file=sys.stderr))


def recommend(source: Source, plan: Plan, legs: Legs, say: Callable[[str], None]) -> Recommendation:
    """Train to the states, branch, and decide; `say` gets a line for each decision."""
    known: dict[Leg, Ran] = {}

    def run(parts: Iterable[tuple[Leg, Leg | None]]) -> dict[Leg, Ran]:
        found = legs.run(parts)
        known.update(found)
        return found

    ends: dict[int, Leg | None] = {0: None, **_trunk(source, plan, run)}
    trunk = [point for leg in ends.values() if leg is not None for point in known[leg].curve]
    states = []
    for segment in plan.branched:
        branches = _Branches(plan, segment, ends[segment.begin], run, legs, trunk)
        states.append(_state(plan, segment, legs, branches))
        behind = "".join(f", {arm} stopped after {end:,}" for arm, end in states[-1].stopped.items())
        where = f"after {segment.begin:,} samples, at batch size {segment.batch_size:,}"
        say(f"{where}: {states[-1].best} is best{behind}")
    found = Recommendation(plan, source, tuple(states), tuple(trunk), "", 0, 0.0)
    critical = _critical(plan, found.rule, ends[plan.trunk], run)
    used = sum(leg.samples for leg in known)
    return found._replace(critical=critical, samples=used, seconds=sum(ran.seconds for ran in known.values()))


Run = Callable[[Iterable[tuple[Leg, Leg | None]]], dict[Leg, Ran]]


def _trunk(source: Source, plan: Plan, run: Run) -> dict[int, Leg]:
    """Train at the reference batch size up to the last state; returns the legs by their ends."""
    found: dict[int, Leg] = {}
    before, begin, start = None, 0, math.nan
    for segment in plan.segments:
        if 0 < segment.begin <= plan.trunk:
            leg = Leg(0, "constant", source.ref_batchsize, _TRUNK_SEED + plan.first_seed, begin, segment.begin)
            curve = run([(leg, before)])[leg].curve
            start = curve[0][1] if before is None else start
            if not curve[-1][1] < start:
                lowers = f"must lower the test loss, got {start:.4g} before and {curve[-1][1]:.4g} after"
                samples = f"{curve[-1][0]:,} samples: choose a smaller learning rate"
                raise ValueError(f"the training at the reference batch size {source.ref_batchsize} {lowers} {samples}")
            found[segment.begin] = before = leg
            begin = segment.begin
    return found


class _Branches:
    """The branches from a state."""

    def __init__(
        self, plan: Plan, segment: Segment, before: Leg | None, run: Run, legs: Legs, trunk: Sequence[tuple[int, float]]
    ) -> None:
        self._plan, self._segment, self._before, self._run, self._legs = plan, segment, before, run, legs
        losses = [loss for _, loss in trunk]
        self._loss_at, self._highest = extrapolated(trunk), 2 * losses[0] - min(losses)
        self.made: dict[tuple[str, int], list[tuple[Leg, Ran]]] = {}  # the legs of each arm and seed

    def losses(self, arms: Sequence[str], begin: int, end: int) -> Losses:
        """Continue arms from one number of samples to another, and predict the losses at the end of the training.

        A branch has diverged if its loss is as far above that of the new model as the training has lowered it. At the
        start of a trace that starts large, a branch that falls behind has also diverged. At the start, losses above
        that of the new model count as equal to it, because the training has shown that they pass.
        """
        half = self._plan.half(self._segment, end)
        if not begin:  # progress is measured along the last leg, which must not start at once
            self._continue(arms, 0, half)
        self._continue(arms, begin or half, end)
        seeds = self._plan.branch_seeds

        failed, limit = {arm for arm in arms if self._fails_at_start(arm)}, self._limit()

        def loss(arm: str, seed: int) -> float:
            found = self._end(arm, seed)
            return found if found <= limit and arm not in failed else math.inf

        losses = {arm: [loss(arm, seed) for seed in seeds] for arm in arms}
        if _num_diverged(losses[REFERENCE]):
            constant = f"the training at the reference batch size {self._plan.ref_batchsize} must not diverge"
            where = f"but did {self._segment.begin:,} samples after its start"
            raise ValueError(f"{constant}, {where}: lower the learning rate")
        rates = self._rates(arms, end)

        def prediction(loss: float, reference: float, rate: float, ceiling: float) -> float:
            if not math.isfinite(loss):
                return math.inf
            lead = min(loss, ceiling) - min(reference, ceiling)
            return self._plan.predicted(self._segment, rate=rate, lead=lead, loss_at=self._loss_at)

        ceilings = [math.inf if self._segment.begin else self._new(seed) for seed in seeds]
        columns = {arm: zip(losses[arm], losses[REFERENCE], rates[arm], ceilings, strict=True) for arm in arms}
        return {arm: [prediction(*column) for column in columns[arm]] for arm in arms}

    def _end(self, arm: str, seed: int) -> float:
        return self.made[arm, seed][-1][1].loss

    def _new(self, seed: int) -> float:
        """The loss where the branches begin; at the start, that of the new model."""
        return self.made[REFERENCE, seed][0][1].curve[0][1]

    def _limit(self) -> float:
        """The highest loss of a branch that has not diverged.

        With a new model, the reference may exceed it for a while, as with batch norm, whose statistics lag.
        """
        if self._segment.begin:
            return self._highest
        legs = [ran for seed in self._plan.branch_seeds for _, ran in self.made[REFERENCE, seed]]
        return max(self._highest, *(loss for ran in legs for _, loss in ran.curve if math.isfinite(loss)))

    def _fails_at_start(self, arm: str) -> bool:
        """Whether an arm improves a new model clearly less than both the unscaled learning rate and the reference.

        At the start there is no jump whose effect would pass, and a larger learning rate that works is far ahead. If
        "constant" was stopped earlier, its last loss counts.
        """
        if self._segment.begin or not self._plan.starts_large or arm == REFERENCE:
            return False

        def gap(seed: int) -> float:
            new, careful = self._new(seed), max(self._end("constant", seed), self._end(REFERENCE, seed))
            return min(self._end(arm, seed), new) - min(careful, new)

        found = difference([gap(seed) for seed in self._plan.branch_seeds])
        return found is not None and found.mean > 0 and found.is_clear

    def _continue(self, arms: Sequence[str], begin: int, end: int) -> None:
        plan, segment, parts = self._plan, self._segment, {}
        for arm in arms:
            rule, size = ("constant", plan.ref_batchsize) if arm == REFERENCE else (arm, segment.batch_size)
            for seed in plan.branch_seeds:
                previous = self.made.setdefault((arm, seed), [])
                if not begin or math.isfinite(previous[-1][1].loss):
                    parts[arm, seed] = Leg(segment.begin, rule, size, seed, begin, end)
        found = self._run([(leg, self.made[key][-1][0] if begin else self._before) for key, leg in parts.items()])
        for key, leg in parts.items():
            _check_noise(leg, found[leg])
            self.made[key].append((leg, found[leg]))

    def _rates(self, arms: Sequence[str], end: int) -> Losses:
        """The progress of arms per sample, relative to the reference, in the last leg."""

        def span(arm: str, seed: int) -> tuple[Leg, Leg] | None:
            legs = [leg for leg, ran in self.made[arm, seed] if math.isfinite(ran.loss)]
            return (legs[-2], legs[-1]) if legs and legs[-1].end == end else None

        seeds, scale = self._plan.branch_seeds, self._segment.batch_size / self._plan.ref_batchsize
        spans = {arm: [span(arm, seed) for seed in seeds] for arm in arms}
        moved = self._legs.moved(f"{self._segment.begin}-moved-{end}", spans, REFERENCE)

        def nominal(arm: str) -> float:
            if arm == REFERENCE:
                return 1.0
            return fmean(self.made[arm, seed][-1][1].factor for seed in seeds) / scale

        return {arm: shrunk_rates(moved[arm], moved[REFERENCE], nominal(arm)) for arm in arms}


def _state(plan: Plan, segment: Segment, legs: Legs, branches: _Branches) -> State:
    """Branch from a state, and stop what is clearly behind."""
    limits = {"first": plan.first(segment), "seeds": plan.seeds, "most": plan.most}
    rungs = _with_a_rule_left(halving(plan.rules, branches.losses, end=segment.end - segment.begin, **limits))
    legs.forget(leg for made in branches.made.values() for leg, _ in made)
    best = State(segment, tuple(rungs)).best
    if _num_diverged(rungs[-1][1][best]):
        start = f"at batch size {segment.batch_size} after {segment.begin:,} samples"
        raise ValueError(f"every rule diverges with some seed {start}: choose smaller batch sizes")

    def curve(arm: str, seed: int) -> tuple[tuple[int, float], ...]:
        return tuple(point for _, ran in branches.made[arm, seed] for point in ran.curve)

    curves = tuple(curve(best, seed) for seed in plan.branch_seeds)
    return State(segment, tuple(rungs), curves, tuple(curve(REFERENCE, seed)[-1][1] for seed in plan.branch_seeds))


def _with_a_rule_left(rungs: list[tuple[int, Losses]]) -> list[tuple[int, Losses]]:
    """Drop last rungs in which every arm diverges; these arms then count as diverged in the rung before."""
    while len(rungs) > 1 and all(_num_diverged(losses) for arm, losses in rungs[-1][1].items() if arm != REFERENCE):
        lost = {arm: [math.inf] * len(losses) for arm, losses in rungs[-1][1].items() if arm != REFERENCE}
        rungs = [*rungs[:-2], (rungs[-2][0], rungs[-2][1] | lost)]
    return rungs


def _check_noise(leg: Leg, ran: Ran) -> None:
    if ran.noise is not None and math.isnan(ran.noise):
        norms = "the squared norms of its gradients must be finite"
        raise ValueError(f"the gradient noise of {leg} is nan: {norms}; scale the loss, or check its gradients")


def _critical(plan: Plan, rule: str, before: Leg | None, run: Run) -> CriticalBatchSize | str:
    """Branch from the last state at several batch sizes with a rule, and compare the samples to the same loss."""
    if not plan.samples_of_sizes:
        return "not measured, as there are too few samples for its branches"
    parts = {
        (size, seed): Leg(plan.trunk, rule, size, plan.seeds + seed, 0, plan.samples_of_sizes)
        for size in plan.sizes
        for seed in plan.branch_seeds
    }
    found = run([(leg, before) for leg in parts.values()])
    branches = [
        Branch(size, plan.samples_of_sizes // size, tuple(found[parts[size, seed]].curve for seed in plan.branch_seeds))
        for size in plan.sizes
    ]
    try:
        return critical_batch_size(branches, tolerance=_TOLERANCE)
    except ValueError as error:
        return f"not found: {error}"
