"""What Adam divides gradients by: the root of its second moment, for rules that measure gradients so divided."""

from __future__ import annotations

import torch
from torch.optim import Optimizer


class Preconditioner:
    """Keeps √v̂ + ε for each parameter that the inner optimizer has updated.

    Args:
        inner: Adam, or an optimizer of its kind.

    Attributes:
        divisors: for each parameter that has a second moment.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self.divisors: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def refresh(self, *, has_updated: bool = True) -> None:
        """After an update, or when another state was loaded: let the divisors be those of the state as it is now."""
        for group in self._inner.param_groups:
            beta, eps = group["betas"][1], group["eps"]
            for p in group["params"]:
                state = self._inner.state.get(p, {})
                if "exp_avg_sq" not in state:
                    if has_updated and p.grad is not None:
                        raise RuntimeError(
                            f"`inner` must keep the second moment of each gradient as Adam does, in its state "
                            f"`exp_avg_sq`, but {type(self._inner).__name__} has none"
                        )
                    self.divisors.pop(p, None)  # of a state that another one was loaded in place of
                    continue
                num_updates = state["step"]
                # read from the host if it is there; one that is on the device stays there
                if not isinstance(num_updates, torch.Tensor) or num_updates.device.type == "cpu":
                    num_updates = float(num_updates)
                second_moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
                root = (second_moment / (1 - beta**num_updates)).sqrt_().add_(eps)
                if p in self.divisors and self.divisors[p].dtype == root.dtype:
                    self.divisors[p].copy_(root)
                else:
                    self.divisors[p] = root
