"""Promise: XLA's SPMD mode gives the weights of one plain process on any number of devices, with five graphs."""

import functools
import json

import pytest
import spmd_runs
import torch
from sharded_models import Normed, largest_difference
from spmd_runs import SIZES, Small

pytestmark = pytest.mark.xla

# number of virtual devices, sharding, model, runs; "nan" has the linear rule, "linear-momentum" clips as "root" does
CASES = [
    *((4, "laid_out", Small, name) for name in ("adascale", "adam", "weighted", "nan")),
    *((4, "wrapped", Small, name) for name in ("adascale", "linear-momentum")),
    *((4, "laid_out", Normed, name) for name in ("adascale",)),
    *((8, "laid_out", Small, name) for name in ("linear",)),
    *((8, "wrapped", Small, name) for name in ("root",)),
    *((8, "wrapped", Small, name) for name in ("adascale",)),
    *((8, "laid_out", Normed, name) for name in ("adascale", "linear-momentum")),
]
each_case = pytest.mark.parametrize(
    ("devices", "way", "kind", "name"),
    [pytest.param(*case, marks=pytest.mark.long if case[0] > 4 else ()) for case in CASES],
)


@pytest.fixture(scope="module")
def found(on_xla):
    """All runs on a number of devices, in one launch."""

    @functools.cache
    def run(devices):
        (results,) = on_xla(devices, spmd_runs.all_of, [case[1:] for case in CASES if case[0] == devices], spmd=True)
        return results

    return run


@functools.cache
def expected(kind, name):
    return spmd_runs.train("plain", kind, name)


@each_case
def test_weights_and_noise_are_those_of_one_plain_process(found, devices, way, kind, name):
    result, plain = found(devices)[way, kind.__name__, name], expected(kind, name)
    assert largest_difference(result["state"], plain["state"]) < 1e-5
    assert result["updates"] == plain["updates"]
    assert result["updates"].count(False) == (name == "nan")
    torch.testing.assert_close(torch.tensor(result["noise"]), torch.tensor(plain["noise"]), rtol=1e-4, atol=1e-6)


@each_case
def test_at_most_five_graphs_are_compiled_and_none_after_the_first_steps(found, devices, way, kind, name):
    programs = found(devices)[way, kind.__name__, name]["programs"]
    assert len(programs) == spmd_runs.NUM_EPOCHS * len(SIZES)
    assert programs[-1] <= 5 + (name == "nan")  # one more if a step is skipped
    assert name == "nan" or programs[-1] == programs[2]


@each_case
def test_sums_and_momentum_are_sharded_like_their_parameters(found, devices, way, kind, name):
    result = found(devices)[way, kind.__name__, name]
    assert all(result["layouts"])
    assert any(layout.startswith("{devices=") for layout in result["layouts"]) == (way != "copied")
    assert result["layouts of sums"] == result["layouts of moments"] == result["layouts"]


@pytest.mark.parametrize("devices", [3, pytest.param(5, marks=pytest.mark.long)])
def test_weights_are_those_of_one_plain_process_for_any_trace(on_xla, devices):
    names = ("linear", "adascale", "root", "adascale")
    (results,) = on_xla(devices, spmd_runs.all_with_any_sizes, "laid_out", Normed, names, spmd=True)
    for result, plain in zip(results, spmd_runs.all_with_any_sizes("plain", Normed, names), strict=True):
        assert largest_difference(result["state"], plain["state"]) < 1e-5
        assert result["updates"] == plain["updates"]
        torch.testing.assert_close(torch.tensor(result["noise"]), torch.tensor(plain["noise"]), rtol=1e-4, atol=1e-6)
        assert result["programs"][-1] <= 5


def test_run_resumes_in_one_plain_process_and_back(on_xla, tmp_path):
    uninterrupted, _, _ = spmd_runs.go(tmp_path / "whole", "plain", Small, "adascale")
    stopped = tmp_path / "stopped"
    spmd_runs.go(stopped, "plain", Small, "adascale", until=3)
    meanwhile = {"asynchronous": True}
    turns = [("laid_out", 5, {}), ("wrapped", 7, meanwhile), ("laid_out", 9, meanwhile)]
    (layouts,) = on_xla(4, spmd_runs.in_turns, stopped, Small, "adascale", turns, spmd=True)
    for of_momentum, of_parameters in layouts:
        assert of_momentum == of_parameters
        assert any(layout.startswith("{devices=") for layout in of_momentum)
    state, _, _ = spmd_runs.go(stopped, "plain", Small, "adascale")
    assert largest_difference(state, uninterrupted) < 1e-5
    records = [json.loads(line) for line in (stopped / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [3, 6, 9, 12]


def test_unsupported_options_raise(on_xla):
    (said,) = on_xla(2, spmd_runs.refusals, spmd=True)
    assert said["exact"].startswith("`exact` must be False in XLA's SPMD mode")
    assert said["format"] == '`format` must be "file" in XLA\'s SPMD mode, got "sharded"'
    assert said["group"].startswith("`process_group` must be None on XLA")
    assert said["threads"].startswith("XLA_USE_SPMD must not be set if each device is a core")
