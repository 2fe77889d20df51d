"""What other packages add by entry points: rules, policies, traces and commands, each named like one of ours."""

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.abc import SourceLoader
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
Kind = Literal["rules", "policies", "traces", "commands"]


@cache
def registered(kind: Kind) -> Mapping[str, EntryPoint]:
    """The entry points of ``variable_batch_size.KIND`` by name; none of them is imported."""
    return {found.name: found for found in entry_points(group=f"variable_batch_size.{kind}")}


def load(kind: Kind, name: str) -> Any:
    """What an entry point refers to; None, with a warning that names its package, if it cannot be imported."""
    found = registered(kind)[name]
    try:
        return found.load()
    except Exception as error:
        _warn(found, error)
        return None


def summary(kind: Kind, name: str) -> str | None:
    """The first line of a module's docstring, after ``name``: if it begins so; the module is read, not imported."""
    found = registered(kind)[name]
    try:
        spec = find_spec(found.module)
        source = spec.loader.get_source(found.module) if spec and isinstance(spec.loader, SourceLoader) else None
        if source is None:
            raise ModuleNotFoundError(f"No module named {found.module!r}")
        line = (ast.get_docstring(ast.parse(source)) or name).partition("\n")[0]
    except Exception as error:
        _warn(found, error)
        return None
    return re.sub(r"^``[^`]*``: ", "", line).rstrip(".")


def text_file(kind: Kind, name: str, suffix: str) -> bytes | None:
    """The content of the file called NAME in the package that is registered; None, with a warning, if it has none."""
    found = registered(kind)[name]
    try:
        return (files(found.module) / f"{name}{suffix}").read_bytes()
    except Exception as error:
        _warn(found, error)
        return None


def _warn(found: EntryPoint, error: Exception) -> None:
    package = found.dist.name if found.dist else "an unknown package"
    kind = found.group.rpartition(".")[2]
    message = f"{package} has registered {found.name!r} for {kind}, but {found.value} cannot be loaded: {error!r}"
    warnings.warn(message, stacklevel=3)


class Registry(Mapping[str, T], Generic[T]):
    """What is built in, by name, and what other packages have registered, which is imported when it is used."""

    def __init__(self, kind: Kind, builtin: Mapping[str, T]) -> None:
        self.kind, self.builtin = kind, builtin

    def __getitem__(self, name: str) -> T:
        if name in self.builtin:
            return self.builtin[name]
        found: T | None = load(self.kind, name) if name in registered(self.kind) else None
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self.builtin
        yield from registered(self.kind).keys() - self.builtin.keys()

    def __len__(self) -> int:
        return len(self.builtin.keys() | registered(self.kind).keys())
