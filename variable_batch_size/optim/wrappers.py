"""Finds what else reduces, shards or counts the gradients of an optimizer: DDP, fully_shard, Accelerate, and others.

A parameter has no reference to the modules around it. They are searched for in the model that the user passed, and on
the heap only if that is not enough, with the objects that ``gc.freeze()`` hides.
"""

import gc
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from variable_batch_size.cores.communicator import Communicator, is_running
from variable_batch_size.cores.dtensor import is_dtensor
from variable_batch_size.optim.proxy import optimizers_of
from variable_batch_size.rules.rule import Rule

_FSDP2 = "torch.distributed.fsdp.FSDPModule"
_FSDP1 = "FullyShardedDataParallel (FSDP1) is not supported, because it reduces gradients in every backward pass: "
_FSDP1 += "use fully_shard (FSDP2) of torch.distributed.fsdp, available since torch 2.6"
_UNSUPPORTED = {
    "torch.distributed.pipelining.stage._PipelineStageBase": "pipeline parallelism is not supported, because its "
    "schedule runs the minibatches itself: use fully_shard or tensor parallelism for a model that does not fit on one "
    "device",
    "torch.distributed._composable.fsdp.FSDPModule": "fully_shard must be that of torch.distributed.fsdp, available "
    "since torch 2.6",
    "deepspeed.runtime.engine.DeepSpeedEngine": "a DeepSpeed engine is not supported, because it accumulates, reduces "
    "and updates itself: train the plain model, with fully_shard if it does not fit on one device",
    "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel.XlaFullyShardedDataParallel": "XlaFullyShardedData"
    "Parallel is not supported, because it reduces gradients in every minibatch: use XLA's SPMD mode for a model that "
    "does not fit on one core",
}
_DATA_PARALLEL = (
    "DataParallel over several devices is not supported, because it runs copies of the model, with their hooks, "
)
_DATA_PARALLEL += "in threads: run a process for each device with vbs.launch or torchrun, and leave the model plain"
_USE_INTEGRATION = (
    "use prepare(accelerator, …) of variable_batch_size.integrations.accelerate instead, or in Transformers the "
    "VariableBatchTrainer of variable_batch_size.integrations.transformers"
)
_PREPARED = f"accelerator.prepare() was given {{}}: {_USE_INTEGRATION}"
_LOADER = _PREPARED.format("a loader that is already sharded by its sampler or stream")
_SKIP = (
    "skip_first_batches() would skip minibatches that the optimizer counts: resume with "
    "`for epoch in optimizer.epochs(…)`, which starts after the saved step"
)
_ACCELERATE = {
    "accelerate.optimizer.AcceleratedOptimizer": _PREPARED.format("an optimizer of this library, or its inner one"),
    "accelerate.scheduler.AcceleratedScheduler": _PREPARED.format("a scheduler, which would count minibatches"),
    "accelerate.data_loader.DataLoaderShard": _LOADER,
    "accelerate.data_loader.DataLoaderDispatcher": _LOADER,
    "accelerate.data_loader.SkipBatchSampler": _SKIP,
    "accelerate.data_loader.SkipDataLoader": _SKIP,
}
_thawing = threading.RLock()
_ddp_made: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # since the first optimizer


