"""Operations of torch_xla that stand for many, each of which the host would trace in every step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import chain, islice
from typing import Any

import torch

from variable_batch_size.cores.communicator import Formula, Operation
from variable_batch_size.cores.formulas import Scalar

_computations: dict[str, Any] = {}  # by their text: cores that are threads must have the same graphs, not equal ones
_lock = threading.Lock()


def as_operation(formula: Formula) -> Operation:
    """An operation on vectors that computes a formula of their elements."""

    def build(*vectors: Any) -> list[Any]:
        rows = formula(*([Scalar(element) for element in _elements(vector)] for vector in vectors))
        return [vectors[0].concat_in_dim([number.op.reshape([1]) for number in row], 0) for row in rows]

    return _Operation(build)


def where(condition: torch.Tensor, ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Each of the first tensors if the condition holds, otherwise each of the others."""
    return _where(condition, *ones, *others) if ones else []  # an XLA operation has a result


def scaled(tensors: Sequence[torch.Tensor], factors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Each tensor times its factor, an element of a vector; 0 where the factor is 0, even for NaN."""
    return _scaled(factors, *tensors)


def squared_norms(lists: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The squared norm of each of several lists of real tensors, none of them empty, in float32."""
    return _squared_norms(tuple(map(len, lists)))(*chain.from_iterable(lists))[0]


class _Operation:
    """An operation on tensors, given how XLA computes it. It is built once for their shapes."""

    def __init__(self, build: Callable[..., list[Any]]) -> None:
        self._build = build
        self._known: dict[Any, Callable[[Sequence[torch.Tensor]], Any]] = {}

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key not in self._known:
            with _lock:
                self._known[key] = self._new(tensors)
        found = self._known[key](tensors)
        return [found] if isinstance(found, torch.Tensor) else found

    def _new(self, tensors: Sequence[torch.Tensor]) -> Any:
        builder = import_module("torch_xla.core.xla_builder")
        shapes = builder.tensor_shape(tensors)
        computation = builder.create_computation("one", lambda *ops: ops[0].tuple(self._build(*ops)), shapes)
        text = builder.get_computation_hlo(computation)
        return builder.xla_computation_as_func(_computations.setdefault(text, computation), "xla::one")


def _build_where(condition: Any, *arrays: Any) -> list[Any]:
    half = len(arrays) // 2
    pairs = zip(arrays[:half], arrays[half:], strict=True)
    return [condition.broadcast(one.shape().sizes).select(one, other) for one, other in pairs]


def _build_scaled(factors: Any, *arrays: Any) -> list[Any]:
    found = []
    for factor, array in zip(_elements(factors), arrays, strict=True):
        shape = array.shape()
        is_counted = (factor != factor.scalar_like(0.0)).broadcast(shape.sizes)
        product = array * factor.cast(shape.dtype).broadcast(shape.sizes)
        found.append(is_counted.select(product, array.scalar_like(0)))
    return found


def _build_squared_norm(arrays: Sequence[Any]) -> Any:
    wide = [array.cast("f32") for array in arrays]
    zero = wide[0].zero(wide[0].builder(), "f32")
    total, *others = [(array * array).reduce_all(zero, lambda one, other: one + other) for array in wide]
    for one in others:
        total = total + one
    return total.reshape([1])


def _build_squared_norms(sizes: Sequence[int], *arrays: Any) -> list[Any]:
    remaining = iter(arrays)
    return [arrays[0].concat_in_dim([_build_squared_norm(list(islice(remaining, size))) for size in sizes], 0)]


_where, _scaled = _Operation(_build_where), _Operation(_build_scaled)


@cache
def _squared_norms(sizes: tuple[int, ...]) -> _Operation:
    """The operation for these numbers of tensors in the lists."""
    return _Operation(partial(_build_squared_norms, sizes))


def _elements(vector: Any) -> list[Any]:
    (size,) = vector.shape().sizes
    return [vector.slice_in_dim(place, place + 1, 0).reshape([]) for place in range(size)]
