"""What the runs of adam_and_muon.py say, with 95 % intervals: tables, claims and the figure.

The best learning rate of a batch size is the minimum of the parabola through the mean losses at the best learning rate
of the grid and its two neighbours, over log2(lr). Its spread over seeds is pooled over all batch sizes of an optimizer,
and so is the spread of a loss: three seeds tell too little about their own spread.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import results

import variable_batch_size as vbs

Row = dict[str, Any]
Losses = dict[float, dict[int, float]]  # by learning rate and seed

ARMS = ("beta2 half-life", "half-lives")  # of AdamW, tuned like fixed betas
EXTRA = 1.2  # times the samples, up to which a batch size counts as efficient
DRAWS = 1000
NOISE_SCALES = [2 ** (power / 4) for power in range(4 * 16 + 1)]  # that are tried for surge, in windows


class Cell(NamedTuple):
    """What a learning rate is tuned for."""

    optimizer: str
    rule: str
    length: str
    batchsize: int


class Interval(NamedTuple):
    """A value, and half the width of its 95 % interval."""

    value: float
    half: float

    def shown(self, digits: int = 3) -> str:
        return f"{self.value:.{digits}f} ± {self.half:.{digits}f}"


class Found:
    """The runs by cell, learning rate and seed.

    Args:
        rows: of the runs.
        reference: the batch size at which rules start.
        seeds: of the tuned learning rates; the first one is that of the grids.
    """

    def __init__(self, rows: Sequence[Row], reference: int, seeds: Sequence[int]) -> None:
        self.reference, self.seeds = reference, list(seeds)
        self.samples: dict[str, int] = {}  # of each length
        self._losses: dict[Cell, Losses] = {}
        self._noise: dict[tuple[Cell, float], dict[int, list[list[float]]]] = {}
        for row in rows:
            cell = Cell(row["optimizer"], row["rule"], row["length"], row["batchsize"])
            lr = 2.0 ** round(math.log2(row["lr"]))  # all are powers of 2, which files round
            assert math.isclose(lr, row["lr"], rel_tol=1e-4)
            self.samples[cell.length] = row["samples"]
            self._losses.setdefault(cell, {}).setdefault(lr, {})[row["seed"]] = row["loss"]
            if row.get("noise"):
                self._noise.setdefault((cell, lr), {})[row["seed"]] = row["noise"]

    def cells(self) -> list[Cell]:
        return list(self._losses)

    def loss(self, cell: Cell, lr: float, seed: int) -> float | None:
        return self._losses.get(cell, {}).get(lr, {}).get(seed)

    def losses(self, cell: Cell, lr: float) -> list[float]:
        """Of all seeds there are."""
        return list(self._losses.get(cell, {}).get(lr, {}).values())

    def mean(self, cell: Cell, lr: float) -> float:
        return statistics.fmean(self.losses(cell, lr))

    def of_seed(self, cell: Cell, seed: int) -> dict[float, float]:
        """The losses of one seed by learning rate."""
        return {lr: losses[seed] for lr, losses in self._losses.get(cell, {}).items() if seed in losses}

    def best_of_seed(self, cell: Cell, seed: int) -> float | None:
        losses = self.of_seed(cell, seed)
        return min(losses, key=losses.__getitem__) if losses else None

    def best(self, cell: Cell) -> float | None:
        """The learning rate with the best mean so far; None while the grid of the first seed is open at that end.

        From the best one of the first seed, it moves to a neighbour with a better mean of all seeds.
        """
        of_first = self.of_seed(cell, self.seeds[0])
        best = self.best_of_seed(cell, self.seeds[0])
        for _ in of_first:
            if best is None or not {best / 2, best * 2} <= of_first.keys():
                return None
            around = [lr for lr in (best, best / 2, best * 2) if self._is_complete(cell, lr)]
            if len(around) < 3:
                return best
            least = min(around, key=lambda lr: self.mean(cell, lr))
            if least == best:
                return best
            best = least
            if not {best / 2, best * 2} <= of_first.keys():
                return best  # its missing neighbour is wanted next
        return best

    def tuned(self, cell: Cell) -> float | None:
        """The same, once it and its neighbours have all seeds and no neighbour is better."""
        best = self.best(cell)
        if best is None or not all(self._is_complete(cell, lr) for lr in (best / 2, best, best * 2)):
            return None
        return best if self.mean(cell, best) <= min(self.mean(cell, best / 2), self.mean(cell, best * 2)) else None

    def _is_complete(self, cell: Cell, lr: float) -> bool:
        return set(self.seeds) <= self._losses[cell].get(lr, {}).keys()

    def differences(self, one: tuple[Cell, float | None], other: tuple[Cell, float | None]) -> list[float]:
        """The loss of one setting minus that of the other, for each seed that both have."""
        first, second = (self._losses.get(cell, {}).get(lr or 0.0, {}) for cell, lr in (one, other))
        return [first[seed] - second[seed] for seed in first if seed in second]

    def best_loss(self, cell: Cell) -> float | None:
        best = self.best(cell)
        return None if best is None else self.mean(cell, best)

    def noise(self, cell: Cell, lr: float) -> list[vbs.rules.Noise]:
        """Of each part of the run, the mean of all seeds; empty where it was not measured."""
        of_seeds = [runs for runs in self._noise.get((cell, lr), {}).values() if all(map(_are_finite, runs))]
        return [
            vbs.rules.Noise(*(statistics.fmean(values) for values in zip(*pairs, strict=True)))
            for pairs in zip(*of_seeds, strict=True)
        ]

    def noise_scale(self, optimizer: str, length: str) -> float | None:
        """V/G² in windows in the second half of the tuned run at the reference batch size."""
        cell = Cell(optimizer, "constant", length, self.reference)
        best = self.best(cell)
        parts = [] if best is None else self.noise(cell, best)
        half = parts[len(parts) // 2 :]
        return sum(half[1:], half[0]).scale if half else None

    # ------------------------------------------------------------------------------------------------ spreads
    def optimum(self, cell: Cell) -> tuple[float, int] | None:
        """log2 of the best learning rate, and the number of its seeds."""
        best = self.best(cell)
        if best is None:
            return None
        around = [self._losses[cell].get(lr, {}) for lr in (best / 2, best, best * 2)]
        common = set.intersection(*(set(losses) for losses in around))
        if not common:
            return None
        means = [statistics.fmean(losses[seed] for seed in common) for losses in around]
        return math.log2(best) + minimum_of_parabola(*means), len(common)

    def optimum_spread(self, optimizer: str) -> tuple[float, int]:
        """The standard deviation over seeds of log2 of the best learning rate, and its degrees of freedom."""
        groups = []
        for cell in self._of(optimizer):
            best = self.best(cell)
            if best is not None:
                around = [self._losses[cell].get(lr, {}) for lr in (best / 2, best, best * 2)]
                common = set.intersection(*(set(losses) for losses in around))
                groups.append([minimum_of_parabola(*(losses[seed] for losses in around)) for seed in common])
        return pooled(groups)

    def loss_spread(self, optimizer: str, length: str) -> tuple[float, int]:
        """The standard deviation over seeds of the loss at the best learning rates, and its degrees of freedom."""
        groups = []
        for cell in self._of(optimizer):
            best = self.best(cell)
            if best is not None and cell.length == length:
                groups.append(self.losses(cell, best))
        return pooled(groups)

    def rules(self, optimizer: str) -> list[str]:
        return list(dict.fromkeys(cell.rule for cell in self._of(optimizer)))

    def _of(self, optimizer: str) -> Iterator[Cell]:
        return (cell for cell in self._losses if cell.optimizer == optimizer)

    def sizes(self, optimizer: str, length: str, rule: str = "constant") -> list[int]:
        """The batch sizes with a best learning rate."""
        cells = [cell for cell in self._of(optimizer) if (cell.length, cell.rule) == (length, rule)]
        return sorted(cell.batchsize for cell in cells if self.best(cell) is not None)

    def lengths(self) -> list[str]:
        return sorted(self.samples, key=self.samples.__getitem__)

    def optimizers(self) -> list[str]:
        return list(dict.fromkeys(cell.optimizer for cell in self._losses))


def _are_finite(pair: Sequence[float]) -> bool:
    return all(map(math.isfinite, pair))


def minimum_of_parabola(left: float, middle: float, right: float) -> float:
    """Where a parabola through values at −1, 0 and 1 has its minimum; at most 1 away.

    >>> minimum_of_parabola(4.0, 1.0, 2.0)
    0.25
    """
    curvature = left - 2 * middle + right
    if curvature <= 0:
        return -1.0 if left < right else 1.0
    return min(1.0, max(-1.0, (left - right) / (2 * curvature)))


def pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The standard deviation within groups, and its degrees of freedom; 0 of these without any group of two."""
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in several)
    return (math.sqrt(squares / freedom), freedom) if freedom else (math.nan, 0)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t by its expansion around the normal one; 1 % off at 3 degrees of freedom."""
    if freedom < 1:
        return math.nan
    z = statistics.NormalDist().inv_cdf(0.975)
    parts = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(part / freedom**power for power, part in enumerate(parts))


# ----------------------------------------------------------------------------------------------------- questions
class Exponent(NamedTuple):
    """Of the best learning rate between two batch sizes: lr ∝ B^exponent."""

    length: str
    begin: int
    end: int
    exponent: Interval
    of_surge: float | None  # the exponent between these, by the rule and the measured noise scale
    place: str  # of both batch sizes, relative to the noise scale


def exponents(found: Found, optimizer: str) -> list[Exponent]:
    spread, freedom = found.optimum_spread(optimizer)
    made = []
    for length in found.lengths():
        noise_scale = found.noise_scale(optimizer, length)
        sizes = found.sizes(optimizer, length)
        for begin, end in pairwise(sizes):
            ends = [found.optimum(Cell(optimizer, "constant", length, size)) for size in (begin, end)]
            if None in ends:
                continue
            (first, num_first), (last, num_last) = ends  # type: ignore[misc]
            octaves = math.log2(end / begin)
            half = t_quantile(freedom) * spread * math.sqrt(1 / num_first + 1 / num_last) / octaves
            of_surge = place = None
            if noise_scale:
                of_surge = math.log2(surge(noise_scale, end, begin)) / octaves
                place = "below" if end <= noise_scale else "beyond" if begin >= noise_scale else "at"
            made.append(
                Exponent(length, begin, end, Interval((last - first) / octaves, half), of_surge, place or "unknown")
            )
    return made


def surge(noise_scale: float, batchsize: float, reference: float) -> float:
    """The factor of the surge rule at this noise scale."""
    gain = vbs.rules.Noise(noise_scale, 1.0).gain(batchsize, reference)
    sizes: Any = (batchsize, batchsize, reference)
    return float(vbs.rules.SurgeRule().scaled(gain, vbs.rules.Step(*sizes)))


def fitted_noise_scale(sizes: Sequence[int], optima: Sequence[float]) -> float:
    """The noise scale with which surge fits log2 of the best learning rates at these batch sizes best."""

    def error(noise_scale: float) -> float:
        offsets = [best - factor for best, factor in zip(optima, _log_surges(noise_scale, *sizes), strict=True)]
        mean = sum(offsets) / len(offsets)
        return sum((offset - mean) ** 2 for offset in offsets)

    return min(NOISE_SCALES, key=error)


@cache
def _log_surges(noise_scale: float, *sizes: int) -> list[float]:
    return [math.log2(surge(noise_scale, size, sizes[0])) for size in sizes]


def drawn(values: Sequence[float], deviations: Sequence[float], of: Callable[[list[float]], float]) -> list[float]:
    """A function of normally distributed values: its median, and the ends of its 95 % interval."""
    generator = random.Random(0)
    made = sorted(
        of([generator.gauss(value, deviation) for value, deviation in zip(values, deviations, strict=True)])
        for _ in range(DRAWS if any(deviations) else 1)
    )
    return [made[len(made) // 2], made[len(made) // 40], made[-1 - len(made) // 40]]


def peak_of_surge(found: Found, optimizer: str, length: str) -> list[float] | None:
    """The noise scale that surge would need, and the ends of its interval, in windows."""
    optima = {size: found.optimum(Cell(optimizer, "constant", length, size)) for size in found.sizes(optimizer, length)}
    known = {size: optimum for size, optimum in optima.items() if optimum}
    spread, _ = found.optimum_spread(optimizer)
    if len(known) < 3 or math.isnan(spread):
        return None
    values, deviations = [value for value, _ in known.values()], [spread / math.sqrt(n) for _, n in known.values()]
    return drawn(values, deviations, lambda optima: fitted_noise_scale(list(known), optima))


def efficient_size(found: Found, optimizer: str, length: str) -> list[float] | None:
    """The batch size that needs 20 % more samples than the best one, in windows, and the ends of its interval.

    With fewer samples, the best batch size has a higher loss. The difference between both lengths says how much a
    fifth more samples is worth.
    """
    best_losses = {
        one: min(found.best_loss(Cell(optimizer, "constant", one, size)) or math.inf for size in sizes)
        for one in found.lengths()
        if (sizes := found.sizes(optimizer, one))
    }
    spread, freedom = found.loss_spread(optimizer, length)
    sizes = found.sizes(optimizer, length)
    if len(best_losses) < 2 or not freedom or len(sizes) < 2:
        return None
    (short, short_loss), (long, long_loss) = best_losses.items()
    worth = (short_loss - long_loss) / math.log(found.samples[long] / found.samples[short]) * math.log(EXTRA)
    cells = [Cell(optimizer, "constant", length, size) for size in sizes]
    losses = [found.best_loss(cell) or math.nan for cell in cells]
    deviations = [spread / math.sqrt(len(found.losses(cell, found.best(cell) or 0.0))) for cell in cells]
    return drawn(losses, deviations, lambda losses: crossing(sizes, losses, worth))


def crossing(sizes: Sequence[int], losses: Sequence[float], worth: float) -> float:
    """The first size after the one with the least loss where it is exceeded by that much; the last one if none.

    >>> crossing([4, 16, 64], [1.0, 1.1, 1.5], 0.3)
    32.0
    """
    least = min(losses)
    limit = least + worth
    for number in range(losses.index(least) + 1, len(sizes)):
        before, after = losses[number - 1], losses[number]
        if after > limit:
            octaves = math.log2(sizes[number] / sizes[number - 1])
            return float(sizes[number - 1] * 2 ** (octaves * (limit - before) / (after - before)))
    return float(sizes[-1])


class Regret(NamedTuple):
    """The loss of a rule minus that of the best setting of any grid at that batch size, with the same seeds."""

    rule: str
    length: str
    batchsize: int
    regret: Interval


def regrets(found: Found, optimizer: str, length: str) -> list[Regret]:
    """Of each rule and batch size, from the tuned learning rate at the reference."""
    reference = found.best(Cell(optimizer, "constant", length, found.reference))
    if reference is None:
        return []
    differences: dict[tuple[str, int], list[float]] = {}
    for rule in dict.fromkeys(("constant", "root", "linear", *found.rules(optimizer))):
        for size in found.sizes(optimizer, length):
            best = best_of_all(found, optimizer, length, size)
            if size == found.reference or best is None or rule in ARMS:
                continue
            cell, lr = Cell(optimizer, rule, length, size), reference
            if rule in ("root", "linear"):
                step = vbs.rules.Step(size, size, found.reference)
                cell, lr = cell._replace(rule="constant"), lr * vbs.rules.make_rule(rule).factor(step)
            differences[rule, size] = found.differences((cell, lr), best)
    halves = half_widths(list(differences.values()))
    return [
        Regret(rule, length, size, Interval(statistics.fmean(of_seeds), half))
        for ((rule, size), of_seeds), half in zip(differences.items(), halves, strict=True)
        if of_seeds
    ]


def half_widths(groups: Sequence[Sequence[float]]) -> list[float]:
    """Of the 95 % intervals of the means, with the spread of all groups; 0 for a run compared with itself."""
    spread, freedom = pooled([group for group in groups if any(group)])
    return [t_quantile(freedom) * spread / math.sqrt(len(group)) if any(group) else 0.0 for group in groups]


def best_of_all(found: Found, optimizer: str, length: str, size: int) -> tuple[Cell, float] | None:
    """The tuned arm with the least mean loss, and its learning rate."""
    cells = [Cell(optimizer, arm, length, size) for arm in ("constant", *ARMS)]
    known = [(cell, best) for cell in cells if (best := found.best(cell)) is not None]
    return min(known, key=lambda pair: found.mean(*pair), default=None)


class Betas(NamedTuple):
    """The loss with scaled betas minus that with fixed ones, each at its best learning rate."""

    arm: str
    length: str
    batchsize: int
    difference: Interval


def betas(found: Found) -> list[Betas]:
    made: list[Betas] = []
    for length in found.lengths():
        differences: dict[tuple[str, int], list[float]] = {}
        for arm in ARMS:
            for size in found.sizes("adamw", length, arm):
                cells = [Cell("adamw", rule, length, size) for rule in (arm, "constant")]
                of_arm, fixed = ((cell, found.best(cell)) for cell in cells)
                if fixed[1] is not None:
                    differences[arm, size] = found.differences(of_arm, fixed)
        halves = half_widths(list(differences.values()))
        made += [
            Betas(arm, length, size, Interval(statistics.fmean(of_seeds), half))
            for ((arm, size), of_seeds), half in zip(differences.items(), halves, strict=True)
            if of_seeds
        ]
    return made


# -------------------------------------------------------------------------------------------------------- tables
def markdown(found: Found) -> str:
    """All tables; batch sizes and noise scales in windows."""
    parts = ["# Results of adam_and_muon.py", _best_table(found), _exponent_table(found), _surge_table(found)]
    parts += [_betas_table(found), _efficiency_table(found), *_regret_tables(found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    rows = [header, ["---"] * len(header), *lines]
    return f"## {title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _best_table(found: Found) -> str:
    header = ("optimizer", "samples", "batch size", "updates", "best lr", "loss", "seeds", "noise scale there")
    lines = []
    for cell in sorted(found.cells(), key=lambda cell: (cell.optimizer, cell.rule, cell.length, cell.batchsize)):
        best, optimum = found.best(cell), found.optimum(cell)
        if best is None or optimum is None or cell.rule not in ("constant", *ARMS):
            continue
        spread, freedom = found.optimum_spread(cell.optimizer)
        factor = 2 ** (t_quantile(freedom) * spread / math.sqrt(optimum[1]))
        loss_spread, loss_freedom = found.loss_spread(cell.optimizer, cell.length)
        number = len(found.losses(cell, best))
        half = t_quantile(loss_freedom) * loss_spread / math.sqrt(number)
        noise = found.noise(cell, best)
        scale = f"{sum(noise[1:], noise[0]).scale:,.0f}" if noise else ""
        name = cell.optimizer if cell.rule == "constant" else f"{cell.optimizer}, {cell.rule}"
        samples = found.samples[cell.length]
        row = (name, f"{samples:,}", f"{cell.batchsize:,}", f"{samples // cell.batchsize:,}")
        lr = f"{2 ** optimum[0]:.2g} ×/÷ {factor:.2f}"
        lines.append((*row, lr, Interval(found.mean(cell, best), half).shown(), str(number), scale))
    return _table("Best learning rates", header, lines)


def _exponent_table(found: Found) -> str:
    header = ("optimizer", "samples", "from", "to", "noise scale", "place", "exponent", "by surge", "by root")
    lines = []
    for optimizer in found.optimizers():
        for one in exponents(found, optimizer):
            noise_scale = found.noise_scale(optimizer, one.length)
            row = (optimizer, f"{found.samples[one.length]:,}", f"{one.begin:,}", f"{one.end:,}")
            of_surge = "" if one.of_surge is None else f"{one.of_surge:.2f}"
            scale = "" if noise_scale is None else f"{noise_scale:,.0f}"
            lines.append((*row, scale, one.place, one.exponent.shown(2), of_surge, "0.50"))
    return _table("Exponents of the best learning rate", header, lines)


def _surge_table(found: Found) -> str:
    header = ("optimizer", "samples", "noise scale at the reference, by eighths", "peak that surge needs", "ratio")
    lines = []
    for optimizer in found.optimizers():
        for length in found.lengths():
            measured, fitted = found.noise_scale(optimizer, length), peak_of_surge(found, optimizer, length)
            if measured is None or fitted is None:
                continue
            cell = Cell(optimizer, "constant", length, found.reference)
            scales = [part.scale for part in found.noise(cell, found.best(cell) or 0.0)]
            shown = ", ".join(f"{scale:.3g}" for scale in scales)
            peak = f"{fitted[0]:.3g} ({fitted[1]:.3g} to {fitted[2]:.3g})"
            row = (optimizer, f"{found.samples[length]:,}", shown, peak, f"{fitted[0] / measured:.2g}")
            lines.append(row)
    return _table("Where surge would have to peak", header, lines)


def _betas_table(found: Found) -> str:
    header = ("betas", "samples", "batch size", "loss − that of fixed betas")
    lines = [
        (one.arm, f"{found.samples[one.length]:,}", f"{one.batchsize:,}", one.difference.shown())
        for one in betas(found)
    ]
    return _table("Betas of AdamW, each at its best learning rate", header, lines)


def _efficiency_table(found: Found) -> str:
    header = ("optimizer", "samples", "batch size with 20 % more samples", "over that of AdamW")
    lines = []
    for length in found.lengths():
        of_adamw = efficient_size(found, "adamw", length)
        for optimizer in found.optimizers():
            size = efficient_size(found, optimizer, length)
            if size is not None:
                ratio = f"{size[0] / of_adamw[0]:.2g}" if of_adamw else ""
                shown = f"{size[0]:,.0f} ({size[1]:,.0f} to {size[2]:,.0f})"
                lines.append((optimizer, f"{found.samples[length]:,}", shown, ratio))
    return _table("How far the batch size can grow", header, lines)


def _regret_tables(found: Found) -> Iterator[str]:
    for optimizer in found.optimizers():
        for length in found.lengths():
            made = regrets(found, optimizer, length)
            sizes = sorted({one.batchsize for one in made})
            by_rule: dict[str, dict[int, Interval]] = {}
            for one in made:
                by_rule.setdefault(one.rule, {})[one.batchsize] = one.regret
            lines = [
                (rule, *(of_sizes[size].shown() if size in of_sizes else "" for size in sizes))
                for rule, of_sizes in by_rule.items()
            ]
            title = f"Regret in nats: {optimizer}, {found.samples[length]:,} samples, tuned at {found.reference}"
            yield _table(title, ("rule", *(f"{size:,}" for size in sizes)), lines)


def claims(found: Found) -> list[results.Claim]:
    """What papers say, where these runs can say it, too."""
    made = []
    for length in found.lengths():
        of_adamw = exponents(found, "adamw")
        beyond = [one for one in of_adamw if one.length == length]
        if beyond:
            last = beyond[-1]
            name = f"adamw {length}"
            what = f"exponent from {last.begin} to {last.end}, beyond the peak"
            made.append(results.Claim(name, what, "surge: below 0", last.exponent.value, -math.inf, 0.0))
        peak, measured = peak_of_surge(found, "adamw", length), found.noise_scale("adamw", length)
        if peak and measured:
            what = "peak of the best lr / noise scale"
            made.append(results.Claim.near(f"adamw {length}", what, 1.0, peak[0] / measured, within=0.5))
        sizes = {optimizer: efficient_size(found, optimizer, length) for optimizer in ("adamw", "muon")}
        if sizes["adamw"] and sizes["muon"]:
            ratio = sizes["muon"][0] / sizes["adamw"][0]
            what = "batch size with 20 % more samples / AdamW's"
            made.append(results.Claim(f"muon {length}", what, "larger (Shah et al. 2025)", ratio, 1.0, math.inf))
        for rule, size in (("adam", 4), ("timescale", 4), ("muon", 4)):
            optimizer = "muon" if rule == "muon" else "adamw"
            for one in regrets(found, optimizer, length):
                if (one.rule, one.batchsize) == (rule, size * found.reference):
                    what = f"regret at {size} times the batch size, nats"
                    made.append(results.Claim(f"{rule} {length}", what, "0", one.regret.value, -math.inf, 0.02))
    for one in betas(found):
        if one.arm == "beta2 half-life" and one.batchsize < found.reference:
            what = f"loss − that of fixed betas at {one.batchsize}, nats"
            made.append(
                results.Claim(
                    "β2 half-life", what, "below 0 (Marek et al. 2025)", one.difference.value, -math.inf, 0.005
                )
            )
    return made


def with_noise(row: Row) -> list[Row]:
    """The rows of the runs with the noise of the curve."""
    noise: dict[tuple[Any, ...], list[list[float]]] = {}
    fields = ("optimizer", "rule", "length", "batchsize", "lr", "seed")
    for point in row["curve"]:
        pair = [point["variance"], point["square_norm"]]
        noise.setdefault(tuple(point[field] for field in fields), []).append(pair)
    return [{**one, "noise": noise.get(tuple(one[field] for field in fields), [])} for one in row["rows"]]


def draw(found: Found, path: Path) -> None:
    """Best learning rates over the batch size with what surge predicts, losses there, and regrets of rules."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lengths = found.lengths()
    figure, panels = plt.subplots(len(lengths), 3, figsize=(13, 3.6 * len(lengths)), squeeze=False)
    for (of_lr, of_loss, of_regret), length in zip(panels, lengths, strict=True):
        for color, optimizer in zip(("C0", "C3", "C2"), found.optimizers(), strict=False):
            sizes = found.sizes(optimizer, length)
            optima = [found.optimum(Cell(optimizer, "constant", length, size)) for size in sizes]
            spread, freedom = found.optimum_spread(optimizer)
            known = [(size, *optimum) for size, optimum in zip(sizes, optima, strict=True) if optimum]
            if not known:
                continue
            lrs = [2**value for _, value, _ in known]
            halves = [t_quantile(freedom) * spread / math.sqrt(number) for _, _, number in known]
            errors = [
                [lr * (1 - 2**-half) for lr, half in zip(lrs, halves, strict=True)],
                [lr * (2**half - 1) for lr, half in zip(lrs, halves, strict=True)],
            ]
            of_lr.errorbar([size for size, _, _ in known], lrs, errors, color=color, marker="o", label=optimizer)
            noise_scale = found.noise_scale(optimizer, length)
            at_reference = found.optimum(Cell(optimizer, "constant", length, found.reference))
            if noise_scale and at_reference:
                fine = [sizes[0] * 2 ** (power / 4) for power in range(4 * round(math.log2(sizes[-1] / sizes[0])) + 1)]
                surges = [2 ** at_reference[0] * surge(noise_scale, size, found.reference) for size in fine]
                of_lr.plot(fine, surges, color=color, linestyle=":", linewidth=1)
                of_lr.axvline(noise_scale, color=color, linewidth=0.5)
            losses = [found.best_loss(Cell(optimizer, "constant", length, size)) for size, _, _ in known]
            of_loss.plot([size for size, _, _ in known], losses, color=color, marker="o", label=optimizer)
        of_rules: dict[str, list[tuple[int, float]]] = {}
        for one in regrets(found, "adamw", length):
            of_rules.setdefault(one.rule, []).append((one.batchsize, max(one.regret.value, 1e-3)))
        for rule, points in of_rules.items():
            of_regret.plot(*zip(*points, strict=True), marker=".", label=rule)
        of_lr.set(ylabel=f"best lr, {found.samples[length]:,} samples", xscale="log", yscale="log")
        of_loss.set(ylabel="loss there, nats a byte", xscale="log")
        of_regret.set(ylabel="AdamW: regret, nats", xscale="log", yscale="log")
        for axes in (of_lr, of_loss, of_regret):
            axes.set(xlabel="batch size, windows of 256 bytes")
            axes.grid(alpha=0.2)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
