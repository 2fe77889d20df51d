"""Noise: estimates against true values, and the gain against published numbers."""

import math

import numpy as np
import pytest
from known_gains import GAIN_OF_TWO_STEPS, TWO_STEPS, with_known_gains

from variable_batch_size.rules.noise import Noise, NoiseAverage, NoiseMeter, NoiseSpread
from variable_batch_size.rules.rule import Norms, Step


def linear_norms(inputs):
    """L and T for Linear(2, 2) with the loss Σ outputs: a sample's gradient is its input twice, and 1 for each bias."""
    gradients = np.array([[*x, *x, 1, 1] for x in inputs])
    return (gradients**2).sum(1).mean(), (gradients.mean(0) ** 2).sum()


@with_known_gains
def test_known_gains_of_two_samples(inputs, gain):
    noise = Noise.from_norms(*linear_norms(inputs), batch_size=2, num_minibatches=2)
    assert noise.gain(2, 1) == pytest.approx(gain, rel=1e-7)


def test_four_orthogonal_gradients_have_gain_four_and_identical_ones_gain_one():
    orthogonal = Noise.from_norms(1.0, 1 / 4, batch_size=4, num_minibatches=4)
    assert orthogonal.gain(4, 1) == pytest.approx(4)
    identical = Noise.from_norms(1.0, 1.0, batch_size=4, num_minibatches=4)
    assert identical.gain(4, 1) == pytest.approx(1)


def test_two_steps_average_to_the_known_gain():
    average = NoiseAverage()
    for inputs in TWO_STEPS:
        average.add(Noise.from_norms(*linear_norms(inputs), batch_size=2, num_minibatches=2), scale=2.0)
    assert average.noise.gain(2, 1) == pytest.approx(GAIN_OF_TWO_STEPS, rel=1e-6)


def test_starts_with_mean_is_the_plain_mean_at_first():
    average = NoiseAverage(starts_with_mean=True)
    for variance in (1.0, 2.0, 6.0):
        average.add(Noise(variance, 1.0), scale=4.0)
    assert average.noise.variance == pytest.approx(3.0)
    assert average.noise.square_norm == pytest.approx(1.0)


def test_starts_with_mean_ends_after_the_span_of_the_average():
    average = NoiseAverage(starts_with_mean=True, smoothing="paper")
    for _ in range(10):
        average.add(Noise(0.0, 0.0), scale=100.0)  # remembers 10 steps
    average.add(Noise(1.0, 1.0), scale=100.0)
    assert average.noise.variance == pytest.approx(0.1)


def test_in_the_paper_only_the_latest_step_counts_at_scale_1000():
    average = NoiseAverage(smoothing="paper")
    average.add(Noise(5.0, 5.0), scale=1.0)
    average.add(Noise(1.0, 2.0), scale=1000.0)
    assert average.noise == Noise(1.0, 2.0)


def test_an_average_is_saved_and_loaded():
    average, other = NoiseAverage(), NoiseAverage()
    average.add(Noise(5.0, 4.0), scale=3.0)
    other.load_state_dict(average.state_dict())
    for each in (average, other):
        each.add(Noise(1.0, 2.0), scale=8.0)
    assert average.noise == other.noise


@pytest.mark.parametrize("batch_size", [1, 16, 128, 129, 10**6])
@pytest.mark.parametrize(
    "noise", [Noise(0.0, 0.0), Noise(-3.0, 2.0), Noise(3.0, -2.0), Noise(-1.0, -1.0), Noise(5.0, 1.0)]
)
def test_the_gain_is_finite_and_between_one_and_the_scale(noise, batch_size):
    scale = batch_size / 128
    assert min(1, scale) * (1 - 1e-12) <= noise.gain(batch_size, 128) <= max(1, scale) * (1 + 1e-12)


def test_the_gain_at_the_reference_is_exactly_one():
    assert Noise(7.3, 0.2).gain(128, 128) == 1.0


def test_noise_scale():
    assert Noise(variance=100.0, square_norm=0.5).scale == 200
    assert Noise(1.0, 0.0).scale == float("inf")


def test_negative_variance_counts_as_zero():
    assert Noise(-1.0, 2.0).scale == 0
    assert Noise(0.5, 1.0).scale == 0.5
    assert Noise(-1.0, 2.0).gain(256, 128) == 1


def test_negative_square_norm_counts_as_zero():
    assert Noise(2.0, -1.0).gain(256, 128) == 2
    assert Noise(2.0, -1.0).scale == float("inf")


def test_noise_of_unequal_minibatches_by_hand():
    # sizes 1 and 3, ‖g_i‖² 8 and 4: Σ w/b = 1/4 + 1/4, Σ w²/b = 1/16 + 3/16, L = 8/4 + 3 = 5,
    # V = (5 − 3)/(1/2 − 1/4), G² = 3 − 8/4
    found = Noise.from_norms(5.0, 3.0, batch_size=4, num_minibatches=2)
    assert vars(found) == pytest.approx({"variance": 8.0, "square_norm": 1.0})


