"""Fixtures shared by the tests of traces."""

import pytest


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Write a file, always the same one, and return its path."""
    path = tmp_path_factory.mktemp("traces") / "spot.csv"

    def save(text):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return save