def _imported(path: str) -> Any:
    """A class of another library; None if its module was not imported, so that there is no instance."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def is_zero(inner: Any) -> bool:
    """Whether an optimizer is a ZeroRedundancyOptimizer, which shards its state."""
    kind = _imported("torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer")
    return isinstance(inner, kind or ())


def forget_partition(zero: Any) -> None:
    """Let a ZeroRedundancyOptimizer assign its parameters to ranks again."""
    zero._clear_cache()


@cache
def _watch_for_ddp() -> None:
    """Record every DistributedDataParallel from now on: a model may be wrapped after the optimizer was made."""

    def record(module: Module, name: str, submodule: Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            _ddp_made.add(module)

    register_module_module_registration_hook(record)


class Wrappers:
    """What else reduces or shards the gradients of an optimizer's parameters."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], model: Module | None = None, cleared: Iterable[torch.Tensor] = ()
    ) -> None:
        self.parameters, self.model = list(parameters), model
        # parameters, also others of the model, that are in no DistributedDataParallel from before the optimizer
        self.cleared = {*cleared}
        self.is_checked = False  # whether the first minibatch of a pass has been checked
        if is_running():
            _watch_for_ddp()
        candidates = [*(model.modules() if model is not None else ()), *_ddp_made]
        if torch.cuda.device_count() > 1:
            candidates += _alive(DataParallel)
        self._sort(candidates)
        kinds = self._kinds_to_search()
        if kinds:
            self._sort([*candidates, *_alive(*kinds)])
        if is_running():
            others = [p for p in (model.parameters() if model is not None else ()) if not _is_costly(p)]
            self.cleared |= {*self.parameters, *others} - _hooked(others)
        _records.add(self)

    def update(self, parameters: Iterable[torch.Tensor]) -> None:
        """Search again, after parameters were added or the model was wrapped."""
        found = Wrappers(parameters, self.model, self.cleared)
        found.is_checked = self.is_checked
        self.__dict__.update(vars(found))

    def _sort(self, candidates: Iterable[Any]) -> None:
        own, unsupported, fsdp = {*self.parameters}, _unsupported(), _imported(_FSDP2) or ()
        known = (DistributedDataParallel, SyncBatchNorm, fsdp, *unsupported)
        found = {id(one): one for one in candidates if isinstance(one, known) and _has_some(one, own)}
        things = list(found.values())
        self.ddp = [one for one in things if isinstance(one, DistributedDataParallel)]
        # in the same order on all ranks, as they run collectives
        self.fsdp = _outer_first([one for one in things if isinstance(one, fsdp)], self.parameters)
        for module in self.fsdp:
            module.reshard()  # after a forward pass without a backward pass it may still be unsharded
        norms = [one for one in candidates if isinstance(one, SyncBatchNorm)]
        around = [*norms, *self.ddp, *self.fsdp, *([] if self.model is None else [self.model])]
        if self.model is None and any(not _has_some(norm, own) for norm in norms):  # their model may be that of others
            around += _modules_alive()
        around = [module for module in around if _has_some(module, own)]
        self.has_sync_batch_norm = any(isinstance(part, SyncBatchNorm) for one in around for part in one.modules())
        things.append(self.model)
        self.unsupported = [text for kind, text in unsupported.items() if any(isinstance(one, kind) for one in things)]
        if any(getattr(p, "_fsdp_flattened", False) for p in own):
            self.unsupported.append(_FSDP1)
        if any(isinstance(one, DataParallel) and len(one.device_ids) > 1 and _has_some(one, own) for one in candidates):
            self.unsupported.append(_DATA_PARALLEL)

    def _uncovered(self) -> list[torch.Tensor]:
        """The parameters that are in none of the modules that were found."""
        covered = {p for module in [*self.ddp, *self.fsdp] for p in _sharded_parameters(module)}
        return [p for p in self.parameters if p not in covered]

    def _kinds_to_search(self) -> list[type]:
        """The classes to search the heap for; none if nothing can be missing."""
        unsupported = list(_unsupported())
        if not is_running():
            return [kind for kind in unsupported if not kind.__module__.startswith("torch.distributed")]
        uncovered = self._uncovered()
        is_open = self.model is None or bool(unsupported) or any(map(_is_costly, uncovered))
        if not uncovered or (not is_open and not _hooked(uncovered) - self.cleared):
            return []
        kinds = [DistributedDataParallel, SyncBatchNorm, _imported(_FSDP2), *unsupported]
        return [kind for kind in kinds if kind is not None]

    def disable_ddp_allreduce(self, communicator: Communicator) -> None:
        """Switch off DDP's all-reduce, which is wrong or hangs if ranks have different numbers of minibatches."""
        is_alone = communicator.num_replicas == 1
        for ddp in self.ddp:
            if ddp.static_graph and not is_alone:
                kind = "DistributedDataParallel(static_graph=True)"
                raise ValueError(f"{kind} reduces in every backward pass: wrap the model without static_graph")
            if not ddp.static_graph:
                _disable_before_forward(ddp, None)
                ddp.register_forward_pre_hook(_disable_before_forward)  # loops that accumulate switch it on again
        if self.has_sync_batch_norm and not is_alone:
            reason = "waits for all ranks in every minibatch, but some may be idle"
            raise ValueError(f"SyncBatchNorm {reason}: use BatchNorm")

    def refuse_unsupported(self, rule: Rule, inner: Optimizer) -> None:
        """Raise if a wrapper is not supported, or not together with the rule."""
        if self.unsupported:
            raise ValueError(self.unsupported[0])
        if self.fsdp:
            refuse_left_out([p for p in self.parameters if not is_dtensor(p)])
        is_by_zero = any(map(is_zero, optimizers_of(inner)))
        if rule.preconditions and (self.fsdp or is_by_zero or any(map(is_dtensor, self.parameters))):
            sharded = "fully_shard" if self.fsdp else "ZeroRedundancyOptimizer" if is_by_zero else "tensor parallelism"
            problem = f"{type(rule).__name__} needs the full second moments on every rank, but {sharded} shards them"
            raise ValueError(f"{problem}: use AdaScaleRule or AdamRule")

    def check_first_minibatch(self, optimizer: Any, communicator: Communicator) -> None:
        """At the first minibatch of each pass, raise if something was wrapped or prepared since, or others train it."""
        is_several, own = is_running() and communicator.num_replicas > 1, {*self.parameters}
        if is_several and any(ddp.require_backward_grad_sync and _has_some(ddp, own) for ddp in _ddp_made):
            late = "the model was wrapped in DistributedDataParallel after the optimizer was made"
            raise RuntimeError(f"{late}, so its gradients were reduced twice: wrap the model first")
        is_initialized = _imported("accelerate.state.is_initialized")
        accelerate = [*map(_imported, _ACCELERATE)] if is_initialized is not None and is_initialized() else []
        left_out = self._left_out() if is_several else set()
        is_untouched = is_running() and all(p.grad is None and not is_dtensor(p) for p in self.parameters)
        fsdp = _imported(_FSDP2) if is_untouched else None
        kinds = [kind for kind in (*accelerate, fsdp, Optimizer if left_out else None) if kind is not None]
        found = _alive(*kinds) if kinds else []
        if accelerate:
            _refuse_prepared(optimizer, found)
        modules = self.model.modules() if self.model is not None else ()
        if fsdp and any(isinstance(one, fsdp) for one in (*found, *modules)):
            problem = "no parameter of the optimizer has a gradient; fully_shard replaces the parameters of a model"
            advice = "apply it first, then make the optimizer from model.parameters(), before the model runs"
            raise RuntimeError(f"{problem}: {advice}")
        self._refuse_other_optimizers([one for one in found if isinstance(one, Optimizer)], left_out)
        is_unknown = self.model is None and bool(self._uncovered())
        if is_several and not self.is_checked and is_unknown:
            self._watch_other_optimizers()
        self.is_checked = True

    def _left_out(self) -> set[torch.Tensor]:
        """The parameters of the model that are trained, and not by an optimizer of this library."""
        states = fsdp_states(part for module in self.fsdp for part in module.modules())
        modules = [*self.ddp, *([] if self.model is None or self.fsdp else [self.model])]
        found = {*(state.sharded_param for state in states), *(p for module in modules for p in module.parameters())}
        return {p for p in found if p.requires_grad} - _reduced()

    def _trained_beside(self, optimizer: Optimizer) -> set[torch.Tensor]:
        """The parameters of another optimizer that are in a module with those of this one."""
        others = {p for p in _parameters_of(optimizer) if p.requires_grad} - _reduced()
        own, modules = {*self.parameters}, _modules_alive() if others else []
        return {p for module in modules if _has_some(module, own) for p in others.intersection(module.parameters())}

    def _refuse_other_optimizers(self, optimizers: Iterable[Any], left_out: set[torch.Tensor]) -> None:
        for one in optimizers:
            if not left_out.isdisjoint(_parameters_of(one)):
                ddp = "whose DistributedDataParallel no longer reduces" if self.ddp else "on several cores"
                model = "a fully_shard model" if self.fsdp else f"a model {ddp}"
                rule = f"all trained parameters of {model} must belong to optimizers of this library"
                raise RuntimeError(f"{rule}, but {type(one).__name__} has some: pass both optimizers as a list")

    def _watch_other_optimizers(self) -> None:
        """Check every optimizer at its first step, if the model is not known."""
        record, checked = weakref.ref(self), weakref.WeakSet[Optimizer]()

        def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            own = record()
            if own is not None and optimizer not in checked:
                own._refuse_other_optimizers([optimizer], own._left_out() | own._trained_beside(optimizer))
                checked.add(optimizer)

        register_optimizer_step_pre_hook(check)


