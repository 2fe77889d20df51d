"""How tests are divided among workers: the slowest files first, and files with a common fixture together."""

from dataclasses import dataclass
from pathlib import Path

import division
import pytest


@dataclass
class Item:
    path: Path


@pytest.mark.parametrize("path", sorted({*division.TOGETHER, *division.LONGEST}))
def test_every_file_in_the_division_exists(path):
    assert (division.HERE / path).exists()


def test_longest_tests_come_first_with_their_group_and_the_others_keep_their_order():
    names = ["runs/test_log.py", "test_layers.py", "promises/test_stopped_is_never_stopped.py", "test_files.py"]
    found = division.longest_first([Item(division.HERE / name) for name in [*names, division.LONGEST[0]]])
    expected = [division.LONGEST[0], names[0], names[2], names[1], names[3]]
    assert [item.path.relative_to(division.HERE).as_posix() for item in found] == expected
