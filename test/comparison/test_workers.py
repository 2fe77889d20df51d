"""Processes that make runs, where some of them die."""

from operator import neg

from variable_batch_size.comparison.executors import Workers
from variable_batch_size.comparison.experiment import FAILED, Run


def test_a_process_that_dies_before_it_has_begun_fails_its_run_only():
    with Workers(1) as workers:
        workers.start(Run("ramp", "linear", 0), (neg, (1,), {}))
        ((process, _),) = workers._busy.values()
        process.kill()
        run, outcome = workers.next_outcome()
        assert (run.seed, outcome.status, outcome.reason) == (0, FAILED, "its process died with exit code -9")
        workers.start(Run("ramp", "linear", 1), (neg, (2,), {}))
        assert workers.next_outcome() == (Run("ramp", "linear", 1), -2)
        # and one that dies while it waits is replaced
        ((_, process),) = workers._waiting
        process.kill()
        process.join()
        workers.start(Run("ramp", "linear", 2), (neg, (3,), {}))
        assert workers.next_outcome() == (Run("ramp", "linear", 2), -3)
