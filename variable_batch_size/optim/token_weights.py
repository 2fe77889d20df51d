"""TokenWeights: the weights of minibatches, such as their tokens, and their total in a run."""

import math
from typing import Any

import torch

Weight = float | torch.Tensor


class TokenWeights:
    """Checks that either all minibatches of a run have a weight or none has, and sums the weights of its steps."""

    def __init__(self, device: torch.device, *, is_required: bool = False) -> None:
        self._is_required = is_required
        self._device = device  # of the sum, so that the host need not wait for it
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no double precision
        self.is_weighted: bool | None = None  # None before the first minibatch
        self.before = 0.0  # the sum over the steps of the run before this object was made
        self.known = 0.0  # the part of the sum since then that is on the host
        self.unread: torch.Tensor | None = None  # the rest of it, one element on the device

    def checked(self, weight: Weight | None) -> Weight | None:
        """The weight of a minibatch as a number, or a scalar on the device, without waiting for its value."""
        if weight is None and self._is_required:
            raise ValueError(
                "`weight` must be passed to step(): minibatches of a TokenBudget hold different numbers of tokens. "
                "Call backward() on the sum of their losses, and step(weight=tokens)"
            )
        checked = None if weight is None else self._checked(weight)
        if self.is_weighted not in (None, weight is not None):
            got, before = ("none", "had one") if weight is None else ("one", "had none")
            rule = "`weight` must be passed for all minibatches of a run or for none"
            raise ValueError(f"{rule}, got {got} after some {before}")
        self.is_weighted = weight is not None
        return checked

    def _checked(self, weight: Any) -> Weight:
        shape = tuple(getattr(weight, "shape", ()))
        if math.prod(shape) != 1:
            raise ValueError(f"`weight` must be one number, got a value of the shape {shape}")
        if isinstance(weight, torch.Tensor):
            # these represent all integers up to 2,048 and 256 only
            if weight.dtype in (torch.float16, torch.bfloat16) or weight.is_complex():
                rule = "`weight` must have a dtype that represents large integers, such as int64 or float32"
                raise ValueError(f"{rule}, got {weight.dtype}: sum a mask before converting it")
            if weight.device.type != "cpu":
                return weight.detach().reshape(()).to(self._device, self._dtype)
        try:
            if isinstance(weight, str):
                raise TypeError
            number = float(weight.item() if hasattr(weight, "item") else weight)
        except (TypeError, OverflowError):
            raise ValueError(f"`weight` must be one number, got {weight!r}") from None
        if not 0 <= number < math.inf:
            raise ValueError(f"`weight` must be finite and at least 0, got {number!r}")
        return number

    def add(self, weight: Weight) -> None:
        """Add the sum over a step."""
        if not isinstance(weight, torch.Tensor):
            self.known += weight
            return
        if self.unread is None:  # made on the host: on an XLA device it would be a graph of its own
            self.unread = torch.zeros(1, dtype=self._dtype).to(self._device)
        self.unread.add_(weight.detach().view(1).to(self._device))  # parameters may be offloaded to the host

    @property
    def done(self) -> float:
        """The sum over all steps of the run so far; waits for the device."""
        return self.before + self.since

    @property
    def since(self) -> float:
        """The sum over the steps made with this object, whatever was loaded in between; waits for the device."""
        return self.known + (0.0 if self.unread is None else float(self.unread))

    def state_dict(self) -> dict[str, Any]:
        return {"is_weighted": self.is_weighted, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_weighted = state["is_weighted"]
        self.before = state["done"] - self.since
