"""Choices between numbers, which are Python numbers or scalar tensors on a device.

A formula of these functions, without ``if`` on a measured value, works for both: the host need not read the tensor.
"""

import math
from typing import Any

Number = Any  # a float, or a tensor of one element
Condition = Any  # a bool, or a tensor of one element


def is_tensor(number: Number) -> bool:
    """Whether a number is a tensor."""
    return hasattr(number, "clamp")  # torch need not be imported to scale a batch size


def where(condition: Condition, one: Number, other: Number) -> Number:
    """The first number if the condition holds, otherwise the second; one of them must be a tensor if the condition is.

    >>> where(True, 1.0, 2.0)
    1.0
    """
    if isinstance(condition, bool) or not is_tensor(condition):
        return one if condition else other
    return one.where(condition, other) if is_tensor(one) else other.where(condition.logical_not(), one)


def at_least(number: Number, bound: float) -> Number:
    """The number, or the bound if that is larger."""
    return number.clamp(min=bound) if is_tensor(number) else max(number, bound)


def at_most(number: Number, bound: Number) -> Number:
    """The number, or the bound if that is smaller."""
    if is_tensor(number):
        return number.clamp(max=bound)
    return bound.clamp(max=number) if is_tensor(bound) else min(number, bound)


def sqrt(number: Number) -> Number:
    """The square root."""
    return number.sqrt() if is_tensor(number) else math.sqrt(number)
