"""Fixtures that several test files share."""

import pytest


@pytest.fixture(scope="session")
def results_on():
    """Runs the scenarios of `scenarios.py` on some cores, each combination once for the whole session.

    Starting XLA takes 10 s, so one launch runs them all.
    """
    import scenarios

    import variable_batch_size as vbs

    found = {}

    def run(backend, cores):
        if (backend, cores) not in found:
            if backend == "alone":
                found[backend, cores] = [scenarios.run_all(scenarios.models(), "cpu")]
            else:
                args = (scenarios.models(), backend)
                found[backend, cores] = vbs.launch(scenarios.run_all, args, cores=cores, backend=backend)
        return found[backend, cores]

    return run
