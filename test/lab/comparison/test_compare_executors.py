"""vbs compare --executor: the same results from loky, Dask and a Ray cluster while workers are killed."""

import os
import re
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import comparisons
import forked
import plain_line
import psutil
import pytest
from comparisons import rows, rows_by_run, sigterm_as_it_is, vbs_compare, wait_for_runs
from held import Hold
from ray_cluster import ray_cluster

from variable_batch_size.lab.command.main import main

# a file instead of the digits, for which every worker would import scikit-learn
LINE = ["--workload", f"{plain_line.__file__}:line", "--seeds", 2, "--rules", "linear"]
NUM_RUNS = 6
INTERRUPTED = "interrupted; the same command resumes"
PAGE = comparisons.ROOT / "docs" / "clusters.md"
RECIPES = {
    re.match(r"# (\S+)\n", block)[1]: block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The results of a process on this machine."""
    directory = tmp_path_factory.mktemp("local")
    vbs_compare(*LINE, "--out", directory)
    return (directory / "results.csv").read_bytes()


@pytest.fixture(autouse=True)
def sigterm():
    with sigterm_as_it_is():
        yield


def options_for(recipe, folder, **changes):
    """The options of a comparison with a recipe of the documentation, or with changes to it."""
    text = RECIPES[recipe]
    for name, value in changes.items():
        text, number = re.subn(rf"{name}=\d+", f"{name}={value}", text)
        assert number == 1
    (folder / recipe).write_text(text)
    return ["compare", *map(str, LINE), "--out", str(folder / "out"), "--executor", f"{folder / recipe}:executor"]


def until(question):
    """Wait until the condition is true, and return its value."""
    deadline = time.monotonic() + 600
    while not (answer := question()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return answer


def below(pid, name):
    """All descendant processes with this text in their command line."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def of_session(session):
    found = []
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getsid(pid) == session:
                found.append(pid)
    return found


@pytest.fixture
def hold(tmp_path, monkeypatch):
    """Holds the runs of the second seed, so that no comparison ends before it is released."""
    found = Hold(tmp_path / "hold")
    monkeypatch.setenv(plain_line.HOLD, str(found.folder))
    return found


def started(options, hold):
    """A comparison in a forked process that leads its own session, when it has done a run and another is held."""
    running = forked.Program(lead_session, options, folder=comparisons.HERE)
    wait_for_runs(1, running, folder_of(options))
    hold.wait(lambda: None if running.poll() is None else running.finish())
    return running


def finished(running):
    """The outcome of a comparison, which must end by itself."""
    try:
        until(lambda: running.poll() is not None)
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGKILL)
    return running.finish()


def lead_session(options):
    os.setsid()
    warnings.simplefilter("error")
    # of Dask, if another cluster has its usual port, or if the machine is busy
    for beginning in ("Port", "Creating scratch directories"):
        warnings.filterwarnings("ignore", beginning)
    sys.exit(main(options))


def folder_of(options):
    return Path(options[options.index("--out") + 1])


def made_before_the_interruption(options):
    """The files of the runs that an interrupted comparison has made, with their modification times."""
    made = made_in(folder_of(options))
    assert 1 <= len(made) < NUM_RUNS
    return made


