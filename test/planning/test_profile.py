"""Profile, fit_throughput and NoiseCurve.read."""

import numpy as np
import pytest

import variable_batch_size as vbs
from variable_batch_size.planning.profile import Measured

HEAD = "machines,cores,minibatch_size,seconds_accumulating,seconds_updating\n"


def test_profile_is_read_back(tmp_path):
    rows = (Measured(1, 1, 32, 0.25, 0.5), Measured(2, 8, 1_234_567, 1e-5, 1234.5))
    vbs.planning.Profile(rows).write(tmp_path / "profile.csv", comment="made by: a test\non two lines")
    assert (tmp_path / "profile.csv").read_text().startswith("# made by: a test\n# on two lines\n" + HEAD)
    found = vbs.planning.Profile.read(tmp_path / "profile.csv")
    assert found.rows == rows
    assert not found.extrapolates


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"p.csv:1: the columns of a profile must be machines,cores"),
        ("cores,seconds\n1,2\n", r"p.csv:1: the columns of a profile must be machines,cores"),
        (HEAD, r"p.csv: a profile must have a row, got none"),
        (HEAD + "1,1,32,0.1,0.2\n# a comment\n\n1,2,x,0.1,0.2\n", r"p.csv:5: a row of a profile must be three counts"),
        (
            HEAD + "1,1,32,0.1\n",
            r"p.csv:2: a row of a profile must be three counts and two times in seconds, got 1,1",
        ),
        (HEAD + "1,0,32,0.1,0.2\n", r"p.csv:2: counts and seconds must be positive, got 1,0,32"),
        (HEAD + "1,1,32,0,0.2\n", r"p.csv:2: counts and seconds must be positive, got 1,1,32,0,0.2"),
        (HEAD + "1,1,32,0.1,inf\n", r"p.csv:2: counts and seconds must be positive"),
    ],
)
def test_invalid_rows_are_rejected_with_their_place(tmp_path, text, message):
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        vbs.planning.Profile.read(tmp_path / "p.csv")


def test_times_are_interpolated_between_numbers_of_cores():
    profile = vbs.planning.Profile(
        (Measured(1, 2, 32, 1.0, 3.0), Measured(1, 1, 32, 1.0, 2.0), Measured(1, 6, 32, 3.0, 5.0))
    )
    assert profile.times(cores=2, minibatch_size=32) == (1.0, 3.0)
    assert profile.times(cores=4, minibatch_size=32) == (2.0, 4.0)


def test_repeated_measurements_are_averaged():
    twice = Measured(1, 1, 32, 1.0, 2.0), Measured(1, 1, 32, 3.0, 6.0)
    profile = vbs.planning.Profile((*twice, Measured(1, 3, 32, 4.0, 6.0)))
    assert profile.times(cores=1, minibatch_size=32) == (2.0, 4.0)
    assert profile.times(cores=2, minibatch_size=32) == (3.0, 5.0)


def test_minibatch_beyond_twice_the_measured_range_is_rejected():
    profile = vbs.planning.Profile((Measured(1, 1, 32, 1.0, 2.0), Measured(1, 2, 32, 1.0, 3.0)), "p.csv")
    with pytest.raises(ValueError, match=r"p.csv was measured with 32 to 32 samples in a minibatch, got 65"):
        profile.times(cores=1, minibatch_size=65)
    assert profile.times(cores=1, minibatch_size=64).accumulating > 1.0


@pytest.mark.parametrize("seed", range(6))
def test_the_fit_predicts_numbers_of_cores_that_were_not_measured(seed):
    draws = np.random.RandomState(seed)
    alpha, beta = np.exp(draws.uniform(-5, 0, 2)).tolist()
    model = vbs.policies.Throughput(alpha, beta / 64, 1.0, 0.1, 2 * alpha, 0.2 * alpha, float(draws.uniform(1, 4)))
    rows = [
        Measured(1, cores, size, model.accumulating(size), model.updating(1, cores, size))
        for cores in (1, 2, 3, 4)
        for size in (16, 32, 64)
    ]
    fitted = vbs.planning.fit_throughput(rows)
    for cores in (1, 3, 6, 8):
        for size in (24, 96):
            assert fitted.accumulating(size) == pytest.approx(model.accumulating(size), rel=0.03)
            assert fitted.updating(1, cores, size) == pytest.approx(model.updating(1, cores, size), rel=0.1)


def test_fit_of_a_single_row():
    fitted = vbs.planning.fit_throughput([Measured(1, 1, 32, 0.5, 0.5)])
    assert fitted.accumulating(32) == pytest.approx(0.5, rel=1e-3)
    assert fitted.accumulating(64) == pytest.approx(0.75, rel=1e-3)  # half of it is taken for constant


def test_noise_curve_of_a_log(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = ['{"progress": 0.0, "noise_scale": null}', '{"progress": 10.0, "noise_scale": 100.0}']
    lines += ['{"progress": 20.0, "accuracy": 0.5}', '{"progress": 30.0, "noise_scale": 10000.0}']
    log.write_text("\n".join(lines) + "\n")
    curve = vbs.planning.NoiseCurve.read(log)
    assert [curve(progress) for progress in (0, 10, 20, 30, 99)] == pytest.approx([100, 100, 1000, 10_000, 10_000])
    log.write_text('{"progress": 10.0, "samples": 50, "weight": 4000.0, "noise_scale": 800.0}\n')
    assert vbs.planning.NoiseCurve.read(log).noise_scales == [10.0]  # samples, of 80 tokens each
    log.write_text('{"progress": 1.0}\n')
    with pytest.raises(
        ValueError, match="the log must have records with a noise scale, as of runs with AdaScale, got no"
    ):
        vbs.planning.NoiseCurve.read(log)
    log.write_text('{"progress": 1.0, "noise_scale": 5.0}\n{"progress": 2.0, "noi')  # what a crash has left
    with pytest.raises(ValueError, match=r"log.jsonl:2: expected a JSON record, got '{\"progress\": 2.0, \"noi'"):
        vbs.planning.NoiseCurve.read(log)
    with pytest.raises(ValueError, match="`noise_scale` must be a positive number, got 0"):
        vbs.planning.NoiseCurve.constant(0)


def test_cores_without_a_measured_all_reduce_are_rejected():
    alone = vbs.planning.Profile((Measured(1, 1, 32, 0.04, 0.05),), "p.csv")
    with pytest.raises(ValueError, match=r"p.csv must have a row with several cores on one machine, to time th"):
        alone.times(cores=2, minibatch_size=32)
    together = vbs.planning.Profile((Measured(1, 1, 32, 0.04, 0.05), Measured(1, 2, 32, 0.04, 0.15)), "p.csv")
    with pytest.raises(
        ValueError, match=r"p.csv must have a row with several cores on several machines, to time their all-reduce"
    ):
        together.times(cores=2, minibatch_size=32, machines=2)
    assert together.times(cores=4, minibatch_size=32).updating > 0.1
    assert vbs.planning.Profile(alone.rows, extrapolates=True).times(cores=2, minibatch_size=32).updating > 0
