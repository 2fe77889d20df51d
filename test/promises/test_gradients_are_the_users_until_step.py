"""Promise: changes to ``p.grad`` between backward() and step() apply to that minibatch's gradient."""

import pytest
import torch
import user_programs as programs
from hypothesis import given, settings
from hypothesis import strategies as st

import variable_batch_size as vbs

DEEDS_ON_XLA = ["twice", "clamped", "without_head", "assigned", "hooked"]
"""One change for an entire program each, because all XLA cores must do the same."""


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_weights_equal_those_of_a_plain_loop_for_any_gradient_modification(seed):
    program = programs.draw(seed)
    weights, _ = programs.run(program)
    assert programs.largest_difference(weights, programs.run_plainly(program)) < 1e-6


@pytest.mark.parametrize(
    ("cores", "number"), [(2, 5), (3, 5), *(pytest.param(cores, 30, marks=pytest.mark.long) for cores in (2, 3))]
)
def test_same_on_several_processes(on_cores, cores, number):
    drawn = [programs.draw(seed) for seed in range(100 * cores, 100 * cores + number)]
    expected = [programs.run_plainly(program) for program in drawn]
    for results in on_cores(cores, programs.run_many, drawn, "gloo"):
        for program, (weights, _), plain in zip(drawn, results, expected, strict=True):
            assert programs.largest_difference(weights, plain) < 1e-6, program


@pytest.mark.xla
def test_same_on_virtual_xla_cores(on_xla):
    drawn = [
        programs.draw(seed, deeds=[deed], events=["evaluate", "zero", "leave"])
        for seed, deed in enumerate(DEEDS_ON_XLA)
    ]
    expected = [programs.run_plainly(program) for program in drawn]
    for results in on_xla(2, programs.run_many, drawn, "xla"):
        for program, (weights, _), plain in zip(drawn, results, expected, strict=True):
            assert programs.largest_difference(weights, plain) < 1e-4, program


def test_adascale_measures_the_gradient_that_step_accumulates(on_cores):
    """The same gains on two processes as in one, for any gradient modification."""
    drawn = [programs.draw(seed, events=["evaluate"]) for seed in range(5)]
    alone = [programs.run(program, rule=vbs.rules.AdaScaleRule()) for program in drawn]
    for results in on_cores(2, adascale_runs, drawn):
        for (weights, gains), (expected, expected_gains) in zip(results, alone, strict=True):
            assert gains == pytest.approx(expected_gains, rel=1e-9)
            assert programs.largest_difference(weights, expected) < 1e-9


def adascale_runs(drawn):
    return [programs.run(program, rule=vbs.rules.AdaScaleRule()) for program in drawn]


def test_programs_cover_all_modifications():
    drawn = [programs.draw(seed) for seed in range(60)]
    assert {deed for program in drawn for deed in program.deeds} == set(programs.DEEDS)
    assert {event for program in drawn for event in program.events.values()} == set(programs.EVENTS)
    assert {program.is_adam for program in drawn} == {True, False}
    assert torch.tensor([len(set(program.sizes)) for program in drawn]).min() > 2
