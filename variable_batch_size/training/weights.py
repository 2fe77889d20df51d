"""Weights: what minibatches weigh, such as their tokens, and how much that is in a run so far."""

from __future__ import annotations

import math
from typing import Any

import torch

Weight = float | torch.Tensor


class Weights:
    """Sees that all minibatches of a run have a weight or none has, and sums the weights of its steps.

    Args:
        device: where the sum is kept, so that nobody has to wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = 0.0  # the part of the sum that is known on the host
        self._done: torch.Tensor | None = None  # and the rest of it
        self._is_weighted: bool | None = None  # unknown before the first minibatch

    @property
    def is_weighted(self) -> bool:
        """Whether minibatches have weights, as far as is known."""
        return bool(self._is_weighted)

    def checked(self, weight: Weight | None) -> Weight | None:
        """The weight of a minibatch, a tensor as a scalar; one that cannot be right is refused.

        What is on an accelerator is not looked at, as that would mean to wait for it.
        """
        if isinstance(weight, torch.Tensor) and weight.numel() != 1:
            raise ValueError(f"`weight` must be one number, got a tensor of the shape {tuple(weight.shape)}")
        is_known = weight is not None and (not isinstance(weight, torch.Tensor) or weight.device.type == "cpu")
        if is_known and not 0 <= float(weight) < math.inf:  # type: ignore[arg-type]
            raise ValueError(f"`weight` must be finite and at least 0, got {float(weight)!r}")  # type: ignore[arg-type]
        if self._is_weighted not in (None, weight is not None):
            got = "none" if weight is None else "one"
            before = "had one" if self._is_weighted else "had none"
            raise ValueError(
                f"`weight` must be given in all minibatches of a run or in none, got {got} after some {before}"
            )
        self._is_weighted = weight is not None
        return weight.detach().reshape(()) if isinstance(weight, torch.Tensor) else weight

    def add(self, weight: Weight | None) -> None:
        """Take in the sum over a step."""
        if isinstance(weight, torch.Tensor):
            self._tensor().add_(weight.detach().view(1))
        elif weight is not None:
            self._known += weight

    @property
    def done(self) -> float:
        """The sum over all steps so far; waits for the device."""
        return self._known + (0.0 if self._done is None else float(self._done))

    def _tensor(self) -> torch.Tensor:
        if self._done is None:
            # made on the host, as what is made on an XLA device is a program of its own
            dtype = torch.float32 if self._device.type == "mps" else torch.float64
            self._done = torch.zeros(1, dtype=dtype).to(self._device)
        return self._done

    def state_dict(self) -> dict[str, Any]:
        return {"is_weighted": self._is_weighted, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._is_weighted = state.get("is_weighted")
        self._known = state.get("done", 0.0)
        self._done = None
