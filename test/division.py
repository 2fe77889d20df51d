"""How tests are divided among the workers of pytest-xdist: by file, the longest files first."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent

# files that share a fixture which takes long are run by one worker
TOGETHER = {
    "promises/test_stopped_is_never_stopped.py": "long runs",
    "runs/test_log.py": "long runs",
    "runs/test_metrics.py": "long runs",
}

# those that a worker must not begin last, as the others would wait for it
LONGEST = []


def divide(items):
    """Put the tests of a file, or of several that share something, into a group of --dist loadgroup, and sort them."""
    names = [item.path.relative_to(HERE).as_posix() for item in items]
    groups = [TOGETHER.get(name, name) for name in names]
    places = {TOGETHER.get(name, name): place for place, name in reversed(list(enumerate(LONGEST)))}
    for item, group in zip(items, groups, strict=True):
        item.add_marker(pytest.mark.xdist_group(group))
    order = sorted(range(len(items)), key=lambda number: places.get(groups[number], len(LONGEST)))
    items[:] = [items[number] for number in order]