def test_decay_by_hand():
    average = NoiseAverage(smoothing=0.5)
    average.add(Noise(1.0, 5.0), scale=500.0)
    average.add(Noise(3.0, 2.0), scale=500.0)
    # weights 1/4 and 1/2 of what was seen
    assert vars(average.noise) == pytest.approx({"variance": 7 / 3, "square_norm": 3.0})
    assert average.state_dict() == {"variance": 1.75, "square_norm": 2.25, "weight": 0.75, "count": 2}


def test_decay_is_not_negative_beyond_scale_1000():
    average = NoiseAverage(smoothing="paper")
    average.add(Noise(5.0, 5.0), scale=1.0)
    average.add(Noise(1.0, 2.0), scale=3000.0)
    assert average.noise == Noise(1.0, 2.0)


KINDS = {"noise dominated": (0.05, 3.0), "signal dominated": (1.0, 0.5)}


def draw_norms(rng, sizes, weights, *, true_gradient, deviation):
    """‖g_i‖² and ‖Σ w_i g_i‖² of minibatches whose samples have the given mean and deviation in each coordinate."""
    gradients = rng.standard_normal((len(sizes), len(true_gradient)), dtype=np.float32)
    gradients *= (deviation / np.sqrt(sizes, dtype=np.float32))[:, None]
    gradients += true_gradient
    mean = weights.astype(np.float32) @ gradients
    return np.einsum("ij,ij->i", gradients, gradients).tolist(), float(mean @ mean)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_even", [True, False], ids=["equal minibatches", "minibatches weighted by their sizes"])
