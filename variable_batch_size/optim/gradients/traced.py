"""TracedAccumulator: gradients on XLA, one tensor for each parameter, and the same graph on every core."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch.optim import Optimizer

from variable_batch_size.cores import xla
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.gradients.accumulator import GradientAccumulator, StepGradient, per_weight
from variable_batch_size.optim.gradients.fixed_point import FixedPoint32
from variable_batch_size.optim.token_weights import Weight


@final
class TracedAccumulator(GradientAccumulator):
    """For devices that trace operations into a graph and compile it.

    Every minibatch adds its gradients to sums that keep their memory, even if it is the core's only one: all cores run
    the same graph, so whether a core is idle is data in a tensor and not a branch. The reduction is a graph of its own,
    as the user's loop is part of the graph of a minibatch.

    Which parameters have a gradient is data, too: a core may leave out a minibatch or a layer. The inner optimizer, on
    the host, must skip parameters without a gradient on any core, and the same ones on every core. Where the host reads
    numbers of each step before the update, their presence comes along. Otherwise the cores agree on it in the first
    step of an epoch, and a later step that deviates is detected on the device and raises when the host reads next.
    Every minibatch changes all sums, in the same order, also those to which it adds nothing: torch_xla orders the
    results of a graph by when tensors were last changed. Another order is another graph on some cores. Or worse, it has
    the same hash, if parameters have the same shape, and then one parameter gets the results of another.

    With `exact`, gradients are summed as integers (:class:`FixedPoint32`). A compiler may round differently in another
    graph. So the graph is cut after a minibatch was run and after it was added: what rounds is in the same two graphs
    for every minibatch, on every core.
    """

    def __init__(self, inner: Optimizer, communicator: Communicator, *, exact: bool = False, **common: Any) -> None:
        super().__init__(inner, communicator, **common)
        self._fixed_point: FixedPoint32 | None = FixedPoint32(inner) if exact else None
        self._sums: dict[torch.Tensor, torch.Tensor] = {}  # over the minibatches so far
        self._squares = torch.zeros(0)  # likewise, squared norms of each measured group
        self._weights = torch.zeros(0)  # likewise, the sum of the weights and the number above 0
        self._gradient: dict[torch.Tensor, torch.Tensor] = {}  # of the step, once it is reduced
        self._step_numbers: torch.Tensor | None = None  # likewise, the squared norms and the weights
        self._infinities: dict[torch.Tensor, torch.Tensor] = {}  # in place of divisors that do not exist yet
        self._present: set[torch.Tensor] = set()  # in a minibatch of this core
        self._has_sums = False
        self._agreed: list[bool] | None = None  # whether each parameter with a sum has a gradient on some core
        self._trainable: list[bool] = []  # when they agreed
        self._presence: torch.Tensor | None = None  # of the step, summed over the cores, until it is read
        self._deviations: torch.Tensor | None = None  # of each parameter from what was agreed, in steps not read
        if exact and any(p.dtype == torch.float64 or p.is_complex() for p in self._parameters()):
            raise ValueError("`exact` must be False for float64 or complex parameters on an XLA device")
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self.check_presence()
        self._agreed = self._deviations = None
        if self._has_sums:
            self.reset()
        else:
            self.zero_grad()
        self._ensure_sums()

    def _ensure_sums(self) -> bool:
        """Make a sum for each parameter that may get a gradient, and the numbers; True if some are new."""
        # on the device before they are used: a scalar of exactly 0 would become a constant, and so make another graph
        known = self._sums if self._fixed_point is None else self._fixed_point.limbs
        trainable = [p for p in self._parameters() if p.requires_grad or p.grad is not None or p in known]
        if self._fixed_point is not None:
            self._ensure_infinities(trainable)
            self._fixed_point.ensure(trainable)
            return False
        converted = [p for p, tensor in self._sums.items() if tensor.dtype != _sum_dtype(p)]
        self._sums |= {p: self._sums[p].to(_sum_dtype(p)) for p in converted}
        new = [p for p in trainable if p not in self._sums]
        # made on the host: zeros made on the device would be a graph of their own
        self._sums |= {p: xla.to_device_like(p, torch.zeros(p.shape, dtype=_sum_dtype(p))) for p in new}
        if new:
            self.check_presence()
            self._agreed = self._deviations = None
        has_new_infinities = self._ensure_infinities(trainable)
        num_new = self._num_measured() - len(self._squares)
        if num_new:
            zeros = torch.zeros(num_new).to(self._device())
            self._squares = torch.cat([self._squares, zeros]) if len(self._squares) else zeros
        if not len(self._weights):  # always, as they must not be added later on some cores
            self._weights = torch.zeros(2).to(self._device())
        self.communicator.shard_like([self._squares, self._weights])
        return bool(converted or new or has_new_infinities or num_new)

    def _device(self) -> torch.device:
        return self._parameters()[0].device

    def _ensure_infinities(self, parameters: list[torch.nn.Parameter]) -> bool:
        """Make these for parameters without a divisor: new ones, and all when a run starts over. True if any is new."""
        known = self.divisors
        new = [] if known is None else [p for p in parameters if p not in known and p not in self._infinities]
        self._infinities |= {p: xla.to_device_like(p, torch.full(p.shape, torch.inf)) for p in new}
        return bool(new)

    def accumulate(self, plan: StepPlan, weight: Weight | None = None) -> None:
        self._is_weighted = weight is not None
        if self._fixed_point is not None:
            self._accumulate_fixed_point(self._fixed_point, plan, weight)
            return
        if self._ensure_sums():
            self.communicator.flush()
        of_one = None if weight is None else _on_device(weight, self._device())
        if self._measures:
            squares = self._squares_of_minibatch(plan)
            self._squares.add_(squares if of_one is None else per_weight(squares, of_one))
        for p in self._parameters():
            if p.grad is not None:
                self._sums[p].add_(p.grad)
                self._present.add(p)
                p.grad = None
            elif p in self._sums:
                self._sums[p].add_(0)  # keeps the order of results
        if of_one is not None:
            self._weights.add_(torch.cat([of_one, (of_one > 0).float()]))
        self._has_sums = True

    def _squares_of_minibatch(self, plan: StepPlan) -> torch.Tensor:
        groups = [[(p, p.grad) for p in group["params"] if p.grad is not None] for group in self.inner.param_groups]
        squares = self._squared_norms_by_group(groups)
        if self.norm_layers is None:
            return squares
        # an idle core runs the same program, and drops its numbers when they are reduced
        known = self._squared_norm_of_layers()
        of_samples = self.norm_layers.take(plan._replace(is_padding=False), squared_norm=known)
        return torch.cat([of_samples.to(squares.dtype).view(1), squares])

    def _accumulate_fixed_point(self, fixed_point: FixedPoint32, plan: StepPlan, weight: Weight | None) -> None:
        fixed_point.check_num_minibatches(plan.num_minibatches)
        self._ensure_sums()
        self.communicator.flush()
        if not self._has_sums:
            if not fixed_point.scale.has_asked:  # rank 0 has the first minibatch, on any number of ranks
                fresh = self._fresh(fixed_point)
                sizes = torch.cat([fixed_point.largest_of(fresh), self._numbers_of(fresh, weight)])
                self.communicator.flush()  # it may differ between cores
                self.communicator.broadcast([sizes])
                fixed_point.update_scale(self._read(sizes))
            fixed_point.begin_step()
        fresh = self._fresh(fixed_point)
        fixed_point.add_(fresh, self._numbers_of(fresh, weight))
        self._present.update(fresh)
        self._has_sums = True
        self.zero_grad()

    def _fresh(self, fixed_point: FixedPoint32) -> dict[torch.Tensor, torch.Tensor]:
        return {p: p.grad.detach().float() for p in fixed_point.limbs if p.grad is not None}

    def _numbers_of(self, fresh: Mapping[torch.Tensor, torch.Tensor], weight: Weight | None) -> torch.Tensor:
        """The squared norms and the weight of a minibatch."""
        groups = [[(p, fresh[p]) for p in group["params"] if p in fresh] for group in self.inner.param_groups]
        of_one = _on_device(0.0 if weight is None else weight, self._device())
        squares = self._squared_norms_by_group(groups) if self._measures else torch.zeros(len(groups)).to(of_one.device)
        squares = squares if weight is None else per_weight(squares, of_one)
        return torch.cat([squares.float(), of_one, (of_one > 0).float()])

    def reduce(self, plan: StepPlan) -> StepGradient:
        if self._fixed_point is None:
            self._reduce(plan)
        elif self._fixed_point.limbs:
            self._reduce_fixed_point(self._fixed_point, plan)
        numbers = self._step_numbers  # None in fixed point, if no parameter can have a gradient
        return StepGradient(self, plan, numbers[-2:-1] if self._is_weighted and numbers is not None else None)

    def _reduce(self, plan: StepPlan) -> None:
        self.communicator.flush()  # what the loop has traced may differ between cores, as a sum of losses does
        presence = self._own_presence(plan, torch.float32)
        self._agree(presence)
        factors = [self._factor(plan)] * len(self._sums) + [1.0, 1.0]
        scales = torch.tensor([0.0] * len(factors) if plan.is_idle else factors).to(self._device())
        found = self.communicator.scaled([*self._sums.values(), self._squares, self._weights], scales)
        self.communicator.sum([*found, presence])
        *sums, squares, weights = found
        self._presence, self._step_numbers = presence, torch.cat([squares, weights])
        if self._is_weighted:
            weight = weights[:1]
            divisor = torch.where(weight == 0, torch.full_like(weight, math.inf), weight)  # so that nothing is left
            sums = [(tensor / divisor.to(tensor.dtype)).view_as(tensor) for tensor in sums]
        self._gradient = dict(zip(self._sums, sums, strict=True))
        self._set_gradients(self._agreed or [])

    def _reduce_fixed_point(self, fixed_point: FixedPoint32, plan: StepPlan) -> None:
        self.communicator.flush()
        presence = self._own_presence(plan, torch.int32)
        sums = fixed_point.tensors()
        counts = torch.tensor([0 if plan.is_idle else 1], dtype=torch.int32).to(sums[0].device)
        for tensor in sums:
            tensor.copy_((tensor * counts).view_as(tensor))
        self.communicator.sum([*sums, presence])
        totals, numbers = fixed_point.decode()
        factor = _on_device(self._factor(plan), self._device())
        if self._is_weighted:
            weight = numbers[-2:-1]
            factor = torch.where(weight == 0, torch.zeros_like(weight), factor / weight)  # NaN stays NaN
        self._gradient = {p: (total * factor).view(p.shape).to(p.dtype) for p, total in totals.items()}
        self._presence, self._step_numbers = presence, numbers
        fixed_point.check(self._read(fixed_point.to_check(totals, numbers)), plan.num_minibatches)

    # -------------------------------------------------------------------------------- which parameters have a gradient

    def _known(self) -> list[torch.Tensor]:
        return list(self._sums if self._fixed_point is None else self._fixed_point.limbs)

    def _own_presence(self, plan: StepPlan, dtype: torch.dtype) -> torch.Tensor:
        """Whether each parameter has a gradient on this core, as data; an idle core has none."""
        present = [0 if plan.is_idle else int(p in self._present) for p in self._known()] or [0]
        return torch.tensor(present, dtype=dtype).to(self._device())

    def _agree(self, presence: torch.Tensor) -> None:
        """In the first step of an epoch, and after parameters were frozen or added: wait for the union of all cores."""
        trainable = [p.requires_grad for p in self._known()]
        if self.communicator.num_replicas == 1:
            self._agreed = [p in self._present for p in self._known()]
        elif not self._stays_on_device and (self._is_read or self._is_weighted):
            self._agreed = [True] * len(trainable)  # until the numbers of the step are read, before the update
        elif self._agreed is None or trainable != self._trainable:
            self.check_presence()
            total = presence.clone()
            self.communicator.sum([total])
            counts = self._read(total, is_extra=True)
            self._agreed, self._trainable = [count > 0 for count in counts[: len(trainable)]], trainable
            self._expected = torch.tensor(self._agreed or [False]).to(presence.device)
            self._deviations = torch.zeros(len(self._agreed) or 1).to(presence.device)

    def _set_gradients(self, present: list[bool]) -> None:
        for (p, tensor), is_present in zip(self._gradient.items(), present, strict=True):
            p.grad = tensor.to(p.dtype) if is_present else None

    def end_epoch(self) -> None:
        self.check_presence()

    def state_dict(self) -> dict[str, Any]:
        self.check_presence()
        return super().state_dict()

    def check_presence(self) -> None:
        """Raise, on every core, if a parameter had a gradient in some steps and not in others while none was read."""
        if self._deviations is None:
            return
        # not by cpu(), which would start graphs of several threads at once
        self.communicator.flush(is_extra=True)
        counts = super()._read(self._deviations.cpu())
        if not any(counts):
            return
        known, self._deviations = self._known(), None
        place = next(index for index, count in enumerate(counts) if count)
        number = next(index for index, p in enumerate(self._parameters()) if p is known[place])
        raise RuntimeError(
            f"Parameter {number} of the optimizer, of shape {tuple(known[place].shape)}, had a gradient in some steps "
            f"of the epoch, but on no core in others ({int(counts[place])} steps differ from the first). On several "
            "XLA cores, each step must then be checked: pass `skip_nonfinite=True` to the optimizer, which waits for "
            "the device once per step."
        )

    def reset(self) -> None:
        sums = [*self._sums.values(), self._squares, self._weights]
        for tensor in sums if self._fixed_point is None else self._fixed_point.tensors():
            tensor.zero_()
        if self._presence is not None and self._deviations is not None:
            self._deviations.add_(((self._presence > 0) != self._expected).float())
        self._gradient, self._step_numbers, self._presence = {}, None, None
        self._has_sums = False
        self._present.clear()
        self.zero_grad()

    def _numbers(self) -> list[torch.Tensor]:
        return [torch.zeros(self._num_measured() + 2) if self._step_numbers is None else self._step_numbers]

    def _gradients_by_group(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        # not of p.grad, which is set by what was agreed: the sum of a parameter without a gradient is 0
        return [[(p, self._gradient[p]) for p in group if p in self._gradient] for group in self._measured()]

    def _gradients(self) -> list[torch.Tensor]:
        return list(self._gradient.values())

    def _keep_in_sums(self) -> None:
        """Write the gradient of the step, which the graph would otherwise return beside the sums, into their memory."""
        for p, tensor in self._sums.items():
            self._gradient[p] = tensor.copy_(self._gradient[p])

    def _read(self, numbers: torch.Tensor, *, is_extra: bool = False) -> list[float]:
        """Numbers on the host; with them, after a reduction, which parameters have a gradient on some core."""
        presence, self._presence = self._presence, None
        if presence is not None:
            numbers = torch.cat([numbers, presence.to(numbers.dtype)])
            self._keep_in_sums()
        self.communicator.flush(is_extra=is_extra)
        values = super()._read(numbers.cpu())
        if presence is None:
            return values
        counts = values[-len(presence) :]
        self._set_gradients([count > 0 for count in counts[: len(self._gradient)]])
        return values[: -len(presence)]

    def _divisor_of(self, p: torch.Tensor) -> torch.Tensor | None:
        divisor = super()._divisor_of(p)
        if divisor is None:
            return self._infinities[p]  # leaves nothing to count, by the same graph
        self._infinities.pop(p, None)
        return divisor

    def _clip_(self, limit: float, gradient: StepGradient) -> None:
        torch.nn.utils.clip_grad_norm_([p for p in self._parameters() if p.grad is not None], limit)

    def _squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return self._squared_norms([gradients])[0]

    def _squared_norms(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        if all(lists):
            real = [[one.abs() if one.is_complex() else one for one in gradients] for gradients in lists]
            return self.communicator.squared_norms(real)
        zero = torch.zeros(1).to(self._device())  # made on the host, as above
        return torch.cat([self._squared_norms([gradients]) if gradients else zero for gradients in lists])


def _sum_dtype(p: torch.Tensor) -> torch.dtype:
    """The dtype of a gradient sum: float32 at least, as float16 overflows and bfloat16 loses small terms."""
    return torch.promote_types(p.dtype, torch.float32)


def _on_device(weight: Weight, device: torch.device) -> torch.Tensor:
    """A weight as one element, which is data on all cores; a Python scalar may become a constant of the graph."""
    if isinstance(weight, torch.Tensor):
        return weight.detach().to(device).float().view(1)
    return torch.tensor([float(weight)]).to(device)
