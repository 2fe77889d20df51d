"""Finds what else reduces, shards or counts the gradients of an optimizer: DDP, fully_shard, Accelerate, and others.

A parameter has no reference to the modules around it: they are looked for in the model that the user passed, and on the
heap only if that is not enough. ``gc.freeze()`` hides objects from a search of the heap: doubtful cases are refused.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.nn import SyncBatchNorm
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from variable_batch_size.cores.communicator import Communicator, is_running
from variable_batch_size.cores.dtensor import is_dtensor
from variable_batch_size.optim.proxy import optimizers_of
from variable_batch_size.rules.rule import Rule

Pair = tuple[torch.nn.Parameter, torch.nn.Parameter]


class Foreign(NamedTuple):
    """A class that is looked up only if its module was imported: otherwise there are no instances.

    Args:
        advice: what is wrong with it, and what to do instead.
        holds: the attribute with what it was made from.
    """

    module: str
    name: str
    advice: str = ""
    holds: str = ""

    @property
    def kind(self) -> Any:
        """The class; None if its module was not imported."""
        return getattr(sys.modules.get(self.module), self.name, None)


_FSDP2 = Foreign("torch.distributed.fsdp", "FSDPModule")
_ZERO = Foreign("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
_FSDP1 = (
    "FullyShardedDataParallel (FSDP1) is not supported, because it reduces gradients in every backward pass: use "
    "fully_shard (FSDP2) of torch.distributed.fsdp, available since torch 2.6"
)
_UNSUPPORTED = [
    Foreign(
        "torch.distributed.pipelining.stage",
        "_PipelineStageBase",
        "pipeline parallelism is not supported, because its schedule runs the minibatches itself: use fully_shard or "
        "tensor parallelism for a model that does not fit on one device",
    ),
    Foreign(
        "torch.distributed._composable.fsdp",
        "FSDPModule",
        "fully_shard must be that of torch.distributed.fsdp, available since torch 2.6",
    ),
    Foreign(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine",
        "a DeepSpeed engine is not supported, because it accumulates, reduces and updates itself: train the plain "
        "model, with fully_shard if it does not fit on one device",
    ),
    Foreign(
        "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel",
        "XlaFullyShardedDataParallel",
        "XlaFullyShardedDataParallel is not supported, because it reduces gradients in every minibatch: use XLA's SPMD "
        "mode for a model that does not fit on one core",
    ),
]

_USE_INTEGRATION = (
    "use prepare(accelerator, …) of variable_batch_size.integrations.accelerate instead, or in Transformers the "
    "VariableBatchTrainer of variable_batch_size.integrations.transformers"
)
_LOADER = f"accelerator.prepare() was given a loader that is already sharded by its sampler: {_USE_INTEGRATION}"
_STREAM = f"accelerator.prepare() was given a loader that is already sharded by its stream: {_USE_INTEGRATION}"
_OPTIMIZER = f"accelerator.prepare() was given an optimizer of this library, or its inner one: {_USE_INTEGRATION}"
_SCHEDULER = f"accelerator.prepare() was given a scheduler, which would count minibatches: {_USE_INTEGRATION}"
_SKIP = (
    "skip_first_batches() would skip minibatches that the optimizer counts: resume with "
    "`for epoch in vbs.epochs(optimizer, …)`, which starts after the saved step"
)
_ACCELERATE = [
    Foreign("accelerate.optimizer", "AcceleratedOptimizer", _OPTIMIZER, "optimizer"),
    Foreign("accelerate.scheduler", "AcceleratedScheduler", _SCHEDULER, "scheduler"),
    Foreign("accelerate.data_loader", "DataLoaderShard", _LOADER, "batch_sampler"),
    Foreign("accelerate.data_loader", "DataLoaderDispatcher", _LOADER, "batch_sampler"),
    Foreign("accelerate.data_loader", "DataLoaderShard", _STREAM, "dataset"),
    Foreign("accelerate.data_loader", "DataLoaderDispatcher", _STREAM, "dataset"),
    Foreign("accelerate.data_loader", "SkipBatchSampler", _SKIP, "batch_sampler"),
    Foreign("accelerate.data_loader", "SkipDataLoader", _SKIP, "dataset"),
]


def is_zero(inner: Any) -> bool:
    """Whether an optimizer is a ZeroRedundancyOptimizer, which shards its state."""
    return isinstance(inner, _ZERO.kind or ())


def forget_partition(zero: Any) -> None:
    """Let a ZeroRedundancyOptimizer assign its parameters to ranks again."""
    zero._clear_cache()


@dataclass(eq=False)
class Wrappers:
    """What else reduces or shards the gradients of an optimizer's parameters.

    Args:
        model: as the user passed it; None if it was not passed.
        fsdp: the modules of fully_shard, outer before inner, in the same order on all ranks, as they run collectives.
        unsupported: advice for each wrapper that is not supported.
        cleared: parameters, also others of the model, that are in no DistributedDataParallel from before the optimizer.
        is_prepared: whether an integration has prepared the optimizer for its framework.
        is_checked: whether the first minibatch of a pass has been checked.
    """

    parameters: list[torch.Tensor]
    model: torch.nn.Module | None
    ddp: list[DistributedDataParallel] = field(default_factory=list)
    fsdp: list[Any] = field(default_factory=list)
    sync_batch_norms: list[SyncBatchNorm] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    cleared: set[torch.Tensor] = field(default_factory=set)
    is_prepared: bool = False
    is_checked: bool = False

    def uncovered(self) -> list[torch.Tensor]:
        """The parameters that are in none of these DistributedDataParallel and fully_shard modules."""
        covered = {p for module in [*self.ddp, *self.fsdp] for p in _sharded_parameters(module)}
        return [p for p in self.parameters if p not in covered]

    def update(self, parameters: Iterable[torch.Tensor]) -> None:
        """Find again, after parameters were added or the model was wrapped."""
        found = find_wrappers(parameters, self.model, self.cleared)
        found.is_prepared, found.is_checked = self.is_prepared, self.is_checked
        self.__dict__.update(vars(found))


_records: weakref.WeakSet[Wrappers] = weakref.WeakSet()
_ddp_made: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # since the first optimizer


def find_wrappers(
    parameters: Iterable[torch.Tensor], model: torch.nn.Module | None = None, cleared: Iterable[torch.Tensor] = ()
) -> Wrappers:
    """Find what wraps some parameters: first in the model, then on the heap if something may be missing.

    Args:
        cleared: parameters that are in none but a DistributedDataParallel that was made since the first optimizer.

    Raises:
        RuntimeError: if ``gc.freeze()`` may have hidden something from the search of the heap.
    """
    if is_running():
        _watch_for_ddp()
    found = Wrappers(list(parameters), model, cleared={*cleared})
    candidates = [*(model.modules() if model is not None else ()), *_ddp_made]
    _sort(found, candidates)
    kinds = _kinds_to_search(found)
    if kinds:
        _sort(found, [*candidates, *alive(*kinds)])
        _refuse_hidden(found)
    if is_running():
        others = [p for p in (model.parameters() if model is not None else ()) if not _is_costly(p)]
        found.cleared |= {*found.parameters, *others} - _hooked(others)
    _records.add(found)
    return found


@cache
def _watch_for_ddp() -> None:
    """Note every DistributedDataParallel from now on: a model may be wrapped after the optimizer was made."""

    def note(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            _ddp_made.add(module)

    register_module_module_registration_hook(note)


def alive(*kinds: type) -> list[Any]:
    """All objects of some classes, in no order, from one search of the heap: an object refers to its class."""
    classes = [*kinds]
    for one in classes:
        classes += type.__subclasses__(one)
    return [thing for thing in gc.get_referrers(*classes) if issubclass(type(thing), kinds)]


def _sort(found: Wrappers, candidates: Iterable[Any]) -> None:
    own, unsupported, fsdp = set(found.parameters), _unsupported(), _FSDP2.kind or ()
    known = (DistributedDataParallel, SyncBatchNorm, *unsupported, *([fsdp] if fsdp else []))
    things = _unique([one for one in candidates if isinstance(one, known) and _has_some(one, own)])
    found.ddp = [one for one in things if isinstance(one, DistributedDataParallel)]
    found.fsdp = _outer_first([one for one in things if isinstance(one, fsdp)], found.parameters)
    for module in found.fsdp:
        module.reshard()  # after a forward pass without a backward pass it may still be unsharded
    norms = [*things, *(part for module in [*found.ddp, *found.fsdp] for part in module.modules())]
    found.sync_batch_norms = _unique([one for one in norms if isinstance(one, SyncBatchNorm) and _has_some(one, own)])
    found.unsupported = [
        advice for kind, advice in unsupported.items() if any(isinstance(one, kind) for one in [found.model, *things])
    ]
    if any(getattr(p, "_fsdp_flattened", False) for p in own):
        found.unsupported.append(_FSDP1)


def _unsupported() -> dict[type, str]:
    """The advice for each of these classes whose module was imported; since torch 2.6 both FSDPModules are the same."""
    return {row.kind: row.advice for row in _UNSUPPORTED if row.kind not in (None, _FSDP2.kind)}


def _has_some(thing: Any, parameters: set[torch.Tensor]) -> bool:
    module = getattr(thing, "submod", thing)  # of a pipeline stage
    return not parameters.isdisjoint(_sharded_parameters(module))


def _kinds_to_search(found: Wrappers) -> list[type]:
    """The classes to search the heap for; none if nothing can be missing."""
    unsupported = list(_unsupported())
    if not is_running():
        return [kind for kind in unsupported if not kind.__module__.startswith("torch.distributed")]
    uncovered = found.uncovered()
    is_open = found.model is None or bool(unsupported) or any(map(_is_costly, uncovered))
    if not uncovered or (not is_open and not _hooked(uncovered) - found.cleared):
        return []
    return [DistributedDataParallel, SyncBatchNorm, *([_FSDP2.kind] if _FSDP2.kind else []), *unsupported]


def _is_costly(p: torch.Tensor) -> bool:
    """Whether a view of a parameter, which _hooked() makes, is more than a moment's work."""
    return is_dtensor(p) or p.device.type == "xla"


