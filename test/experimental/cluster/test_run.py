"""vbs cluster run: real jobs on this machine's cores, killed, failing and arriving; decisions with fake jobs."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import forked
import fsspec
import psutil
import pytest
import starting_job
import torch
from held import Hold

import variable_batch_size as vbs
from variable_batch_size.experimental.cluster import processes
from variable_batch_size.experimental.cluster.processes import Command, LocalPool, Polled
from variable_batch_size.experimental.cluster.run import ClusterRun, read_state
from variable_batch_size.lab.command.main import main
from variable_batch_size.policies.hints import HINTS

SCRIPT = Path(__file__).parents[2] / "support" / "cluster_job.py"


def written(folder, pool, *jobs, script=SCRIPT):
    text = f"[pool]\n{pool}\n"
    for name, settings in jobs:
        text += f'[[job]]\nname = "{name}"\nscript = "{script}"\ncheckpoint = "{name}"\n{settings}\n'
    path = folder / "jobs.toml"
    path.write_text(text)
    return path


def args(*more):
    return f"args = {json.dumps(['--checkpoint', '{checkpoint}', *more])}"


# ------------------------------------------------------------------------------------------------ with fake processes


class MadeGroup:
    def __init__(self, where):
        self.where, self.codes, self.is_lost, self.was_stopped = where, None, False, False

    def poll(self):
        return Polled(self.codes, is_lost=self.is_lost)

    def stop(self):
        self.was_stopped = True

    def kill(self):
        pass


class MadePool:
    def __init__(self, *nodes):
        self.sizes, self.started, self.requested = list(nodes), [], []

    def nodes(self):
        return {f"node {number}": cores for number, cores in enumerate(self.sizes) if cores}

    def start(self, command, where):
        self.started.append(MadeGroup(where))
        return self.started[-1]

    def request(self, num_nodes, node_cores):
        self.requested.append((num_nodes, node_cores))

    def close(self):
        pass


@pytest.fixture
def made(tmp_path):
    """A pool of four fake cores with a clock, and its jobs."""
    now = [0.0]

    def make(pool, *jobs, nodes=(4,)):
        path = written(tmp_path, pool, *jobs)
        run = ClusterRun(path, MadePool(*nodes), tmp_path / "out", clock=lambda: now[0])

        def tick(seconds=0.0):
            now[0] += seconds
            run.tick()

        return run, tick

    return make


FOUR = {"max_cores": 4, "goodput": (1.0, 1.9, 2.7, 3.5), "throughput": (1.0, 1.9, 2.7, 3.5)}


def hint(folder, name, **values):
    known = {"cores": 1, "min_cores": 1, "max_cores": 2, "goodput": (1.0, 1.9), "throughput": (1.0, 1.9)}
    (folder / name).mkdir(exist_ok=True)
    hints = vbs.policies.Hints(**{**known, "restart_seconds": 1.0, "progress_goal": 1e6, **values})
    (folder / name / HINTS).write_text(json.dumps(hints.as_dict()))


def test_a_job_begins_with_at_most_twice_its_minimum_of_cores_and_grows_as_its_hints_cover_more(made, tmp_path):
    run, tick = made("interval_seconds = 10", ("a", ""))
    tick()
    (job,), pool = run.jobs, run.pool
    assert job.cores == 2
    hint(tmp_path, "a", **FOUR)
    tick(10.0)
    assert pool.started[0].was_stopped and job.state == "stopping" and len(pool.started) == 1
    pool.started[0].codes = (75, 75)
    tick()
    tick()
    assert job.state == "running" and job.cores == 4 and job.failures == 0
    assert job.why == "speed-up 1.00 over an equal share"
    pool.started[1].codes = (0, 0, 0, 0)
    tick()
    assert job.state == "done"


def test_hints_that_vary_by_a_few_percent_cost_no_more_than_that_in_restarts(made, tmp_path):
    run, tick = made("interval_seconds = 50\nhorizon_seconds = 10000", ("a", ""))
    for number in range(80):
        speeds = (1.0, 1.9, 2.7 + 0.15 * (number % 2), 2.76)
        hint(tmp_path, "a", **{**FOUR, "goodput": speeds, "throughput": speeds, "restart_seconds": 5.0})
        tick(50.0)
        if run.jobs[0].state == "stopping":
            run.pool.started[-1].codes = (75,)
            tick()
    assert 5 * run.jobs[0].starts <= 0.03 * 80 * 50 and run.jobs[0].cores >= 3


def test_no_core_has_two_jobs_while_one_stops(made, tmp_path):
    run, tick = made("interval_seconds = 10", ("a", ""), ("b", "arrives = 5"), nodes=(2,))
    hint(tmp_path, "a")
    tick()
    assert run.jobs[0].cores == 2
    tick(5.0)  # the other one arrives, and the first must give it a core
    assert run.jobs[0].state == "stopping" and run.jobs[1].state == "waiting"
    tick(1.0)
    assert sum(job.cores for job in run.jobs) == 2 and len(run.pool.started) == 1
    run.pool.started[0].codes = (75, 75)
    tick()
    tick()
    assert [job.cores for job in run.jobs] == [1, 1]


def test_a_job_is_started_again_after_a_while_and_given_up_at_its_third_failure(made):
    run, tick = made("failures = 3\nbackoff_seconds = 4", ("a", ""))
    (job,) = run.jobs
    tick()
    for number, wait in ((1, 4.0), (2, 8.0)):
        run.pool.started[-1].codes = (1,)
        tick()
        assert job.state == "waiting" and job.failures == number
        tick(wait - 0.5)
        assert job.state == "waiting"
        tick(1.0)
        assert job.state == "running"
    run.pool.started[-1].codes = (1,)
    tick()
    assert job.state == "failed" and job.problem == "exit codes 1"
    assert "exit codes 1" in (run.out / "logs" / "a.log").read_text()


@pytest.mark.parametrize(("code", "most"), [(1, 1), (-9, 10)])
def test_failures_with_a_new_checkpoint_between_them_do_not_add_up(made, tmp_path, code, most):
    run, tick = made("failures = 2\nbackoff_seconds = 1", ("a", ""))
    (tmp_path / "a").mkdir()
    for number in range(3 * most):
        tick(2.0)
        assert run.jobs[0].state == "running"
        if number % most == 0:
            (tmp_path / "a" / f"step-{number:02}").touch()
        run.pool.started[-1].codes = (code,)
        tick()
    assert run.jobs[0].starts == 3 * most + (code == -9)  # a killed job is started again at once


def end_with(code, run, tick):
    """Wait until the job is running, and let it end."""
    while run.jobs[0].state != "running":
        assert run.jobs[0].state != "failed"
        tick(1.0)
    run.pool.started[-1].codes = (code,)
    tick()


def test_kills_are_counted_apart_from_errors(made):
    run, tick = made("failures = 2\nbackoff_seconds = 1", ("a", ""))
    (job,) = run.jobs
    for code in (-9,) * 5 + (1,) + (-9,) * 5:  # a spot machine, before the first checkpoint
        end_with(code, run, tick)
    assert job.state == "running" and (job.failures, job.kills) == (1, 10)
    end_with(1, run, tick)
    assert job.state == "failed" and job.problem == "exit codes 1"


def test_a_job_that_is_always_killed_is_given_up_at_ten_times_as_many_kills_as_errors(made):
    run, tick = made("failures = 2", ("a", ""))
    tick()
    for _ in range(19):
        end_with(-9, run, tick)
    assert run.jobs[0].state == "running"
    end_with(-9, run, tick)
    assert run.jobs[0].state == "failed" and run.jobs[0].starts == 20


def test_a_killed_worker_is_no_failure_of_the_others_which_end_with_an_error(made):
    run, tick = made("failures = 1\nbackoff_seconds = 100", ("a", ""))
    tick()
    run.pool.started[0].codes = (-9, 1)
    tick()
    assert run.jobs[0].state == "running" and run.jobs[0].starts == 2 and run.jobs[0].kills == 1


def test_a_lost_node_lets_its_job_wait_for_the_cores_that_are_left(made):
    run, tick = made("interval_seconds = 10", ("a", "min_cores = 4\nmax_cores = 4"), nodes=(4, 4))
    tick()
    run.pool.started[0].is_lost = True
    run.pool.sizes = [2]
    tick()
    tick(10.0)
    assert run.jobs[0].state == "waiting"
    run.pool.sizes = [4]
    tick(10.0)
    tick()
    assert run.jobs[0].state == "running" and run.jobs[0].kills == 1


def test_jobs_move_to_other_nodes_if_one_that_needs_a_whole_node_would_not_fit(made, tmp_path):
    small = [(name, "max_cores = 1") for name in "abcd"]
    run, tick = made("", *small, ("wide", "min_cores = 2\narrives = 5"), nodes=(2, 2))
    tick()
    a, b, c, d, wide = run.jobs
    assert a.where == b.where != c.where == d.where
    for job in (a, c):  # a core of each node is free now
        job.group.codes = (0,)
    tick(5.0)
    stopping = [job for job in (b, d) if job.state == "stopping"]
    assert len(stopping) == 1 and wide.state == "waiting"
    stopping[0].group.codes = (75,)
    tick()
    assert [b.cores, d.cores, wide.cores] == [1, 1, 2] and len(wide.where) == 1 and b.where == d.where != wide.where


def test_a_job_that_ends_as_if_it_was_stopped_but_was_not_is_given_up_in_the_end(made):
    run, tick = made("failures = 1", ("a", ""))
    for _ in range(20):
        tick()
        if run.jobs[0].group is not None:
            run.pool.started[-1].codes = (75,)
    assert run.jobs[0].state == "failed" and run.jobs[0].starts == 10


def test_a_job_whose_hints_require_more_cores_than_there_are_waits_and_shows_why(made, tmp_path):
    hint(tmp_path, "a", min_cores=5, max_cores=5, goodput=(0.0,) * 4 + (1.0,), throughput=(0.0,) * 4 + (1.0,))
    run, tick = made("interval_seconds = 1", ("a", ""), ("b", "max_cores = 1"))
    tick()
    assert [job.cores for job in run.jobs] == [0, 1]
    assert run.jobs[0].why == "waits: it needs at least 5 cores, which no nodes have now"
    run.pool.sizes = [8]
    tick(1.0)
    assert run.jobs[0].cores == 5


def test_no_job_has_more_cores_than_its_user_allows_whatever_its_hints_say(made, tmp_path):
    hint(tmp_path, "a", min_cores=3, max_cores=3, goodput=(0.0, 0.0, 1.0), throughput=(0.0, 0.0, 1.0))
    run, tick = made("", ("a", "max_cores = 2"))
    tick()
    assert 1 <= run.jobs[0].cores <= 2


def test_hints_that_become_known_cause_a_decision_at_once(made, tmp_path):
    run, tick = made("interval_seconds = 1000", ("a", ""))
    tick()
    hint(tmp_path, "a", **FOUR)
    tick(60.0)
    assert run.jobs[0].state == "stopping"


def test_a_job_whose_times_are_not_known_for_a_moment_keeps_its_cores(made, tmp_path):
    hint(tmp_path, "a", **FOUR)
    run, tick = made("interval_seconds = 100", ("a", ""))
    tick()
    hint(tmp_path, "a", max_cores=4, goodput=None, throughput=None)
    tick(100.0)
    assert run.jobs[0].state == "running" and run.jobs[0].cores == 4


def test_a_job_at_a_url_has_hints_and_checkpoints(tmp_path):
    path, now = written(tmp_path, "interval_seconds = 10", ("a", "")), [0.0]
    path.write_text(path.read_text().replace('checkpoint = "a"', 'checkpoint = "memory://pool/a"'))
    run = ClusterRun(path, MadePool(4), tmp_path / "out", clock=lambda: now[0])
    (job,) = run.jobs
    run.tick()
    assert (job.newest(), job.hints, job.problem) == ("", None, "")
    files = fsspec.filesystem("memory")
    hints = vbs.policies.Hints(cores=1, min_cores=1, **FOUR)
    files.pipe({"/pool/a/hints.json": json.dumps(hints.as_dict()).encode(), "/pool/a/step-000000003.pt": b""})
    now[0] = 100.0
    run.tick()
    assert job.newest() == "step-000000003.pt" and job.hints == hints and job.state == "stopping"


def test_a_job_with_the_checkpoint_of_one_that_has_not_ended_does_not_arrive(made, tmp_path, caplog):
    run, tick = made("", ("a", ""))
    tick()

    def rename(number):
        text = written(tmp_path, "", ("b", "")).read_text()
        run.path.write_text(text.replace('checkpoint = "b"', 'checkpoint = "a"'))
        os.utime(run.path, ns=(number, number))
        tick()

    rename(1)
    assert "job b must have its own checkpoint, got that of job a" in caplog.text and len(run.jobs) == 1
    run.pool.started[0].codes = (0,)
    tick()
    rename(2)
    assert [job.spec.name for job in run.jobs] == ["a", "b"]


def test_changed_settings_of_a_job_that_has_arrived_are_reported_and_have_no_effect(made, tmp_path, caplog):
    run, tick = made("", ("a", ""))
    tick()
    written(tmp_path, "", ("a", "max_cores = 1"))
    os.utime(run.path, ns=(1, 1))
    tick()
    assert "job a keeps the settings that it arrived with" in caplog.text


def test_jobs_that_are_added_to_the_file_arrive_and_a_mistake_in_it_changes_nothing(made, tmp_path, caplog):
    run, tick = made("", ("a", ""))
    tick()
    text = run.path.read_text()
    run.path.write_text(text + "[[job]]\n")
    os.utime(run.path, ns=(1, 1))
    tick()
    assert "no jobs were added: " in caplog.text and len(run.jobs) == 1
    written(tmp_path, "", ("a", ""), ("b", ""))
    os.utime(run.path, ns=(2, 2))
    tick()
    tick()
    assert [job.state for job in run.jobs] == ["running", "running"]


def test_a_truncated_hints_file_is_reported_and_the_job_continues(made, tmp_path):
    run, tick = made("interval_seconds = 1", ("a", ""))
    tick()
    hint(tmp_path, "a")
    path = tmp_path / "a" / HINTS
    path.write_text(path.read_text()[:50])
    tick(1.0)
    assert run.jobs[0].state == "running"
    assert run.jobs[0].problem.endswith("hints must be a JSON object, got a truncated or damaged file")
    path.unlink()
    path.mkdir()
    tick(1.0)
    assert run.jobs[0].state == "running" and "Is a directory" in run.jobs[0].problem


def test_a_job_that_needs_more_cores_than_there_are_is_refused(made):
    with pytest.raises(ValueError, match="job a needs at least 5 cores, but the pool has 4 cores on 1 node"):
        made("", ("a", "min_cores = 5"))


def test_the_size_of_the_pool_is_suggested_and_requested(made, tmp_path):
    hint(tmp_path, "a")
    prices = "price_per_core_hour = 0.5\nworth_per_core_hour = 1.0\nrequest_nodes = true"
    run, tick = made(prices, ("a", ""), nodes=(1,))
    tick()
    assert run.suggestion == {"nodes": 2, "why": "one more brings 0.00 an hour and costs 0.50"}
    assert run.pool.requested == [(2, 1)]
    assert "Suggested size" in (run.out / "index.html").read_text()


def test_status_shows_what_the_pool_has_written_and_the_page_is_escaped(made, tmp_path, capsys):
    run, tick = made("", ("a", ""))
    run.command = "vbs cluster run <jobs>"
    tick()
    assert main(["cluster", "status", str(run.out)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 4 cores on 1 node are in use by the policy goodput" in shown and "running" in shown
    page = (run.out / "index.html").read_text()
    assert "vbs cluster run &lt;jobs&gt;" in page and "<jobs>" not in page
    (run.out / "state.json").write_text("{}")
    assert main(["cluster", "status", str(run.out)]) == 1
    assert "must be the state that vbs cluster run has written" in capsys.readouterr().err
    assert main(["cluster", "status", str(tmp_path / "none")]) == 1


# -------------------------------------------------------------------------------------------------- with real processes


def test_processes_end_with_the_code_of_the_first_that_fails_and_have_ranks_of_their_own(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "print(os.environ['RANK'], os.environ['MINE'], flush=True)\n"
        "if sys.argv[1] == os.environ['RANK']:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    group = LocalPool(2).start(Command([str(script), "1"], str(tmp_path), {"RANK": "7", "MINE": "x"}), {"local": 2})
    output, polled = b"", Polled(None)
    while polled.codes is None:
        polled = group.poll()
        output += polled.output
        time.sleep(0.02)
    assert polled.codes == (-9,)  # not that of the other one, which was ended
    assert group.pids() == [] and b"7" not in output and b"1 x\n" in output
    group.kill()


def start_one_that_starts_another(folder, on_sigterm, how):
    """A job with one process, and the other one that this has started."""
    command = Command([starting_job.__file__, str(folder), on_sigterm, how], str(folder))
    group = LocalPool(1).start(command, {"local": 1})
    (other,) = Hold(folder / "hold").wait()
    return group, other


def has_ended(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # and its new parent has not looked yet
    return True


@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("fails", 1), ("killed", -9), ("runs", None)])
def test_what_a_job_has_started_ends_with_it_by_sigterm(tmp_path, monkeypatch, how, code):
    monkeypatch.setattr(processes, "SECONDS_TO_END", 60.0)
    group, other = start_one_that_starts_another(tmp_path, "notes", how)
    while code is not None and (polled := group.poll()).codes is None:
        time.sleep(0.01)
    assert code is None or polled.codes == (code,)
    group.kill()
    assert has_ended(other) and (tmp_path / "note").exists()


def test_what_a_job_has_started_is_killed_if_sigterm_does_not_end_it(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_TO_END", 0.5)
    group, other = start_one_that_starts_another(tmp_path, "ignores", "runs")
    group.kill()
    wait_for_end(other)


def test_what_a_job_has_started_ends_with_a_pool_that_is_killed(tmp_path):
    def run():
        start_one_that_starts_another(tmp_path, "notes", "runs")
        time.sleep(600)

    pool = forked.Leader(run, environment={})
    (other,) = Hold(tmp_path / "hold").wait(pool.poll)
    pool.send_signal(signal.SIGKILL)
    wait_for_end(other)
    assert (tmp_path / "note").exists()


def wait_for_end(pid):
    end = time.monotonic() + 600
    while not has_ended(pid):
        assert time.monotonic() < end
        time.sleep(0.01)


class Forked(forked.Leader):
    """A process of a job that is forked where `LocalPool` would start an interpreter, which has torch to import."""

    def __init__(self, command, *, cwd, env, stdin, stdout, stderr, start_new_session):
        _, _, _, _, script, *arguments = command
        super().__init__(_in_folder, cwd, script, *arguments, environment=env, output=stdout.fileno())

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _in_folder(folder, script, *arguments):
    os.chdir(folder)
    forked.run_script_here(script, *arguments)


def start_or_fork(command, start=processes.subprocess.Popen, **options):
    return (Forked if processes._WRAPPER in command else start)(command, **options)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A job that is killed, stopped with its pool and resumed by another one; and one that always fails."""
    with patch.object(processes.subprocess, "Popen", start_or_fork):
        return run_until_the_end(tmp_path_factory.mktemp("pool"))


