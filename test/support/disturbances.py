"""Disturbances of a run: signals, kills, a full disk, a removed directory."""

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from session_process import SessionProcess

import variable_batch_size as vbs

STOPPED, RAISED, ENDED = "saved, code 75", "raised, code 1", "had ended, code 0"
TERMINATED, KILLED = "code 143", "code 137"
MEANING = {vbs.EXIT_STOPPED: STOPPED, 1: RAISED, 0: ENDED, -signal.SIGTERM: TERMINATED, -signal.SIGKILL: KILLED}

# maximum file size: more than other files of a core, and less than a checkpoint, which then fails in its middle
FEWEST_BYTES, MOST_BYTES = 13_000, 18_000


@dataclass(frozen=True)
class Disturbance:
    """A disturbance of a session.

    Attributes:
        name: in the table.
        happen: causes it.
        outcomes: how a session may end after it, once it trains.
        mend: repairs what the next session needs, after this one has ended.
    """

    name: str
    happen: Callable[[SessionProcess, random.Random], None]
    outcomes: set[str]
    mend: Callable[[SessionProcess, random.Random], None] = lambda session, rng: None


def _terminate(session, rng):
    session.signal(signal.SIGTERM)


def _terminate_group(session, rng):
    session.signal_group(signal.SIGTERM)


def _kill(session, rng):
    session.signal(signal.SIGKILL)


def _kill_group(session, rng):
    session.signal_group(signal.SIGKILL)


def _kill_core(session, rng):
    os.kill(session.pid_of_core(rng.randrange(session.cores)), signal.SIGKILL)


def _kill_worker(session, rng):
    workers = _children(session.pid_of_core(rng.randrange(session.cores)))
    if not workers:
        raise ProcessLookupError
    os.kill(rng.choice(workers), signal.SIGKILL)


def _children(pid):
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def _fill_disk(session, rng):
    limit = rng.randrange(FEWEST_BYTES, MOST_BYTES)
    resource.prlimit(session.pid_of_core(0), resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def _away(session):
    return session.place.root / "away"


def _take_directory_away(session, rng):
    session.place.checkpoints.rename(_away(session))


def _bring_directory_back_or_not(session, rng):
    if rng.random() < 0.5:
        _away(session).rename(session.place.checkpoints)
    else:  # the run starts over
        _away(session).rename(session.place.root / f"lost-{session.name}")
        session.place.weights.unlink(missing_ok=True)


IN_TRAINING = [
    Disturbance("SIGTERM to the process", _terminate, {STOPPED}),
    Disturbance("SIGTERM to the process group", _terminate_group, {STOPPED}),
    Disturbance("SIGKILL to the process", _kill, {KILLED}),
    Disturbance("SIGKILL to the process group", _kill_group, {KILLED}),
    Disturbance("SIGKILL to a core", _kill_core, {RAISED, KILLED}),
    Disturbance("SIGKILL to a loader worker", _kill_worker, {RAISED}),
    Disturbance("disk full", _fill_disk, {RAISED}),
    Disturbance("directory gone", _take_directory_away, {RAISED}, mend=_bring_directory_back_or_not),
]
AT_ANY_TIME = IN_TRAINING[:4]


def happens(disturbance: Disturbance, session: SessionProcess, rng: random.Random, *, is_in_training: bool) -> bool:
    """Cause it after some steps of the session, or while it may still be starting; returns whether it happened."""
    if is_in_training:
        session.wait_for_steps(rng.choice([1, 1, 2, 3, 5, 8]), or_end=True)
        time.sleep(rng.uniform(0, 0.1))
    else:
        time.sleep(rng.uniform(0, 8))
    if session.has_ended:
        return False
    try:
        disturbance.happen(session, rng)
    except (ProcessLookupError, FileNotFoundError):  # it has just exited, or has no workers
        return False
    return True
