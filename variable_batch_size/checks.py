"""Checks of arguments, with errors that contain name, rule and value."""

import copy
import difflib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any, NoReturn, TypeGuard, TypeVar

T = TypeVar("T")


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is an int or a numpy integer, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integer(**values: Any) -> None:
    _check(values, "an integer", is_integer)


def check_positive(**values: Any) -> None:
    _check(values, "a positive integer", lambda value: is_integer(value) and value > 0)


def check_positive_number(**values: Any) -> None:
    _check(values, "a positive number", lambda value: is_number(value) and 0 < value < math.inf)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is an int, a float or a number of numpy, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_not_negative_number(**values: Any) -> None:
    _check(values, "a non-negative number", lambda value: is_number(value) and 0 <= value < math.inf)


def check_not_negative(**values: Any) -> None:
    _check(values, "a non-negative integer", lambda value: is_integer(value) and value >= 0)


def check_within(largest: int, **values: Any) -> None:
    _check(values, f"an integer from 0 to {largest}", lambda value: is_integer(value) and 0 <= value <= largest)


def check_flag(**values: Any) -> None:
    _check(values, "True or False", lambda value: isinstance(value, bool))


def check_one_of(choices: Iterable[str], **values: Any) -> None:
    for name, value in values.items():
        if value not in choices:
            known = ", ".join(map(repr, choices))
            raise ValueError(f"`{name}` must be one of {known}, got {value!r}{did_you_mean(value, choices)}")


def did_you_mean(value: Any, choices: Iterable[str]) -> str:
    """A hint at the choice that resembles a wrong value; empty if there is none."""
    found = difflib.get_close_matches(value, choices, n=1, cutoff=0.75) if isinstance(value, str) else []
    return f" (did you mean {found[0]!r}?)" if found else ""


def _check(values: Mapping[str, Any], rule: str, is_right: Callable[[Any], bool]) -> None:
    for name, value in values.items():
        if not is_right(value):
            raise ValueError(f"`{name}` must be {rule}, got {value!r}")


def copy_for_run(recipe: T, *shared: Any) -> T:
    """A copy of a rule or policy for a run; it refers to the `shared` objects that the recipe refers to."""
    try:
        return copy.deepcopy(recipe, {id(one): one for one in shared})
    except TypeError as error:
        name = type(recipe).__name__
        found = f"every run has its own copy of {name}, which cannot be copied ({error})"
        raise ValueError(f"{found}: implement {name}.__deepcopy__") from error


def install(extra: str) -> str:
    """How to install the packages of an extra, from an index or from a clone."""
    return f"pip install 'variable_batch_size[{extra}]', or in a clone pip install '.[{extra}]'"


def import_extra(module: str, needs: str, extra: str) -> Any:
    """Import a module of an extra; the ImportError of a missing package names what needs it, and how to install it."""
    with imported_extra(module.partition(".")[0], needs, extra):
        return importlib.import_module(module)


@contextmanager
def imported_extra(package: str, needs: str, extra: str) -> Iterator[None]:
    """Like :func:`import_extra`, for the import statements within."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is installed, and something that it needs is not
        raise ImportError(f"{needs}: {install(extra)}") from None


def check_extra(needs: str, extra: str, *packages: str) -> None:
    """Raise an ImportError if packages of an extra are missing, without importing them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(f"{needs} {', '.join(missing)}: {install(extra)}")


def refuse(place: str, rule: str, value: Any) -> NoReturn:
    """Raise for a value at a place in a file: ``spot.csv:17: batchsize must be positive, got 0``."""
    raise ValueError(f"{place}: {rule}, got {value}")


def given_ref_batchsize(ref_batchsize: int | None, ref_batch_size: int | None) -> int:
    """The value that was passed under one of two spellings."""
    if ref_batchsize is not None and ref_batch_size is not None:
        raise ValueError("`ref_batchsize` and `ref_batch_size` are the same: pass one of them")
    given = ref_batch_size if ref_batchsize is None else ref_batchsize
    if given is None:
        raise ValueError("`ref_batchsize` must be given: the batch size at which the settings of `inner` are right")
    check_positive(**{"ref_batch_size" if ref_batchsize is None else "ref_batchsize": given})
    return given
