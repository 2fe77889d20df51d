"""Keeps a stand-in minibatch from leaving a mark on a model's buffers, such as BatchNorm's running statistics."""

from __future__ import annotations

import torch

from variable_batch_size.communication import Communicator, Xla


class Buffers:
    """Remembers a model's buffers before a step and puts them back if the core was idle in it.

    Args:
        model: whose buffers; None for none.
        communicator: tells whether idleness may be a branch or must be data (XLA: one program for all cores).
    """

    def __init__(self, model: torch.nn.Module | None, communicator: Communicator) -> None:
        self._model = model if communicator.num_replicas > 1 else None
        self._is_xla = isinstance(communicator, Xla)
        self._saved: list[torch.Tensor] = []

    @torch.no_grad()
    def save(self, is_idle: bool) -> None:
        """Remember the buffers if a stand-in is next."""
        if self._model is not None and (is_idle or self._is_xla):
            self._saved = [buffer.clone() for buffer in self._model.buffers()]

    @torch.no_grad()
    def restore(self, is_idle: bool) -> None:
        """Put the buffers back if the step's minibatch was a stand-in."""
        if self._model is None or not (is_idle or self._is_xla) or not self._saved:
            return
        was_idle = torch.tensor([is_idle]).to(self._saved[0].device)
        for buffer, saved in zip(self._model.buffers(), self._saved, strict=True):
            buffer.copy_(torch.where(was_idle, saved, buffer).view_as(buffer) if self._is_xla else saved)
