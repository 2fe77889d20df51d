"""Passes: whether sampler and optimizer go through the same epoch together."""

from __future__ import annotations

from variable_batch_size.training.dealer import Dealer
from variable_batch_size.training.position import Position


class Passes:
    """Sees the minibatches of each pass over the loader, and refuses those of a pass that only one of the two began."""

    def __init__(self, sampler: Dealer) -> None:
        self._sampler = sampler
        self._has_begun = False  # whether there was a minibatch since the optimizer's set_epoch
        self._pass = -1  # of the sampler, that of the latest minibatch

    def begin(self) -> None:
        """The optimizer's ``set_epoch`` was called."""
        self._has_begun = False

    def see(self, position: Position, *, is_driven: bool = False) -> bool:
        """Before each minibatch; True for the first one of a pass.

        Args:
            position: of the optimizer.
            is_driven: whether somebody else's loop runs it, as a closure, who may not know of epochs.
        """
        sampler = self._sampler
        if is_driven and not sampler.num_passes:
            raise RuntimeError(
                "step(closure) was called before set_epoch: take `for epoch in vbs.epochs(optimizer, …)` in a loop of "
                "your own, and with a framework what variable_batch_size.integrations has for it, such as the callback "
                "for Lightning"
            )
        if sampler.epoch != position.epoch or sampler.first_step != position.first_step:
            raise RuntimeError(
                f"the sampler is in epoch {sampler.epoch} (from its step {sampler.first_step} on) but the optimizer in "
                f"epoch {position.epoch} (from {position.first_step} on): call set_epoch on both, alike"
            )
        is_same_pass = sampler.num_passes == self._pass
        if is_same_pass != self._has_begun:
            who = "optimizer" if is_same_pass else "sampler"
            raise RuntimeError(
                f"set_epoch was called on the {who} only: call it on the sampler and the optimizer before each pass "
                "over the loader"
            )
        self._pass, is_first, self._has_begun = sampler.num_passes, not self._has_begun, True
        return is_first
