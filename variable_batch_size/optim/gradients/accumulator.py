"""GradientAccumulator, which sums the gradients of a step over minibatches and ranks, and StepGradient, the result."""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.dtensor import is_dtensor, to_local
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.gradients.fixed_point import FixedPoint32, FixedPoint64
from variable_batch_size.optim.norm_layers import NormLayers
from variable_batch_size.optim.own_norms import OwnNorms
from variable_batch_size.optim.token_weights import Weight
from variable_batch_size.rules.noise import Noise
from variable_batch_size.rules.numbers import Number, is_tensor, where
from variable_batch_size.rules.rule import Norms

Divisors = dict[torch.Tensor, torch.Tensor]

# what a rank without weights sends as its number of weighted minibatches, so that a mix is detected in the sum
UNWEIGHTED = -(2.0**20)

_NUM_SAMPLES = 8  # weights that are compared in the first step of an epoch
NUM_COUNTS, _NUM_CHECKSUMS = 5, 4
_SCALED = 3  # which of them is `scaled`
NUM_CHECKS = NUM_COUNTS + _NUM_CHECKSUMS
NUM_DIGEST = _NUM_SAMPLES + NUM_CHECKS
_MAX_DRIFT = 1e-4  # of weights between ranks; processors of different kinds may round differently

_params_of = itemgetter("params")  # of a parameter group

EPS = 1e-6  # added to a norm before it divides, as in torch.nn.utils.clip_grad_norm_


class Counts(NamedTuple):
    """Minibatches of a step, without padding."""

    own: int  # that this rank has run; in totals, that all ranks have run
    of_all: int | None  # that all ranks should have run together; None if that is not known, in open steps
    read: int = 0  # that were read from the loader, in open steps only
    weighted: int = 0  # that have a weight, in open steps only
    scaled: int = 0  # 1 if this rank has a GradScaler, and if the sum was read, if any has; in totals, how many have
    at_end: int = 0  # 1 if this rank has no more in the epoch; in totals, how many have none; in open steps only


class Measured(NamedTuple):
    """What was measured of the gradients of a step."""

    norms: Sequence[Norms | Noise | None]  # of each parameter group, or its noise; None if nothing was measured
    is_finite: bool  # whether all measured values are finite, and therefore the gradients
    weight: float | None  # W, the sum of the minibatches' weights; None without weights
    num_weighted: int | None  # the number of minibatches with a weight above 0; None without weights
    of_samples: Norms | None = None  # of the samples' gradients of norm layers, if they are measured


class Layout(NamedTuple):
    """What the numbers of a step's gradient are."""

    are_measured: tuple[bool, ...]  # the parameter groups
    has_samples: bool  # whether the first numbers are those of norm layers
    measures_samples: bool  # and whether these were measured
    is_weighted: bool
    multiple: int  # the step's gradient is this multiple of the mean gradient

    def interpret(self, values: Sequence[Number], n: Number, *, is_finite: bool | None = None) -> Measured:
        """The norms in the numbers of a step of `n` minibatches; for tensors, `is_finite` must be passed."""
        num_groups = len(self.are_measured)
        *squares, weight, num_weighted = values[: num_groups + 2]
        total = weight if self.is_weighted else n
        is_something = is_tensor(total) or bool(total)
        pairs = zip(squares, values[num_groups + 2 : 2 * num_groups + 2], strict=True)
        norms: list[Any] = [
            Norms(of_each / total, of_mean / self.multiple**2) if is_something and is_measured else None
            for is_measured, (of_each, of_mean) in zip(self.are_measured, pairs, strict=True)
        ]
        of_samples = norms.pop(0) if self.has_samples else None
        of_samples = of_samples if self.measures_samples else None
        if is_tensor(n) or n == 1:  # the minibatch need not have been measured by itself
            norms = [pair and Norms(where(n == 1, pair[1], pair[0]), pair[1]) for pair in norms]
        is_finite = all(map(math.isfinite, values)) if is_finite is None else is_finite
        if not is_finite or not self.is_weighted:
            return Measured(norms, is_finite, None, None, of_samples)
        return Measured(norms, True, weight, num_weighted if is_tensor(weight) else round(num_weighted), of_samples)


