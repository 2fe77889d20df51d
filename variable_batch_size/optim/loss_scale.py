"""LossScale: divides the gradients of each minibatch by the scale that a torch.amp.GradScaler had for it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.dtensor import to_locals
from variable_batch_size.data.cursor import StepPlan


class LossScale:
    """What ``GradScaler.step(optimizer)`` leaves to the optimizer for each minibatch; the scale may change in a step.

    GradScaler sets ``grad_scale``, None after ``unscale_``, and ``found_inf`` of the optimizer. If it has found a value
    that is not finite, gradients become NaN, which stays in all sums: every rank finds it and skips the update.
    """

    def __init__(
        self, parameters: Callable[[], Iterable[Any]], *, is_summed: bool, everyone: Communicator | None, measures: bool
    ) -> None:
        self._parameters, self._measures = parameters, measures
        self._everyone = everyone  # ranks of a model in fully_shard, which reduces before gradients are unscaled
        self._is_summed = is_summed  # whether p.grad is the sum over the step's minibatches so far
        self._of_step: list[tuple[torch.Tensor, torch.Tensor]] = []  # scale and found_inf of its minibatches
        self.is_used = False  # whether a GradScaler has called step() in this pass

    def unscale_(self, plan: StepPlan, scale: torch.Tensor | None, found_inf: Any) -> torch.Tensor | None:
        """Divide ``p.grad`` by the scale; returns the factor applied, None if the user has already unscaled it."""
        if not isinstance(found_inf, torch.Tensor):  # there are no gradients
            if self._everyone is not None:
                problem = "GradScaler needs a gradient in every minibatch, but fully_shard has reduced none"
                raise RuntimeError(f"{problem}: pass `reduce_scatter_once=False`")
            return None
        if scale is None:
            self._check_unscaled(plan)
            self._multiply_(torch.where(found_inf > 0, torch.nan, torch.ones_like(found_inf)))
            return None
        # as GradScaler computes it; Apple's GPUs have no double precision
        inverse = scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
        if self._is_summed or self._everyone is not None:
            self._of_step.append((scale.clone(), found_inf.clone()))
            if plan.is_last:
                self._check_step()
        if not self._is_summed or plan.is_last:
            self._multiply_(torch.where(found_inf > 0, torch.nan, inverse))
        return inverse

    def reset(self) -> None:
        self._of_step = []

    def _multiply_(self, factor: torch.Tensor) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for p in self._parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad * factor.to(p.grad.device)
            elif p.grad is not None:
                by_device.setdefault(p.grad.device, []).append(p.grad)
        for device, gradients in by_device.items():
            torch._foreach_mul_(to_locals(gradients), factor.to(device))

    def _check_unscaled(self, plan: StepPlan) -> None:
        if self._is_summed and plan.num_rounds > 1:
            problem = "with `gradient_as_bucket_view`, GradScaler.unscale_() would unscale earlier minibatches again"
            raise RuntimeError(f"{problem}: use `clip_grad_norm` instead, or `gradient_as_bucket_view=False`")
        if self._everyone is not None and self._measures:
            needs = "a rule that measures gradients of a model in fully_shard needs the scale"
            raise RuntimeError(f"{needs}, which GradScaler.unscale_() removes: use `clip_grad_norm` instead")

    def _check_step(self) -> None:
        """Raise if scales differ that must be the same; waits for the device."""
        of_step, self._of_step = self._of_step, []
        if self._everyone is not None:
            places = torch.arange(1, len(of_step) + 1, dtype=torch.float64)
            own = (torch.stack([scale for scale, _ in of_step]).double().cpu() * places).sum()
            sums = torch.stack([own, own.square()]).to(of_step[0][0].device)
            self._everyone.sum([sums])
            mean, of_squares = (sums / self._everyone.num_replicas).tolist()
            if abs(of_squares - mean**2) > 1e-9 * mean**2:
                raise RuntimeError(
                    "the scale of GradScaler must be the same on all ranks of a model in fully_shard, which reduces "
                    f"gradients before they are unscaled, got {[float(scale) for scale, _ in of_step]} on this rank"
                )
            return
        scales = [float(scale) for scale, _ in of_step]
        if len(set(scales)) > 1 and not any(float(inf) for _, inf in of_step):
            raise RuntimeError(
                "with `gradient_as_bucket_view`, the scale of GradScaler must not change within a step, as autograd "
                f"sums its gradients, got {scales}: use a large growth_interval, or `gradient_as_bucket_view=False`"
            )
