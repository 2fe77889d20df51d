"""How tests are divided among workers: the longest files first, and what shares a fixture together."""

from dataclasses import dataclass
from pathlib import Path

import division
import pytest


@dataclass
class Item:
    path: Path


@pytest.mark.parametrize("path", sorted({*division.TOGETHER, *division.LONGEST}))
def test_every_file_it_names_is_there(path):
    assert (division.HERE / path).exists()


def test_the_longest_come_first_with_what_is_run_together_with_them_and_the_others_stay_as_they_were():
    names = ["runs/test_log.py", "test_layers.py", "promises/test_stopped_is_never_stopped.py", "test_files.py"]
    found = division.longest_first([Item(division.HERE / name) for name in [*names, division.LONGEST[0]]])
    expected = [division.LONGEST[0], names[0], names[2], names[1], names[3]]
    assert [item.path.relative_to(division.HERE).as_posix() for item in found] == expected
