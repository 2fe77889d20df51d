"""A simulated pool: hand-computed times, the readers of the artifact's files, and policies on recorded jobs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import variable_batch_size as vbs
from variable_batch_size.experimental.cluster.report import gantt
from variable_batch_size.experimental.cluster.simulate import Submitted, read_applications, read_jobs, simulate_cluster
from variable_batch_size.lab.command.main import main

RECORDED = Path(__file__).parents[3] / "reproduce" / "recorded" / "pollux"
HEAD = "name,time,application,num_replicas,batch_size\n"


def hinted(folder, **applications):
    """Applications with these goodputs on 1, 2, … cores and these goals."""
    for name, (goodput, goal) in applications.items():
        (folder / name).mkdir()
        fewest = 1 + sum(speed == 0 for speed in goodput)
        hints = vbs.policies.Hints(
            cores=fewest,
            min_cores=fewest,
            max_cores=len(goodput),
            goodput=goodput,
            throughput=goodput,
            progress_goal=goal,
            restart_seconds=2.0,
        )
        (folder / name / "hints.json").write_text(json.dumps(hints.as_dict()))
    return read_applications(folder, applications)


def submitted(*rows):
    return [Submitted(f"job {number}", time, name, 2, 1) for number, (time, name) in enumerate(rows)]


def test_completion_times_of_first_come_first_served_by_hand(tmp_path):
    applications = hinted(tmp_path, short=((1.0, 1.5), 30.0), long=((1.0, 2.0), 80.0))
    jobs = submitted((0.0, "long"), (10.0, "short"))
    found = simulate_cluster(jobs, applications, [2], policy="fifo", interval_seconds=10.0)
    # a start takes 2 seconds; 80/2 on both cores, and from the next decision, at 50, 30/1.5
    assert [run.ended for run in found.runs] == pytest.approx([42.0, 72.0])
    assert found.completion_seconds == pytest.approx([42.0, 62.0])
    assert (found.mean, found.makespan) == pytest.approx((52.0, 72.0))
    assert found.utilisation == pytest.approx((2 * 42 + 2 * 22) / (2 * 72))
    assert found.runs[1].spans == [(pytest.approx(50.0), pytest.approx(72.0), 2)]


def test_resized_jobs_lose_the_time_of_a_restart(tmp_path):
    applications = hinted(tmp_path, long=((1.0, 2.0), 1000.0), short=((1.0, 1.0), 50.0))
    found = simulate_cluster(submitted((0.0, "long"), (100.0, "short")), applications, [2], interval_seconds=10.0)
    long, short = found.runs
    # both cores until 100, one until the short one has ended, at 152, then both from 160 on
    assert short.ended == pytest.approx(152.0)
    done = 2 * (100 - 2) + (60 - 2)
    assert long.ended == pytest.approx(160 + 2 + (1000 - done) / 2) and long.restarts == 2
    assert [cores for _, _, cores in long.spans] == [2, 1, 2]


def test_a_job_that_has_not_run_yet_begins_with_at_most_twice_its_minimum_of_cores(tmp_path):
    speeds = (1.0, 2.0, 3.0, 4.0)
    (run,) = simulate_cluster(
        submitted((0.0, "a")), hinted(tmp_path, a=(speeds, 100.0)), [4], interval_seconds=10.0
    ).runs
    # a start takes 2 seconds: 8 seconds on two cores, then all
    assert [cores for _, _, cores in run.spans] == [2, 4] and run.ended == pytest.approx(12 + (100 - 8 * 2) / 4)


def test_jobs_that_need_several_cores_are_simulated_with_them(tmp_path):
    applications = hinted(tmp_path, a=((0.0, 0.0, 3.0, 4.0), 30.0))
    for policy in ("goodput", "fifo", "equal", "shortest"):
        found = simulate_cluster(submitted((0.0, "a"), (0.0, "a")), applications, [4], policy=policy)
        assert {cores for run in found.runs for _, _, cores in run.spans} <= {3, 4}, policy
    with pytest.raises(ValueError, match="job job 0 needs at least 3 cores, but the pool has 2 cores on 1 node"):
        simulate_cluster(submitted((0.0, "a")), applications, [2])


def test_a_run_that_was_slower_before_is_simulated_at_its_mean_speed(tmp_path):
    known = {"cores": 1, "min_cores": 1, "max_cores": 2, "goodput": (4.0, 6.0), "throughput": (4.0, 6.0)}
    ended = vbs.policies.Hints(**known, progress=100.0, progress_goal=100.0, seconds=(20.0, 20.0), restart_seconds=1.0)
    # 20 s on one core and 20 s on two, a progress of 200 at the speeds at its end
    assert (ended.mean_speed(1), ended.mean_speed(2)) == (2.0, 3.0)
    half = replace(ended, progress=50.0, seconds=(25.0, 0.0))  # 25 s, and 12.5 more at the current speed
    assert half.mean_speed(1) == pytest.approx(100 / 37.5)
    for hints in (replace(ended, seconds=None), replace(ended, progress=0.0, seconds=(1.0, 0.0))):
        assert hints.mean_speed(1) == 4.0
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "hints.json").write_text(json.dumps(ended.as_dict()))
    (run,) = simulate_cluster(
        submitted((0.0, "a")), read_applications(tmp_path, ["a"]), [2], policy="fifo", interval_seconds=10.0
    ).runs
    assert run.ended == pytest.approx(1 + 100 / 3)


def test_a_recorded_application_has_the_times_and_the_noise_of_its_files():
    application = read_applications(RECORDED, ["cifar10"])["cifar10"]
    assert application.limits.ref_batchsize == 128 and application.goal == pytest.approx(39068.08)
    assert application.noise_scale(391.09, 128) == pytest.approx(128 * 6.740280 / 8.978533)
    times = application.profile.times(cores=8, minibatch_size=257, machines=2)
    assert times == pytest.approx((0.260411 - 0.059469, 0.260411))
    # 1024 samples on four cores of one machine in minibatches of 256: between 129 and 257
    gain = (1000 / 128 + 1) / (1000 / 1024 + 1)
    seconds = 0.110512 + (256 - 129) / (257 - 129) * (0.203831 - 0.110512)
    assert application.fixed(4, 1024, 1000.0, 4) == pytest.approx(gain / seconds, rel=1e-6)
    goodputs, _ = application.best((1, 2, 4, 8, 16), 1000.0, 4)
    assert goodputs[2] >= application.fixed(4, 1024, 1000.0, 4) * 0.999
    assert goodputs == sorted(goodputs) or goodputs[3] > 0


def test_the_order_of_policies_on_recorded_jobs_is_the_published_one():
    """On a few short jobs and a small pool; all of them are too long for a test."""
    jobs = [job for job in read_jobs(RECORDED / "workload-6.csv")[:24] if job.application in ("cifar10", "ncf")]
    applications = read_applications(RECORDED, [job.application for job in jobs])
    names = ("goodput", "tiresias", "optimus")
    given = {"interval_seconds": 300.0}
    mean = {name: simulate_cluster(jobs, applications, [4] * 4, policy=name, **given).mean for name in names}
    assert mean["goodput"] < mean["tiresias"] and mean["goodput"] < mean["optimus"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name,time\n",
            r"jobs.csv:1: the columns must be name,time,application,num_replicas,batch_size, got name,time",
        ),
        (HEAD, "jobs.csv: a table must have a row, got none"),
        (HEAD + "a,x,b,1,1\n", "jobs.csv:2: a job must have a time in seconds"),
        (HEAD + "a,1,b,1\n", "jobs.csv:2: a row must have 5 values, got a,1,b,1"),
        (HEAD + "a,-1,b,1,1\n", "jobs.csv:2: times must not be negative"),
        (HEAD + "a,1,b,1,1\na,1,b,1,1\n", "jobs.csv:3: every job must have a name of its own, got a"),
    ],
)
def test_mistakes_in_a_file_of_jobs_are_refused_with_their_line(tmp_path, text, message):
    (tmp_path / "jobs.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_jobs(tmp_path / "jobs.csv")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "placements.csv",
            "placement,local_bsz,step_time,sync_time\n1,32,0.1,x\n",
            "placements.csv:2: all values must be positive",
        ),
        (
            "placements.csv",
            "placement,local_bsz\n1,32\n",
            "placements.csv:1: the columns must be placement,local_bsz,step_time",
        ),
        ("validation-8.csv", "progress,grad_sqr,grad_var\n", "validation-8.csv: a table must have a row"),
    ],
)
def test_mistakes_in_a_profile_are_refused_with_their_line(tmp_path, name, text, message):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "placements.csv").write_text("placement,local_bsz,step_time,sync_time\n1,8,0.1,0.01\n2,8,0.1,0.02\n")
    (folder / "validation-8.csv").write_text("progress,grad_sqr,grad_var\n100,1,1\n")
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_applications(tmp_path, ["a"])


def test_missing_profiles_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be the folder of the application a, but does not exist"):
        read_applications(tmp_path, ["a"])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "placements.csv").write_text("placement,local_bsz,step_time,sync_time\n1,8,0.1,0.01\n")
    with pytest.raises(FileNotFoundError, match="has no validation"):
        read_applications(tmp_path, ["a"])


def test_the_command_prints_a_table_and_writes_a_page(tmp_path, capsys):
    hinted(tmp_path, short=((1.0, 1.5), 30.0), long=((1.0, 2.0), 80.0))
    (tmp_path / "jobs.csv").write_text(HEAD + "a,0,long,2,1\n<b>,10,short,2,1\n")
    command = ["cluster", "simulate", str(tmp_path / "jobs.csv"), "--nodes", "1x2", "--interval-seconds", "10"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert all(policy in shown for policy in ("goodput", "fifo", "equal", "shortest"))
    page = (tmp_path / "out" / "index.html").read_text()
    assert "&lt;b&gt;" in page and "<b>" not in page and page.count("<svg") == 4
    assert (tmp_path / "out" / "jobs.csv").read_text().count("\n") == 1 + 4 * 2


def test_a_job_that_no_pool_has_room_for_and_unequal_nodes_are_refused(tmp_path, capsys):
    applications = hinted(tmp_path, a=((1.0,), 1.0))
    with pytest.raises(ValueError, match=r"`nodes` must all have the same number of cores, got \[1, 2\]"):
        simulate_cluster(submitted((0.0, "a")), applications, [1, 2])
    with pytest.raises(SystemExit):
        main(["cluster", "simulate", "jobs.csv", "--nodes", "0x4"])
    assert "expected nodes x cores, as in 16x4, got '0x4'" in capsys.readouterr().err


def test_a_chart_has_a_bar_for_each_span_and_a_line_for_each_job():
    chart = gantt([("a", 0.0, [(0.0, 5.0, 1), (5.0, 10.0, 2)]), ("b & c", 2.0, [])], 2)
    assert chart.count("<rect") == 2 and chart.count("<path") == 2 and "b &amp; c" in chart