def made_in(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/*/run.json")}


def ends_with(expected, options, hold, *, number=1, meanwhile=lambda: None):
    """A comparison ends with these results although one of the processes that run it is killed.

    Args:
        number: of processes that run something at the same time.
        meanwhile: is called after the kill.
    """
    hold.again()

    def kill():
        try:
            os.kill(hold.wait(number=number)[0], signal.SIGKILL)
            meanwhile()
        finally:
            hold.release()

    with ThreadPoolExecutor() as pool:
        killing = pool.submit(kill)
        assert main(options) == 0
        killing.result()
    return (folder_of(options) / "results.csv").read_bytes() == expected


def test_loky_resumes_after_an_interruption_and_a_killed_worker(local, tmp_path, hold):
    options = options_for("on_loky.py", tmp_path, max_workers=1)  # each has to import torch, and again after the kill
    running = started(options, hold)
    running.send_signal(signal.SIGINT)
    done = finished(running)
    assert done.returncode == 130, done.stderr
    assert INTERRUPTED in done.stderr
    until(lambda: not of_session(running.pid))
    made = made_before_the_interruption(options)
    assert ends_with(local, options, hold)
    assert made_in(tmp_path / "out").items() >= made.items()
    until(lambda: not below(os.getpid(), "popen_loky"))


def test_dask_continues_after_a_killed_worker_and_leaves_no_process(local, tmp_path, hold):
    running = started(options_for("on_dask.py", tmp_path, n_workers=1), hold)  # as with loky; Dask starts another one
    os.kill(hold.wait()[0], signal.SIGKILL)
    hold.release()
    done = finished(running)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "results.csv").read_bytes() == local
    until(lambda: not of_session(running.pid))


@pytest.fixture
def cluster(monkeypatch, hold):  # which its processes inherit
    with ray_cluster(monkeypatch, num_cpus=1) as found:
        monkeypatch.setenv("RAY_ADDRESS", found.address)
        yield found


@pytest.mark.filterwarnings("ignore")  # of Ray and its dependencies
def test_ray_resumes_after_an_interruption_a_killed_worker_and_a_removed_node(local, tmp_path, hold, cluster, capsys):
    options = options_for("on_ray.py", tmp_path)

    def interrupt():
        until(lambda: made_in(tmp_path / "out"))
        hold.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with comparisons.on_sigint(signal.default_int_handler), pytest.raises(SystemExit) as caught:
        main(options)
    interrupting.join()
    assert caught.value.code == 130
    assert INTERRUPTED in capsys.readouterr().err
    made = made_before_the_interruption(options)
    until(lambda: not below(os.getpid(), "ray::make"))
    second_node = cluster.add_node(num_cpus=1, include_log_monitor=False)
    leave = partial(cluster.remove_node, second_node, allow_graceful=False)
    assert ends_with(local, options, hold, number=2, meanwhile=leave)  # a run on each node
    assert made_in(tmp_path / "out").items() >= made.items()


def test_run_that_kills_its_worker_fails_and_the_others_complete(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(comparisons.HERE)
    (tmp_path / "pool.py").write_text(
        "import multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "def executor():\n"
        "    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('fork'))\n"
    )
    options = ["--workload", "comparisons:deadly", "--rules", "linear", "--seeds", "2", "--samples", "64"]
    assert main(["compare", *options, "--executor", f"{tmp_path}/pool.py:executor", "--out", str(tmp_path / "out")])
    assert "3 runs failed" in capsys.readouterr().err
    found = rows_by_run(tmp_path / "out")
    assert {seed: row["status"] for (_, _, seed), row in found.items()} == {0: "done", 1: "failed"}
    assert len(rows(tmp_path / "out")) == NUM_RUNS
    assert found["ramp", "linear", 1]["reason"].startswith("BrokenProcessPool: A process in the process pool was")


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        ("on_ray", "`executor` must be FILE.py:FUNCTION, got 'on_ray'"),
        ("nowhere.py:executor", "there is no file nowhere.py"),
        ("comparisons:nothing", "comparisons has no function 'nothing'"),
        ("comparisons:environment", "comparisons:environment must return a concurrent.futures.Executor, got dict"),
    ],
)
def test_object_that_is_not_an_executor_raises(tmp_path, capsys, monkeypatch, executor, message):
    monkeypatch.chdir(comparisons.HERE)
    options = [*map(str, LINE), "--executor", executor, "--out", str(tmp_path / "out")]
    assert main(["compare", *options]) == 1
    assert message in capsys.readouterr().err


def test_executor_decides_the_number_of_parallel_runs(capsys):
    assert main(["compare", "--executor", "on_ray.py:executor", "--jobs", "2"]) == 1
    assert (
        "--jobs has no effect with --executor, which determines the number of concurrent runs"
        in capsys.readouterr().err
    )


def test_results_are_written_to_a_directory_of_this_machine(capsys):
    assert main(["compare", "--out", "s3://bucket/results"]) == 1
    assert "--out must be a local directory, got s3://bucket/results" in capsys.readouterr().err


def test_a_recipe_has_no_more_than_22_lines():
    assert set(RECIPES) == {"on_ray.py", "on_dask.py", "on_loky.py", "on_mpi.py", "on_slurm.py"}
    for block in RECIPES.values():
        assert 2 <= len([line for line in block.splitlines()[1:] if line]) <= 22
