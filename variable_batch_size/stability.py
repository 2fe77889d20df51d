"""What may be relied on: the mark of what may change or be removed in any version."""

from collections.abc import Callable
from typing import TypeVar

NOTE = "Experimental: may change or be removed in any version."
T = TypeVar("T", bound=Callable[..., object])


def experimental(thing: T) -> T:
    """Add the note to the docstring of a class or function, which is then known as experimental.

    >>> @experimental
    ... def f(): "Return nothing."
    >>> f.__doc__, is_experimental(f)
    ('Return nothing.\\n\\nExperimental: may change or be removed in any version.', True)
    """
    thing.__doc__ = f"{thing.__doc__ or ''}\n\n{NOTE}"
    return thing


def is_experimental(thing: object) -> bool:
    return (getattr(thing, "__doc__", None) or "").endswith(NOTE)
