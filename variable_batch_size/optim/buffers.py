"""Restores a model's buffers, such as BatchNorm's statistics, after minibatches that do not count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from variable_batch_size.cores.communicator import Communicator, each_element_once
from variable_batch_size.cores.detect import communicator_for


class _Saved(NamedTuple):
    """A buffer as it was: its owner and name there, the tensor itself, its version and a copy of its values."""

    owner: torch.nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    values: torch.Tensor


class Buffers:
    """Remembers a model's buffers before a step and puts them back if the core's minibatches in it do not count.

    They are remembered when the step before has ended. What the user does to them after that, such as loading weights,
    is seen when the model next runs, as a whole or in parts, and they are remembered again.

    Args:
        model: whose buffers; None for none.
        communicator: tells whether idleness may be a branch or must be data.
        may_skip: whether the step of a core that was not idle may be taken back, too.
    """

    def __init__(self, model: torch.nn.Module | None, communicator: Communicator, *, may_skip: bool = False) -> None:
        self._model = model if communicator.num_replicas > 1 or may_skip else None
        self._communicator = communicator
        self._is_one_program = communicator.is_one_program
        self._is_always_saved = self._is_one_program or may_skip
        self._saved: list[_Saved] = []
        self._is_fresh = False  # whether the model has not run since they were saved
        for module in self._model.modules() if self._model is not None else ():
            if module is self._model or module._buffers:
                module.register_forward_pre_hook(self._before_forward)

    def save(self, is_idle: bool) -> None:
        """Remember the buffers if what is next may have to be taken back; `is_idle` if it is a stand-in."""
        if self._model is None or not (is_idle or self._is_always_saved):
            self._saved = []
        elif not (self._is_one_program and self._saved and self._is_as_saved()):  # there, a program is spared
            self._copy()
        self._is_fresh = bool(self._saved)

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        # what torch.compile sees of this must be nothing
        if torch.compiler.is_compiling() or not self._is_fresh or not module.training:
            return
        self._is_fresh = False
        if not self._is_as_saved():
            self._copy()
            self._communicator.flush()  # else it would be part of another program on a core that has more to run

    def _copy(self) -> None:
        assert self._model is not None
        self._saved = [
            _Saved(owner, name, buffer, buffer._version, _copy_of(buffer))
            for owner, name, buffer in _buffers_of(self._model)
        ]

    def _is_as_saved(self) -> bool:
        assert self._model is not None
        now = [(id(buffer), buffer._version) for _, _, buffer in _buffers_of(self._model)]
        return now == [(id(saved.buffer), saved.version) for saved in self._saved]

    @torch.no_grad()
    def settle(self, is_taken_back: bool) -> None:
        """After the minibatches of a step: put the buffers back if they are not to count."""
        if not self._saved or not (is_taken_back or self._is_one_program):
            return
        if self._is_one_program:
            must_go = torch.tensor([is_taken_back]).to(self._saved[0].values.device)
            for saved in self._saved:
                buffer = saved.owner._buffers[saved.name]
                assert buffer is not None
                written = each_element_once(buffer)
                written.copy_(torch.where(must_go, saved.values, written).view_as(written))
            return
        for saved in self._saved:
            written = each_element_once(saved.buffer)
            written.copy_(saved.values.view_as(written))
            saved.owner._buffers[saved.name] = saved.buffer  # the minibatch may have put another tensor there


def _copy_of(buffer: torch.Tensor) -> torch.Tensor:
    values = each_element_once(buffer.detach())
    return (values if values.dim() else values.view(1)).clone()


def _buffers_of(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


def share_buffers(model: torch.nn.Module, process_group: Any = None) -> None:
    """Replace the buffers of a model on all cores by those of core 0, which is never idle; call it before evaluating.

    Every core must call it. BatchNorm's statistics are each core's own while training.

    Args:
        model: whose buffers.
        process_group: the cores, as :class:`CustomSampler` takes it.
    """
    buffers = list(model.buffers())
    communicator = communicator_for(buffers, process_group)
    with torch.no_grad():
        communicator.broadcast(buffers)
    communicator.flush()