def _hooked(parameters: Iterable[torch.Tensor]) -> set[torch.Tensor]:
    """The parameters whose AccumulateGrad node something keeps alive, as the reducer of DDP does for its hooks.

    Otherwise the node, and what is noted in it, is gone when nothing refers to it. A graph that is still in use keeps
    it alive, too, so that only the other parameters are certain.
    """
    key, trained = "variable_batch_size", [p for p in parameters if p.requires_grad and p.is_leaf]
    for p in trained:
        _notes(p)[key] = True
    return {p for p in trained if _notes(p).pop(key, False)}


@torch.enable_grad()  # type: ignore[no-untyped-call]
def _notes(p: torch.Tensor) -> Any:
    node: Any = get_gradient_edge(p).node
    return node.metadata


def _is_frozen() -> bool:
    """Whether ``gc.freeze()`` was called with torch loaded, many thousand objects; Python 3.12 starts with 375."""
    return gc.get_freeze_count() > 10_000


def _refuse_hidden(found: Wrappers) -> None:
    if not _is_frozen() or not is_running() or dist.get_world_size() == 1:
        return
    uncovered = found.uncovered()
    may_have_norms = found.model is None and any(p.device.type not in ("cpu", "xla") for p in uncovered)
    if may_have_norms or _hooked(uncovered) - found.cleared:  # SyncBatchNorm itself refuses to train on a CPU
        raise RuntimeError(
            "gc.freeze() hides the modules around the parameters, such as a DistributedDataParallel: pass the wrapped "
            "model as `model=`, or call gc.freeze() after the optimizer is made"
        )