class StepGradient:
    """The gradient of a step. It is in ``p.grad`` of all parameters until the accumulator is reset."""

    def __init__(self, accumulator: "GradientAccumulator", plan: StepPlan, weight: Weight | None) -> None:
        self._accumulator = accumulator
        self.weight = weight  # W, the sum of all minibatches' weights, maybe on the device; None without weights
        self._num_minibatches = plan.num_minibatches
        self._multiple = plan.num_minibatches if accumulator.sums_gradients else 1
        self._are_measured: list[bool] = []  # the parameter groups
        layers = accumulator.norm_layers
        self.has_samples = layers is not None  # before the groups, the numbers of norm layers
        self.measures_samples = layers is not None and layers.is_on
        self._own: list[Norms | Noise | None] | None = None  # of each group, if they are measured in its own norm
        if accumulator.own_norms is not None:
            sizes: Any = {"multiple": self._multiple, "is_weighted": weight is not None}
            self._own = accumulator.own_norms.reduce(plan, **sizes)

    @property
    def has_own_norms(self) -> bool:
        """Whether norms are measured in the optimizer's own norm."""
        return self._own is not None

    @property
    def tells_noise(self) -> bool:
        """Whether norms were measured, which happens only in some steps in the optimizer's own norm."""
        return self._own is None or any(self._own)

    @property
    def weighs_nothing(self) -> bool:
        """Whether W is known to be 0. Does not wait for a weight that is on an accelerator."""
        is_on_device = isinstance(self.weight, torch.Tensor) and self.weight.device.type != "cpu"
        return self.weight is not None and not is_on_device and not self.weight

    def measure(self) -> Measured:
        """The norms of the minibatch gradients and of the mean gradient. Waits for the device, once."""
        return self.interpret(self._accumulator._read(self.numbers()))

    def numbers(self) -> torch.Tensor:
        """What :meth:`measure` reads, on the device."""
        own, divisors = self._accumulator, self._accumulator.divisors
        numbers = [*own._numbers(), own._squares_by_group()]
        self._are_measured = [True] * own._num_measured()
        if divisors is not None:  # what has no divisor must be finite, too
            self._are_measured = [any(p in divisors for p in group) for group in own._measured()]
            numbers.append(own._squared_norm_of_step().view(1))
        dtype = numbers[-1].dtype
        return torch.cat([number if number.dtype == dtype else number.to(dtype) for number in numbers])

    @property
    def layout(self) -> Layout:
        """How to read what :meth:`numbers` has returned."""
        are_measured, is_weighted = tuple(self._are_measured), self.weight is not None
        return Layout(are_measured, self.has_samples, self.measures_samples, is_weighted, self._multiple)

    def interpret(self, values: Sequence[Number], *, is_finite: bool | None = None) -> Measured:
        """The norms in the values of :meth:`numbers`, which are floats, or tensors that nothing here waits for."""
        measured = self.layout.interpret(values, self._num_minibatches, is_finite=is_finite)
        return measured if self._own is None else measured._replace(norms=self._own)

    def norm(self) -> torch.Tensor:
        """The norm of the mean gradient over all parameters, on the device."""
        own = self._accumulator
        return own._squared_norm_of_step().sqrt() / own.communicator.traced_scalar(self._multiple)

    def clip_(self, max_norm: float) -> None:
        """Scale the gradient so that the norm of the mean over all parameters is at most `max_norm`."""
        limit = self._accumulator.communicator.traced_scalar(max_norm * self._multiple)
        self._accumulator._clip_(limit, self)

    def clip_factor(self, limit: float) -> torch.Tensor:
        return (limit / (self.norm() * self._multiple + EPS)).clamp(max=1.0)


