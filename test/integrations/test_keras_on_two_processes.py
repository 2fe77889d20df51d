"""Keras on two processes, started once: weights, losses and metrics are those of one process."""

import csv

import pytest
import torch
from fresh_process import quick_searches_for_garbage
from torch.testing import assert_close

# from Keras, when it converts a variable to an array
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def all_runs(folder):
    import keras_runs

    with quick_searches_for_garbage():
        return keras_runs.all_runs(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def found(on_new_cores, folder):
    return on_new_cores(2, all_runs, folder, imports=["keras_runs"])


@pytest.fixture(scope="module")
def expected():
    import keras_runs

    return {rule: keras_runs.Session(rule).fit() for rule in keras_runs.RULES}


def check_equal(run, alone):
    assert_close(run["weights"], alone["weights"], **TOLERANCE)
    for name in ("loss", "accuracy"):
        assert_close(run["history"][name], alone["history"][name], rtol=1e-5, atol=0)
    assert_close(torch.tensor(run["seen"]), torch.tensor(alone["seen"]), rtol=1e-5, atol=1e-7)
    assert run["steps"] == alone["steps"]


def test_weights_losses_and_metrics_are_those_of_one_process_with_idle_ranks_and_dropout(found, expected):
    for runs, *_ in found:
        for rule, alone in expected.items():
            check_equal(runs[rule], alone)
        check_equal(runs["lockstep"], expected["adascale"])


def test_statistics_and_seeds_are_not_reported_as_state_that_depends_on_the_rank(found):
    for runs, *_ in found:
        warnings = [message for run in runs.values() for message in run["warnings"]]
        assert not [message for message in warnings if message.startswith("The forward pass changes")]


def test_all_ranks_evaluate_and_end_with_the_statistics_of_rank_0(found):
    (first, *_), (second, *_) = found
    for name, run in first.items():
        assert_close(second[name]["statistics"], run["statistics"], rtol=0, atol=0)
        assert second[name]["history"] == run["history"]
        assert run["statistics"][0].any()


def test_a_rank_that_stops_stops_all_after_the_same_update_and_the_run_resumes_from_the_backup(found, expected):
    for runs, *_ in found:
        assert runs["stopped"]["steps"] == 4
        assert_close(runs["resumed"]["weights"], expected["adascale"]["weights"], **TOLERANCE)
        assert runs["resumed"]["steps"] == 10


def test_one_process_resumes_what_two_have_saved(found, folder, expected):
    import keras_runs

    session = keras_runs.Session("adascale")
    session.model.load_weights(folder / "1.weights.h5")  # of the latest run with files, after four steps
    assert session.optimizer.steps_done == 4
    assert_close(session.fit()["weights"], expected["adascale"]["weights"], **TOLERANCE)


def test_files_have_one_writer(found, folder):
    with (folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert [float(row["loss"]) for row in rows] == found[0][0]["adascale"]["history"]["loss"]
    assert (folder / "best.weights.h5").exists()


def test_different_settings_on_ranks_raise_on_all_of_them(found):
    for _, (position, epochs, part, evaluation, assign), _ in found:
        assert "differ in what is done: 0 steps, epoch 0, step 0 on rank 0, 0 steps, epoch 0, step 1" in position
        assert "differ in epochs: 1 on rank 0, 2 on rank 1" in epochs
        assert part.endswith("must be all of the data on each rank, got a DataLoader of this rank's part")
        assert evaluation.endswith("got a EvaluationLoader of this rank's part")
        assert assign.startswith("`assign` must not be given with Keras, which needs to know each rank's")


def test_the_example_has_the_same_result_on_two_processes(found):
    import keras_runs

    num_updates, accuracy = keras_runs.example()
    assert (num_updates, accuracy > 0.8) == (46, True)
    for _, _, result in found:
        assert result == (num_updates, pytest.approx(accuracy, abs=0.005))
