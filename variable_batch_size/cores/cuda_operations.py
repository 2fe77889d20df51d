"""Formulas of single numbers as one CUDA kernel, where the device would otherwise start a hundred."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from variable_batch_size.cores.communicator import Formula, Operation
from variable_batch_size.cores.formulas import Scalar

_NAME = "formula"
_FUNCTIONS = """
#define infinity __longlong_as_double(0x7ff0000000000000LL)
__device__ double power(double a, double b) { return pow(a, b); }
__device__ double maximum(double a, double b) { return a > b || a != a ? a : b; }  // NaN stays NaN
__device__ double minimum(double a, double b) { return a < b || a != a ? a : b; }
template <typename T> __device__ T select(bool condition, T one, T other) { return condition ? one : other; }
"""


def are_available(device: torch.device) -> bool:
    """Whether torch can compile a kernel: since torch 2.9 by NVRTC, which torch's CUDA wheels include."""
    return device.type == "cuda" and torch.version.cuda is not None and _compiles()


@cache
def _compiles() -> bool:
    if not hasattr(torch.cuda, "_compile_kernel"):
        return False
    try:
        torch.cuda._compile_kernel(f'{_FUNCTIONS}extern "C" __global__ void {_NAME}() {{}}', _NAME)
    except (AssertionError, OSError, RuntimeError):  # of a library that is not there, or of another version
        return False
    return True


def as_operation(formula: Formula) -> Operation:
    """An operation on vectors in float64 that computes a formula of their elements."""
    known: dict[Any, tuple[Any, Source]] = {}

    def operation(*vectors: torch.Tensor) -> Sequence[torch.Tensor]:
        device = vectors[0].device
        key = device, tuple(map(len, vectors))
        with torch.cuda.device(device):
            if key not in known:
                source = source_of(formula, key[1])
                known[key] = torch.cuda._compile_kernel(source.text, _NAME), source
            kernel, source = known[key]
            found = [torch.empty(size, dtype=dtype, device=device) for size, dtype in source.results]
            kernel(args=[*vectors, *found])
        return found

    return operation


class Source(NamedTuple):
    """A kernel in C++."""

    text: str
    statements: list[str]  # of its numbers, in order; in Python they mean the same
    results: list[tuple[int, torch.dtype]]  # the size and the type of each vector


def source_of(formula: Formula, sizes: Sequence[int]) -> Source:
    """The kernel of a formula of vectors of these sizes."""
    statements: list[str] = []
    names = itertools.count()
    vectors = [
        [Scalar(Expression(f"from{number}[{place}]", statements, names)) for place in range(size)]
        for number, size in enumerate(sizes)
    ]
    rows = [[number.op for number in row] for row in formula(*vectors)]
    types = ["bool" if row[0].is_condition else "double" for row in rows]
    for number, row in enumerate(rows):
        statements += [f"to{number}[{place}] = {op.name}" for place, op in enumerate(row)]
    parameters = [f"const double* from{number}" for number in range(len(sizes))]
    parameters += [f"{kind}* to{number}" for number, kind in enumerate(types)]
    body = "".join(f"  {statement};\n" for statement in statements)
    text = f'{_FUNCTIONS}extern "C" __global__ void {_NAME}({", ".join(parameters)}) {{\n{body}}}\n'
    dtypes = [torch.bool if kind == "bool" else torch.float64 for kind in types]
    return Source(text, statements, [(len(row), dtype) for row, dtype in zip(rows, dtypes, strict=True)])


class _Shape(NamedTuple):
    dtype: str


class Expression:
    """A number or a condition in a kernel, with those methods of ``torch_xla.core.xla_builder.Op`` that Scalar uses."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, text: str, statements: list[str], names: Any, *, is_condition: bool = False) -> None:
        self.is_condition, self._statements, self._names = is_condition, statements, names
        self.name = f"x{next(names)}"
        statements.append(f"{'bool' if is_condition else 'double'} {self.name} = {text}")

    def _new(self, text: str, *, is_condition: bool = False) -> Expression:
        return Expression(text, self._statements, self._names, is_condition=is_condition)

    def shape(self) -> _Shape:
        return _Shape("pred" if self.is_condition else "f64")

    def scalar_like(self, value: float) -> Expression:
        if self.is_condition:
            return self._new(str(int(value)), is_condition=True)
        return self._new("infinity" if value == math.inf else "-infinity" if value == -math.inf else repr(value))

    def cast(self, _: str) -> Expression:
        return self._new(f"1.0 * {self.name}")

    def select(self, one: Expression, other: Expression) -> Expression:
        return self._new(f"select({self.name}, {one.name}, {other.name})", is_condition=one.is_condition)

    def __add__(self, other: Expression) -> Expression:
        return self._new(f"{self.name} + {other.name}")

    def __sub__(self, other: Expression) -> Expression:
        return self._new(f"{self.name} - {other.name}")

    def __mul__(self, other: Expression) -> Expression:
        return self._new(f"{self.name} * {other.name}")

    def __truediv__(self, other: Expression) -> Expression:
        return self._new(f"{self.name} / {other.name}")

    def __pow__(self, other: Expression) -> Expression:
        return self._new(f"power({self.name}, {other.name})")

    def __lt__(self, other: Expression) -> Expression:
        return self._new(f"{self.name} < {other.name}", is_condition=True)

    def __gt__(self, other: Expression) -> Expression:
        return self._new(f"{self.name} > {other.name}", is_condition=True)

    def __ge__(self, other: Expression) -> Expression:
        return self._new(f"{self.name} >= {other.name}", is_condition=True)

    def __eq__(self, other: Expression) -> Expression:  # type: ignore[override]
        return self._new(f"{self.name} == {other.name}", is_condition=True)

    def __ne__(self, other: Expression) -> Expression:  # type: ignore[override]
        return self._new(f"{self.name} != {other.name}", is_condition=True)

    def __and__(self, other: Expression) -> Expression:
        return self._new(f"{self.name} & {other.name}", is_condition=True)

    def __or__(self, other: Expression) -> Expression:
        return self._new(f"{self.name} | {other.name}", is_condition=True)

    def max(self, other: Expression) -> Expression:
        return self._new(f"maximum({self.name}, {other.name})")

    def min(self, other: Expression) -> Expression:
        return self._new(f"minimum({self.name}, {other.name})")

    def floor(self) -> Expression:
        return self._new(f"floor({self.name})")

    def sqrt(self) -> Expression:
        return self._new(f"sqrt({self.name})")