def run_until_the_end(folder):
    hopeless = folder / "hopeless.py"
    hopeless.write_text("import sys\nsys.exit('it fails on purpose')\n")
    settings = "interval_seconds = 2\nfailures = 2\nbackoff_seconds = 0.1"
    hold = Hold(folder / "hold")  # so that the job does not end before it is killed or stopped
    options = args("--pause", "0.02", "--progress", "200", "--hold", str(hold.folder))
    path = written(folder, settings, ("a", f"max_cores = 1\n{options}"), ("hopeless", ""))
    path.write_text(path.read_text().replace(str(SCRIPT), str(hopeless)).replace(str(hopeless), str(SCRIPT), 1))
    run = ClusterRun(path, LocalPool(2), folder / "out")
    job, was_killed = run.jobs[0], False
    while not (was_killed and job.state == "running" and job.newest() != job.mark):
        run.tick()
        assert job.state not in ("done", "failed"), job.problem
        if not was_killed and job.state == "running" and job.newest():
            os.kill(job.group.pids()[0], signal.SIGKILL)
            was_killed = True
        time.sleep(0.05)
    run.stop()
    hold.release()
    stopped = run.state()["jobs"]
    again = ClusterRun(path, LocalPool(2), folder / "out")
    return folder, stopped, again.run(), read_state(folder / "out")["jobs"]


def test_a_killed_job_resumes_and_a_stop_lets_jobs_save_for_the_next_pool(ended):
    folder, (before, _), _, (after, _) = ended
    assert before["kills"] == 1 and before["state"] == "waiting" and before["problem"] == "exit codes -9"
    assert after["state"] == "done" and after["starts"] == 1
    assert (folder / "a" / "weights.pt").exists()


def test_a_job_that_keeps_failing_is_given_up_with_its_log(ended):
    _, _, has_completed, (_, hopeless) = ended
    assert not has_completed and hopeless["state"] == "failed" and hopeless["starts"] == 2
    assert "it fails on purpose" in Path(hopeless["log"]).read_text()


def test_weights_are_those_of_the_executed_trace_alone(ended, tmp_path, monkeypatch):
    folder = ended[0]
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import cluster_job

    alone, trace = tmp_path / "alone", str(folder / "a" / "executed.csv")
    cluster_job.main(cluster_job.parser.parse_args(["--checkpoint", str(alone), "--trace", trace]))
    there, here = (torch.load(where / "weights.pt") for where in (folder / "a", alone))
    assert all(torch.equal(there[key], here[key]) for key in there)
