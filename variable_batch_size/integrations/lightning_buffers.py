"""StepBuffers: a module's buffers as they were when a step began, for checkpoints that are saved within it."""

from __future__ import annotations

from typing import final

import torch


@final
class StepBuffers:
    """Copies of a module's buffers; of those that did not change since the latest copy, that copy stays.

    A step that was not complete when a run was saved is made again from its beginning. BatchNorm's statistics must then
    not know its minibatches yet.
    """

    def __init__(self) -> None:
        self._copies: dict[str, tuple[int, torch.Tensor]] = {}

    def copy(self, module: torch.nn.Module) -> None:
        """Note the buffers as they are."""
        for name, buffer in module.named_buffers():
            version = buffer._version
            if name not in self._copies or self._copies[name][0] != version:
                self._copies[name] = (version, buffer.detach().clone())

    def put_into(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the buffers of a module's state, of which some may not be saved, by the copies."""
        state.update({name: copy for name, (_, copy) in self._copies.items() if name in state})
