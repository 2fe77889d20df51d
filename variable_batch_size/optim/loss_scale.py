"""LossScale: divides the gradients of each minibatch by the scale that a torch.amp.GradScaler had for it."""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.dtensor import to_locals
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.buffers import Buffers
from variable_batch_size.optim.flow import Flow
from variable_batch_size.optim.gradients.accumulator import GradientAccumulator, StepGradient
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.optim.run import Run
from variable_batch_size.rules.rule import Step


class LossScale:
    """What ``GradScaler.step(optimizer)`` leaves to the optimizer for each minibatch; the scale may change in a step.

    GradScaler sets ``grad_scale``, None after ``unscale_``, and ``found_inf`` of the optimizer. If it has found a value
    that is not finite, gradients become NaN, which stays in all sums: every rank finds it and skips the update.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[Any]],
        *,
        is_summed: bool,
        everyone: Communicator | None,
        measures: bool,
        reduces_once: bool,
    ) -> None:
        self._parameters, self._measures = parameters, measures
        self._everyone = everyone  # ranks of a model in fully_shard, which reduces before gradients are unscaled
        self._reduces_once = reduces_once  # whether fully_shard reduces in the last round of a step only
        self._is_summed = is_summed  # whether p.grad is the sum over the step's minibatches so far
        self._was_used = False  # in any pass
        self.reset()

    def reset(self) -> None:
        """Before a pass."""
        self._of_step: list[tuple[torch.Tensor, torch.Tensor]] = []  # scale and found_inf of its minibatches
        self.is_used = False  # whether a GradScaler has called step() in this pass, on any rank as far as is known
        self.is_absent = False  # whether none is in use, as a minibatch of this rank had gradients without one

    def use(self) -> None:
        """From now on in this pass, look for gradients that are not finite."""
        self.is_used = self._was_used = True
        self.is_absent = False

    def unscale_(self, plan: StepPlan, scale: torch.Tensor | None, found_inf: Any) -> torch.Tensor | None:
        """Divide ``p.grad`` by the scale; returns the factor applied, None if the user has already unscaled it."""
        if self._reduces_once:
            problem = "GradScaler needs the gradient of every minibatch, but fully_shard reduces that of a whole step"
            raise RuntimeError(f"{problem}: pass `reduce_scatter_once=False`")
        if self.is_absent and self._is_summed:
            self._refuse_mix()
        self.use()
        if not isinstance(found_inf, torch.Tensor):  # there are no gradients
            self.leave_out(plan, has_gradients=False)
            return None
        found_inf = found_inf.reshape(())
        if scale is None:
            self._check_unscaled(plan)
            self._multiply_(torch.where(found_inf > 0, torch.nan, torch.ones_like(found_inf)))
            return None
        if self._is_summed or self._everyone is not None:
            self._of_step.append((scale.clone(), found_inf.clone()))
        inverse = _inverse(scale)
        if not self._is_summed:
            self._multiply_(torch.where(found_inf > 0, torch.nan, inverse))
        self._end_step(plan)
        return inverse

    def leave_out(self, plan: StepPlan, *, has_gradients: bool) -> bool:
        """Take a minibatch that no GradScaler has scaled, as one without a backward pass; returns `is_absent`."""
        if self._everyone is not None and self._was_used and not has_gradients:
            rule = "with GradScaler and fully_shard, a minibatch must not be left out"
            raise RuntimeError(f"{rule}, as the other ranks would wait for this one: multiply its loss by 0 instead")
        if not self.is_used:
            self.is_absent = has_gradients
            return self.is_absent
        if self._is_summed and has_gradients:
            self._refuse_mix()
        self._end_step(plan)
        return self.is_absent

    def _end_step(self, plan: StepPlan) -> None:
        """After the last minibatch of a step: check its scales, and unscale the sum of its gradients."""
        if plan.is_last and self._of_step:
            scale, found_inf = self._of_step[-1]
            self._check_step()
            if self._is_summed:
                self._multiply_(torch.where(found_inf > 0, torch.nan, _inverse(scale)))

    def _multiply_(self, factor: torch.Tensor) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for p in self._parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad * factor.to(p.grad.device)
            elif p.grad is not None:
                by_device.setdefault(p.grad.device, []).append(p.grad)
        for device, gradients in by_device.items():
            torch._foreach_mul_(to_locals(gradients), factor.to(device))

    def _refuse_mix(self) -> NoReturn:
        problem = "with `gradient_as_bucket_view`, GradScaler must scale all minibatches of a step or none"
        raise RuntimeError(f"{problem}, as autograd sums their gradients: use `gradient_as_bucket_view=False`")

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


class Unscaling(Part):
    """Divides the gradients of each minibatch by the scale of the GradScaler, if one has called ``step()``.

    Attributes:
        given: ``grad_scale`` and ``found_inf`` that a GradScaler has set for the latest minibatch.
    """

    def __init__(
        self,
        loss_scale: LossScale,
        gradients: GradientAccumulator,
        buffers: Buffers,
        flow: Flow,
        communicator: Communicator,
        *,
        skips: bool,  # whether updates are skipped without a GradScaler, too
    ) -> None:
        self._loss_scale, self._gradients, self._buffers, self._flow = loss_scale, gradients, buffers, flow
        self._is_one_program, self._skips = communicator.is_one_program, skips
        self.given: tuple[torch.Tensor | None, Any] | None = None

    def begin_pass(self, run: Run) -> None:
        self._loss_scale.reset()

    def before_first_minibatch(self) -> None:
        self._loss_scale.reset()

    def after_backward(self, plan: StepPlan) -> None:
        given, self.given = self.given, None
        if given is not None:
            if self._is_one_program and not self._skips:
                raise RuntimeError("GradScaler on XLA needs an optimizer with `skip_nonfinite=True`")
            self._gradients.inverse_scale = self._loss_scale.unscale_(plan, *given)
            if not self._is_one_program:
                self._buffers.expect_skips(True)
        elif not self._loss_scale.is_absent:
            is_absent = self._loss_scale.leave_out(plan, has_gradients=self._gradients.has_gradients())
            # in open steps, others may scale
            if is_absent and not self._is_one_program and not plan.is_open:
                self._buffers.expect_skips(self._skips)

    def before_update(self, step: Step, gradient: StepGradient) -> None:
        self._flow.skips = self._skips or self._loss_scale.is_used


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """As GradScaler computes it; Apple's GPUs have no double precision."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
