"""Promise: an interrupted run ends like an uninterrupted one. `make soak` is the long version."""

import re

import soak


def test_repeatedly_interrupted_runs_end_like_uninterrupted_ones(tmp_path):
    said = []
    # of this seed: SIGKILL to the process on one core, SIGTERM to the group of two, and the end on one, in exact mode
    tally = soak.soak(tmp_path, stops=2, seconds=900, seed=318, most_cores=2, say=said.append)
    assert not tally["broken promises"], said
    assert soak.num_disturbances(tally) > 0
    assert tally["runs"] > 0
    again = soak.soak(tmp_path, stops=2, seconds=0, seed=318)  # it resumes
    assert again == tally
    assert re.search(r"^\| SIGTERM to the process group \| \d", soak.table(tally), re.MULTILINE)
    assert "| broken promises | 0 |" in soak.table(tally)
