"""Worker processes of a comparison, some of which die."""

import multiprocessing
import time
from operator import neg

from comparisons import forked_runs

from variable_batch_size.lab.comparison.compare import LocalProcesses
from variable_batch_size.lab.comparison.experiment import FAILED, Run


def test_a_process_that_dies_before_it_has_begun_fails_its_run_only():
    with LocalProcesses(1) as workers:
        workers.start(Run("ramp", "linear", 0), (time.sleep, (600,), {}))
        (process,) = multiprocessing.active_children()
        process.kill()  # while it imports torch, which those after it need not
        run, outcome = workers.next_outcome()
        assert (run.seed, outcome.status, outcome.reason) == (0, FAILED, "its process died with exit code -9")
        with forked_runs():
            workers.start(Run("ramp", "linear", 1), (neg, (2,), {}))
            assert workers.next_outcome() == (Run("ramp", "linear", 1), -2)
            # and one that dies while it waits is replaced
            (process,) = multiprocessing.active_children()
            process.kill()
            process.join()
            workers.start(Run("ramp", "linear", 2), (neg, (3,), {}))
            assert workers.next_outcome() == (Run("ramp", "linear", 2), -3)
