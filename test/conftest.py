"""Fixtures that several test files share."""

import os
import platform
from importlib import import_module
from importlib.util import find_spec

# the tests' networks are tiny: a second thread would only be waited for, here and in processes that tests start
os.environ["OMP_NUM_THREADS"] = "1"

import division
import pytest
import torch
from hypothesis import HealthCheck, settings

if settings.get_current_profile_name() == "default":
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a busy machine is no failure
    # others with --hypothesis-profile default
    settings.register_profile("the same each time", derandomize=True, **patient)
    settings.load_profile("the same each time")
torch.set_num_threads(1)  # on the platforms that do not ask for the variable


NO_WHEEL = f"torch_xla has no wheel for this processor ({platform.system()} on {platform.machine()})"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return division.scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config, items):
    """Leave out what needs torch_xla where it cannot be installed; on Linux with x86-64 its absence is a failure."""
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        items[:] = division.longest_first(items)
    if find_spec("torch_xla") or (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return
    for item in items:
        if item.get_closest_marker("xla"):
            item.add_marker(pytest.mark.skip(reason=NO_WHEEL))


def pytest_unconfigure(config):
    """Say how many these were, in the last line; the processes of xdist have no reporter."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    num_left_out = sum(NO_WHEEL in str(report.longrepr) for report in skipped)
    if num_left_out:
        reporter.write_line(f"{num_left_out} XLA tests did not run: {NO_WHEEL}", yellow=True, bold=True)


def pytest_collection_finish():
    """Import what an optimizer's first step takes a second to import, and not in each process that is forked."""
    import_module("torch._dynamo")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Have every test begin with the same seed, whichever the tests before it have left."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def on_cores(tmp_path_factory):
    """Runs a function on some gloo processes that stay for the session; an error there must not leave any waiting."""
    from standing_cores import StandingCores

    standing = {}

    def run(cores, function, *args):
        if cores not in standing or standing[cores].is_broken:
            standing[cores] = StandingCores(cores, tmp_path_factory.mktemp(f"{cores}-cores"))
        return standing[cores].run(function, *args)

    yield run
    for one in standing.values():
        one.kill()


@pytest.fixture(scope="session")
def on_new_cores(tmp_path_factory):
    """Runs a function on gloo processes that end with it: for what changes a process, by signals or its environment.

    They are forked from this process, which has imported torch and the frameworks: a launch takes seconds to do so.
    """
    from standing_cores import StandingCores

    def run(cores, function, *args):
        new = StandingCores(cores, tmp_path_factory.mktemp("new-cores"))
        try:
            return new.run(function, *args)
        finally:
            new.kill()

    return run


@pytest.fixture(scope="session")
def run_on(on_cores):
    """Runs a function on every core of a backend, as a launch does; for gloo on the processes that stay."""
    import variable_batch_size as vbs

    def run(backend, cores, function, *args):
        if backend == "gloo":
            return on_cores(cores, function, *args)
        return vbs.launch(function, args, cores=cores, backend=backend)

    return run


@pytest.fixture(scope="session")
def results_on(run_on):
    """Runs the scenarios of `scenarios.py` on some cores, each combination once for the whole session.

    Starting XLA takes 10 s, so one launch runs them all.
    """
    import scenarios

    found = {}

    def run(backend, cores):
        if (backend, cores) not in found:
            names = scenarios.names_on(backend, cores)
            if backend == "alone":
                found[backend, cores] = [scenarios.run_all(scenarios.models(), "cpu", names)]
            else:
                found[backend, cores] = run_on(backend, cores, scenarios.run_all, scenarios.models(), backend, names)
        return found[backend, cores]

    return run


@pytest.fixture(scope="session")
def long_runs_on(run_on, tmp_path_factory):
    """Runs `run_all` of `stoppable_run.py` on two cores, once for each backend; the results, and where files are."""
    import contextlib

    import stoppable_run

    found = {}

    def run(backend):
        if backend not in found:
            directory = tmp_path_factory.mktemp(backend)
            stopped_alone = directory / "alone"
            with contextlib.suppress(stoppable_run.Stopped):
                stoppable_run.Session(stopped_alone).train(stop_at=(13, 2))
            results = run_on(backend, 2, stoppable_run.run_all, backend, directory, stopped_alone)
            found[backend] = results, directory
        return found[backend]

    return run