_records: weakref.WeakSet[Wrappers] = weakref.WeakSet()


def _reduced() -> set[torch.Tensor]:
    """The parameters of all optimizers of this library."""
    return {p for record in [*_records] for p in record.parameters}


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", ())  # an optimizer whose construction failed may have none
    return [p for group in groups for p in group["params"]]


@contextmanager
def _thawed() -> Iterator[None]:
    """Show to a search what ``gc.freeze()`` hides; afterwards it is hidden again, with what was made since."""
    with _thawing:  # or another thread would freeze it again within this search
        if gc.get_freeze_count() < 10_000:  # not called with torch loaded; Python 3.12 starts with 375 objects
            yield
            return
        gc.unfreeze()
        gc.collect()  # otherwise what is not needed any more, such as earlier models, would never be freed
        try:
            yield
        finally:
            gc.freeze()


def _modules_alive() -> list[Module]:
    with _thawed():
        return [one for one in gc.get_objects() if issubclass(type(one), Module)]


def _alive(*kinds: type) -> list[Any]:
    """All objects of some classes, in no order, from one search of the heap: an object refers to its class."""
    classes = [*kinds]
    for one in classes:
        classes += type.__subclasses__(one)
    with _thawed():
        return [thing for thing in gc.get_referrers(*classes) if issubclass(type(thing), kinds)]


