"""Keeps minibatches that do not count from leaving a mark on a model's buffers, such as BatchNorm's statistics."""

from __future__ import annotations

import torch

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.running import communicator_for


class Buffers:
    """Remembers a model's buffers before a step and puts them back if the core's minibatches in it do not count.

    Args:
        model: whose buffers; None for none.
        communicator: tells whether idleness may be a branch or must be data (XLA: one program for all cores).
        may_skip: whether the step of a core that was not idle may be taken back, too.
    """

    def __init__(self, model: torch.nn.Module | None, communicator: Communicator, *, may_skip: bool = False) -> None:
        self._model = model if communicator.num_replicas > 1 or may_skip else None
        self._is_one_program = communicator.is_one_program
        self._is_always_saved = self._is_one_program or may_skip
        self._saved: list[torch.Tensor] = []
        self._versions: list[int] = []

    def save(self, is_idle: bool) -> None:
        """Remember the buffers if what is next may have to be taken back; `is_idle` if it is a stand-in."""
        if self._model is None or not (is_idle or self._is_always_saved):
            return
        buffers = list(self._model.buffers())
        versions = [buffer._version for buffer in buffers]
        if versions != self._versions:  # else nothing has changed them since, and on XLA a program is spared
            self._saved = [buffer.detach().clone() for buffer in buffers]
            self._versions = versions

    def settle(self, is_taken_back: bool) -> None:
        """After the minibatches of a step: put the buffers back if they are not to count."""
        if self._model is None or not (is_taken_back or self._is_one_program) or not self._saved:
            return
        must_go = torch.tensor([is_taken_back]).to(self._saved[0].device)
        with torch.no_grad():
            for buffer, saved in zip(self._model.buffers(), self._saved, strict=True):
                buffer.copy_(torch.where(must_go, saved, buffer).view_as(buffer) if self._is_one_program else saved)


def share_buffers(model: torch.nn.Module) -> None:
    """Replace the buffers of a model on all cores by those of core 0, which is never idle; call it before evaluating.

    Every core must call it. BatchNorm's statistics are each core's own while training.
    """
    buffers = list(model.buffers())
    communicator = communicator_for(buffers)
    with torch.no_grad():
        communicator.broadcast(buffers)
    communicator.flush()
