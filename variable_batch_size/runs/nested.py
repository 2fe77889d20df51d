"""Nested containers, as the states of a run are: made anew of what becomes of their parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any


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
