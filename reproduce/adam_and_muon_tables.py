"""What the runs of adam_and_muon.py say, with 95 % intervals: tables, claims and the figure.

The best learning rate of a batch size is the minimum of the parabola through the mean losses at the best learning rate
of the grid and its two neighbours, over log2(lr). Its spread over seeds is pooled over all batch sizes of an optimizer,
and so is the spread of a loss: three seeds tell too little about their own spread.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import results

import variable_batch_size as vbs

Row = dict[str, Any]
Losses = dict[float, dict[int, float]]  # by learning rate and seed

NAMES = {"adamw": "AdamW", "muon": "Muon", "lion": "Lion"}
ARMS = ("beta2 half-life", "half-lives")  # of AdamW, tuned like fixed betas
PLAIN = ("constant", "root", "linear")  # rules whose runs are those of the grid
EXTRA = 1.2  # times the samples, up to which a batch size counts as efficient
UNTUNED = 4  # the factor by which a reference learning rate that was not tuned is too low
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

    def best(self, cell: Cell) -> float | None:
        """The learning rate with the best mean so far; None while the grid of the first seed is open at that end.

        From the best one of the first seed, it moves to a neighbour with a better mean of all seeds.
        """
        of_first = self.of_seed(cell, self.seeds[0])
        best = min(of_first, key=of_first.__getitem__, default=None)
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
        parts = self.noise_of_parts(optimizer, length)
        half = parts[len(parts) // 2 :]
        return sum(half[1:], half[0]).scale if half else None

    def noise_of_parts(self, optimizer: str, length: str) -> list[vbs.rules.Noise]:
        """Of the tuned run at the reference batch size, from the first part to the last."""
        cell = Cell(optimizer, "constant", length, self.reference)
        best = self.best(cell)
        return [] if best is None else self.noise(cell, best)

    # ------------------------------------------------------------------------------------------------ spreads
    def optimum(self, cell: Cell) -> tuple[float, int] | None:
        """log2 of the best learning rate, and the number of its seeds."""
        best, around = self.best(cell), list(self._around(cell).values())
        if best is None or not around:
            return None
        means = [statistics.fmean(losses) for losses in zip(*around, strict=True)]
        return math.log2(best) + minimum_of_parabola(*means), len(around)

    def optimum_spread(self, optimizer: str) -> tuple[float, int]:
        """The standard deviation over seeds of log2 of the best learning rate, and its degrees of freedom."""
        groups = [self._around(cell).values() for cell in self._of(optimizer)]
        return pooled([[minimum_of_parabola(*losses) for losses in group] for group in groups])

    def _around(self, cell: Cell) -> dict[int, list[float]]:
        """The losses of each seed at the best learning rate and its neighbours, in their order."""
        best = self.best(cell)
        if best is None:
            return {}
        around = [self._losses[cell].get(lr, {}) for lr in (best / 2, best, best * 2)]
        common = set.intersection(*(set(losses) for losses in around))
        return {seed: [losses[seed] for losses in around] for seed in sorted(common)}

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


def half_width(spread: float, freedom: int, number: float) -> float:
    """Of the 95 % interval of a mean of that many values, with their standard deviation and its degrees of freedom."""
    return t_quantile(freedom) * spread / math.sqrt(number)


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
    of_surge: float | None  # between these, by the rule and the measured noise scale


def exponents(found: Found, optimizer: str) -> list[Exponent]:
    spread, freedom = found.optimum_spread(optimizer)
    made = []
    for length in found.lengths():
        noise_scale = found.noise_scale(optimizer, length)
        for begin, end in pairwise(found.sizes(optimizer, length)):
            ends = [found.optimum(Cell(optimizer, "constant", length, size)) for size in (begin, end)]
            if None in ends:
                continue
            (first, num_first), (last, num_last) = ends  # type: ignore[misc]
            octaves = math.log2(end / begin)
            half = half_width(spread, freedom, 1 / (1 / num_first + 1 / num_last)) / octaves
            of_surge = math.log2(surge(noise_scale, end, begin)) / octaves if noise_scale else None
            made.append(Exponent(length, begin, end, Interval((last - first) / octaves, half), of_surge))
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


def samples_ratio(found: Found, size: int, *, is_short: bool) -> list[float] | None:
    """The samples of AdamW over those of Muon for the same loss at a batch size, and the ends of its interval.

    The loss is that of Muon after the short training, or that of AdamW after the long one; between both lengths, losses
    are linear in the logarithm of samples. None if the long training of one is not clearly better.
    """
    short, long = found.lengths()[0], found.lengths()[-1]
    cells = [Cell(optimizer, "constant", length, size) for optimizer in ("adamw", "muon") for length in (short, long)]
    losses = [loss for loss in map(found.best_loss, cells) if loss is not None]
    deviations = [found.loss_spread(cell.optimizer, cell.length)[0] / math.sqrt(len(found.seeds)) for cell in cells]
    if len(losses) < 4 or not all(losses[i] - losses[i + 1] > 5 * max(deviations) for i in (0, 2)):
        return None
    octaves = math.log2(found.samples[long] / found.samples[short])

    def ratio(losses: list[float]) -> float:
        adamw, muon = losses[:2], losses[2:]
        loss = muon[0] if is_short else adamw[1]
        needed, of_muon = ((first - loss) / (first - last) for first, last in (adamw, muon))
        return float(2 ** (octaves * (needed - of_muon)))

    return drawn(losses, deviations, ratio)


def regrets(found: Found, optimizer: str, length: str, *, below: int = 1) -> dict[tuple[str, int], Interval]:
    """The loss of a rule minus that of the best setting of any grid at that batch size, with the same seeds.

    By rule and batch size. Rules start from the tuned learning rate of the reference batch size, divided by `below`.
    """
    reference = found.best(Cell(optimizer, "constant", length, found.reference))
    if reference is None:
        return {}
    differences: dict[tuple[str, int], list[float]] = {}
    for rule in dict.fromkeys((*PLAIN, *found.rules(optimizer))):
        for size in found.sizes(optimizer, length):
            best = best_of_all(found, optimizer, length, size)
            if size == found.reference or best is None or rule in ARMS:
                continue
            cell, lr = Cell(optimizer, rule, length, size), reference / below
            if rule in ("root", "linear"):
                step = vbs.rules.Step(size, size, found.reference)
                cell, lr = cell._replace(rule="constant"), lr * vbs.rules.make_rule(rule).factor(step)
            differences[rule, size] = found.differences((cell, lr), best)
    return intervals(differences)


def best_of_all(found: Found, optimizer: str, length: str, size: int) -> tuple[Cell, float] | None:
    """The tuned arm with the least mean loss, and its learning rate."""
    cells = [Cell(optimizer, arm, length, size) for arm in ("constant", *ARMS)]
    known = [(cell, best) for cell in cells if (best := found.best(cell)) is not None]
    return min(known, key=lambda pair: found.mean(*pair), default=None)


def betas(found: Found, length: str) -> dict[tuple[str, int], Interval]:
    """The loss with scaled betas minus that with fixed ones, each at its best learning rate; by arm and batch size."""
    differences = {}
    for arm in ARMS:
        for size in found.sizes("adamw", length, arm):
            cells = [Cell("adamw", rule, length, size) for rule in (arm, "constant")]
            differences[arm, size] = found.differences(*((cell, found.best(cell)) for cell in cells))
    return intervals(differences)


def intervals(groups: Mapping[tuple[str, int], Sequence[float]]) -> dict[tuple[str, int], Interval]:
    """Of the means, with the spread of all groups; no width for a run compared with itself."""
    spread = pooled([group for group in groups.values() if any(group)])
    return {
        key: Interval(statistics.fmean(group), half_width(*spread, len(group)) if any(group) else 0.0)
        for key, group in groups.items()
        if group
    }


# -------------------------------------------------------------------------------------------------------- tables
Cells = dict[str, str]  # of a line, by column


def markdown(found: Found) -> str:
    """All tables; batch sizes and noise scales in windows."""
    parts = ["# Results of adam_and_muon.py", *_best_tables(found), _exponent_table(found), _betas_table(found)]
    parts += [_efficiency_table(found), _ratio_table(found), *_regret_tables(found), _untuned_table(found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, lines: Sequence[Cells], columns: Sequence[str] = ()) -> str:
    """The columns are these, in their order, and then others as they come."""
    columns = list(dict.fromkeys((*columns, *(column for line in lines for column in line))))
    columns = [column for column in columns if any(column in line for line in lines)]
    rows = [columns, ["---"] * len(columns), *([line.get(column, "") for column in columns] for line in lines)]
    return f"## {title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) if lines else ""


def _best_tables(found: Found) -> Iterator[str]:
    """Learning rates and losses, by batch size."""
    lrs, losses, sizes = [], [], sorted({cell.batchsize for cell in found.cells()})
    for optimizer in found.optimizers():
        factor = 2 ** half_width(*found.optimum_spread(optimizer), len(found.seeds))
        for arm, length in product(("constant", *ARMS), found.lengths()):
            half = half_width(*found.loss_spread(optimizer, length), len(found.seeds))
            name = NAMES[optimizer] + (f", {arm}" if arm != "constant" else "")
            line = {"optimizer": name, "samples": f"{found.samples[length]:,}"}
            cells = [Cell(optimizer, arm, length, size) for size in found.sizes(optimizer, length, arm)]
            if cells:
                optima = {f"{cell.batchsize:,}": found.optimum(cell) for cell in cells}
                of_sizes = {size: f"{2 ** optimum[0]:.2g}" for size, optimum in optima.items() if optimum}
                lrs.append({**line, "×/÷": f"{factor:.2f}", **of_sizes})
                means = {f"{cell.batchsize:,}": f"{found.best_loss(cell):.3f}" for cell in cells}
                losses.append({**line, "±": f"{half:.3f}", **means})
    columns = ["optimizer", "samples", *(f"{size:,}" for size in sizes)]
    yield _table("Best learning rates", lrs, columns)
    yield _table("Losses there", losses, columns)


def _exponent_table(found: Found) -> str:
    """With that of surge in parentheses, and the noise scale that surge would need."""
    lines, steps = [], set()
    for optimizer, length in product(found.optimizers(), found.lengths()):
        line = {"optimizer": NAMES[optimizer], "samples": f"{found.samples[length]:,}"}
        noise_scale, fitted = found.noise_scale(optimizer, length), peak_of_surge(found, optimizer, length)
        if noise_scale:
            parts = found.noise_of_parts(optimizer, length)
            line["noise scale"] = f"{noise_scale:,.0f} ({parts[0].scale:,.0f} to {parts[-1].scale:,.0f})"
        for one in exponents(found, optimizer):
            if one.length == length:
                of_surge = "" if one.of_surge is None else f" ({one.of_surge:.2f})"
                steps.add((one.begin, one.end))
                line[f"{one.begin:,} → {one.end:,}"] = one.exponent.shown(2) + of_surge
        if fitted:
            line["fitted"] = shown(fitted)
        lines.append(line)
    columns = ["optimizer", "samples", "noise scale", *(f"{begin:,} → {end:,}" for begin, end in sorted(steps))]
    return _table("Exponents of the best learning rate", lines, columns)


def shown(of_draws: Sequence[float]) -> str:
    """A value and its interval."""
    values = [f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in of_draws]
    return f"{values[0]} ({values[1]} to {values[2]})"


def _betas_table(found: Found) -> str:
    lines = []
    for length in found.lengths():
        of_length = betas(found, length)
        for arm in ARMS:
            of_sizes = {f"{size:,}": one.shown() for (name, size), one in of_length.items() if name == arm}
            lines.append({"betas": arm, "samples": f"{found.samples[length]:,}", **of_sizes})
    sizes = sorted({cell.batchsize for cell in found.cells()})
    return _table("Loss of AdamW − that of fixed betas", lines, ["betas", "samples", *(f"{size:,}" for size in sizes)])


def _efficiency_table(found: Found) -> str:
    lines = []
    for optimizer in found.optimizers():
        sizes = {length: efficient_size(found, optimizer, length) for length in found.lengths()}
        of_lengths = {f"{found.samples[length]:,} samples": shown(size) for length, size in sizes.items() if size}
        lines.append({"optimizer": NAMES[optimizer], **of_lengths})
    return _table("Batch size with 20 % more samples", lines)


def _ratio_table(found: Found) -> str:
    lines = []
    for is_short, name in ((True, "of Muon after the short training"), (False, "of AdamW after the long training")):
        ratios = {size: samples_ratio(found, size, is_short=is_short) for size in found.sizes("adamw", "long")}
        lines.append({"loss": name, **{f"{size:,}": shown(ratio) for size, ratio in ratios.items() if ratio}})
    return _table("Samples of AdamW / those of Muon for the same loss", lines)


def _regret_tables(found: Found) -> Iterator[str]:
    """One for each optimizer, in nats."""
    for optimizer in found.optimizers():
        by_rule: dict[str, Cells] = {}
        for length in found.lengths():
            for (rule, size), regret in sorted(regrets(found, optimizer, length).items(), key=lambda one: one[0][1]):
                cells = by_rule.setdefault(rule, {"rule": rule})
                cells[f"{found.samples[length]:,}: {size:,}"] = regret.shown() if regret.half else "best"
        order = [rule for rule in dict.fromkeys((*PLAIN, *found.rules(optimizer))) if rule in by_rule]
        lines = [by_rule[rule] for rule in order]
        yield _table(f"Regret of rules for {NAMES[optimizer]}", lines)


def _untuned_table(found: Found) -> str:
    """Regrets of rules at the next batch size above the reference, from a learning rate that is too low."""
    lines = []
    for optimizer, length in product(found.optimizers(), found.lengths()):
        size = min((size for size in found.sizes(optimizer, length) if size > found.reference), default=0)
        for below in (1, UNTUNED):
            of_rules = regrets(found, optimizer, length, below=below)
            line = {"optimizer": NAMES[optimizer], "samples": f"{found.samples[length]:,}", "batch size": f"{size:,}"}
            line["reference learning rate"] = "tuned" if below == 1 else f"that / {below}"
            for rule in PLAIN:
                if (rule, size) in of_rules:
                    line[rule] = of_rules[rule, size].shown() if of_rules[rule, size].half else "best"
            lines.append(line)
    return _table("Regret from a reference learning rate that is too low", lines)


def claims(found: Found) -> list[results.Claim]:
    """What papers say, where these runs can say it, too."""
    made = []
    for length in found.lengths():
        beyond = [one for one in exponents(found, "adamw") if one.length == length]
        if beyond:
            last = beyond[-1]
            what = f"exponent from {last.begin} to {last.end}, beyond the peak"
            made.append(results.Claim(f"adamw {length}", what, "surge: below 0", last.exponent.value, -math.inf, 0.0))
        peak, measured = peak_of_surge(found, "adamw", length), found.noise_scale("adamw", length)
        if peak and measured:
            what = "peak of the best lr / noise scale"
            made.append(results.Claim.near(f"adamw {length}", what, 1.0, peak[0] / measured, within=0.5))
        sizes = {optimizer: efficient_size(found, optimizer, length) for optimizer in ("adamw", "muon")}
        if sizes["adamw"] and sizes["muon"]:
            ratio = sizes["muon"][0] / sizes["adamw"][0]
            what = "batch size with 20 % more samples / AdamW's"
            made.append(results.Claim(f"muon {length}", what, "larger (Shah et al. 2025)", ratio, 1.0, math.inf))
        size = 4 * found.reference
        for rule, optimizer in (("adam", "adamw"), ("timescale", "adamw"), ("muon", "muon")):
            regret = regrets(found, optimizer, length).get((rule, size))
            if regret:
                what = "regret at 4 times the batch size, nats"
                made.append(results.Claim(f"{rule} {length}", what, "0", regret.value, -math.inf, 0.02))
        for (arm, size), one in betas(found, length).items():
            if arm == "beta2 half-life" and size < found.reference:
                what = f"loss − that of fixed betas at {size}, nats"
                source = "below 0 (Marek et al. 2025)"
                made.append(results.Claim("β2 half-life", what, source, one.value, -math.inf, 0.005))
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

    lengths, sizes = found.lengths(), sorted({cell.batchsize for cell in found.cells()})
    figure, panels = plt.subplots(len(lengths), 4, figsize=(15, 3.7 * len(lengths)), squeeze=False, sharex=True)
    for row, length in zip(panels, lengths, strict=True):
        for color, optimizer in zip(("C0", "C2", "C3"), NAMES, strict=True):
            _draw_best(found, row[0], optimizer, length, color)
            known = found.sizes(optimizer, length)
            losses = [found.best_loss(Cell(optimizer, "constant", length, size)) for size in known]
            row[1].plot(known, losses, color=color, marker="o", label=NAMES[optimizer])
        for axes, optimizer in zip(row[2:], ("adamw", "muon"), strict=True):
            _draw_regrets(found, axes, optimizer, length)
        samples = f"{found.samples[length]:,} samples"
        row[0].set(yscale="log", title=f"best learning rate, {samples} (dotted: surge)")
        row[1].set(title=f"loss there, nats per byte, {samples}")
        for axes in row:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axes.grid(alpha=0.2)
            axes.title.set_fontsize(9)
    for axes in panels[0, 1:]:
        axes.legend(fontsize=7)
    for axes in panels[-1]:
        axes.set_xlabel("batch size, windows of 256 bytes")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def _draw_best(found: Found, axes: Any, optimizer: str, length: str, color: str) -> None:
    """The best learning rates; dotted, what surge predicts; its peak, a triangle, is at the noise scale."""
    sizes = found.sizes(optimizer, length)
    optima = [found.optimum(Cell(optimizer, "constant", length, size)) for size in sizes]
    lrs = [2 ** optimum[0] if optimum else math.nan for optimum in optima]
    factor = 2 ** half_width(*found.optimum_spread(optimizer), len(found.seeds))
    errors = [[lr * (1 - 1 / factor) for lr in lrs], [lr * (factor - 1) for lr in lrs]]
    axes.errorbar(sizes, lrs, errors, color=color, marker="o", label=NAMES[optimizer])
    noise_scale = found.noise_scale(optimizer, length)
    if noise_scale and found.reference in sizes:
        at_reference = lrs[sizes.index(found.reference)]
        fine = [sizes[0] * 2 ** (power / 4) for power in range(4 * round(math.log2(sizes[-1] / sizes[0])) + 1)]
        predicted = [at_reference * surge(noise_scale, size, found.reference) for size in fine]
        axes.plot(fine, predicted, color=color, linestyle=":", linewidth=1)
        peak = at_reference * surge(noise_scale, noise_scale, found.reference)
        axes.plot([noise_scale], [peak], color=color, marker="^")


def _draw_regrets(found: Found, axes: Any, optimizer: str, length: str) -> None:
    points: dict[str, list[tuple[int, float]]] = {}
    for (rule, size), regret in regrets(found, optimizer, length).items():
        points.setdefault(rule, []).append((size, regret.value))
    styles = {"constant": "C7", "root": "C1", "linear": "C4", "surge": "C5", "adamscale": "C9", "timescale": "C8"}
    for rule, of_sizes in points.items():
        color, is_dashed = styles.get(rule, "C2" if rule == "muon" else "C0"), rule == "adam:half-life"
        axes.plot(
            *zip(*sorted([*of_sizes, (found.reference, 0.0)]), strict=True),
            color=color,
            linestyle="--" if is_dashed else "-",
            marker=".",
            label=rule,
        )
    axes.axhline(0.0, color="black", linewidth=0.5)
    axes.set(ylim=(-0.15, 1.5), title=f"{NAMES[optimizer]}: regret of rules, {found.samples[length]:,} samples")
