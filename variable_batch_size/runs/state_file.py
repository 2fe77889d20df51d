"""Checkpoint files: their names, what they hold, and reading them with `weights_only=True`."""

from __future__ import annotations

import inspect
import os
import re
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from variable_batch_size.files import TEMPORARY, write


def mapped(value: Any, change: Callable[[Any, str], Any], place: str = "") -> Any:
    """A value whose parts are changed, wherever they are in lists, tuples and dicts.

    A named tuple becomes a tuple, as it does in a file.

    Args:
        value: left as it is.
        change: what becomes of a part at a place; the part itself for no change, but perhaps of what is in it.
        place: of the value, as keys in brackets.

    >>> mapped({"a": [1, "text"], "b": (2,)}, lambda part, place: f"{part} at {place}" if part == 2 else part)
    {'a': [1, 'text'], 'b': ("2 at ['b'][0]",)}
    """
    changed = change(value, place)
    if changed is not value:
        return changed
    if isinstance(value, dict):
        return _like(value, [(key, mapped(part, change, f"{place}[{key!r}]")) for key, part in value.items()])
    if isinstance(value, list | tuple):
        parts = [mapped(part, change, f"{place}[{number}]") for number, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _like(value: dict[Any, Any], items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    if not isinstance(value, OrderedDict):
        return dict(items)
    ordered = OrderedDict(items)
    if hasattr(value, "_metadata"):  # the versions of a model's modules, which load_state_dict goes by
        ordered._metadata = value._metadata  # type: ignore[attr-defined]
    return ordered


class Stateful(Protocol):
    """Something with a state, such as a scheduler of torch."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def state_of(scheduler: Stateful) -> dict[str, Any]:
    """Its state without functions, which are part of how it was made and are there when it is made again."""
    state: dict[str, Any] = _without_functions(scheduler.state_dict())
    return state


def load_state(scheduler: Stateful, saved: dict[str, Any]) -> None:
    """Put a scheduler that was made in the same way into a saved state."""
    scheduler.load_state_dict(_in_containers_of(scheduler.state_dict(), saved))


def _without_functions(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_functions(part) for key, part in value.items() if not inspect.isroutine(part)}
    return [_without_functions(part) for part in value] if isinstance(value, list) else value


def _in_containers_of(present: Any, saved: Any) -> Any:
    """A saved value with a Counter, which is saved as a dictionary, where there is one at present."""
    if isinstance(present, Counter):
        return Counter(saved)
    if isinstance(present, dict) and isinstance(saved, dict):
        return {key: _in_containers_of(present.get(key), part) for key, part in saved.items()}
    if isinstance(present, list) and isinstance(saved, list) and len(present) == len(saved):
        return [_in_containers_of(*pair) for pair in zip(present, saved, strict=True)]
    return saved


_NAME = re.compile(r"step-([0-9]{9,})(?:\.pt|-([0-9]+))")
"""Of a file, and of a directory: there may be several after the same step, the latest with the largest number."""

_MARK = "variable_batch_size checkpoint"
_VERSION = 1


def path_of(directory: Path, steps_done: int) -> Path:
    """The file of the checkpoint after `steps_done` steps."""
    return directory / f"step-{steps_done:09d}.pt"


def directory_of(directory: Path, steps_done: int, number: int) -> Path:
    """The directory of a checkpoint after `steps_done` steps, of which there may be several."""
    return directory / f"step-{steps_done:09d}-{number}"


def free_number(directory: Path, steps_done: int) -> int:
    """The number of one more checkpoint after `steps_done` steps."""
    names = [path.name for path in checkpoints(directory) if path.name.startswith(f"step-{steps_done:09d}-")]
    return 1 + max((int(name.rpartition("-")[2]) for name in names), default=0)


def rest_of(directory: Path) -> Path:
    """The file in the directory of a checkpoint that has all but the tensors which are in parts."""
    return directory / "run.pt"


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, the newest last."""
    if not directory.exists():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return [path for *_, path in sorted((int(match[1]), int(match[2] or 0), path) for match, path in found if match)]


def prepare(directory: Path) -> None:
    """Make the directory, see that it can be written to, and clean up what a crash has left of an unfinished file."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(f"*{TEMPORARY}"):
            remove(path)
        write(directory / "writable", Path.touch)
        (directory / "writable").unlink()
    except OSError as error:
        raise ValueError(f"`directory` must be one that can be written to, got {directory}: {error}") from error


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state of tensors and primitives, the tensors from whatever device they are on."""
    marked = {"format": _MARK, "version": _VERSION, **state}
    plain = _plain(marked, "")

    def fill(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            torch.save(plain, file)

    try:
        write(path, fill)
    except (OSError, RuntimeError) as error:  # the latter is torch's, where a file cannot be written to its end
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"{path} could not be written: {cause}") from error


def load(path: Path) -> dict[str, Any]:
    """Read what :func:`save` wrote; tensors on the CPU. Nothing is unpickled but tensors and primitives."""
    with open(rest_of(path) if path.is_dir() else path, "rb") as file:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of many kinds, depending on where the file ends
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(f"{path} does not load, it is cut short or no checkpoint: {reason}") from error
    if not isinstance(state, dict) or state.get("format") != _MARK:
        raise ValueError(f"{path} is no checkpoint of variable_batch_size")
    if state["version"] != _VERSION:
        raise ValueError(f"{path} has version {state['version']} of the format, expected {_VERSION}")
    return state


def keep_only(directory: Path, number: int) -> None:
    """Remove all checkpoints but the newest `number`."""
    for path in checkpoints(directory)[:-number]:
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a directory with all that is in it."""
    if path.is_dir():
        temporary = path.with_name(path.name + TEMPORARY)  # else what a crash leaves of it would pass for a checkpoint
        os.replace(path, temporary)
        shutil.rmtree(temporary)
    else:
        path.unlink()


def _plain(value: Any, place: str) -> Any:
    """A copy of nested containers with all tensors on the CPU; refuses what ``weights_only`` would not load again."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.generic):
        return value.item()
    if value is None or type(value) in (bool, int, float, str, bytes, complex):
        return value
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = ((_plain(k, place), _plain(v, f"{place}[{k!r}]")) for k, v in value.items())
        if not isinstance(value, OrderedDict):
            return dict(items)
        ordered = OrderedDict(items)
        if hasattr(value, "_metadata"):  # the versions of a model's modules, which load_state_dict goes by
            ordered._metadata = _plain(value._metadata, place)  # type: ignore[attr-defined]
        return ordered
    if isinstance(value, (list, tuple)):
        parts = [_plain(part, f"{place}[{i}]") for i, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, (torch.dtype, torch.device)):
        return value
    raise ValueError(f"a checkpoint holds tensors and primitives only, got {type(value).__name__} at state{place}")
