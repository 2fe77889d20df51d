"""Stand-ins of cores in lockstep, where one may follow minibatches of the same core that count."""

from __future__ import annotations

import torch

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.training.buffers import Buffers
from variable_batch_size.training.gradients import Gradients
from variable_batch_size.training.position import Position
from variable_batch_size.training.weights import Weight


class StandIns:
    """Sees that a stand-in leaves no mark, minibatch by minibatch; without lockstep the whole step is taken back.

    Args:
        is_on: whether cores are in lockstep.
        gradients: of the core.
        model: whose buffers are put back; None for none.
        communicator: the way to the other cores.
    """

    def __init__(
        self, is_on: bool, gradients: Gradients, model: torch.nn.Module | None, communicator: Communicator
    ) -> None:
        self._is_on = is_on
        self._gradients = gradients
        self._buffers = Buffers(model if is_on else None, communicator)

    def expect(self, position: Position) -> None:
        """Before a minibatch."""
        if self._is_on:
            self._gradients.expect(is_stand_in=position.is_stand_in_next, is_last=position.is_last_next)
            self._buffers.save(position.is_stand_in_next)

    def take_back(self, position: Position, weight: Weight | None) -> Weight | None:
        """After a minibatch, of which only the gradient of the others is left if it was a stand-in; what it weighs."""
        if not self._is_on or not position.is_stand_in:
            return weight
        self._buffers.settle(is_taken_back=True)
        self._gradients.leave_out()
        return None if weight is None else 0.0
