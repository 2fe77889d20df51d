"""Noise: estimates against true values, and the gain against published numbers."""

import numpy as np
import pytest
from known_gains import GAIN_OF_TWO_STEPS, TWO_STEPS, with_known_gains

from variable_batch_size.rules.noise import Noise, NoiseAverage


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
    average = NoiseAverage(starts_with_mean=True)
    for _ in range(10):
        average.add(Noise(0.0, 0.0), scale=100.0)  # remembers 10 steps
    average.add(Noise(1.0, 1.0), scale=100.0)
    assert average.noise.variance == pytest.approx(0.1)


def test_at_scale_1000_only_the_latest_step_counts():
    average = NoiseAverage()
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
    average = NoiseAverage()
    average.add(Noise(1.0, 5.0), scale=500.0)
    average.add(Noise(3.0, 2.0), scale=500.0)
    # weights 1/4 and 1/2 of what was seen
    assert vars(average.noise) == pytest.approx({"variance": 7 / 3, "square_norm": 3.0})
    assert average.state_dict() == {"variance": 1.75, "square_norm": 2.25, "weight": 0.75, "count": 2}


def test_decay_is_not_negative_beyond_scale_1000():
    average = NoiseAverage()
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
    for n in rng.integers(2, 65, 12_000):
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
