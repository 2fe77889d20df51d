"""Series: any number of records in a bounded number of buckets."""

from itertools import pairwise

import numpy as np
import pytest
from watched_runs import record

from variable_batch_size.lab.watch.series import MOST_BUCKETS, Series, parsed


def test_few_records_are_kept_as_they_are():
    series = Series()
    series.add([record(step) for step in (10, 20, 30)])
    columns = series.columns()
    assert columns["step"].tolist() == [10, 20, 30]
    assert columns["samples"].tolist() == [640, 1280, 1920]
    assert columns["loss"].tolist() == columns["loss_low"].tolist() == [1.99, 1.98, 1.97]
    # 640 samples between records, at 1,280 per second
    assert columns["seconds"].tolist() == [0.5, 1.0, 1.5]
    assert columns["seconds_per_step"].tolist() == [0.05, 0.05, 0.05]
    assert np.isnan(columns["tokens"]).all()


@pytest.mark.parametrize("number", [MOST_BUCKETS, MOST_BUCKETS + 1, 10_007])
@pytest.mark.parametrize("part", [97, 5000])
def test_buckets_have_the_mean_the_extremes_and_the_last_position_of_their_records(number, part):
    losses = np.random.default_rng(0).normal(size=number)
    records = [record(step + 1, loss=float(loss)) for step, loss in enumerate(losses)]
    series = Series()
    for start in range(0, number, part):
        series.add(records[start : start + part])
    columns = series.columns()
    edges = [0, *columns["step"].astype(int)]
    assert edges[-1] == number
    assert len(edges) <= MOST_BUCKETS + 2
    parts = [losses[begin:end] for begin, end in pairwise(edges)]
    assert columns["loss"] == pytest.approx([part.mean() for part in parts])
    assert columns["loss_low"].tolist() == [part.min() for part in parts]
    assert columns["loss_high"].tolist() == [part.max() for part in parts]
    assert series.num_records == number


def test_missing_and_invalid_values_are_gaps():
    series = Series()
    series.add([record(1), record(2, loss=None, lr="fast"), record(3, gain=True, noise_scale=[1], cores=10**400)])
    series.add([{"step": 4, "accuracy": 0.9}])  # not of a step
    columns = series.columns()
    assert columns["step"].tolist() == [1, 2, 3]
    assert np.isnan(columns["loss"][1]) and np.isnan(columns["lr"][1])
    assert np.isnan(columns["noise_scale"][2]) and np.isnan(columns["cores"][2])


def test_weights_are_tokens():
    series = Series()
    series.add([record(1, weight=900.0)])
    assert series.columns()["tokens"].tolist() == [900.0]


def test_the_smooth_loss_is_the_mean_of_the_latest_two_percent():
    series = Series()
    series.add([record(step, loss=float(step)) for step in range(1, 101)])
    assert series.columns()["loss_smooth"][[0, 1, 99]].tolist() == [1.0, 1.5, 99.5]


def test_one_huge_loss_leaves_the_smooth_loss_after_it_as_it_is():
    series = Series()
    series.add([record(step, loss=1e20 if step == 50 else 2.0) for step in range(1, 201)])
    smooth = series.columns()["loss_smooth"]
    assert smooth[48] == 2.0 < smooth[49]
    assert smooth[60:].tolist() == [2.0] * 140


@pytest.mark.parametrize("part", [1, 7, 100])
def test_a_log_that_grows_has_the_columns_of_one_that_is_read_at_once(part):
    records = [record(step, batch_size=64 + step, samples_per_second=1000.0 + step) for step in range(1, 101)]
    whole, grown = Series(), Series()
    whole.add(records)
    for start in range(0, 100, part):
        grown.add(records[start : start + part])
    for name, values in whole.columns().items():
        np.testing.assert_allclose(grown.columns()[name], values, rtol=1e-12, err_msg=name)


def test_lines_that_are_not_records_are_left_out():
    assert parsed([b'{"a": 1}', b"{", b"[]", b'"<b>"', b"", b'{"b": 2}', b"\xff"]) == [{"a": 1}, {"b": 2}]
    assert parsed([b'{"a": 1', b'"b": 2}', b"[" * 100_000]) == []
    assert parsed([b'{"a": 1}', b'{"b": 2}']) == [{"a": 1}, {"b": 2}]
