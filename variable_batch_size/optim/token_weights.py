"""TokenWeights: the weights of minibatches, such as their tokens, and their total in a run."""

from __future__ import annotations

import math
from typing import Any

import torch

Weight = float | torch.Tensor

_COUNTS_BADLY = (torch.float16, torch.bfloat16)
"""Their whole numbers have gaps from 2,048 and from 256 on."""


class TokenWeights:
    """Sees that all minibatches of a run have a weight or none has, and sums the weights of its steps.

    Args:
        device: where the sum is kept, so that nobody has to wait for it.

    Attributes:
        before: the sum over the steps of the run that were not made with this object.
        known: the part of the sum over those that were which the host knows.
        unread: the rest of it, one element on the device; None if there is none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # double precision is not to be had on Apple's GPUs
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._is_weighted: bool | None = None  # unknown before the first minibatch
        self.before = 0.0
        self.known = 0.0
        self.unread: torch.Tensor | None = None

    @property
    def is_weighted(self) -> bool:
        """Whether minibatches have weights, as far as is known."""
        return bool(self._is_weighted)

    def checked(self, weight: Weight | None) -> Weight | None:
        """The weight of a minibatch as a number, or a scalar on the device; one that cannot be right is refused.

        What is on an accelerator is not looked at, as that would mean to wait for it.
        """
        checked = None if weight is None else self._checked(weight)
        if self._is_weighted not in (None, weight is not None):
            got = "none" if weight is None else "one"
            before = "had one" if self._is_weighted else "had none"
            raise ValueError(
                f"`weight` must be given in all minibatches of a run or in none, got {got} after some {before}"
            )
        self._is_weighted = weight is not None
        return checked

    def _checked(self, weight: Any) -> Weight:
        shape = tuple(getattr(weight, "shape", ()))
        if math.prod(shape) != 1:
            raise ValueError(f"`weight` must be one number, got something of the shape {shape}")
        if isinstance(weight, torch.Tensor):
            if weight.dtype in _COUNTS_BADLY or weight.is_complex():
                raise ValueError(
                    f"`weight` must be of a type that can count, as int64 or float32, got {weight.dtype}: sum a mask "
                    "before it is converted"
                )
            if weight.device.type != "cpu":
                return weight.detach().reshape(()).to(self._device, self._dtype)
        number = _number(weight)
        if not 0 <= number < math.inf:
            raise ValueError(f"`weight` must be finite and at least 0, got {number!r}")
        return number

    def add(self, weight: Weight | None) -> None:
        """Take in the sum over a step."""
        if isinstance(weight, torch.Tensor):
            # parameters may be on the host and what was summed on a device, where they are offloaded
            self._tensor().add_(weight.detach().view(1).to(self._device))
        elif weight is not None:
            self.known += weight

    @property
    def done(self) -> float:
        """The sum over all steps of the run so far; waits for the device."""
        return self.before + self.since

    @property
    def since(self) -> float:
        """The sum over the steps made with this object, whatever was loaded meanwhile; waits for the device."""
        return self.known + (0.0 if self.unread is None else float(self.unread))

    def _tensor(self) -> torch.Tensor:
        if self.unread is None:
            # made on the host, as what is made on an XLA device is a program of its own
            self.unread = torch.zeros(1, dtype=self._dtype).to(self._device)
        return self.unread

    def state_dict(self) -> dict[str, Any]:
        return {"is_weighted": self._is_weighted, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._is_weighted = state.get("is_weighted")
        self.before = state.get("done", 0.0) - self.since


def _number(weight: Any) -> float:
    try:
        if isinstance(weight, str):
            raise TypeError
        return float(weight.item() if hasattr(weight, "item") else weight)
    except (TypeError, OverflowError):
        raise ValueError(f"`weight` must be one number, got {weight!r}") from None
