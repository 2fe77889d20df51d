"""StepBuffers: a module's buffers as they were when a step began, for checkpoints that are saved within it."""

from __future__ import annotations

from typing import final

import torch


@final
class StepBuffers:
    """Copies of a module's buffers.

    A step that was not complete when a run was saved is made again from its beginning. BatchNorm's statistics must then
    not know its minibatches yet.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def copy(self, module: torch.nn.Module) -> None:
        """Note the buffers as they are."""
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in self._copies and self._copies[name].shape == buffer.shape:
                    self._copies[name].copy_(buffer)
                else:
                    self._copies[name] = buffer.detach().clone()

    def put_into(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the buffers in a module's state, which need not have all, by the copies."""
        state.update({name: copy for name, copy in self._copies.items() if name in state})
