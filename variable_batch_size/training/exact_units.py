"""Units of exact sums: powers of two of which all that is added up is a whole multiple, so that no sum is rounded.

float64 holds whole multiples of a unit u exactly up to 2⁵³·u, and sums of such numbers do not depend on their order. So
every gradient is rounded to a unit that is small against it, and that does not depend on the cores: it follows from the
gradient of the step before, which is the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

HEADROOM = 12
"""By how many powers of two a minibatch's gradient may exceed the step's mean gradient before, in the same unit, and by
how many it may be smaller."""

MOST_RUNGS = 180
"""In each direction, at 12 powers of two a rung: more than float64 has."""

MOST_MINIBATCHES = 2**13
"""In a step."""

_BITS = 51
"""How many powers of two the sum may be larger than the unit, for adding 1.5 · 2⁵² units to round to whole ones."""


class Units:
    """The unit of each parameter's gradient in each step.

    With |mean gradient of the step before| < 2^e and at most 2^k minibatches, a gradient up to 2^(e + 12) is rounded to
    multiples of u = 2^(e + 12 + k − 51): 39 − k bits below the mean gradient, where float32 has 24. One that is larger,
    or smaller than 2^(e − 12), is on another *rung*, whose sum is kept apart and whose unit is 2^12, 2^24 … times as
    large or as small; so at least 27 − k bits of its largest element remain. On which rung it is depends on itself
    only, so every sum is exact.
    """

    def __init__(self) -> None:
        self._exponents: dict[Hashable, int] = {}
        self.has_asked = False  # whether core 0 has told the first ones

    def learn(self, parameters: Sequence[Hashable], largest: Iterable[float]) -> None:
        """Take in the largest element of each mean gradient; what is 0 or not finite tells nothing."""
        for p, value in zip(parameters, largest, strict=True):
            if 0 < value < math.inf:
                self._exponents[p] = math.frexp(value)[1]

    def lower(self, p: Hashable) -> None:
        """Let the unit be much smaller, after all of a gradient was too small for it."""
        self._exponents[p] = self.limit(p) - 3 * HEADROOM

    def limit(self, p: Hashable) -> int:
        """The exponent up to which gradients are on rung 0."""
        exponent = self._exponents.get(p)
        if exponent is None:  # had no gradient yet
            exponent = max(self._exponents.values(), default=0)
        return exponent + HEADROOM

    def rung(self, p: Hashable, largest: float) -> int:
        """On which rung a gradient is, by its largest element; one that is not finite stays so on any."""
        if not 0 < largest < math.inf:
            return 0
        above = math.frexp(largest)[1] - self.limit(p)
        return -(-above // HEADROOM) if above > 0 else min(0, (above - 1) // HEADROOM + 2)

    def rounder(self, p: Hashable, rung: int, num_minibatches: int) -> float:
        """What rounds a number in float64 to a whole multiple of the unit, if it is added and subtracted again."""
        num_bits = (num_minibatches - 1).bit_length()
        return math.ldexp(1.5, 52 + self.limit(p) + rung * HEADROOM + num_bits - _BITS)

    def state_dict(self, parameters: Iterable[Hashable]) -> dict[str, Any]:
        return {"exponents": [self._exponents.get(p) for p in parameters], "has_asked": self.has_asked}

    def load_state_dict(self, state: Mapping[str, Any], parameters: Iterable[Hashable]) -> None:
        pairs = zip(parameters, state["exponents"], strict=False)
        self._exponents = {p: exponent for p, exponent in pairs if exponent is not None}
        self.has_asked = state["has_asked"]


_RUNGS_OF_NUMBERS = tuple(range(88, -153, -40))
"""Exponents of the units of a number's parts: all of float32's range, so that no number is out of it."""

NUM_PARTS = len(_RUNGS_OF_NUMBERS)

_LARGEST = 2.0**128
"""From which on a number counts as infinite."""


def parts_of(numbers: torch.Tensor) -> torch.Tensor:
    """Split each number, at least 0, into parts that add up exactly over up to 2¹³ minibatches; a row for each part.

    What is not finite stays so.
    """
    rest = torch.where(numbers < _LARGEST, numbers.double(), math.inf)
    parts = []
    for exponent in _RUNGS_OF_NUMBERS:
        rounder = math.ldexp(1.5, 52 + exponent)
        part = (rest + rounder) - rounder
        parts.append(part)
        rest = rest - part
    return torch.stack(parts)


def joined(parts: torch.Tensor) -> torch.Tensor:
    """The numbers that sums of parts make."""
    total = parts[-1]
    for part in reversed(parts[:-1].unbind()):
        total = total + part
    return total
