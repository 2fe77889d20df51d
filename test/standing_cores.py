"""Processes of torch.distributed that stay for a session and do one job after another: starting them takes long."""

import gc
import pickle
import sys
import threading
import time
import traceback
from pathlib import Path

import torch.distributed as dist

import variable_batch_size as vbs

SECONDS_BETWEEN_LOOKS = 0.02
MOST_SECONDS = 600


class StandingCores:
    """Some gloo processes, started with the first job.

    Args:
        cores: how many.
        directory: where jobs and what came of them are put down.
    """

    def __init__(self, cores, directory):
        self._cores, self._directory = cores, Path(directory)
        self._num_jobs = 0
        self._thread = None
        self._error = None
        self.is_broken = False

    def run(self, function, *args):
        """What ``function(*args)`` returns on each core, as from a launch."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._launch, daemon=True)
            self._thread.start()
        # what to do is read where it can be imported from
        number = self._put((sys.path, pickle.dumps((function, args))))
        paths = [self._directory / f"result-{number}-{rank}" for rank in range(self._cores)]
        end = time.monotonic() + MOST_SECONDS
        found = {}
        while len(found) < self._cores:
            for path in paths:
                if path not in found and path.exists():
                    is_good, found[path] = pickle.loads(path.read_bytes())
                    if not is_good:
                        self.is_broken = True  # others may wait for this one, for ever
                        raise RuntimeError(f"{path.name} failed:\n{found[path]}")
            if not self._thread.is_alive() or time.monotonic() > end:
                self.is_broken = True
                raise RuntimeError(f"the job has not ended: {self._error}")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return [found[path] for path in paths]

    def close(self):
        if self._thread is not None and not self.is_broken:
            self._put(None)
            self._thread.join(60)

    def _launch(self):
        try:
            vbs.launch(work, (self._directory,), cores=self._cores, backend="gloo")
        except BaseException as error:
            self._error = error

    def _put(self, job):
        number, self._num_jobs = self._num_jobs, self._num_jobs + 1
        _write(self._directory / f"job-{number}", job)
        return number


def work(directory):
    """On each core: do jobs until there is one that is None."""
    number = 0
    while True:
        path = directory / f"job-{number}"
        while not path.exists():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        content = path.read_bytes()
        if pickle.loads(content) is None:
            return
        _write(directory / f"result-{number}-{dist.get_rank()}", _outcome(content))
        gc.collect()  # models of this job are not the next one's
        number += 1


def _outcome(content):
    try:
        sys.path[:], what = pickle.loads(content)
        function, args = pickle.loads(what)
        return True, function(*args)
    except BaseException:
        return False, traceback.format_exc()


def _write(path, content):
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(pickle.dumps(content))
    temporary.rename(path)
