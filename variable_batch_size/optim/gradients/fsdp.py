"""FSDPAccumulator: gradients of fully_shard (FSDP2) models, which FSDP itself reduces."""

import math
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from variable_batch_size.cores import dtensor
from variable_batch_size.cores.communicator import Communicator, Ranks
from variable_batch_size.cores.dtensor import to_local, to_locals
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.gradients.accumulator import NUM_CHECKS, UNWEIGHTED, GradientAccumulator, StepGradient
from variable_batch_size.optim.gradients.norms import (
    norms_of,
    sharded_squared_norms,
    squared_norm,
    squared_norms_of_shards,
)
from variable_batch_size.optim.token_weights import Weight
from variable_batch_size.optim.wrappers import Wrappers, fsdp_states, refuse_divide_factor, refuse_left_out

_MAX_HELD = 2**23  # elements of gradients, 32 MB, that may be kept a moment longer to be measured together


@final
class FSDPAccumulator(GradientAccumulator):
    """Sums, shard by shard, what FSDP reduces: in each round of a step, the mean over all ranks.

        gradient = Σ means · R / n        on R ranks; with weights Σ w_i in place of n

    So ``p.grad`` between ``backward()`` and ``step()`` is a shard of the mean over the round's minibatches. A hook on
    each unsharded parameter sees a rank's own gradient before that: it zeroes a padding minibatch, which a loss times 0
    would not do for NaN, and measures the others. FSDP reduces gradients before they are unscaled, so a loss scale must
    be the same on all ranks in a round. All ranks must run each backward pass: where the user leaves a minibatch out,
    :meth:`accumulate` runs it with a gradient of zeros.
    """

    _about_layout = "have gradients, which fully_shard then mixes up. Use the same layers in a round"

    # of the latest minibatch:
    _num_seen: dict[torch.nn.Parameter, int]  # how many gradients its hook has seen
    _held: list[tuple[torch.nn.Parameter, torch.Tensor]]  # local gradients that are not measured yet
    _num_held: int  # elements of these
    _norms: list[tuple[torch.nn.Parameter, torch.Tensor]]  # of local gradients
    _squares: torch.Tensor | None  # of the norms of the step's gradient, for each group, if they are measured

    def __init__(
        self,
        inner: Optimizer,
        communicator: Communicator,
        *,
        ranks: Ranks,  # those that have different samples
        everyone: Communicator,  # all that have a shard
        model_parallel: Communicator,  # those that have this rank's samples, as parameters are sharded over them, too
        model_groups: list[Ranks],  # that model_parallel consists of
        wrappers: Wrappers,
        reduce_scatter_once: bool = False,  # whether FSDP sums unsharded gradients until the last round of a step
        **common: Any,
    ) -> None:
        super().__init__(inner, communicator, **common)
        self._ranks, self._everyone, self._wrappers = set(ranks), everyone, wrappers
        self._model_parallel, self._model_groups = model_parallel, model_groups
        self._reduces_once = reduce_scatter_once
        self._reduces = True  # whether the backward pass of the next forward pass reduces
        self._num_unreduced = 0  # minibatches of the step that FSDP has not reduced yet
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._to_reduce: set[torch.nn.Parameter] = set()  # parameters with gradients that FSDP has not reduced yet
        self._is_padding = False
        self._graphs: list[torch.Tensor] = []  # of the minibatch, until its backward pass: a sum of no elements each
        self._has_run_backward = False
        self._hooks: list[RemovableHandle] = []
        self._replicas: dict[torch.nn.Parameter, int] = {}  # how many ranks have the same local gradient
        self.rebuild()
        self.begin_epoch(0)
        states = fsdp_states(self._modules)
        if reduce_scatter_once and not (states and all(hasattr(s, "unsharded_accumulated_grad") for s in states)):
            raise ValueError(f"`reduce_scatter_once` does not support fully_shard of torch {torch.__version__}")

    def rebuild(self) -> None:
        if self._num_unreduced:
            when = "call add_param_group() after step() has returned True, or pass `reduce_scatter_once=False`"
            raise RuntimeError(f"FSDP has summed gradients of this step for the added parameters already: {when}")
        self._modules: list[Any] = self._wrappers.fsdp
        inner = {id(part) for module in self._modules for part in module.modules() if part is not module}
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for module in self._modules:
            if id(module) not in inner:
                self._hooks.append(module.register_forward_pre_hook(partial(_set_grad_sync, weakref.ref(self))))
                self._hooks.append(module.register_forward_hook(partial(_keep_graph, weakref.ref(self))))
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(None)  # the mean; a number may multiply, which gloo cannot
        parameters = self._parameters()
        like, device = to_local(parameters[0]), self._register_hooks(set(parameters))
        self._like = torch.empty(0, dtype=like.dtype, device=device or like.device)
        self._reset_minibatch()

    def _register_hooks(self, own: set[torch.nn.Parameter]) -> torch.device | None:
        """Replace the hooks of an earlier optimizer; returns the device of the unsharded parameters."""
        device = None
        for p, unsharded in self._with_unsharded():
            device = unsharded.device
            self._check_mesh(p, unsharded)
            if p not in own:
                continue
            own.remove(p)
            hooks = unsharded._backward_hooks or {}
            for key in [key for key, hook in hooks.items() if isinstance(hook, _GradHook)]:
                del hooks[key]
            requires_grad = unsharded.requires_grad
            unsharded.requires_grad_(True)  # a frozen parameter, too, as it may be unfrozen
            unsharded.register_hook(_GradHook(self, p, unsharded))  # type: ignore[no-untyped-call]
            unsharded.requires_grad_(requires_grad)
        refuse_left_out(own)
        return device

    def _with_unsharded(self) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Each sharded parameter with its unsharded one, the same object for the whole run. Every rank must call it."""
        for module in self._modules:
            sharded = dict(module.named_parameters())
            module.unshard()
            try:
                pairs = [(sharded[name], p) for name, p in module.named_parameters() if p is not sharded[name]]
            finally:
                module.reshard()
            yield from pairs

    def _check_mesh(self, p: torch.nn.Parameter, unsharded: torch.nn.Parameter) -> None:
        sizes, sizes_unsharded = (
            [len(one.ranks) for one in dtensor.dimensions_of(tensor) if self._ranks.issuperset(one.ranks)]
            for tensor in (p, unsharded)
        )
        if math.prod(sizes) != len(self._ranks) or sizes_unsharded:
            raise ValueError(
                f"fully_shard must be over the {len(self._ranks)} ranks that the sampler assigns different samples to. "
                'Use the same mesh for both: fully_shard(model, mesh=mesh["data"]) and process_group=mesh["data"].'
            )

    def _drop_unreduced(self) -> None:
        for state in fsdp_states(self._modules):
            state.unsharded_accumulated_grad = None
            if hasattr(state, "_unsharded_param"):
                state._unsharded_param.grad = None

    def begin_epoch(self, epoch: int) -> None:
        self._read_digest()  # of all rounds of the previous epoch
        self._layout, self._to_reduce = 0, set()
        self._drop_unreduced()
        self._graphs, self._has_run_backward = [], False
        super().begin_epoch(epoch)

    def begin_minibatch(self, *, is_padding: bool, is_last: bool) -> None:
        self._is_padding = is_padding
        self._reduces = is_last or not self._reduces_once

    def _on_unsharded_grad(self, p: torch.nn.Parameter, unsharded: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """What to reduce of this rank's gradient."""
        self._num_seen[p] = self._num_seen.get(p, 0) + 1
        if self._is_padding:
            return torch.zeros_like(grad)
        grad = dtensor.redistribute_like(unsharded, grad)
        if self._measures:
            if p not in self._replicas:
                self._replicas[p] = dtensor.replication_factor(grad, self._model_groups)
            local = to_local(grad.detach())  # another reference to the gradient itself would make autograd copy it
            self._held.append((p, local))
            self._num_held += local.numel()
            if self._num_held >= _MAX_HELD:
                self._measure_held()
        return grad

    def _measure_held(self) -> None:
        """Measure several gradients together, as each alone takes longer on the host than on the device."""
        norms = norms_of([local for _, local in self._held], like=self._like)
        self._norms += zip((p for p, _ in self._held), norms, strict=True)
        self._held, self._num_held = [], 0

    def accumulate(self, plan: StepPlan, weight: Weight | None = None) -> None:
        self._is_weighted = weight is not None
        if not (self._num_seen or self._has_run_backward) and self._everyone.num_replicas > 1:
            self._run_empty_backward()
        gradients = {p: p.grad for p in self._parameters() if p.grad is not None}
        self._check_seen(gradients)
        squares = self._measure() if self._measures else None
        if self.norm_layers is not None:
            # gradients are those of several ranks by now
            squares = self._with_samples(squares, self.norm_layers.take(plan, inverse_scale=self.inverse_scale))
        self._add_numbers(squares, 0.0 if plan.is_padding and weight is not None else weight)
        if known := [p for p in gradients if p in self._sums]:
            torch._foreach_add_(to_locals(self._sums[p] for p in known), to_locals(gradients[p] for p in known))
        new = [p for p in gradients if p not in self._sums]
        self._sums |= {p: gradients[p].to(torch.promote_types(p.dtype, torch.float32)) for p in new}
        self._num_unreduced = 0 if self._reduces else self._num_unreduced + 1
        self._to_reduce.update(self._num_seen)
        if self._reduces:  # FSDP reduces what this rank has: all ranks must have the same, in all rounds of the epoch
            used = [p for p in self._parameters() if p in self._to_reduce]
            self._layout, self._to_reduce = zlib.crc32(b"%d %d" % (self._layout, self._layout_of(used))), set()
        self._graphs, self._has_run_backward = [], False
        self._reset_minibatch()

    def _run_empty_backward(self) -> None:
        """Take part in the backward pass of a minibatch that the user leaves out on this rank, with zeros."""
        parameters = self._parameters()
        if not any(p.requires_grad for p in parameters) or any(p.grad is not None for p in parameters):
            return
        if not self._graphs:
            raise RuntimeError(
                "step() was called without a forward pass of the fully_shard model, in which the other ranks wait for "
                "this one. To leave a minibatch out, run its forward pass, and call step() without backward()."
            )
        was_padding, self._is_padding = self._is_padding, True  # zeros times an infinite activation are NaN
        torch.autograd.backward(self._graphs, [torch.zeros_like(graph) for graph in self._graphs])
        self._is_padding = was_padding

    def _check_seen(self, found: Iterable[torch.nn.Parameter]) -> None:
        for p in found:
            if p not in self._num_seen and not self._num_unreduced:
                which = f"a parameter of shape {tuple(p.shape)} without calling its hook"
                advice = "Construct the optimizer after fully_shard(model) and after moving the model to its device."
                raise RuntimeError(f"fully_shard reduced the gradient of {which}. {advice}")
        if self._reduces and any(p.grad is None for p in self._num_seen):
            for state in fsdp_states(self._modules):
                full = getattr(state, "_unsharded_param", None)
                if state.unsharded_accumulated_grad is not None or (full is not None and full.grad is not None):
                    advice = "Pass `reduce_scatter_once=True` to reduce once a step."
                    cause = "set_requires_gradient_sync() was called between forward and backward"
                    raise RuntimeError(f"fully_shard has not reduced the gradients: {cause}. {advice}")
        if self._measures and any(number > 1 for number in self._num_seen.values()):
            advice = "Run one backward pass per minibatch, and no reentrant checkpointing of tied parameters."
            raise RuntimeError(f"Cannot measure a gradient that fully_shard reduced in several parts. {advice}")

    def _measure(self) -> torch.Tensor:
        """This rank's share of the squared norm of the minibatch, for each group."""
        self._measure_held()
        zero, squares = self._squared_norm([]), []
        groups = {p: number for number, group in enumerate(self.inner.param_groups) for p in group["params"]}
        # of each group, by how many ranks have the same gradient
        of_groups: list[dict[int, list[torch.Tensor]]] = [{} for _ in self.inner.param_groups]
        for p, norm in self._norms:
            if p in groups:
                of_groups[groups[p]].setdefault(self._replicas[p], []).append(norm)
        for by_replicas in of_groups:
            parts = [torch.stack(norms).to(zero).square().sum() / num for num, norms in by_replicas.items()]
            squares.append(torch.stack(parts).sum() if parts else zero)
        if self.norm_layers is not None:
            squares.insert(0, zero)
        scale = self.inverse_scale  # the hooks have measured scaled gradients
        return torch.stack(squares) if scale is None else torch.stack(squares) * scale.to(zero.device).square()

    def _reset_minibatch(self) -> None:
        self._num_seen, self._held, self._num_held = {}, [], 0
        self._norms = []
        self.inverse_scale = None
        super().zero_grad()

    def reduce(self, plan: StepPlan) -> StepGradient:
        for module in self._modules:
            module.reshard()  # a module that has kept unsharded parameters must all-gather the updated ones
        self._all_reduce_numbers()
        factor = self._factor(plan) * self.communicator.num_replicas * self._inverse_weight()
        self._scale_(factor)
        if self._squares is not None:
            self._squares = self._squares * (factor * factor)
        self._sums = {p: gradient.to(p.dtype) for p, gradient in self._sums.items()}
        for p, gradient in self._sums.items():
            p.grad = gradient
        return self._step_gradient(plan)

    def _all_reduce_numbers(self) -> None:
        numbers = torch.cat(self._numbers())
        if not self._is_weighted:
            numbers[-1:].fill_(UNWEIGHTED)
        if self._model_parallel.num_replicas > 1:  # ranks that share samples have the same weights
            numbers[-2:].div_(self._model_parallel.num_replicas)
            if self.norm_layers is not None:
                numbers[:1].div_(self._model_parallel.num_replicas)
        squares = numbers.new_empty(0)
        if self._measures:
            pairs = [[(p, self._sums[p]) for p in group if p in self._sums] for group in self._measured()]
            squares = squared_norms_of_shards(self._divided(pairs), self._model_groups, like=self._like)
        numbers = torch.cat([numbers, squares.to(numbers), numbers.new_empty(NUM_CHECKS)])
        self._write_digest(numbers[-NUM_CHECKS:])
        self._everyone.sum([numbers])
        self._squares = numbers[-NUM_CHECKS - len(squares) : -NUM_CHECKS] if self._measures else None
        digest, numbers = numbers[-NUM_CHECKS:], numbers[: -NUM_CHECKS - len(squares)]
        is_read = not self._has_checked_weights
        self._check_weights(numbers[-1], self.communicator.num_replicas)
        self._check_digest(digest, self._everyone.num_replicas)
        if is_read:
            self._read_digest()
        self._read_numbers(numbers)

    def _scale_(self, factor: Weight) -> None:
        shards = to_locals(self._sums.values())
        if shards and (isinstance(factor, torch.Tensor) or factor != 1):
            torch._foreach_mul_(shards, factor.to(shards[0].device) if isinstance(factor, torch.Tensor) else factor)

    def _clip_(self, limit: float, gradient: StepGradient) -> None:
        self._scale_(gradient.clip_factor(limit))

    def reset(self) -> None:
        self._sums, self._num_unreduced, self._squares = {}, 0, None
        self._reset_numbers()
        self._reset_minibatch()

    def zero_grad(self) -> None:
        if self._num_seen and self._reduces_once:
            if self._num_unreduced:
                which = "a minibatch that is not the first of its step: fully_shard has added it to the others."
                raise RuntimeError(f"With `reduce_scatter_once`, zero_grad() cannot drop the gradient of {which}")
            self._drop_unreduced()
        self._reset_minibatch()

    def _squared_norms_by_group(self, groups: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> torch.Tensor:
        # of the step's gradient: they came with the numbers, in one collective
        return super()._squared_norms_by_group(groups) if self._squares is None else self._squares

    def _squared_norm_of_step(self) -> torch.Tensor:
        is_known = self._squares is not None and self.divisors is None
        if not is_known:
            return super()._squared_norm_of_step()
        return self._squares[-len(self.inner.param_groups) :].sum()  # type: ignore[index]

    def _squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return self._squared_norms([gradients])[0] if gradients else squared_norm([], like=self._like)

    def _squared_norms(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        return sharded_squared_norms(lists, self._everyone, self._model_groups, like=self._like)


class _GradHook:
    """Passes the gradient of an unsharded parameter to the accumulator, as long as that exists."""

    def __init__(self, accumulator: FSDPAccumulator, p: torch.nn.Parameter, unsharded: torch.nn.Parameter) -> None:
        self._accumulator, self._p, self._unsharded = weakref.ref(accumulator), weakref.ref(p), weakref.ref(unsharded)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        own, p, unsharded = self._accumulator(), self._p(), self._unsharded()
        if own is None or p is None or unsharded is None:
            return gradient
        return own._on_unsharded_grad(p, unsharded, gradient)


def _set_grad_sync(accumulator: weakref.ref[FSDPAccumulator], module: Any, args: Any) -> None:
    """Before a forward pass: loops that accumulate by themselves disable the reduction of most minibatches."""
    own = accumulator()
    if own is not None:
        refuse_divide_factor(own._wrappers.fsdp)
        module.set_is_last_backward(True)
        module.set_requires_gradient_sync(own._reduces)


def _keep_graph(accumulator: weakref.ref[FSDPAccumulator], module: Any, args: Any, output: Any) -> None:
    """After a forward pass: keep its graph, but not its outputs, in case the user leaves the minibatch out."""
    own = accumulator()
    if own is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(_note_backward, accumulator))  # type: ignore[no-untyped-call]
                local = tensor.to_local() if dtensor.is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
                own._graphs.append(local.reshape(-1)[:0].sum())


def _note_backward(accumulator: weakref.ref[FSDPAccumulator], gradient: torch.Tensor) -> None:
    own = accumulator()
    if own is not None:
        own._has_run_backward, own._graphs = True, []


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors_in(part)
