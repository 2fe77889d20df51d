"""Profile, fit_throughput and NoiseCurve.read."""

import math

import numpy as np
import pytest

import variable_batch_size as vbs
from variable_batch_size.lab.planning.profile import Measured

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
        (HEAD + "3,2,32,0.1,0.2\n", r"p.csv:2: a row must have at least as many cores as machines, got 3,2,32"),
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
    assert fitted.accumulating(64) == pytest.approx(0.75, rel=1e-3)  # half of it is assumed constant


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
        ValueError, match="the log must have records with a noise scale, as in runs with AdaScale, got no"
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


def test_minibatch_sizes_between_measured_ones_are_on_a_line():
    rows = [Measured(1, cores, size, size, size**2 + cores) for cores in (1, 3) for size in (4, 8)]
    profile = vbs.planning.Profile(rows)
    # on 2 cores 16 + 2 and 64 + 2; 5 is a quarter of the way from 4 to 8
    assert profile.times(cores=2, minibatch_size=5) == (5.0, 18 + (66 - 18) / 4)
    assert profile.basis(cores=1, minibatch_size=5) == "interpolated"
    assert profile.basis(cores=1, minibatch_size=9) == "extrapolated"
    # a size that was measured on other cores only is no neighbour
    partly = vbs.planning.Profile([*rows, Measured(1, 8, 6, 99.0, 99.0)])
    assert partly.times(cores=2, minibatch_size=6) == (6.0, 42.0)


def test_times_on_several_machines_are_those_measured_there():
    one = [Measured(1, cores, 32, 1.0, 1.0 + 0.1 * cores) for cores in (1, 2, 4)]
    two, four = Measured(2, 8, 32, 1.0, 3.0), Measured(4, 16, 32, 1.0, 5.0)
    profile = vbs.planning.Profile([*one, two, four, Measured(2, 2, 32, 1.0, 2.4)])
    assert profile.times(cores=2, minibatch_size=32, machines=1).updating == pytest.approx(1.2)
    assert profile.times(cores=2, minibatch_size=32, machines=2).updating == 2.4
    assert profile.times(cores=4, minibatch_size=32, machines=2).updating == pytest.approx(2.6)  # a third of the way
    both = vbs.planning.Profile([two, two._replace(machines=4, seconds_updating=9.0)])
    assert both.times(cores=8, minibatch_size=32, machines=2).updating == 3.0
    # nothing was measured on three machines, whose network is that of two and four
    assert profile.times(cores=12, minibatch_size=32, machines=3).updating == 4.0
    assert [
        profile.basis(cores=cores, minibatch_size=32, machines=machines)
        for cores, machines in ((8, 2), (12, 3), (8, 4), (32, 8))
    ] == ["measured", "interpolated", "interpolated", "extrapolated"]
    with pytest.raises(ValueError, match="`machines` must be at most the number of cores, which is 2, got 3"):
        profile.times(cores=2, minibatch_size=32, machines=3)
    with pytest.raises(
        ValueError, match="profile was measured with 2 to 16 cores on several machines, got 33: more than"
    ):
        profile.times(cores=33, minibatch_size=32, machines=4)
    with pytest.raises(ValueError, match="profile was measured with 1 to 4 cores, got 16: more than"):
        profile.times(cores=16, minibatch_size=32, machines=1)


