"""Goodput: the closed form against a search, and the model against the numbers of AdaptDL."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import variable_batch_size as vbs
from variable_batch_size.policies.autoscale import Goodput, gain


def test_gain_is_that_of_the_noise():
    for size, ref in ((400, 100), (32, 128), (128, 128)):
        expected = vbs.rules.Noise(variance=300.0, square_norm=2.0).gain(size, ref)
        assert gain(size, ref_batchsize=ref, noise_scale=150.0) == pytest.approx(expected)
    assert gain(64, ref_batchsize=16, noise_scale=0.0) == 1.0
    assert gain(64, ref_batchsize=16, noise_scale=math.inf) == 4.0


@settings(max_examples=120, deadline=None)
@given(
    cores=st.integers(1, 20),
    minibatch_size=st.integers(1, 64),
    noise_scale=st.one_of(st.sampled_from([0.0, math.inf]), st.floats(1e-3, 1e7)),
    accumulating=st.one_of(st.just(0.0), st.floats(1e-6, 10)),
    overhead=st.floats(1e-9, 100),
    first=st.integers(1, 50),
    number=st.integers(1, 400),
)
def test_the_closed_form_finds_what_a_search_finds(
    cores, minibatch_size, noise_scale, accumulating, overhead, first, number
):
    goodput = Goodput(
        cores=cores,
        minibatch_size=minibatch_size,
        ref_batchsize=64,
        noise_scale=noise_scale,
        accumulating=accumulating,
        updating=accumulating + overhead,
    )
    allowed = range(first, first + number)
    assert goodput.best(allowed) in allowed
    assert goodput(goodput.best(allowed)) == pytest.approx(max(map(goodput, allowed)), rel=1e-9)


def test_closed_form_for_millions_of_minibatches():
    shape = {"cores": 8, "minibatch_size": 32, "ref_batchsize": 256, "accumulating": 1.0, "updating": 9.0}
    assert Goodput(noise_scale=1e12, **shape).best(range(1, 10**9)) == 8 * 176777


# ------------------------------------------------------------------- AdaptDL 0.2.11, from its own test's parameters

_DRAWS = np.random.RandomState(0)
MODELS = [vbs.policies.Throughput(*_DRAWS.gamma(2.0, 2.0, [7]).tolist()) for _ in range(10)]
NOISES = [(sqr, var) for sqr, var in (_DRAWS.gamma(2.0, 2.0, [2]).tolist() for _ in range(10))]


def noise_scale(noise, ref):
    square, variance = noise  # AdaptDL's variance is that of a gradient of `ref` samples
    return ref * variance / square


@pytest.mark.parametrize(
    ("machines", "cores", "minibatch", "accumulating", "expected"),
    [
        (1, 1, 16, 0, 0.19533861430705596),
        (1, 2, 8, 1, 0.2946192978035751),
        (2, 4, 12, 3, 0.2533511515694258),
        (4, 8, 24, 4, 0.14164638826336887),
    ],
)
def test_goodput_equals_adaptdl(machines, cores, minibatch, accumulating, expected):
    batch_size = cores * minibatch * (accumulating + 1)
    seconds = MODELS[0].step(machines, cores, minibatch, accumulating + 1)
    worth = gain(batch_size, ref_batchsize=16, noise_scale=noise_scale(NOISES[0], 16))
    assert 16 * worth / seconds == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    ("cores", "goodput", "minibatch"),
    [
        (1, 0.21943028703302228, 128),
        (2, 0.4312621735855993, 64),
        (4, 0.7320670930190109, 64),
        (8, 1.1240940370299224, 64),
        (16, 1.5350804351967329, 64),
    ],
)
def test_best_split_equals_adaptdl(cores, goodput, minibatch):
    best = split_of(MODELS[0], NOISES[0], cores, max_batch_size=1280, min_minibatch=64, max_minibatch=256)
    assert best == (pytest.approx(goodput, rel=1e-6), minibatch, 1)


def split_of(model, noise, cores, **bounds):
    return vbs.policies.best_split(model, noise_scale=noise_scale(noise, 128), ref_batchsize=128, cores=cores, **bounds)


@pytest.mark.parametrize("model", MODELS)
def test_best_split_respects_bounds_that_adaptdl_exceeds(model):
    for noise in NOISES:
        for cores in range(1, 20):
            best = split_of(model, noise, cores, max_batch_size=1280, min_minibatch=64, max_minibatch=256)
            assert 64 <= best.minibatch_size <= 256
            assert 128 <= cores * best.minibatch_size * best.depth <= 1280  # AdaptDL's test allows 1280 + cores · depth
            assert cores > 1 or best.depth > 1 or best.minibatch_size <= 128


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_reference_batch_size_is_split_equally_as_in_adaptdl(cores):
    best = split_of(MODELS[3], NOISES[2], cores, max_batch_size=128, may_accumulate=False)
    assert best[1:] == (128 // cores, 1)


def test_reference_that_cannot_be_split_equally_is_rejected():
    with pytest.raises(
        ValueError, match="no split satisfies all bounds on 3 cores: 128 to 128 samples in total, 1 to 128 in a"
    ):
        split_of(MODELS[3], NOISES[2], 3, max_batch_size=128, may_accumulate=False)


def test_one_core_alone_does_not_communicate():
    model = MODELS[1]
    assert model.updating(1, 1, 24) == model.accumulating(24)
    assert model.step(1, 1, 24, 3) == pytest.approx(3 * model.accumulating(24))


def test_a_power_of_short_times_does_not_vanish():
    short = vbs.policies.Throughput(1e-40, 1e-40, 1e-40, 1e-40, 1e-40, 1e-40, 10.0)
    assert 3e-40 < short.updating(1, 2, 2) < 4e-40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_scale": math.nan}, "`noise_scale` must be a non-negative number, got nan"),
        ({"noise_scale": -50.0}, "`noise_scale` must be a non-negative number, got -50.0"),
        ({"cores": 0}, "`cores` must be a positive integer, got 0"),
        ({"max_minibatch": 0}, "`max_minibatch` must be a positive integer, got 0"),
    ],
)
def test_invalid_arguments_of_best_split_are_rejected(change, message):
    options = {"noise_scale": 100.0, "ref_batchsize": 128, "cores": 2, "max_batch_size": 1024, **change}
    with pytest.raises(ValueError, match=message):
        vbs.policies.best_split(MODELS[0], **options)
