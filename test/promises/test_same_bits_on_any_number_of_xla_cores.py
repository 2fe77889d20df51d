"""Promise: in exact mode the weights are the same to the last bit on any number of XLA cores, virtual ones here."""

import functools

import exact_on_xla
import pytest
from exact_on_xla import FIRST, LATER, RUNS

import variable_batch_size as vbs

pytestmark = pytest.mark.xla

each_run = pytest.mark.parametrize("name", RUNS)


@functools.cache
def results_on(cores):
    return vbs.launch(exact_on_xla.run_all, cores=cores, backend="xla")


@each_run
@pytest.mark.parametrize("cores", [2, 4, 8])
def test_after_every_step_the_weights_are_those_of_one_core(cores, name):
    expected = results_on(1)[0][name]
    assert len(results_on(cores)) == cores
    for result in results_on(cores):
        assert result[name]["digests"] == expected["digests"]
        assert result[name]["factor"] == expected["factor"]
    num_steps = len(FIRST) + len(LATER)
    assert len(expected["digests"]) == num_steps
    assert len(set(expected["digests"])) >= num_steps - 1  # of one step the minibatches may all weigh nothing


@each_run
@pytest.mark.parametrize("cores", [1, 2])
def test_later_steps_compile_nothing(cores, name):
    # a core may be ahead of another, in the next run: the first to read the count has read it before that
    counts = [result[name]["programs"] for result in results_on(cores)]
    assert min(count[-1] for count in counts) <= max(count[len(FIRST) - 1] for count in counts)
