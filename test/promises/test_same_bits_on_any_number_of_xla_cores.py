"""Promise: in exact mode the weights are bitwise equal on any number of (virtual) XLA cores."""

import functools

import exact_on_xla
import pytest
from exact_on_xla import FIRST, LATER, LONG, RUNS

pytestmark = pytest.mark.xla

each_run = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in RUNS]
)


@pytest.fixture(scope="module")
def results_on(on_xla, request):
    names = [name for name in RUNS if name not in LONG or "long" in request.config.option.markexpr]
    return functools.cache(lambda cores: on_xla(cores, exact_on_xla.run_all, names, is_optimized=True))


@each_run
@pytest.mark.parametrize("cores", [4, *(pytest.param(cores, marks=pytest.mark.long) for cores in (2, 8))])
def test_after_every_step_the_weights_are_those_of_one_core(results_on, cores, name):
    expected = results_on(1)[0][name]
    assert len(results_on(cores)) == cores
    for result in results_on(cores):
        assert result[name]["digests"] == expected["digests"]
        assert result[name]["factor"] == expected["factor"]
    num_steps = len(FIRST) + len(LATER)
    assert len(expected["digests"]) == num_steps
    assert len(set(expected["digests"])) >= num_steps - 1  # all minibatches of one step may have weight 0


@pytest.mark.parametrize("cores", [4, pytest.param(2, marks=pytest.mark.long)])
def test_wide_contractions_convolutions_and_attention_have_the_same_bits(results_on, cores):
    expected = results_on(1)[0]["wide"]
    assert len(set(expected)) == 3
    assert [result["wide"] for result in results_on(cores)] == [expected] * cores


@each_run
@pytest.mark.parametrize("cores", [1, 4, pytest.param(2, marks=pytest.mark.long)])
def test_later_steps_do_not_compile(results_on, cores, name):
    # a core may already be in the next run: the first one to read the counter has read it before that
    counts = [result[name]["programs"] for result in results_on(cores)]
    assert min(count[-1] for count in counts) <= max(count[len(FIRST) - 1] for count in counts)
