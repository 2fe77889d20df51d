"""Autoscale where cores and machines change, driven step by step with exact or noisy times, against an oracle."""

import math
import random

import pytest

import variable_batch_size as vbs
from variable_batch_size.policies.autoscale import Goodput, gain
from variable_batch_size.policies.timing import PolicyTiming

SIZES = {"minibatch_size": 32, "ref_batchsize": 64}
NOISE_SCALE, LARGEST = 5000.0, 8192
UPDATING = {1: 1.05, 2: 2.0, 4: 2.5, 8: 3.0, 15: 3.4, 16: 3.5}  # by number of cores


def goodput_on(cores, accumulating, updating):
    return Goodput(cores=cores, noise_scale=NOISE_SCALE, accumulating=accumulating, updating=updating, **SIZES)


def run(cores_at, times_at, num_steps=2000, jitter=0.0, error=0.0):
    """Seconds of the run relative to those of an oracle for the same progress, and the batch sizes of all steps."""
    draw, timing = random.Random(0), PolicyTiming(vbs.Autoscale(max_batch_size=LARGEST))
    seconds, best, sizes, rows = 0.0, 0.0, [], []
    for step in range(num_steps):
        cores = cores_at(step)
        if step and cores != cores_at(step - 1):
            timing.restart(sizes[-1])
            rows.clear()
        while number := timing.num_rows(len(rows)):
            noise_scale = NOISE_SCALE * math.exp(draw.gauss(0, error)) if sizes else None
            situation = vbs.policies.Situation(cores=cores, noise_scale=noise_scale, **SIZES)
            rows += [timing.answer(situation).batch_size] * number
        sizes.append(rows.pop(0))
        depth = -(-sizes[-1] // (SIZES["minibatch_size"] * cores))
        accumulating, updating = times_at(step, cores)
        took = (depth - 1) * accumulating + updating
        timing.note_steps(sizes[-1], cores, took * math.exp(draw.gauss(0, jitter)), depth=depth)
        goodput = goodput_on(cores, accumulating, updating)
        seconds += took
        best += gain(sizes[-1], ref_batchsize=64, noise_scale=NOISE_SCALE) / goodput(goodput.best(range(2, 257)))
    return seconds / best, sizes


def constant(step, cores):
    return 1.0, UPDATING[cores]


@pytest.mark.parametrize("cores", [(1, 2), (16, 15), (16, 1), (4, 8, 2), (8,)])
@pytest.mark.parametrize(("jitter", "error"), [(0.0, 0.0), (0.2, 0.3)])
def test_every_fifty_steps_other_cores(cores, jitter, error):
    ratio, _ = run(lambda step: cores[step // 50 % len(cores)], constant, jitter=jitter, error=error)
    assert 1 <= ratio < 1.05


def test_each_number_of_cores_has_its_own_size_from_then_on():
    _, sizes = run(lambda step: 15 + step // 50 % 2, constant)
    assert {tuple(sizes[first : first + 50]) for first in range(1000, 2000, 100)} == {(2400,) * 50}
    assert {tuple(sizes[first : first + 50]) for first in range(1050, 2000, 100)} == {(2560,) * 50}


@pytest.mark.parametrize("cores", [(8,), (16, 15), (16, 1)])
@pytest.mark.parametrize(
    "times_at",
    [
        lambda step, cores: (10.0, 10 * UPDATING[cores]) if 500 <= step < 560 else constant(step, cores),
        lambda step, cores: (1.0, 4 * UPDATING[cores]) if step >= 500 else constant(step, cores),
        lambda step, cores: (1.0, 1 + (UPDATING[cores] - 1) / 4) if step >= 500 else constant(step, cores),
        lambda step, cores: (2.0, 1 + UPDATING[cores]) if step >= 500 else constant(step, cores),
    ],
    ids=["slow for a while", "slower network", "faster network", "slower computation"],
)
def test_other_machines(cores, times_at):
    ratio, _ = run(lambda step: cores[step // 50 % len(cores)], times_at)
    assert 1 <= ratio < 1.06
