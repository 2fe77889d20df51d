"""Finds what else reduces, shards or counts the gradients of an optimizer: DDP, fully_shard, Accelerate, and others.

A parameter has no reference to the modules around it. Those in the model that the user passed, and those of
fully_shard, of which torch has a list, are found when the optimizer is made. Others are found when they run: torch
calls a hook before the forward pass of every module, until nothing can be missing or the first minibatch has run.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
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
from variable_batch_size.optim.module_hooks import add_hook_to_all
from variable_batch_size.optim.proxy import optimizers_of
from variable_batch_size.rules.rule import Rule

_FSDP2 = "torch.distributed.fsdp.FSDPModule"
_FSDP1 = "FullyShardedDataParallel (FSDP1) is not supported, because it reduces gradients in every backward pass: "
_FSDP1 += "use fully_shard (FSDP2) of torch.distributed.fsdp, available since torch 2.6"
_UNSUPPORTED = {
    "torch.distributed.pipelining.stage._PipelineStageBase": "pipeline parallelism is not supported, because its "
    "schedule runs the minibatches itself: use fully_shard or tensor parallelism for a model that does not fit on one "
    "device",
    "torch.distributed._composable.replicate.DDP": "replicate() is not supported, because it reduces gradients in "
    "every backward pass: leave the model plain",
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
_PREPARED = (
    "accelerator.prepare() was given {}: use prepare(accelerator, …) of variable_batch_size.integrations.accelerate "
    "instead, or in Transformers the VariableBatchTrainer of variable_batch_size.integrations.transformers"
)


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


class Wrappers:
    """What else reduces or shards the gradients of an optimizer's parameters.

    Attributes:
        parameters: those of the optimizer.
        model: what the user passed.
        communicator: of the cores.
        ddp: the DistributedDataParallel modules that were found.
        fsdp: the modules of fully_shard, the outermost first.
        has_sync_batch_norm: whether a SyncBatchNorm was found.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], model: Module | None, communicator: Communicator) -> None:
        self.parameters: list[torch.Tensor] = []
        self.model, self.communicator = model, communicator
        self.ddp: list[DistributedDataParallel] = []
        self.fsdp: list[Any] = []
        self.has_sync_batch_norm = False
        self._num_disabled = 0  # of the DDP modules
        self._unsupported: list[str] = []  # advice for each module found that is not supported
        self._suspects: set[torch.Tensor] = set()  # parameters that seem to be in a DDP that was not found
        self._start()
        self.update(parameters)

    def __getstate__(self) -> dict[str, Any]:
        """All but what watches: a copy has other modules and optimizers, of which none has run."""
        watching = ("_seen", "_inside", "_others_checked", "_stop_watching", "_watches_optimizers")
        return {name: value for name, value in self.__dict__.items() if name not in watching}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
        self._watch()

    def _start(self) -> None:
        self._seen = weakref.WeakSet[Module]()  # outermost modules that have run
        self._inside = weakref.WeakSet[Module]()  # these, and all modules inside
        self._others_checked = weakref.WeakSet[Optimizer]()
        self._stop_watching: Callable[[], Any] = _nothing
        self._watches_optimizers = False
        _records.add(self)
        if is_running():
            _watch_for_ddp()

    def update(self, parameters: Iterable[torch.Tensor]) -> None:
        """Find what is around the parameters, after some were added."""
        known, self.parameters = {*self.parameters}, list(parameters)
        self.fsdp = fsdp_modules(self.parameters)
        for module in self.fsdp:
            module.reshard()  # after a forward pass without a backward pass it may still be unsharded
        roots = [*self.fsdp, *([] if self.model is None else [self.model])]
        self._find(part for root in roots for part in root.modules())
        if any(getattr(p, "_fsdp_flattened", False) for p in self.parameters):
            self._unsupported.append(_FSDP1)
        if is_running():
            self._suspects |= _hooked(p for p in self._uncovered() - known if not _is_costly(p))
        self._watch()

    def _find(self, candidates: Iterable[Any]) -> None:
        own, unsupported = {*self.parameters}, _unsupported_kinds()
        for module in candidates:
            self.has_sync_batch_norm |= isinstance(module, SyncBatchNorm)
            if isinstance(module, (DistributedDataParallel, DataParallel, *unsupported)) and _has_some(module, own):
                self._unsupported += [advice for kind, advice in unsupported.items() if isinstance(module, kind)]
                if isinstance(module, DataParallel) and len(module.device_ids) > 1:
                    self._unsupported.append(_DATA_PARALLEL)
                if isinstance(module, DistributedDataParallel) and all(module is not ddp for ddp in self.ddp):
                    self.ddp.append(module)
        self._suspects -= _parameters_in(self.ddp)

    def _uncovered(self) -> set[torch.Tensor]:
        """The parameters that are in none of the modules that were found."""
        return {*self.parameters} - _parameters_in([*self.ddp, *self.fsdp])

    def _may_miss_something(self) -> bool:
        """Whether there may be something around the parameters that was not found."""
        if self._suspects:
            return True
        unseen = self._uncovered() - _parameters_in(self._seen)
        if is_running() and (self.model is None or any(map(_is_costly, unseen))):
            return bool(unseen)
        excluded = "torch.distributed._composable." if is_running() else "torch.distributed."  # these are in the model
        kinds = [kind for kind in _unsupported_kinds() if not kind.__module__.startswith(excluded)]
        return bool(unseen) and (bool(kinds) or torch.cuda.device_count() > 1)

    def _watch(self) -> None:
        """Look at the modules that run, until nothing can be missing."""
        self._stop_watching()
        self._seen.clear()
        self._inside.clear()
        if not self._may_miss_something():
            return
        # a suspect may be in a DDP that a compiler traces, which then breaks the graph as it does by itself
        handle = add_hook_to_all(self._before_forward, is_compiled=not self._suspects)
        self._stop_watching = weakref.finalize(self, handle.remove)

    def _before_forward(self, module: Module) -> None:
        if module in self._seen:  # this is another minibatch
            self._end_watch()
        elif torch.is_grad_enabled() and module not in self._inside and _has_some(module, {*self.parameters}):
            self._find([*module.modules(), *_callers("torch.distributed.pipelining.")])
            self._refuse_found()
            self.disable_ddp_allreduce()
            self._seen.add(module)
            self._inside.update(module.modules())
            # before a compiler traces a module inside, which it would trace once more without the hook
            if not self._may_miss_something():
                self._stop_watching()

    def _end_watch(self) -> None:
        """After a minibatch; but go on if parameters have not run yet that seem to be in a DDP."""
        if self._suspects <= _parameters_in(self._seen):
            self._stop_watching()

    def suspect(self, module: Module) -> None:
        """Look for the DistributedDataParallel that a module was put into."""
        if found := {*self.parameters}.intersection(module.parameters()):
            self._suspects |= found
            self._watch()

    def disable_ddp_allreduce(self) -> None:
        """Switch off DDP's all-reduce, which is wrong or hangs if ranks have different numbers of minibatches."""
        is_alone = self.communicator.num_replicas == 1
        for ddp in self.ddp[self._num_disabled :]:
            if ddp.static_graph and not is_alone:
                kind = "DistributedDataParallel(static_graph=True)"
                raise ValueError(f"{kind} reduces in every backward pass: wrap the model without static_graph")
            if not ddp.static_graph:
                _disable_before_forward(ddp, None)
                ddp.register_forward_pre_hook(_disable_before_forward)  # loops that accumulate switch it on again
            self._num_disabled += 1
        if self.has_sync_batch_norm and not is_alone:
            reason = "waits for all ranks in every minibatch, but some may be idle"
            raise ValueError(f"SyncBatchNorm {reason}: use BatchNorm")

    def _refuse_found(self) -> None:
        if self._unsupported:
            raise ValueError(self._unsupported[0])

    def refuse_unsupported(self, rule: Rule, inner: Optimizer) -> None:
        """Raise if a wrapper is not supported, or not together with the rule."""
        self._refuse_found()
        if self.fsdp:
            refuse_left_out([p for p in self.parameters if not is_dtensor(p)])
        is_by_zero = any(map(is_zero, optimizers_of(inner)))
        if rule.preconditions and (self.fsdp or is_by_zero or any(map(is_dtensor, self.parameters))):
            sharded = "fully_shard" if self.fsdp else "ZeroRedundancyOptimizer" if is_by_zero else "tensor parallelism"
            problem = f"{type(rule).__name__} needs the full second moments on every rank, but {sharded} shards them"
            raise ValueError(f"{problem}: use AdaScaleRule or AdamRule")

    def check_first_minibatch(self, optimizer: Any) -> None:
        """At the first minibatch of each pass, raise if the model was sharded or Accelerate has prepared something."""
        self._end_watch()
        is_initialized = _imported("accelerate.state.is_initialized")
        if is_initialized is not None and is_initialized():
            _refuse_prepared(optimizer)
        if is_running() and all(p.grad is None and not is_dtensor(p) for p in self.parameters) and _fsdp_modules():
            problem = "no parameter of the optimizer has a gradient; fully_shard replaces the parameters of a model"
            advice = "apply it first, then make the optimizer from model.parameters(), before the model runs"
            raise RuntimeError(f"{problem}: {advice}")
        is_several = is_running() and self.communicator.num_replicas > 1
        if is_several and not self._watches_optimizers and self._left_out():
            handle = register_optimizer_step_pre_hook(_weak(self._check_other_optimizer))
            weakref.finalize(self, handle.remove)
            self._watches_optimizers = True

    def _left_out(self) -> set[torch.Tensor]:
        """The parameters of the model that belong to no optimizer of this library."""
        modules = [*self.ddp, *self.fsdp, *self._seen, *([] if self.model is None else [self.model])]
        return _parameters_in(modules).difference(self.parameters, *(record.parameters for record in [*_records]))

    def _check_other_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before each step of every optimizer, raise if it trains a part of the model."""
        if optimizer in self._others_checked:
            return
        left_out = self._left_out().intersection(*(group["params"] for group in optimizer.param_groups))
        if any(p.requires_grad for p in left_out):
            ddp = "whose DistributedDataParallel no longer reduces" if self.ddp else "on several cores"
            model = "a fully_shard model" if self.fsdp else f"a model {ddp}"
            rule = f"all trained parameters of {model} must belong to optimizers of this library"
            raise RuntimeError(f"{rule}, but {type(optimizer).__name__} has some: pass both optimizers as a list")
        if not left_out:
            self._others_checked.add(optimizer)


_records: weakref.WeakSet[Wrappers] = weakref.WeakSet()


@cache
def _watch_for_ddp() -> None:
    """From now on, look for every DistributedDataParallel that a model is put into."""

    def record(module: Module, name: str, submodule: Module | None) -> None:
        if isinstance(module, DistributedDataParallel) and submodule is not None:
            for wrappers in [*_records]:
                wrappers.suspect(submodule)

    register_module_module_registration_hook(record)


def _nothing() -> None:
    pass


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls a method, and does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call


def _callers(package: str) -> list[Any]:
    """The objects whose methods in a package have called this function, directly or not."""
    found, frame = [], sys._getframe(1).f_back
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(package):
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found


def _unsupported_kinds() -> dict[type, str]:
    """The advice for each of these classes whose module was imported; since torch 2.6 both FSDPModules are the same."""
    kinds = {_imported(path): advice for path, advice in _UNSUPPORTED.items()}
    return {kind: advice for kind, advice in kinds.items() if kind not in (None, _imported(_FSDP2))}


def _fsdp_modules() -> list[Any]:
    """The modules of fully_shard, of all models."""
    kind, modules = _imported(_FSDP2), _imported("torch.distributed._composable_state._module_state_mapping")
    return [] if kind is None else [module for module in modules if isinstance(module, kind)]


def fsdp_modules(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """The modules of fully_shard that have some of these parameters, in the same order on all ranks."""
    own = {*parameters}
    return _outer_first([module for module in _fsdp_modules() if _has_some(module, own)], parameters)


def _parameters_in(modules: Iterable[Any]) -> set[torch.Tensor]:
    return {p for module in modules for p in _sharded_parameters(module)}


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


def _outer_first(modules: list[Any], parameters: Sequence[torch.Tensor]) -> list[Any]:
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


def _refuse_prepared(optimizer: Any) -> None:
    """Raise if the loop uses an optimizer or a loader that Accelerate has prepared: minibatches would be skipped."""
    state = _imported("accelerate.state.GradientState")()
    kind, inner = _imported("accelerate.optimizer.AcceleratedOptimizer") or (), optimizers_of(optimizer.inner)
    if any(isinstance(thing, kind) for thing in (*inner, *_callers("accelerate."))):
        raise RuntimeError(_PREPARED.format("an optimizer of this library, or its inner one"))
    for loader in filter(None, state.dataloader_references):  # that are being read
        read = [getattr(loader, name, None) for name in ("batch_sampler", "dataset")]
        read += [getattr(source, name, None) for source, name in zip(read, ("batch_sampler", "dataset"), strict=True)]
        if any(source is optimizer.sampler for source in read):
            raise RuntimeError(_PREPARED.format("a loader that is already sharded by its sampler or stream"))
    if state.num_steps != 1:
        reason = "the trace defines the minibatches of a step"
        raise RuntimeError(f"Accelerate's `gradient_accumulation_steps` must be 1, got {state.num_steps}: {reason}")