def _unsupported() -> dict[type, str]:
    """The advice for each of these classes whose module was imported; since torch 2.6 both FSDPModules are the same."""
    kinds = {_imported(path): advice for path, advice in _UNSUPPORTED.items()}
    return {kind: advice for kind, advice in kinds.items() if kind not in (None, _imported(_FSDP2))}


def _has_some(thing: Any, parameters: set[torch.Tensor]) -> bool:
    module = getattr(thing, "submod", thing)  # of a pipeline stage
    return not parameters.isdisjoint(_sharded_parameters(module))


def _is_costly(p: torch.Tensor) -> bool:
    """Whether a view of a parameter, which _hooked() makes, is more than a moment's work."""
    return is_dtensor(p) or p.device.type == "xla"


@torch.enable_grad()
def _hooked(parameters: Iterable[torch.Tensor]) -> set[torch.Tensor]:
    """The parameters whose AccumulateGrad node something keeps alive, as the reducer of DDP does for its hooks.

    A graph that is still in use keeps it alive, too, so that only the other parameters are certain.
    """
    key, trained = "variable_batch_size", [p for p in parameters if p.requires_grad and p.is_leaf]
    for p in trained:
        get_gradient_edge(p).node.metadata[key] = True  # type: ignore[index]
    return {p for p in trained if get_gradient_edge(p).node.metadata.pop(key, False)}  # type: ignore[attr-defined]


