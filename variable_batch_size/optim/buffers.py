"""Buffers: restores a model's buffers, such as BatchNorm's statistics, after minibatches that do not count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from variable_batch_size.cores.communicator import Communicator, each_element_once
from variable_batch_size.cores.detect import communicator_for


class _Saved(NamedTuple):
    """A buffer at a moment: its module and name, the tensor, its version and a copy of its values."""

    owner: torch.nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    values: torch.Tensor


class Buffers:
    """Takes a snapshot of a model's buffers before a step, and restores it if the rank's minibatches do not count.

    The snapshot is taken when the step before has ended. If the user changes buffers after that, for example by loading
    weights, the next forward pass of the model, or of a part of it, takes it again. In lockstep a padding minibatch may
    follow others of its step: a second snapshot then holds the buffers before it.

    Args:
        model: whose buffers; None for none.
        communicator: of the ranks, which tells whether idleness may be a branch or must be data.
        may_skip: whether the update of a rank that is not idle may be skipped.

    Attributes:
        is_on: whether there may be anything to restore.
    """

    def __init__(self, model: torch.nn.Module | None, communicator: Communicator, *, may_skip: bool = False) -> None:
        self._model = model
        self._communicator = communicator
        self.is_one_program = communicator.is_one_program
        self._before_step: list[_Saved] = []
        self._before_padding: list[_Saved] = []
        self._is_fresh = False  # whether the model has not run since the latest snapshot
        self._hooks: list[RemovableHandle] = []
        self.expect_skips(may_skip)

    def expect_skips(self, may_skip: bool) -> None:
        """From now on, whether the update of a rank that is not idle may be skipped."""
        self._is_always_saved = self.is_one_program or may_skip
        self.is_on = self._model is not None and (self._communicator.num_replicas > 1 or may_skip)
        if self.is_on and not self._hooks:
            assert self._model is not None
            modules = [module for module in self._model.modules() if module is self._model or module._buffers]
            self._hooks = [module.register_forward_pre_hook(self._before_forward) for module in modules]
        elif self._hooks and not self.is_on:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def snapshot(self, is_idle: bool) -> None:
        """Before a step: save the buffers if the step may have to be undone."""
        if not self.is_on or not (is_idle or self._is_always_saved):
            self._before_step = []
        elif not (self.is_one_program and self._before_step and self._is_unchanged()):  # there, it saves a graph
            self._before_step = self._copies()
        self._before_padding = []
        self._is_fresh = bool(self._before_step)

    def snapshot_before_padding(self) -> None:
        """In lockstep, before a padding minibatch that follows others of its step."""
        if self.is_on:
            self._before_padding = self._copies()
            self._is_fresh = bool(self._before_padding)

    def restore_before_padding(self) -> None:
        """After that minibatch."""
        _write_back(self._before_padding)
        self._before_padding = []

    def restore(self, is_undone: bool) -> None:
        """After a step: restore the buffers if the rank's minibatches do not count."""
        if not self._before_step or not (is_undone or self.is_one_program):
            return
        if not self.is_one_program:
            _write_back(self._before_step)
            return
        as_data = torch.tensor([is_undone]).to(self._before_step[0].values.device)
        with torch.no_grad():
            for saved in self._before_step:
                buffer = saved.owner._buffers[saved.name]
                assert buffer is not None
                written = each_element_once(buffer)
                written.copy_(torch.where(as_data, saved.values, written).view_as(written))

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        # torch.compile must see nothing of this
        if torch.compiler.is_compiling() or not self._is_fresh or not module.training:
            return
        self._is_fresh = False
        if not self._is_unchanged():
            if self._before_padding:
                self._before_padding = self._copies()
            else:
                self._before_step = self._copies()
            self._communicator.flush()  # else it would be part of another graph on a rank that has more to run

    def _copies(self) -> list[_Saved]:
        assert self._model is not None
        return [
            _Saved(owner, name, buffer, buffer._version, _copy_of(buffer))
            for owner, name, buffer in _buffers_of(self._model)
        ]

    def _is_unchanged(self) -> bool:
        """Whether the buffers are those of the latest snapshot."""
        assert self._model is not None
        now = [(id(buffer), buffer._version) for _, _, buffer in _buffers_of(self._model)]
        return now == [(id(saved.buffer), saved.version) for saved in self._before_padding or self._before_step]


@torch.no_grad()
def _write_back(snapshot: list[_Saved]) -> None:
    for saved in snapshot:
        written = each_element_once(saved.buffer)
        written.copy_(saved.values.view_as(written))
        saved.owner._buffers[saved.name] = saved.buffer  # the minibatch may have replaced the tensor


def _copy_of(buffer: torch.Tensor) -> torch.Tensor:
    values = each_element_once(buffer.detach())
    return (values if values.dim() else values.view(1)).clone()


def _buffers_of(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


def share_buffers(model: torch.nn.Module, process_group: Any = None) -> None:
    """Broadcast the buffers of core 0, which is never idle, to all cores; call it before evaluating.

    Every core must call it. During training, each core has its own BatchNorm statistics.

    Args:
        model: whose buffers.
        process_group: the cores, as :class:`CustomSampler` takes it.
    """
    buffers = list(model.buffers())
    communicator = communicator_for(buffers, process_group)
    with torch.no_grad():
        communicator.broadcast(buffers)
    communicator.flush()
