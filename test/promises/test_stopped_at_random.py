"""Promise: whatever happens to a run, it ends as if nothing had happened. `make soak` is the long form."""

import re

import soak


def test_disturbed_again_and_again_runs_end_as_if_nothing_had_happened(tmp_path):
    said = []
    tally = soak.soak(tmp_path, stops=2, seconds=900, seed=24, most_cores=2, say=said.append)
    assert not tally["broken promises"], said
    assert soak.num_disturbances(tally) > 0
    assert tally["runs"] > 0
    again = soak.soak(tmp_path, stops=2, seconds=0, seed=24)  # it goes on where it was
    assert again == tally
    assert re.search(r"^\| SIGTERM to the process group \| \d", soak.table(tally), re.MULTILINE)
    assert "| broken promises | 0 |" in soak.table(tally)