def test_noise_curve_of_a_table(tmp_path):
    table = tmp_path / "noise.csv"
    table.write_text("# of a run\nprogress, noise_scale, batch_size\n0,100,32\n\n10,400,128\n")
    curve = vbs.planning.NoiseCurve.read(table)
    assert (curve(5), curve.batch_size(5)) == (pytest.approx(200), pytest.approx(64))
    table.write_text("progress,noise_scale\n0,100\n10,400\n")
    assert vbs.planning.NoiseCurve.read(table).batch_sizes is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("progress,noise\n0,1\n", r"n.csv:1: the columns must be progress,noise_scale or .*, got progress,noise"),
        ("progress,noise_scale\n", "n.csv: a table of noise scales must have a row, got none"),
        ("progress,noise_scale\n0,0\n", "n.csv:2: a row must be a progress and positive numbers, got 0,0"),
        ("progress,noise_scale\n0,nan\n", "n.csv:2: a row must be a progress and positive numbers, got 0,nan"),
        ("progress,noise_scale\n0,1,2\n", "n.csv:2: a row must be a progress and positive numbers, got 0,1,2"),
        (
            "progress,noise_scale,batch_size\n0,1,2\n0,1,4\n",
            "n.csv:3: progress must ascend: each run, or batch size, is",
        ),
    ],
)
def test_invalid_tables_of_noise_are_rejected(tmp_path, text, message):
    (tmp_path / "n.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        vbs.planning.NoiseCurve.read(tmp_path / "n.csv")


def test_noise_of_several_batch_sizes_is_interpolated_in_both():
    small = vbs.planning.NoiseCurve([0.0, 100.0], [10.0, 1000.0], [64, 64])
    large = vbs.planning.NoiseCurve([0.0, 100.0], [40.0, 4000.0], [1024, 1024])
    noise = vbs.planning.NoiseCurves([small, large])
    # after 50 steps 100 and 400; 256 is in the middle of 64 and 1024
    assert [noise(50, size) for size in (32, 64, 256, 1024, 9999)] == pytest.approx([100, 100, 200, 400, 400])
    assert noise(100, 256) == pytest.approx(2000)
    # one that grew from 64 to 256 was at 128 after 50 steps: two runs at 64 average to √(100 · 400)
    grown = vbs.planning.NoiseCurve([0.0, 100.0], [10.0, 1000.0], [64, 256])
    assert vbs.planning.NoiseCurves([grown, large])(50, 128) == pytest.approx(100)
    again = vbs.planning.NoiseCurve.constant(400.0, batch_size=64)
    assert vbs.planning.NoiseCurves([small, again])(50, 7) == pytest.approx(200)
    with pytest.raises(ValueError, match="the noise of several runs needs the batch size of each: one has none"):
        vbs.planning.NoiseCurves([small, vbs.planning.NoiseCurve.constant(5.0)])


def test_the_interval_of_times_that_were_not_measured_is_that_of_the_errors_of_the_model():
    # errors of ±10 % of four times and two parameters: a deviation of √(4 · 0.01 / 2); t(2) = 4.3027
    model = vbs.policies.Throughput(0.5, 0.5 / 32, 1e-8, 1e-8, 1.0, 1e-8, 1.0)
    low, high = math.exp(-0.1), math.exp(0.1)
    rows = (Measured(1, 1, 32, low, high), Measured(1, 2, 32, high, 2 * low))
    profile = vbs.planning.Profile(rows)
    vars(profile)["throughput"] = model
    factor = math.exp(4.3027 * math.sqrt(0.02))
    for end, expected in zip(profile.ends, (1 / factor, factor), strict=True):
        assert end.times(cores=2, minibatch_size=32) == (high, 2 * low)  # measured
        assert end.times(cores=1, minibatch_size=64) == pytest.approx((1.5 * expected, 1.5 * expected), rel=1e-4)
    between = vbs.planning.Profile((rows[0], rows[1]._replace(cores=3)), guess=2.0)
    assert between.times(cores=2, minibatch_size=32) == pytest.approx((low + high, high + 2 * low))
    assert vbs.planning.Profile([Measured(1, 3, 32, 1.0, 1.0)]).ends is None  # too few rows


def test_the_interval_of_the_noise_is_that_of_runs_at_the_same_batch_size():
    runs = [vbs.planning.NoiseCurve.constant(scale, batch_size=64) for scale in (100.0, 400.0)]
    large = vbs.planning.NoiseCurve.constant(1000.0, batch_size=1024)
    ends = vbs.planning.NoiseCurves([*runs, large]).ends
    # the mean of the logarithms is log 200, their deviation log 4 / √2; t(1) = 12.7062
    factor = math.exp(12.7062 * math.log(4) / 2)
    assert [end(0.0, 64) for end in ends] == pytest.approx([200 / factor, 200 * factor], rel=1e-4)
    assert [end(0.0, 1024) for end in ends] == pytest.approx([1000, 1000])
    assert vbs.planning.NoiseCurves([runs[0], large]).ends is None