def _unique(things: Iterable[Any]) -> list[Any]:
    return list({id(thing): thing for thing in things}.values())


def disable_ddp_allreduce(wrappers: Wrappers, communicator: Communicator) -> None:
    """Switch off the all-reduce of every DistributedDataParallel that was found.

    It averages over all processes in every backward pass. That is wrong if they have different numbers of minibatches,
    and hangs if some have none.
    """
    is_alone = communicator.num_replicas == 1
    for ddp in wrappers.ddp:
        if ddp.static_graph:
            if is_alone:
                continue
            raise ValueError(
                "DistributedDataParallel(static_graph=True) reduces in every backward pass: wrap the model without it"
            )
        ddp.require_backward_grad_sync = False
        ddp.register_forward_pre_hook(_disable_before_forward)  # loops that accumulate switch it on again
    if wrappers.sync_batch_norms and not is_alone:
        raise ValueError(
            "SyncBatchNorm waits for all ranks in every minibatch, but they may have different numbers of minibatches: "
            "use BatchNorm"
        )


def _disable_before_forward(ddp: DistributedDataParallel, args: Any) -> None:
    ddp.require_backward_grad_sync = False


def wrapped_by_framework(wrappers: Wrappers, communicator: Communicator) -> None:
    """Find wrappers again after an integration has let its framework wrap the model, and switch DDP off."""
    wrappers.update(wrappers.parameters)
    wrappers.is_prepared = True
    disable_ddp_allreduce(wrappers, communicator)


