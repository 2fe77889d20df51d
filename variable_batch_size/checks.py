"""Refuses a wrong argument in one sentence: its name, the rule and the value."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any, NoReturn, TypeGuard


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number to count with: an int or a numpy integer, no bool.

    >>> is_integer(3), is_integer(3.0), is_integer(True)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integer(**values: Any) -> None:
    """Refuse an argument that is no integer."""
    for name, value in values.items():
        if not is_integer(value):
            raise ValueError(f"`{name}` must be an integer, got {value!r}")


def check_positive(**values: Any) -> None:
    """Refuse an argument that is not a positive integer.

    >>> check_positive(minibatch_size=0)
    Traceback (most recent call last):
    ValueError: `minibatch_size` must be a positive integer, got 0
    """
    for name, value in values.items():
        if not is_integer(value) or value <= 0:
            raise ValueError(f"`{name}` must be a positive integer, got {value!r}")


def check_not_negative(**values: Any) -> None:
    """Refuse an argument that is not 0 or a positive integer."""
    for name, value in values.items():
        if not is_integer(value) or value < 0:
            raise ValueError(f"`{name}` must be a non-negative integer, got {value!r}")


def check_within(largest: int, **values: Any) -> None:
    """Refuse an argument that is not an integer from 0 to `largest`."""
    for name, value in values.items():
        if not is_integer(value) or not 0 <= value <= largest:
            raise ValueError(f"`{name}` must be an integer from 0 to {largest}, got {value!r}")


def check_one_of(choices: Iterable[str], **values: Any) -> None:
    """Refuse an argument that is none of the choices.

    >>> check_one_of(("stop", "hold"), on_end="halt")
    Traceback (most recent call last):
    ValueError: `on_end` must be one of 'stop', 'hold', got 'halt'
    """
    for name, value in values.items():
        if value not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}")


def install(extra: str) -> str:
    """How to get the packages of an extra, for those who have this package from an index and those who cloned it.

    >>> print(install("report"))
    pip install 'variable_batch_size[report]', or in a clone pip install '.[report]'
    """
    return f"pip install 'variable_batch_size[{extra}]', or in a clone pip install '.[{extra}]'"


def refuse(place: str, rule: str, value: Any) -> NoReturn:
    """Refuse a value found at a place in a file: ``spot.csv:17: batchsize must be positive, got 0``."""
    raise ValueError(f"{place}: {rule}, got {value}")
