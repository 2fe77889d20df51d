"""The zoo: recordings of devices and published batch-size schedules, as ``zoo:NAME``.

They come with this package, or with another one that registers the folder of ``NAME.csv`` as the entry point
``variable_batch_size.traces`` called NAME.
"""

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from variable_batch_size.checks import check_one_of
from variable_batch_size.plugins import registered, text_file
from variable_batch_size.urls import read_bytes

PREFIX = "zoo:"
_SECONDS_PER_STEP = 60  # of a recording that is read as a trace


@dataclass(frozen=True)
class Entry:
    """A file of the zoo, described by the comment at its top."""

    name: str
    title: str  # what it is
    source: str  # where it was published; for a schedule with the sentence that states it
    licence: str
    is_recording: bool  # of devices over time; otherwise the stages of a schedule
    content: bytes


def names() -> list[str]:
    """The names of all entries, in alphabetical order, without broken ones of other packages, of which it warns."""
    others = registered("traces").keys() - _own_names()
    return sorted(_own_names() | {name for name in others if text_file("traces", name, ".csv") is not None})


def entry(name: str) -> Entry:
    """The entry of this name.

    >>> entry("llama-3-405b").title
    'Llama 3, 405B parameters: 4, 8, then 16 million tokens, of 15.6 trillion'
    """
    is_own = name in _own_names()
    if not is_own:
        check_one_of(sorted({*_own_names(), *registered("traces")}), name=name)
    content = (_folder() / f"{name}.csv").read_bytes() if is_own else text_file("traces", name, ".csv")
    if content is None:
        raise ValueError(f"`name` {name!r} is registered by a package without a file {name}.csv")
    lines = content.decode().splitlines()
    comments = [line[2:] for line in itertools.takewhile(lambda line: line.startswith("# "), lines)]
    title, *facts = comments or [name]
    found = dict(fact.split(": ", 1) for fact in facts if ": " in fact)
    is_recording = lines[len(comments)].startswith("seconds,")
    return Entry(
        name, title, found.get("source", "not stated"), found.get("licence", "not stated"), is_recording, content
    )


def read(path: str | os.PathLike[str]) -> bytes:
    """The content of a file at a path, at a URL, or in the zoo."""
    name = _name_of(path)
    return read_bytes(path) if name is None else entry(name).content


def read_trace(path: str | os.PathLike[str]) -> bytes:
    """Like :func:`read`, but a recording of the zoo is converted to a trace, with a step for each minute with devices.

    The batch size is the number of devices at the start of the minute; with ``zoo:NAME:32``, 32 samples per device.
    """
    name = _name_of(path)
    if name is None:
        return read_bytes(path)
    name, colon, samples = name.partition(":")
    found = entry(name)
    if colon and not (found.is_recording and re.fullmatch("[1-9][0-9]{0,8}", samples)):
        rule = "samples per device, a positive integer, only after the name of a recording"
        raise ValueError(f"`trace` must have {rule}, got {os.fspath(path)!r}")
    if not found.is_recording:
        return found.content
    sizes = [count * int(samples or 1) for count in _each_minute(found.content) if count]
    return "\n".join(["step,batchsize", *(f"{step},{size}" for step, size in enumerate(sizes)), ""]).encode()


def _each_minute(content: bytes) -> Iterator[int]:
    """The number of devices at the start of each minute of a recording."""
    rows = [line.split(",") for line in content.decode().splitlines() if line[0].isdigit()]
    for (begin, count), (end, _) in itertools.pairwise(rows):
        first, last = (-(-int(second) // _SECONDS_PER_STEP) for second in (begin, end))
        yield from itertools.repeat(int(count), last - first)


def _name_of(path: str | os.PathLike[str]) -> str | None:
    text = os.fspath(path)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


def _own_names() -> set[str]:
    return {file.name.removesuffix(".csv") for file in _folder().iterdir() if file.name.endswith(".csv")}


def _folder() -> Any:  # the name of its type depends on the version of Python
    return files("variable_batch_size.traces") / "zoo_data"