def _sharded_parameters(module: torch.nn.Module) -> set[torch.Tensor]:
    """The parameters of a module; with fully_shard the sharded ones, even while the module shows the full ones."""
    return {*module.parameters(), *(state.sharded_param for state in _fsdp_states(module.modules()))}


def _outer_first(modules: list[Any], parameters: list[torch.Tensor]) -> list[Any]:
    places = {id(p): place for place, p in enumerate(parameters)}

    def key(module: Any) -> tuple[int, int, int]:
        own = [places[id(p)] for p in _sharded_parameters(module) if id(p) in places]
        return min(own, default=-1), -len(own), -len(list(module.modules()))

    return sorted(modules, key=key)


def outermost(modules: list[Any]) -> list[Any]:
    """Those modules that are in no other of them."""
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def with_whole_parameters(modules: list[Any]) -> Iterator[Pair]:
    """Each sharded parameter with its unsharded one, which is the same object for the whole run.

    It unshards one module at a time. Every rank must call it.
    """
    for module in modules:
        sharded = dict(module.named_parameters())
        module.unshard()
        try:
            pairs = [(sharded[name], p) for name, p in module.named_parameters() if p is not sharded[name]]
        finally:
            module.reshard()
        yield from pairs


def can_keep_unreduced(modules: list[Any]) -> bool:
    """Whether gradients that FSDP has not reduced yet can be reached in this version of torch, to be dropped."""
    states = _fsdp_states(modules)
    return bool(states) and all(hasattr(state, "unsharded_accumulated_grad") for state in states)


def forget_unreduced(modules: list[Any]) -> None:
    """Drop the gradients that FSDP has not reduced yet."""
    for state in _fsdp_states(modules):
        state.unsharded_accumulated_grad = None
        if hasattr(state, "_unsharded_param"):
            state._unsharded_param.grad = None


def has_unreduced(modules: list[Any]) -> bool:
    """Whether FSDP has gradients that it has not reduced yet."""
    kept = [(s.unsharded_accumulated_grad, getattr(s, "_unsharded_param", None)) for s in _fsdp_states(modules)]
    return any(summed is not None or (full is not None and full.grad is not None) for summed, full in kept)


def _fsdp_states(modules: Iterable[Any]) -> list[Any]:
    """FSDP's private state of each parameter; there is no public API for unreduced gradients."""
    states = [module._get_fsdp_state() for module in modules if hasattr(module, "_get_fsdp_state")]
    groups = [
        group
        for state in states
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    ]
    return [state for group in groups if group is not None for state in group.fsdp_params]


def refuse_unsupported(wrappers: Wrappers, rule: Rule, inner: Optimizer) -> None:
    """Raise if a wrapper is not supported, or not together with the rule."""
    if wrappers.unsupported:
        raise ValueError(wrappers.unsupported[0])
    if wrappers.fsdp:
        refuse_left_out([p for p in wrappers.parameters if not is_dtensor(p)])
    if rule.preconditions and (wrappers.fsdp or any(map(is_zero, optimizers_of(inner)))):
        sharded = "fully_shard" if wrappers.fsdp else "ZeroRedundancyOptimizer"
        raise ValueError(
            f"{type(rule).__name__} needs the full second moments on every rank, but {sharded} shards them: use "
            "AdaScaleRule or AdamRule"
        )


def refuse_left_out(others: Collection[torch.Tensor]) -> None:
    """Raise if some parameters are not in fully_shard although others are."""
    if others:
        shapes = ", ".join(str(tuple(p.shape)) for p in list(others)[:3])
        raise ValueError(
            f"either all parameters must be in fully_shard or none, but {len(others)} are not (of shape {shapes}"
            f"{'…' if len(others) > 3 else ''}): apply fully_shard to the outermost module as well, then make the "
            "inner optimizer, before the model runs"
        )


