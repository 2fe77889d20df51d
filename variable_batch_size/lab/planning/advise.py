"""advise: the number of cores and the batch size to train with, from measured times and measured noise.

On a given number of cores, the cost is proportional to the time, so one batch size is both the fastest and the
cheapest. Among these choices, one for each number of cores, the advice is the one with the smallest product of time and
cost: a choice that is twice as fast is worth twice the cost.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from variable_batch_size.checks import check_positive
from variable_batch_size.lab.planning.profile import EXTRAPOLATED, INTERPOLATED, MEASURED, Profile
from variable_batch_size.lab.planning.reports import choice, counted, duration, fastest, profile_warnings, verdict
from variable_batch_size.lab.planning.simulate import Availability, NoiseCurve, Runs, Simulation, simulate
from variable_batch_size.policies.builtin import parse_policy


class NoiseBand(NamedTuple):
    """The noise scale over progress, and the ends of its 95 % interval over seeds."""

    low: NoiseCurve
    mean: NoiseCurve
    high: NoiseCurve

    def text(self, point: int) -> str:
        """The noise scale at one of the points of the curves, with its interval."""
        low, mean, high = (f"{curve.noise_scales[point]:,.3g}" for curve in self)
        return f"{mean} samples (95 % interval {low} to {high})"


class Advice(NamedTuple):
    """The best batch size on each number of cores, as text with its simulated run, and the choice among them."""

    best: Runs
    taken: tuple[str, Simulation]
    ends: tuple[tuple[str, Simulation], ...]  # the choices at both ends of the interval of the noise
    range: tuple[float, float]  # the shortest and the longest time of `taken` over that interval, in seconds
    sizes: tuple[int, ...]  # all batch sizes that were simulated, ascending
    progress: float  # of the training, in steps at the reference batch size


def core_numbers(most: int) -> list[int]:
    """1, 2, 4 and so on, up to and including a largest number.

    >>> core_numbers(8), core_numbers(6)
    ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    check_positive(most=most)
    return [*(2**k for k in range(most.bit_length()) if 2**k < most), most]


def advise(
    profile: Profile,
    noise: NoiseBand,
    *,
    cores: Iterable[int],
    minibatch_size: int,
    ref_batchsize: int,
    num_samples: int,
    max_batch_size: int,
    price: float | None = None,
) -> Advice:
    """Simulate constant batch sizes on several numbers of cores, and choose.

    Args:
        profile: the times of minibatches; it must extrapolate for cores beyond twice the measured ones.
        noise: the noise scale.
        cores: the numbers of cores to choose from.
        minibatch_size: samples per forward and backward pass of one core.
        ref_batchsize: the smallest batch size, for which the optimizer's settings were chosen.
        num_samples: to train on at `ref_batchsize`; other batch sizes train until the same progress.
        max_batch_size: the largest batch size; the choices are the smallest one, doubled repeatedly.
        price: of a device-hour; None for no costs.
    """
    smallest = -(-ref_batchsize // minibatch_size) * minibatch_size
    if max_batch_size < smallest:
        rule = f"at least {smallest}, the reference batch size in whole minibatches"
        raise ValueError(f"`max_batch_size` must be {rule}, got {max_batch_size}")
    sizes = tuple(smallest * 2**k for k in range((max_batch_size // smallest).bit_length()))

    def run(size: int, number: int, curve: NoiseCurve) -> tuple[str, Simulation]:
        return str(size), simulate(
            parse_policy(str(size)),
            profile=profile,
            noise=curve,
            availability=Availability.constant(number),
            minibatch_size=minibatch_size,
            ref_batchsize=ref_batchsize,
            progress=num_samples / ref_batchsize,
            price=price,
        )

    numbers = sorted(set(cores))
    best = [[fastest([run(size, number, curve) for size in sizes]) for number in numbers] for curve in noise]
    low, mean, high = map(_best_of, best)
    seconds = [run(int(mean[0]), mean[1].moments[0].cores, curve)[1].seconds for curve in noise]
    return Advice(best[1], mean, (low, high), (min(seconds), max(seconds)), sizes, num_samples / ref_batchsize)


def _best_of(runs: Runs) -> tuple[str, Simulation]:
    return min(runs, key=lambda item: item[1].seconds * item[1].device_seconds)


def advice_report(advice: Advice, profile: Profile, noise: NoiseBand, *, doubts: Sequence[str] = ()) -> str:
    """The advice as a paragraph: the noise, the origin of the times, the fastest, the cheapest, and which to take.

    `doubts` are reasons not to trust the times, in addition to what the profile shows.
    """
    product = f"the smallest product of time and {'device time' if advice.taken[1].cost is None else 'cost'}"
    sentences = [
        _noise_sentence(noise, advice.progress),
        *_times_sentences(advice, profile),
        *(f"The times are doubtful: {doubt}." for doubt in (*doubts, *profile_warnings(profile))),
        verdict(advice.best),
        f"Take {choice(*advice.taken)}: of these choices it has {product}.",
        *_doubts(advice),
    ]
    return " ".join(sentences)


def _noise_sentence(noise: NoiseBand, progress: float) -> str:
    steps = [f"{at:,.0f}" for at in noise.mean.progress]
    first = f"The noise scale is {noise.text(0)} after {steps[0]} of {progress:,.0f} steps at the reference batch size"
    last = f", and {noise.text(-1)} after {steps[-1]}" if len(steps) > 1 else ""
    return f"{first}{last}{', where it is assumed to stay' if noise.mean.progress[-1] < progress else ''}."


def _times_sentences(advice: Advice, profile: Profile) -> list[str]:
    most = max(row.cores for row in profile.rows)
    network = "the all-reduce takes no time" if most == 1 else f"the all-reduce is no slower than on {most} cores"
    assumed = f"further cores are as fast{f', and {network}' if most <= 2 else ''}"
    words = {
        MEASURED: "were measured, for training steps alone",
        INTERPOLATED: "are interpolated",
        EXTRAPOLATED: f"are a guess, extrapolated on the assumption that {assumed}",
    }
    numbers = {basis: [run.moments[0].cores for _, run in advice.best if run.basis == basis] for basis in words}
    return [f"Times on {_cores(numbers[basis])} {words[basis]}." for basis in words if numbers[basis]]


def _cores(numbers: list[int]) -> str:
    *before, last = numbers
    return f"{', '.join(map(str, before))}{' and ' if before else ''}{counted(last, 'core')}"


def _doubts(advice: Advice) -> list[str]:
    """How far the choice depends on the noise, on guessed times, and on the largest batch size."""
    name, run = advice.taken
    measured = [item for item in advice.best if item[1].basis == MEASURED]
    shortest, longest = map(duration, advice.range)
    takes = f"it takes {shortest}" if shortest == longest else f"it takes {shortest} to {longest}"
    different = [
        f"batch size {int(other):,} on {counted(end.moments[0].cores, 'core')} at the {which} end"
        for which, (other, end) in zip(("lower", "upper"), advice.ends, strict=True)
        if (other, end.moments[0].cores) != (name, run.moments[0].cores)
    ]
    same = f"the choice would be {' and '.join(different)}" if different else "the choice is the same"
    found = [f"Over the interval of the noise scale {takes}, and {same}."]
    if run.basis != MEASURED and measured:
        best = choice(*_best_of(measured))
        found.append(
            f"Its times are a guess: measure them before you rent. The best choice with measured times is {best}."
        )
    if int(name) == advice.sizes[-1] and len(advice.sizes) > 1:
        found.append("It has the largest batch size that was considered (--max-batch-size).")
    return found
