"""A formula with every operator and choice that rules use, and the numbers to compute it from."""

import torch

from variable_batch_size.rules.numbers import at_least, at_most, sqrt, where

VALUES = [0.0, 1.0, -2.5, 3.0, float("inf"), float("-inf"), float("nan")]
PAIRS = [([number, 1 - other], [other]) for number in VALUES for other in (0.5, 2.0, 3.0)]


def formula(numbers, others):
    first, second = numbers
    (other,) = others
    is_more, is_known = first > other, second != 0
    return [
        first + second + 1 - other,
        2 - first * second / 4,
        1 / other + True * other,
        (other * 4) // 1.5,
        first**1 + first**2 + at_least(other, 0.5) ** at_most(other, 2.0),
        sqrt(at_least(first, 0.0)),
        at_most(at_least(second, -1.0), other),
        where(is_more, first, 7.0),
        where(is_more & is_known, 7.0, first),
        where(is_more | False, first, second),
        3 + is_known * 2.0 + (first >= 1),
        (where(is_more, is_known, True)) * 1.0,
    ], [is_more, True & is_known, is_more | (first < other), is_more.logical_not(), (second == other) & True]


def results(as_operation, device, dtype=torch.float32, flush=lambda: None):
    """Those of the formula as an operation, for all pairs."""
    operation, found = as_operation(formula), []
    for pair in PAIRS:
        rows = operation(*(torch.tensor(numbers, dtype=dtype).to(device) for numbers in pair))
        flush()
        found += [row.cpu() for row in rows]
    return found
