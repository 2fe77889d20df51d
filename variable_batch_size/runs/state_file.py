"""Checkpoint files: their names and contents, read with `weights_only=True`."""

import io
import os
import pickle
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from variable_batch_size.cores.dtensor import is_dtensor
from variable_batch_size.files import TEMPORARY, write
from variable_batch_size.runs.checksums import CheckedFile, DamagedFileError, crcs_written

# name of a file, or of a directory; a step may have several directories, the newest with the largest number
_NAME = re.compile(r"step-([0-9]{9,})(?:\.pt|-([0-9]+))")
REST = "run.pt"  # the file in a sharded checkpoint with everything but the sharded tensors
DAMAGED = "damaged-"  # before the name of a checkpoint
EXTRA_STATE = "_extra_state"  # the end of names in a module's state dict for what ``get_extra_state`` returns
_MARK, _VERSION = "variable_batch_size checkpoint", 1


def tree_map(value: Any, change: Callable[[Any, str], Any], place: str = "") -> Any:
    """Apply a function to a value and its place, and to the parts of each value that it returns unchanged.

    A place is written as keys in brackets. Containers are lists, tuples and dicts with their keys and, for a module's
    state, the ``_metadata`` that ``load_state_dict`` reads. They are copied; a named tuple becomes a tuple, as it does
    in a file.
    """
    changed = change(value, place)
    if changed is not value:
        return changed
    if isinstance(value, dict):
        copied: Any = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, part in value.items():
            name = tree_map(key, change, place)
            copied[name] = tree_map(part, change, f"{place}[{key!r}]")
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            copied._metadata = tree_map(value._metadata, change, place)
        return copied
    if isinstance(value, list | tuple):
        parts = [tree_map(part, change, f"{place}[{number}]") for number, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def path_of(directory: Path, steps_done: int, number: int | None = None) -> Path:
    """The file of the checkpoint after `steps_done` steps or, with a number, the directory of a sharded one."""
    return directory / f"step-{steps_done:09d}{'.pt' if number is None else f'-{number}'}"


def free_number(directory: Path, steps_done: int) -> int:
    """The number of the next sharded checkpoint after `steps_done` steps."""
    names = [path.name for path in checkpoints(directory) if path.name.startswith(f"step-{steps_done:09d}-")]
    return 1 + max((int(name.rpartition("-")[2]) for name in names), default=0)


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, the newest last."""
    names = [path.name for path in directory.iterdir()] if directory.exists() else []
    return [directory / name for name in checkpoint_names(names)]


def checkpoint_names(names: Iterable[str]) -> list[str]:
    """Those of some names that are of checkpoints, the newest last."""
    found = ((_NAME.fullmatch(name), name) for name in names)
    return [name for *_, name in sorted((int(match[1]), int(match[2] or 0), name) for match, name in found if match)]


def steps_of(path: Path) -> int:
    """After how many steps a checkpoint was saved."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def prepare(directory: Path) -> None:
    """Create the directory, check that it is writable, and remove unfinished files left by a crash."""
    existing = next((place for place in (directory, *directory.parents) if place.exists()), directory)
    if existing.is_file():
        advice = "pass another place, or the directory that it is in"
        raise ValueError(f"`directory` must be a directory, got {directory}, but {existing} is a file: {advice}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(f"*{TEMPORARY}"):
            remove(path)
        write(directory / "writable", Path.touch)
        (directory / "writable").unlink()
    except OSError as error:
        raise ValueError(f"`directory` must be writable, got {directory}: {error}") from error


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state of tensors, on any device, and primitives."""
    plain = tree_map({"format": _MARK, "version": _VERSION, **state}, _plain)

    def fill(temporary: Path) -> None:
        with open(temporary, "wb") as file, crcs_written():
            torch.save(plain, file)

    try:
        write(path, fill)
    except (OSError, RuntimeError) as error:  # torch raises the latter if it cannot finish writing a file
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"{path} could not be written: {cause}") from error


def _plain(part: Any, place: str) -> Any:
    """Tensors on the CPU and plain numbers; raises for what ``weights_only`` would not load again."""
    if isinstance(part, torch.Tensor):
        return part.detach().cpu()
    if isinstance(part, np.generic):
        return part.item()
    primitives = (bool, int, float, str, bytes, complex, type(None))
    if type(part) in primitives or isinstance(part, dict | list | tuple | torch.dtype | torch.device):
        return part
    raise ValueError(f"a checkpoint holds tensors and primitives only, got {type(part).__name__} at state{place}")


def in_memory(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load a state without a file, and without the contents of tensors except those of extra state."""

    def without_contents(part: Any, place: str) -> Any:
        is_known = type(part) in (torch.Tensor, torch.nn.Parameter) or is_dtensor(part)
        return None if is_known and EXTRA_STATE not in place else _plain(part, place)

    buffer = io.BytesIO()
    torch.save(tree_map(state, without_contents), buffer)
    buffer.seek(0)
    try:
        return torch.load(buffer, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:
        advice = "convert it to tensors, or pass its type to torch.serialization.add_safe_globals"
        raise ValueError(f"the state can be saved, but not loaded: {_reason(error)}; {advice}") from error


def _reason(error: Exception) -> str:
    """The first sentence about what went wrong in ``torch.load``; others advise not to use `weights_only`."""
    text = str(error)
    text = (text.partition("WeightsUnpickler error: ")[2] or text).partition("\n")[0]
    return text.partition(". ")[0] or type(error).__name__


def load(path: Path) -> dict[str, Any]:
    """Read a file of :func:`save`, with tensors on the CPU. Only tensors and primitives are unpickled.

    Raises:
        DamagedFileError: if it is truncated, or is not what was written.
        ValueError: if it is intact, but not a checkpoint.
    """
    if path.is_dir():
        path = path / REST
        if not path.exists():
            raise DamagedFileError(f"{path} is missing")
    with open(path, "rb") as file:
        try:
            checked = CheckedFile(file)
            state = torch.load(checked, map_location="cpu", weights_only=True, mmap=False)  # type: ignore[arg-type]
            checked.finish()
        except pickle.UnpicklingError as error:
            raise ValueError(f"{path} is not a checkpoint: {_reason(error)}") from error
        except Exception as error:  # of many types, depending on what is damaged
            raise DamagedFileError(f"{path} is damaged, truncated or not a checkpoint: {_reason(error)}") from error
    if not isinstance(state, dict) or state.get("format") != _MARK:
        raise ValueError(f"{path} is not a checkpoint of variable_batch_size")
    if state["version"] != _VERSION:
        raise ValueError(f"{path} has version {state['version']} of the format, expected {_VERSION}")
    return state


def keep_only(directory: Path, number: int) -> None:
    """Remove all checkpoints but the newest `number`."""
    for path in checkpoints(directory)[:-number]:
        remove(path)


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it is none."""
    aside = path.with_name(DAMAGED + path.name)
    if aside.exists():
        remove(aside)
    os.replace(path, aside)


def remove(path: Path) -> None:
    """Remove a file, or a directory and its contents."""
    if path.is_dir():
        temporary = path.with_name(path.name + TEMPORARY)  # so that a crash leaves no half-removed directory
        os.replace(path, temporary)
        shutil.rmtree(temporary)
    else:
        path.unlink()