def test_the_estimates_are_unbiased(kind, is_even):
    size, deviation = KINDS[kind]
    true_gradient = np.full(200, size, dtype=np.float32)
    true = Noise(variance=200 * deviation**2, square_norm=200 * size**2)
    rng = np.random.default_rng(0)
    estimates = []
    for n in rng.integers(2, 65, 4000):
        sizes = np.full(n, 8) if is_even else rng.integers(1, 33, n)
        weights = sizes / sizes.sum()
        squares, square = draw_norms(rng, sizes, weights, true_gradient=true_gradient, deviation=deviation)
        mean_of_squares, batch_size = float(weights @ squares), int(sizes.sum())
        estimates.append(Noise.from_norms(mean_of_squares, square, batch_size=batch_size, num_minibatches=n))
    mean = Noise(np.mean([e.variance for e in estimates]), np.mean([e.square_norm for e in estimates]))
    assert mean.variance == pytest.approx(true.variance, rel=0.01)
    standard_error = np.std([e.square_norm for e in estimates]) / len(estimates) ** 0.5
    assert mean.square_norm == pytest.approx(true.square_norm, abs=3 * standard_error)
    for batch_size in (16, 128, 512):
        assert mean.gain(batch_size, 64) == pytest.approx(true.gain(batch_size, 64), rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_gain_is_correct_at_every_size_while_batch_sizes_jump(kind):
    size, deviation = KINDS[kind]
    true_gradient = np.full(200, size, dtype=np.float32)
    true = Noise(variance=200 * deviation**2, square_norm=200 * size**2)
    rng = np.random.default_rng(1)
    average = NoiseAverage()
    for step, n in enumerate(rng.integers(2, 65, 1500).tolist()):
        squares, square = draw_norms(
            rng, np.full(n, 8), np.full(n, 1 / n), true_gradient=true_gradient, deviation=deviation
        )
        noise = Noise.from_norms(sum(squares) / n, square, batch_size=8 * n, num_minibatches=n)
        average.add(noise, scale=n / 8)
        if step >= 300:
            assert average.noise.gain(8 * n, 64) == pytest.approx(true.gain(8 * n, 64), rel=0.05)


def test_default_decay_remembers_20_steps_at_any_scale():
    average, paper = NoiseAverage(), NoiseAverage(smoothing="paper")
    for variance in range(1, 101):
        for one in (average, paper):
            one.add(Noise(float(variance), 1.0), scale=5000.0)
    weights = 0.95 ** np.arange(99, -1, -1)
    assert average.noise.variance == pytest.approx(weights @ np.arange(1, 101) / weights.sum())
    assert paper.noise.variance == 100.0


def test_smoothing_is_a_number_or_a_function_of_the_scale():
    for smoothing, decay in ((0.25, 0.25), (lambda scale: scale / 16, 0.25), ("paper", 0.996), (None, 0.996)):
        average = NoiseAverage(smoothing=smoothing)
        for variance in (1.0, 2.0):
            average.add(Noise(variance, 1.0), scale=4.0)
        assert average.noise.variance == pytest.approx((decay + 2) / (1 + decay))


@pytest.mark.parametrize("smoothing", [1, 1.0, -0.1, True, "papers", math.nan, [0.5]])
def test_other_kinds_of_smoothing_are_refused(smoothing):
    with pytest.raises(ValueError, match=r"^`smoothing` must be None, 'paper', a number from 0 to below 1, or a funct"):
        NoiseMeter(smoothing=smoothing)


def test_smoothing_by_a_function_without_a_decay_is_refused():
    average = NoiseAverage(smoothing=lambda scale: scale / 2)
    with pytest.raises(ValueError, match=r"^`smoothing` must return a number from 0 to below 1, got 2.0 at scale 4$"):
        average.add(Noise(1.0, 1.0), scale=4.0)


def drawn_noise(rng, *, batch_size=2000, minibatch_size=50, variance=1000.0, square_norm=1.0):
    """The estimate of a step at scale 2000, in 100 dimensions."""
    n = batch_size // minibatch_size
    gradients = (square_norm / 100) ** 0.5 + rng.standard_normal((n, 100)) * (variance / minibatch_size / 100) ** 0.5
    pair = ((gradients**2).sum(1).mean(), (gradients.mean(0) ** 2).sum())
    return Noise.from_norms(*pair, batch_size=batch_size, num_minibatches=n)


def test_gain_at_scale_2000_is_within_5_percent_where_that_of_the_paper_is_noise():
    truth = Noise(1000.0, 1.0).gain(2000, 1)
    rng, meters = np.random.default_rng(0), [NoiseAverage(), NoiseAverage(smoothing="paper")]
    errors = [[], []]
    for step in range(400):
        noise = drawn_noise(rng)
        for average, of_average in zip(meters, errors, strict=True):
            average.add(noise, scale=2000.0)
            if step >= 40:
                of_average.append(abs(average.noise.gain(2000, 1) / truth - 1))
    assert np.mean(np.array(errors[0]) < 0.05) > 0.95
    assert np.mean(np.array(errors[1]) < 0.05) < 0.5


@pytest.mark.parametrize("num_steps", [8, 30])
def test_interval_holds_the_true_noise_scale_in_95_of_100_runs(num_steps):
    rng, hits, means = np.random.default_rng(1), [], []
    for _ in range(200):
        meter = NoiseMeter(smoothing=0.95)
        for _ in range(num_steps):
            noise = drawn_noise(rng, minibatch_size=200)
            # L and T that give this estimate
            pair = Norms(noise.square_norm + noise.variance * 10 / 2000, noise.square_norm + noise.variance / 2000)
            meter.observe(Step(2000, 200, 1), [pair])
        low, high = meter.interval()
        hits.append(low <= 1000.0 <= high)
        means.append(low <= meter.noise().scale <= high)
        gain_low, gain_high = meter.gain_interval(2000, 1)
        assert gain_low <= meter.gain(2000, 1) <= gain_high
    assert np.mean(hits) == pytest.approx(0.95, abs=0.04)
    assert all(means)


def test_interval_by_hand():
    # three estimates that all count the same, at V = 100 and G² = 1 with deviations that cancel in V − φ·G² nowhere
    spread = NoiseSpread(smoothing=lambda scale: 1 - 1 / scale)
    for number, variance in enumerate((80.0, 90.0, 100.0, 110.0, 120.0), start=1):
        spread.add(Noise(variance, 1.0), scale=float(number))  # the plain mean
    deviation = 250**0.5 / 5**0.5  # of the mean
    low, high = spread.interval(Noise(100.0, 1.0))
    assert (low, high) == pytest.approx((100 - 2.776 * deviation, 100 + 2.776 * deviation), rel=0.01)


def test_interval_has_no_end_where_the_square_norm_may_be_zero():
    spread = NoiseSpread()
    for square_norm in (-2.0, 3.0) * 10:
        spread.add(Noise(100.0, square_norm), scale=1.0)
    low, high = spread.interval(Noise(100.0, 0.5))
    assert 0 < low < 200
    assert high == math.inf
    other, high = spread.interval(Noise(100.0, -0.5))
    assert low < other < high == math.inf
    assert all(map(math.isnan, NoiseSpread().interval(Noise(1.0, 1.0))))


def test_cosine_is_that_of_the_norms_of_a_step():
    # n = 4, L = 3, T = 2
    for population in (None, 100):
        meter, step = NoiseMeter(), Step(64, 16, 32, population=population)
        meter.observe(step, [Norms(3.0, 2.0)])
        assert meter.report(step)["cosine"] == pytest.approx((4 * 2 - 3) / (3 * 3))


def test_state_without_a_spread_is_loaded():
    meter, other = NoiseMeter(), NoiseMeter()
    meter.observe(Step(64, 16, 32), [Norms(3.0, 2.0)])
    state = meter.state_dict()
    del state["spread"]  # of an earlier version
    other.load_state_dict(state)
    assert other.noise() == meter.noise()
    assert all(map(math.isnan, other.interval()))