def _disable_before_forward(ddp: DistributedDataParallel, args: Any) -> None:
    ddp.require_backward_grad_sync = False
    ddp.require_forward_param_sync = False  # its first forward pass would wait for all ranks, to broadcast buffers
    if ddp._join_config.enable:
        raise RuntimeError(
            "DistributedDataParallel.join() waits for all ranks in every forward pass, but ranks run different numbers "
            "of minibatches: call the model outside of join(), as the sampler ends an epoch on all ranks together"
        )


def _sharded_parameters(module: Module) -> set[torch.Tensor]:
    """The parameters of a module; with fully_shard the sharded ones, even while the module shows the full ones."""
    return {*module.parameters(), *(state.sharded_param for state in fsdp_states(module.modules()))}


def _outer_first(modules: list[Any], parameters: list[torch.Tensor]) -> list[Any]:
    places = {id(p): place for place, p in enumerate(parameters)}

    def key(module: Any) -> tuple[int, int, int]:
        own = [places[id(p)] for p in _sharded_parameters(module) if id(p) in places]
        return min(own, default=-1), -len(own), -len(list(module.modules()))

    return sorted(modules, key=key)


def fsdp_states(modules: Iterable[Any]) -> list[Any]:
    """FSDP's private state of each parameter; there is no public API for unreduced gradients."""
    groups = [group for module in modules if hasattr(module, "_get_fsdp_state") for group in _fsdp_groups(module)]
    return [state for group in groups for state in group.fsdp_params]


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    # several groups in newer versions of torch
    found = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]


def refuse_divide_factor(modules: Iterable[Any]) -> None:
    """Raise if gradients would not be divided by the number of ranks."""
    factors = [getattr(group, "gradient_divide_factor", None) for module in modules for group in _fsdp_groups(module)]
    for factor in factors:
        if factor is not None:
            called = f"set_gradient_divide_factor({factor}) was called after the optimizer was made"
            raise RuntimeError(f"{called}, but it needs the mean over the ranks: multiply the loss by a factor instead")


def refuse_left_out(others: Collection[torch.Tensor]) -> None:
    """Raise if some parameters are not in fully_shard although others are."""
    if others:
        shapes = ", ".join(str(tuple(p.shape)) for p in list(others)[:3]) + ("…" if len(others) > 3 else "")
        rule = f"either all parameters must be in fully_shard or none, but {len(others)} are not (of shape {shapes})"
        advice = "apply fully_shard to the outermost module, too, then make the inner optimizer, before the model runs"
        raise ValueError(f"{rule}: {advice}")


def _refuse_prepared(optimizer: Any, found: list[Any]) -> None:
    """Raise if Accelerate has prepared the optimizer, its loader or its scheduler: minibatches would be skipped."""
    own = [optimizer, optimizer.sampler, optimizer.inner, *optimizers_of(optimizer.inner)]
    for path, advice in _ACCELERATE.items():
        theirs = [thing for thing in found if isinstance(thing, _imported(path) or ())]
        if any(part is one for thing in theirs for part in _parts(thing) for one in own):
            raise RuntimeError(advice)
    num_steps = _imported("accelerate.state.GradientState")().num_steps
    if num_steps != 1:
        reason = "the trace defines the minibatches of a step"
        raise RuntimeError(f"Accelerate's `gradient_accumulation_steps` must be 1, got {num_steps}: {reason}")


def _parts(prepared: Any) -> list[Any]:
    """An object of Accelerate, and what it was made from: the user's optimizer, sampler or stream."""
    parts = [prepared]
    for name in ("optimizer", "scheduler", "batch_sampler", "dataset"):
        held = getattr(prepared, name, None)
        parts.append(getattr(held, "optimizer" if name == "scheduler" else name, held))
    return parts