def check_first_minibatch(optimizer: Any, wrappers: Wrappers, communicator: Communicator) -> None:
    """At the first minibatch of each pass, raise if something was wrapped or prepared since the optimizer was made.

    It also raises if another optimizer trains parameters of a wrapped model, whose gradients are not reduced.
    """
    is_several = is_running() and communicator.num_replicas > 1
    if is_several and any(
        ddp.require_backward_grad_sync and _has_some(ddp, {*wrappers.parameters}) for ddp in _ddp_made
    ):
        raise RuntimeError(
            "the model was wrapped in DistributedDataParallel after the optimizer was made, so its gradients were "
            "reduced twice: wrap the model first"
        )
    is_initialized = Foreign("accelerate.state", "is_initialized").kind
    accelerate = _ACCELERATE if is_initialized is not None and is_initialized() else []
    left_out = _left_out(wrappers) if is_several else set()
    is_untouched = is_running() and all(p.grad is None and not is_dtensor(p) for p in wrappers.parameters)
    kinds = [*(row.kind for row in accelerate), _FSDP2.kind if is_untouched else None, Optimizer if left_out else None]
    kinds = [kind for kind in kinds if kind is not None]
    found = alive(*kinds) if kinds else []
    is_blind = _is_frozen() and not wrappers.is_checked
    if accelerate:
        _refuse_prepared(optimizer, found, is_blind=is_blind and not wrappers.is_prepared)
    if is_untouched:
        _refuse_replaced(wrappers.model, found, is_blind=is_blind)
    if left_out:
        _refuse_other_optimizers(wrappers, [one for one in found if isinstance(one, Optimizer)])
        if is_blind:
            _watch_other_optimizers(wrappers)
    wrappers.is_checked = True


def _left_out(wrappers: Wrappers) -> set[torch.Tensor]:
    """The parameters of the wrapped modules that are trained, and not by an optimizer of this library."""
    states = _fsdp_states(part for module in wrappers.fsdp for part in module.modules())
    wrapped = {*(state.sharded_param for state in states), *(p for ddp in wrappers.ddp for p in ddp.parameters())}
    reduced = {p for record in [wrappers, *_records] for p in record.parameters}
    return {p for p in wrapped if p.requires_grad} - reduced


def _refuse_other_optimizers(wrappers: Wrappers, optimizers: Iterable[Any]) -> None:
    left_out = _left_out(wrappers)
    for one in optimizers:
        groups = getattr(one, "param_groups", ())  # an optimizer whose construction failed may have none
        if any(not left_out.isdisjoint(group["params"]) for group in groups):
            model = (
                "a fully_shard model" if wrappers.fsdp else "a model whose DistributedDataParallel no longer reduces"
            )
            raise RuntimeError(
                f"all trained parameters of {model} must belong to optimizers of this library, but "
                f"{type(one).__name__} has some: pass both optimizers as a list"
            )


def _watch_other_optimizers(wrappers: Wrappers) -> None:
    """Check every optimizer when it makes a step, where ``gc.freeze()`` may have hidden some from the search."""
    record = weakref.ref(wrappers)

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        own = record()
        if own is not None:
            _refuse_other_optimizers(own, [optimizer])

    register_optimizer_step_pre_hook(check)


def _refuse_replaced(model: torch.nn.Module | None, found: list[Any], *, is_blind: bool) -> None:
    seen = [*found, *(model.modules() if model is not None else ())]
    if _FSDP2.kind and ((is_blind and model is None) or any(isinstance(one, _FSDP2.kind) for one in seen)):
        raise RuntimeError(
            "no parameter of the optimizer has a gradient; fully_shard replaces the parameters of a model: apply it "
            "first, then make the optimizer from model.parameters(), before the model runs"
        )


def _refuse_prepared(optimizer: Any, found: list[Any], *, is_blind: bool) -> None:
    """Raise if Accelerate has prepared the optimizer, its loader or its scheduler.

    A prepared optimizer skips minibatches when Accelerate accumulates, a prepared loader is sharded a second time, and
    a prepared scheduler makes a step for each minibatch of each process.
    """
    own = [optimizer, optimizer.sampler, optimizer.inner, *optimizers_of(optimizer.inner)]
    for row in _ACCELERATE:
        theirs = [thing for thing in found if isinstance(thing, row.kind or ())]
        if any(part is one for thing in theirs for part in (thing, _held(thing, row.holds)) for one in own):
            raise RuntimeError(row.advice)
    num_steps = Foreign("accelerate.state", "GradientState").kind().num_steps
    if num_steps != 1:
        raise RuntimeError(
            f"Accelerate's `gradient_accumulation_steps` must be 1, got {num_steps}: the trace defines how many "
            "minibatches make up a step"
        )
    if is_blind:
        raise RuntimeError(
            "gc.freeze() may hide an optimizer or a loader that accelerator.prepare() has made: call gc.freeze() after "
            f"the first step, or {_USE_INTEGRATION}"
        )


def _held(prepared: Any, name: str) -> Any:
    """What an object of Accelerate was made from; of a scheduler its optimizer, of a sharded sampler the sampler."""
    held = getattr(prepared, name, None)
    return getattr(held, "optimizer" if name == "scheduler" else name, held)