class GradientAccumulator(ABC):
    """Takes the gradient of each minibatch, and gives that of the whole step to the inner optimizer.

        gradient = Σ s_i / Σ w_i        over the minibatches of all ranks; w_i = 1 where no weight is passed

    Until :meth:`accumulate`, which leaves ``p.grad`` None, the gradient is the user's: ``p.grad`` at that time is the
    minibatch's gradient. After :meth:`reduce`, ``p.grad`` is the step's gradient; None where no minibatch on any rank
    had one, so that the inner optimizer skips the parameter as usual.

    A few numbers are reduced with the gradients: for each parameter group the sum of the minibatches' squared norms, if
    they are measured, the sum of the weights and the number of weights above 0. A gradient that is not finite on one
    rank is not finite in the sum, so :meth:`StepGradient.measure` reports it on every rank.
    """

    is_one_of_several = False  # whether other optimizers run the same minibatches
    counts: Counts | None = None  # of the step that is reduced; None to check none
    totals: Counts | None = None  # their sums over all ranks, in open steps
    attached = ""  # what else the optimizer has that must be the same on all ranks
    is_summed_by_autograd = False  # whether ``p.grad`` is the sum over the step's minibatches so far
    inverse_scale: torch.Tensor | None = None  # of the latest minibatch, where a GradScaler is in use
    _fixed_point: FixedPoint64 | FixedPoint32 | None = None  # the number format in exact mode
    # numbers of the step so far, which are reduced with the gradients
    _step_squares: torch.Tensor | None
    _weight: Weight
    _num_weighted: Weight
    _layout = 0  # checksum of the parameters that have memory, where they are reduced in one piece
    _about_layout = "require gradients. If you freeze parameters at random, use the same seed"
    _samples_weights = False  # whether all ranks have the same weights, and a place for some of them in a reduction

    def __init__(
        self,
        inner: Optimizer,
        communicator: Communicator,  # of the ranks that have different samples
        *,
        measures: bool = False,  # whether to sum the squared norms of the minibatches' gradients, for each group
        divisors: Divisors | None = None,  # of gradients, before they are measured; None to divide none
        sums_gradients: bool = False,  # whether the gradient is n times the mean, for rules that sum gradients
        is_read: bool = False,  # whether the host measures the gradient of every step before the update
        stays_on_device: bool = False,  # whether it measures none, as the device decides what becomes of a step
        model: torch.nn.Module | None = None,  # whose weights must be the same on all ranks
        norm_layers: NormLayers | None = None,  # whose samples' gradients are measured
        own_norms: OwnNorms | None = None,  # which measure the minibatches' gradients instead
    ) -> None:
        self.inner, self.communicator = inner, communicator
        self.divisors, self.sums_gradients = divisors, sums_gradients
        self._measures, self._is_read, self._stays_on_device = measures, is_read or measures, stays_on_device
        self._is_weighted = False  # whether the minibatches of this step have weights
        self._has_checked_weights = False
        self._model, self.norm_layers, self.own_norms = model, norm_layers, own_norms
        self._checked: int | None = None  # the epoch in whose first step weights were last compared
        self._sampled: torch.Tensor | None = None  # weights of this rank, until they are compared
        self._unread: tuple[torch.Tensor, list[int]] | None = None  # reduced checksums on the device, and expected ones
        self._epoch = 0
        self._reset_numbers()

    @abstractmethod
    def accumulate(self, plan: StepPlan, weight: Weight | None = None) -> None:
        """Take the gradients of the latest minibatch; with a weight w_i, they are those of a sum, not a mean."""

    @abstractmethod
    def reduce(self, plan: StepPlan) -> StepGradient:
        """Set ``p.grad`` to the gradient of the step over all ranks. An idle rank does not count, not even its NaN."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the gradient of the step, after the update."""

    def zero_grad(self) -> None:
        """Drop gradients that were not accumulated yet."""
        for p in self._parameters():
            p.grad = None

    def has_gradients(self) -> bool:
        """Whether there are gradients that were not accumulated yet."""
        return any(p.grad is not None for p in self._parameters())

    def begin_epoch(self, epoch: int) -> None:
        """Drop the gradients of an unfinished step, accumulated or not."""
        self._epoch = epoch
        self.reset()

    def end_epoch(self) -> None:  # noqa: B027 (most detect errors as they occur)
        """After the last step of a pass: raise for errors that only the device has seen."""

    def begin_minibatch(self, *, is_padding: bool, is_last: bool) -> None:  # noqa: B027 (most can drop it later)
        """Before each minibatch of ranks in lockstep: whether it is padding, and whether it is the step's last."""

    def rebuild(self) -> None:  # noqa: B027 (most notice by themselves)
        """After a parameter group was added. Every rank must call it."""

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs from the steps so far. Raises if ranks have become different."""
        self._read_digest()
        if self.own_norms is not None:
            return {"own_norms": self.own_norms.state_dict()}
        return {} if self._fixed_point is None else self._fixed_point.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, on any number of ranks."""
        self._has_checked_weights = False  # a run that is reset to its start may begin to pass weights, or stop
        self.forget_digest()
        if self.own_norms is not None and "own_norms" in state:
            self.own_norms.load_state_dict(state["own_norms"])
        if self._fixed_point is not None:
            self._fixed_point.load_state_dict(state)

    def forget_digest(self) -> None:
        """Forget in what ranks differed, as they are about to load a state."""
        self._checked = self._unread = None

    def compare_again(self) -> None:
        """Compare weights and layouts in the next step, with other ranks. Every rank must call it."""
        self._checked = self._sampled = None

    def _step_gradient(self, plan: StepPlan) -> StepGradient:
        plan = self._closed(plan) if plan.is_open else plan
        has_weights = self._is_weighted and not (plan.is_open and not self.totals.weighted)  # type: ignore[union-attr]
        return StepGradient(self, plan, self._weight if has_weights else None)

    def _closed(self, plan: StepPlan) -> StepPlan:
        """The plan of an open step with the number of minibatches, which is known once it is reduced."""
        if self.communicator.num_replicas == 1:
            self.totals = self.counts
        totals: Any = self.totals
        if totals.weighted not in (0, totals.own):
            passed = f"{totals.weighted} of {totals.own} minibatches of the step have one"
            raise ValueError(f"`weight` must be passed for all minibatches of a run or for none, but {passed}")
        if self._fixed_point is not None:
            self._fixed_point.check_num_minibatches(totals.own)
        return plan._replace(num_minibatches=max(1, totals.own))

    def _factor(self, plan: StepPlan) -> float:
        """What to multiply the sum by: 1/n, as n is known on the host; W is not.

        In floating point that is before the reduction; in fixed point, and where fully_shard has summed, after it.
        """
        multiple = plan.num_minibatches if self.sums_gradients else 1
        return multiple / (1 if self._is_weighted else plan.num_minibatches)

    def _inverse_weight(self) -> Weight:
        """What to multiply the reduced sum by: 1/W, or 0 if W is 0; 1 without weights."""
        if not self._is_weighted:
            return 1.0
        if isinstance(self._weight, torch.Tensor):
            return torch.where(self._weight == 0, 0.0, 1 / self._weight)  # NaN stays NaN, and is detected
        return 1 / self._weight if self._weight else 0.0

    def _add_numbers(self, squares: torch.Tensor | None, weight: Weight | None) -> None:
        """Add the squared norms of a minibatch, per unit of its weight, and its weight."""
        if squares is not None:
            if weight is not None:
                squares = per_weight(squares, weight)
            if self._step_squares is not None:
                number = self._step_squares.numel()  # a group may have been added since
                (squares if number == squares.numel() else squares[:number]).add_(self._step_squares)
            self._step_squares = squares
        if weight is not None:
            self._weight = self._weight + weight
            self._num_weighted = self._num_weighted + (weight > 0)

    def _numbers(self) -> list[torch.Tensor]:
        """The numbers of the step, to be concatenated; 0 where nothing was measured or weighted."""
        num_squares = self._num_measured()
        if not self._is_weighted and self._step_squares is not None and self._step_squares.numel() == num_squares:
            return [self._step_squares, self._step_squares.new_zeros(2)]  # the same as below in one operation
        numbers = self._squared_norm([]).repeat(num_squares + 2)
        self._write_numbers(numbers)
        return [numbers]

    def _write_numbers(self, numbers: torch.Tensor) -> None:
        if self._step_squares is not None:
            numbers[: len(self._step_squares)].copy_(self._step_squares)
        if self._is_weighted:
            for element, number in ((numbers[-2], self._weight), (numbers[-1], self._num_weighted)):
                # numbers[-2] = weight would wait for the device
                element.copy_(number) if isinstance(number, torch.Tensor) else element.fill_(number)

    def _read_numbers(self, numbers: torch.Tensor) -> None:
        if self._step_squares is not None:
            self._step_squares = numbers[:-2]
        if self._is_weighted:
            self._weight, self._num_weighted = numbers[-2], numbers[-1]

    def _reset_numbers(self) -> None:
        self._step_squares = None
        self._weight = self._num_weighted = 0.0

    def _read(self, numbers: torch.Tensor) -> list[float]:
        """Numbers on the host."""
        return numbers.tolist()

    def _parameters(self) -> list[torch.nn.Parameter]:
        # as parameters_of() does, without another call in every minibatch
        return list(chain.from_iterable(map(_params_of, self.inner.param_groups)))

    def _first(self) -> torch.nn.Parameter:
        return next(chain.from_iterable(map(_params_of, self.inner.param_groups)))  # type: ignore[no-any-return]

    def _measured(self) -> list[list[torch.nn.Parameter]]:
        """The parameters of each group, after those of norm layers if their samples are measured: none if not now."""
        groups, layers = list(map(_params_of, self.inner.param_groups)), self.norm_layers
        return groups if layers is None else [layers.parameters if layers.is_on else [], *groups]

    def _num_measured(self) -> int:
        """The length of :meth:`_measured`, without making that list in every minibatch."""
        return len(self.inner.param_groups) + (self.norm_layers is not None)

    def _with_samples(self, squares: torch.Tensor | None, of_samples: torch.Tensor) -> torch.Tensor:
        """The squared norms of a minibatch with those of the samples of norm layers first."""
        if squares is None:
            squares = self._squared_norm([]).repeat(len(self._measured()))
        return torch.cat([of_samples.to(squares), squares[1:]])

    def _squared_norm_of_layers(self) -> torch.Tensor:
        """The squared norm of the norm layers' gradients of a minibatch, as the user leaves them."""
        layers: NormLayers = self.norm_layers  # type: ignore[assignment]
        return self._squared_norm([p.grad.detach() for p in layers.parameters if p.grad is not None])

    def _squares_by_group(self) -> torch.Tensor:
        """The squared norm of each group's gradients as they are now, divided by their divisors."""
        return self._squared_norms_by_group(self._gradients_by_group())

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters() if p.grad is not None]

    def _gradients_by_group(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """For each group, the parameters that have a gradient, and the gradient."""
        return [[(p, grad) for p in group if (grad := p.grad) is not None] for group in self._measured()]

    @abstractmethod
    def _squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The squared norm of several tensors together, in float32 at least; 0 if there are none."""

    def _squared_norm_of_step(self) -> torch.Tensor:
        return self._squared_norm(self._gradients())

    def _squared_norms(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        """The squared norm of each of several lists of tensors."""
        return torch.stack([self._squared_norm(gradients) for gradients in lists])

    def _squared_norms_by_group(self, groups: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> torch.Tensor:
        """The squared norm of each group of gradients, divided by their divisors."""
        return self._squared_norms(self._divided(groups))

    def _divided(self, groups: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> list[list[torch.Tensor]]:
        if self.divisors is None:
            return [[gradient for _, gradient in pairs] for pairs in groups]
        divided = [[(gradient, self._divisor_of(p)) for p, gradient in pairs] for pairs in groups]
        known = [[pair for pair in pairs if pair[1] is not None] for pairs in divided]
        return [list(torch._foreach_div(*map(list, zip(*pairs, strict=True)))) if pairs else [] for pairs in known]

    def _divisor_of(self, p: torch.Tensor) -> torch.Tensor | None:
        return self.divisors.get(p)  # type: ignore[union-attr]

    @abstractmethod
    def _clip_(self, limit: float, gradient: StepGradient) -> None:
        """Scale ``p.grad`` so that its norm over all parameters is at most `limit`."""

    def _check_weights(self, num_weighted: torch.Tensor, ranks: int) -> None:
        """Raise if some ranks pass weights and others do not. In the first step only, as it waits for the device."""
        if self._has_checked_weights:
            return
        self._has_checked_weights = True
        num_without = math.ceil(float(num_weighted) / UNWEIGHTED)
        if num_without not in (0, ranks):
            raise ValueError(
                f"`weight` must be passed on all ranks or on none, but {num_without} of {ranks} passed none. An idle "
                "rank passes the weight of its padding minibatch, which does not count."
            )

    def _write_digest(self, digest: torch.Tensor) -> None:
        """What must be the same on all ranks: in an epoch's first step, some weights; and always, checksums."""
        if self._checked != self._epoch and self._samples_weights:
            self._sampled = self._sample_weights(digest)
            digest[:-NUM_CHECKS].copy_(self._sampled)
            self._checked = self._epoch
        counts = self.counts or Counts(0, 0)
        numbers = [counts.own, *counts[2:], *self._checksums()]
        for place, number in enumerate(numbers, start=-NUM_CHECKS):
            digest[place].fill_(number)

    def _checksums(self) -> list[int]:
        """Checksums of attachments, learning rates, epoch and layout: small enough for an exact sum over ranks."""
        lrs = str([_on_host(group.get("lr")) for group in self.inner.param_groups])
        numbers = [zlib.crc32(self.attached.encode()), zlib.crc32(lrs.encode()), self._epoch, self._layout]
        return [number % 2**12 for number in numbers]

    def _sample_weights(self, like: torch.Tensor) -> torch.Tensor:
        """One element of each of some parameters, which change with the epoch."""
        others = [] if self._model is None else self._model.parameters()
        weights = [*self._parameters(), *(p for p in others if not is_dtensor(p) and not is_lazy(p))]
        found = []
        for number in range(_NUM_SAMPLES):
            place = (self._epoch + number * len(weights) // _NUM_SAMPLES) % len(weights)
            local = to_local(weights[place].detach())
            local = torch.view_as_real(local) if local.is_complex() else local
            element = (
                local[tuple((self._epoch + number) % size for size in local.shape)] if local.numel() else like[0] * 0
            )
            found.append(element.to(like))
        return torch.stack(found).nan_to_num(0.0, 0.0, 0.0)

    def _check_digest(self, reduced: torch.Tensor, ranks: int) -> None:
        """Raise if ranks differ. Waits for the device, but only in the first step of an epoch."""
        checks, copies = reduced[-NUM_CHECKS:], ranks // self.communicator.num_replicas  # of each count
        counts, sums = self.counts or Counts(0, 0), [number * ranks for number in self._checksums()]
        if counts.of_all is None:  # an open step: waits for the device
            found = checks[:NUM_COUNTS].tolist()
            own, *others = (round(number / copies) for number in found)
            self.totals, expected = Counts(own, None, *others), [*found, *sums]
        else:
            expected = [counts.of_all * copies, *[0] * (NUM_COUNTS - 1), *sums]
            expected[_SCALED] = counts.scaled * ranks
        own, self._sampled, self._unread = self._sampled, None, None
        if own is None and checks.device.type != "cpu":
            self._unread = checks.clone(), expected
        elif own is None and (found := checks.tolist()) != expected:
            self._refuse_different(self._learn(found, expected), expected)
        if own is None:
            return
        weights = reduced[:-NUM_CHECKS]
        distance = torch.linalg.vector_norm(weights - own * ranks) - _MAX_DRIFT * ranks * torch.linalg.vector_norm(own)
        *values, excess = torch.cat([checks, distance.view(1)]).tolist()
        weights.zero_()
        self._refuse_different(self._learn(values, expected), expected)
        if excess > 0:
            raise RuntimeError(
                "Ranks have different weights. Load a state on every rank, or before the optimizer is made, which "
                "broadcasts the weights of rank 0. Update parameters that are not in the optimizer, such as those of a "
                "momentum encoder, when step() has returned True: not in forward(), which padding minibatches run, too."
            )

    def _read_digest(self) -> None:
        """Raise if ranks differed in the latest step, where that was not read at once; waits for the device."""
        if self._unread is not None:
            reduced, expected = self._unread
            self._refuse_different(reduced.tolist(), expected)

    def _learn(self, reduced: list[float], expected: Sequence[float]) -> list[float]:
        """What is left to compare, once this rank has learned whether any rank has a GradScaler."""
        if self.counts is not None and self.counts.of_all is not None:
            self.counts = self.counts._replace(scaled=int(reduced[_SCALED] > 0))
        return [*reduced[:_SCALED], expected[_SCALED], *reduced[_SCALED + 1 :]]

    def _refuse_different(self, reduced: list[float], expected: list[int]) -> None:
        are_same = [one == other for one, other in zip(reduced, expected, strict=True)]
        is_complete, *_, are_same_attached, are_same_lrs, is_same_epoch, is_same_layout = are_same
        if not is_same_layout:
            raise RuntimeError(f"Ranks disagree on which parameters {self._about_layout} on every rank.")
        if not is_same_epoch:
            raise RuntimeError(
                f"Ranks are in different epochs; this one is in epoch {self._epoch}. Call step() after every minibatch "
                "on every rank; to leave a minibatch out, call step() without backward()."
            )
        if not is_complete:
            raise RuntimeError(
                f"Ranks have run {reduced[0]:g} minibatches of a step that has {expected[0]}. Call set_epoch() equally "
                "often, and read the same sampler, on every rank."
            )
        if not are_same[_SCALED]:
            raise RuntimeError(
                "Only some ranks have called GradScaler.step() in a step. The first step of an epoch on an accelerator "
                "must show whether a GradScaler is in use: leave out no minibatch in it."
            )
        if not are_same_attached:
            raise RuntimeError(
                f"Ranks have different logs, checkpoints or schedulers; this one has {self.attached or 'none'}. Make "
                "and attach them on every rank: they communicate, and write files on rank 0 only."
            )
        if not are_same_lrs:
            lrs = [_on_host(group.get("lr")) for group in self.inner.param_groups]
            raise RuntimeError(
                f"Ranks have different learning rates; those of this rank, before the rule, are {lrs}. Change them in "
                "the same way on every rank: a scheduler that depends on a metric, such as ReduceLROnPlateau, needs "
                "that of all ranks (vbs.Metrics)."
            )

    def _layout_of(self, parameters: list[torch.nn.Parameter]) -> int:
        """A checksum of the places of some parameters among all."""
        places = {id(p): place for place, p in enumerate(self._parameters())}
        return zlib.crc32(str([places[id(p)] for p in parameters]).encode())


def _on_host(lr: Any) -> Any:
    """A learning rate as a number; None if it is on a device."""
    if not isinstance(lr, torch.Tensor):
        return lr
    return float(lr) if lr.device.type == "cpu" else None


def per_weight(squares: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Squared norms of a minibatch, per unit of its weight; 0 if the weight is 0."""
    if isinstance(weight, torch.Tensor):
        weight = weight.to(squares.device)
        return torch.where(weight > 0, squares / weight, torch.zeros_like(squares))
    return squares / weight if weight else torch.zeros_like(squares)
