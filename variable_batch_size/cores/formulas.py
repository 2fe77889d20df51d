"""Scalar: a number in a formula that becomes one operation of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Scalar:
    """A number or a condition in a formula, with those methods of a tensor that formulas use.

    Args:
        op: what the device's builder of operations has for it, with the methods of ``torch_xla.core.xla_builder.Op``.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, op: Any) -> None:
        self.op = op

    def __bool__(self) -> bool:
        raise TypeError("a formula must choose by `where`: the value is not known when it is traced")

    @property
    def _is_condition(self) -> bool:
        return bool(self.op.shape().dtype == "pred")

    def _number(self) -> Any:
        return self.op.cast("f32") if self._is_condition else self.op

    def _with(self, other: Any, function: Callable[[Any, Any], Any], *, is_first: bool = True) -> Scalar:
        own = self._number()
        other = other._number() if isinstance(other, Scalar) else own.scalar_like(float(other))
        return Scalar(function(own, other) if is_first else function(other, own))

    def _and_condition(self, other: Any, function: Callable[[Any, Any], Any]) -> Scalar:
        return Scalar(function(self.op, other.op if isinstance(other, Scalar) else self.op.scalar_like(bool(other))))

    def __add__(self, other: Any) -> Scalar:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Scalar:
        return self._with(other, lambda a, b: a - b)

    def __rsub__(self, other: Any) -> Scalar:
        return self._with(other, lambda a, b: a - b, is_first=False)

    def __mul__(self, other: Any) -> Scalar:
        return self._with(other, lambda a, b: a * b)

    def __truediv__(self, other: Any) -> Scalar:
        return self._with(other, lambda a, b: a / b)

    def __rtruediv__(self, other: Any) -> Scalar:
        return self._with(other, lambda a, b: a / b, is_first=False)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Any) -> Scalar:
        return self._with(other, lambda a, b: (a / b).floor())

    def __pow__(self, exponent: Any) -> Scalar:
        if isinstance(exponent, int) and exponent > 0:  # exactly
            return self if exponent == 1 else self * self ** (exponent - 1)
        return self._with(exponent, lambda a, b: a**b)

    def __lt__(self, other: Any) -> Scalar:
        return self._with(other, lambda a, b: a < b)

    def __gt__(self, other: Any) -> Scalar:
        return self._with(other, lambda a, b: a > b)

    def __ge__(self, other: Any) -> Scalar:
        return self._with(other, lambda a, b: a >= b)

    def __eq__(self, other: object) -> Scalar:  # type: ignore[override]
        return self._with(other, lambda a, b: a == b)

    def __ne__(self, other: object) -> Scalar:  # type: ignore[override]
        return self._with(other, lambda a, b: a != b)

    def __and__(self, other: Any) -> Scalar:
        return self._and_condition(other, lambda a, b: a & b)

    def __or__(self, other: Any) -> Scalar:
        return self._and_condition(other, lambda a, b: a | b)

    __rand__, __ror__ = __and__, __or__

    def logical_not(self) -> Scalar:
        return self == 0

    def sqrt(self) -> Scalar:
        return Scalar(self.op.sqrt())

    def clamp(self, min: Any = None, max: Any = None) -> Scalar:
        found = self if min is None else self._with(min, lambda a, b: a.max(b))
        return found if max is None else found._with(max, lambda a, b: a.min(b))

    def where(self, condition: Scalar, other: Any) -> Scalar:
        """This number where the condition holds, otherwise the other."""
        if self._is_condition:
            return self._and_condition(other, condition.op.select)
        return self._with(other, condition.op.select)
