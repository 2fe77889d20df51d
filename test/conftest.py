"""Fixtures that several test files share."""

import gc
import os
import platform
from functools import partial
from importlib import import_module
from importlib.util import find_spec

# the networks of the tests are tiny: a second thread would only add waiting, here and in child processes
os.environ["OMP_NUM_THREADS"] = "1"

import division
import pytest
import torch
from hypothesis import HealthCheck, settings

from variable_batch_size.data.sampler import MinibatchSource

if settings.get_current_profile_name() == "default":
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a busy machine is not a failure
    # others with --hypothesis-profile default
    settings.register_profile("the same each time", derandomize=True, **patient)
    settings.load_profile("the same each time")
torch.set_num_threads(1)  # on platforms that do not need the variable


STEPS_BY_HAND = {"optim", "rules", "runs", "policies"}  # directories
NO_WHEEL = f"torch_xla has no wheel for this processor ({platform.system()} on {platform.machine()})"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return division.scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Disable garbage collection meanwhile: nearly all that tests import stays, and collecting takes two seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Leave out what needs ``-m`` (long tests, separate environments), and what needs a missing torch_xla.

    Where torch_xla can be installed, on Linux x86-64, its absence is a failure.
    """
    left_out = {marker for marker in ("long", "tpu_compiler", "torch_tpu") if marker not in config.option.markexpr}
    is_left_out = [any(marker.name in left_out for marker in item.iter_markers()) for item in items]
    config.hook.pytest_deselected(items=[item for item, own in zip(items, is_left_out, strict=True) if own])
    items[:] = [item for item, own in zip(items, is_left_out, strict=True) if not own]
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        items[:] = division.longest_first(items)
    if find_spec("torch_xla") or (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return
    for item in items:
        if item.get_closest_marker("xla"):
            item.add_marker(pytest.mark.skip(reason=NO_WHEEL))


def pytest_unconfigure(config):
    """Print their number in the last line; xdist workers have no reporter."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    num_left_out = sum(NO_WHEEL in str(report.longrepr) for report in skipped)
    if num_left_out:
        reporter.write_line(f"{num_left_out} XLA tests did not run: {NO_WHEEL}", yellow=True, bold=True)


def pytest_collection_finish():
    """Import the modules of an optimizer's first step, which take a second, once instead of in each forked process."""
    import_module("torch._dynamo")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Start every test with the same seed, independent of earlier tests.

    Tests of what an optimizer does with gradients make these by hand; all others must read a loader, as loops must.
    """
    torch.manual_seed(0)
    MinibatchSource.must_be_read = not STEPS_BY_HAND & set(item.path.parts)


@pytest.fixture(scope="session")
def on_cores(tmp_path_factory):
    """Runs a function on gloo processes that live for the session; an error must not leave any process waiting."""
    from standing_cores import StandingCores

    standing = {}

    def run(cores, function, *args):
        if cores not in standing or standing[cores].is_broken:
            standing[cores] = StandingCores(cores, tmp_path_factory.mktemp(f"{cores}-cores"))
        results = standing[cores].run(function, *args)
        if standing[cores].are_busy_when_idle():
            standing[cores].kill()
        return results

    yield run
    for one in standing.values():
        one.kill()


@pytest.fixture(scope="session")
def on_new_cores(tmp_path_factory):
    """Runs a function on new gloo processes: for functions that change the process by signals or its environment."""
    from standing_cores import StandingCores

    def run(cores, function, *args, imports=()):
        new = StandingCores(cores, tmp_path_factory.mktemp("new-cores"), imports)
        try:
            return new.run(function, *args)
        finally:
            new.kill()

    return run


@pytest.fixture(scope="session")
def browser():
    """Shows pages in one Chromium that lives for the session: ``browser(size)`` is a context with a new tab."""
    from chromium import chromium, new_tab

    with chromium() as driver:
        yield partial(new_tab, driver)


@pytest.fixture(scope="session")
def xla_launcher():
    """Launches functions on virtual XLA cores without importing torch_xla each time."""
    from xla_launcher import XlaLauncher

    launcher = XlaLauncher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def on_xla(xla_launcher):
    """Runs a function on virtual XLA cores, like a launch."""

    def run(cores, function, *args, **options):
        return xla_launcher.run(function, args, cores=cores, **options)

    return run


@pytest.fixture(scope="session")
def run_on(on_cores, on_xla):
    """Runs a function on every core of a backend, like a launch, on the processes of the session."""

    def run(backend, cores, function, *args):
        return {"gloo": on_cores, "xla": on_xla}[backend](cores, function, *args)

    return run


@pytest.fixture(scope="session")
def results_on(run_on):
    """Runs the scenarios of `scenarios.py` on some cores, each combination once per session.

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
    """Runs `run_all` of `stoppable_run.py` on two cores, once per backend; returns the results and the directory."""
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
