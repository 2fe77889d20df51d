"""prepare: replaces ``accelerator.prepare`` for a variable batch size; shard: FSDP2 through Accelerate."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from variable_batch_size.checks import imported_extra
from variable_batch_size.cores.dtensor import is_dtensor
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.integrations import common
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.proxy import OptimizerProxy

with imported_extra("accelerate", "variable_batch_size.integrations.accelerate needs accelerate", "accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, save_fsdp_model, send_to_device

_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.XLA)
_SHARD = "model, inner = shard(accelerator, model, inner)"


class UpdateCountingOptimizer(OptimizerProxy):
    """The optimizer as a framework saves it, whose ``step()`` only checks that exactly one update has been made."""

    # Accelerate then uses it as it is, and reads `step_was_skipped`
    _is_accelerate_prepared = True

    def __init__(self, variable: CustomOptimizer) -> None:
        self.inner = self._variable = variable
        self._steps_seen = variable.steps_made
        self._gathered: dict[str, Any] | None = None
        super(OptimizerProxy, self).__setstate__({})  # hooks and profiling, as Optimizer.__init__ sets them up

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step made no update because its gradient was not finite."""
        return not self._variable.updated

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        made, self._steps_seen = self._variable.steps_made - self._steps_seen, self._variable.steps_made
        if made != 1:
            advice = "an overridden `training_step` must call super().training_step()"
            raise RuntimeError(f"the loop counted one step, but the optimizer made {made}: {advice}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: there are no gradients after a step."""

    def state_dict(self) -> dict[str, Any]:
        return common.state_of(self._variable) if self._gathered is None else self._gathered

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, one rank may call :meth:`state_dict` although the state is sharded; all ranks must enter it."""
        self._gathered = self.state_dict()
        try:
            yield
        finally:
            self._gathered = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        common.load_state(self._variable, state_dict)


class ScaledGradients(OptimizerProxy):
    """An optimizer for the accelerator's GradScaler, whose ``step()`` passes the scale to that of this library."""

    _is_accelerate_prepared = True
    _step_supports_amp_scaling = True  # GradScaler then sets `grad_scale` and `found_inf` here
    grad_scale: torch.Tensor | None
    found_inf: Any

    def __init__(self, variable: CustomOptimizer) -> None:
        self.inner = self._variable = variable
        super(OptimizerProxy, self).__setstate__({})

    @property
    def step_was_skipped(self) -> bool:
        return not self._variable.updated

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if not isinstance(self.found_inf, torch.Tensor):
            raise RuntimeError("with fp16, accelerator.backward() must precede step(): don't pass a closure")
        scale: Any = None if self.grad_scale is None else self.grad_scale.clone()  # update() changes it
        self._variable.__dict__.update(grad_scale=scale, found_inf=self.found_inf)

    def state_dict(self) -> dict[str, Any]:
        return {}  # Accelerate saves that of the optimizer of this library

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    @classmethod
    def let_scale(cls, accelerator: Accelerator, optimizer: CustomOptimizer) -> None:
        """Let each step of the optimizer begin with the accelerator's scaler, as in Accelerate's own optimizer."""
        scaled = accelerator.prepare_optimizer(cls(optimizer))  # for accelerator.clip_grad_norm_()

        def before_step(*_: Any) -> None:
            accelerator.scaler.step(scaled)
            accelerator.scaler.update()

        optimizer.register_step_pre_hook(before_step)


def shard(accelerator: Accelerator, model: torch.nn.Module, inner: Optimizer) -> tuple[torch.nn.Module, Optimizer]:
    """Shard a model with the accelerator's FSDP2, and give an optimizer of torch its sharded parameters.

        model, inner = shard(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        optimizer = vbs.Optimizer(inner, loader, rule="adam", ref_batchsize=64, model=model)
        optimizer, loader, scheduler = prepare(accelerator, optimizer, loader, scheduler)

    The optimizer of this library is made after that.

    Args:
        accelerator: with ``FullyShardedDataParallelPlugin(fsdp_version=2)``.
        model: not sharded yet.
        inner: an optimizer of torch with the model's parameters.
    """
    if not getattr(accelerator, "is_fsdp2", False):
        kind = accelerator.distributed_type.value
        raise ValueError(f"`accelerator` must have FullyShardedDataParallelPlugin(fsdp_version=2), got {kind}")
    model, prepared = accelerator.prepare(model, inner)
    return model, taken_back(accelerator, prepared)


def taken_back(accelerator: Accelerator, prepared: Any) -> Optimizer:
    """The optimizer of torch that Accelerate has prepared, which it then neither wraps nor saves."""
    accelerator._optimizers.remove(prepared)
    inner: Optimizer = prepared.optimizer
    return inner


def save_sharded_model(accelerator: Accelerator, model: torch.nn.Module, folder: str) -> None:
    """Save a model in FSDP2 as Accelerate does. Every rank must call it."""
    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, folder)


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """Prepare a model, an optimizer of this library, its loader and its schedulers, and return them in the same order.

        model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)
        for epoch in optimizer.epochs(10):
            for data, target in loader:
                accelerator.backward(loss_fn(model(data), target))
                optimizer.step()
                scheduler.step()  # steps once per update

    The optimizer is returned unchanged. The loader of its sampler, which already assigns minibatches to ranks, moves
    them to the device. ``save_state`` and ``load_state`` of the accelerator include all of this. Other objects, such as
    a validation loader, are passed to ``accelerator.prepare``.

    Args:
        accelerator: the run's accelerator.
        objects: the optimizer, and any of the others. The model may already be prepared; its parameters must be on the
            accelerator's device when the optimizer is created, and with FSDP2 sharded (:func:`shard`).
    """
    optimizers = [thing for thing in objects if isinstance(thing, CustomOptimizer)]
    if len(optimizers) != 1:
        raise ValueError(f"pass exactly one optimizer of this library to prepare(), got {len(optimizers)}")
    (optimizer,) = optimizers
    _check_accelerator(accelerator, optimizer)
    accelerator.register_for_checkpointing(UpdateCountingOptimizer(optimizer))
    if accelerator.scaler is not None:
        ScaledGradients.let_scale(accelerator, optimizer)
    ready = [_prepared(accelerator, optimizer, thing) for thing in objects]
    return ready[0] if len(ready) == 1 else tuple(ready)


def _prepared(accelerator: Accelerator, optimizer: CustomOptimizer, thing: Any) -> Any:
    is_sharded = isinstance(thing, torch.nn.Module) and accelerator.distributed_type == DistributedType.FSDP
    if thing is optimizer or is_sharded:  # by shard()
        return thing
    if isinstance(thing, LRScheduler):
        if all(thing.optimizer is not one for one in optimizer.wrapped()):
            raise ValueError(f"{type(thing).__name__} schedules a different optimizer than the one passed to prepare()")
        accelerator.register_for_checkpointing(thing)
        return SchedulerOfUpdates(thing, optimizer)
    if any(getattr(thing, name, None) is optimizer.sampler for name in ("batch_sampler", "dataset")):
        return LoaderToDevice(thing, optimizer.sampler, accelerator.device)
    return accelerator.prepare(thing)


class LoaderToDevice:
    """Moves the minibatches of a loader to a device. Its sampler has already assigned them to ranks."""

    def __init__(self, loader: DataLoader[Any], sampler: MinibatchSource, device: torch.device) -> None:
        if loader.generator is None:  # otherwise it draws from the global one whenever it starts, also in a resumed run
            loader.generator = torch.Generator().manual_seed(sampler.seed)
        self.loader, self.device = loader, device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for minibatch in self.loader:
            yield send_to_device(minibatch, self.device)


class SchedulerOfUpdates:
    """A scheduler whose ``step()`` is called after every minibatch and takes effect after updates."""

    def __init__(self, scheduler: LRScheduler, optimizer: CustomOptimizer) -> None:
        self.scheduler, self._optimizer = scheduler, optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def step(self, *args: Any) -> None:
        """Call it after each ``optimizer.step()``."""
        if self._optimizer.updated:
            self.scheduler.step(*args)


def _check_accelerator(accelerator: Accelerator, optimizer: CustomOptimizer) -> None:
    """Reject settings that the trace determines, or that would change the result."""
    steps = accelerator.gradient_accumulation_steps
    common.check_setting("`gradient_accumulation_steps`", steps, 1, because=common.TRACE_DECIDES)
    is_fsdp2 = getattr(accelerator, "is_fsdp2", False)
    if accelerator.distributed_type not in _TYPES and not is_fsdp2:
        kind = accelerator.distributed_type.value
        raise ValueError(f"{kind} reduces gradients by itself and is not supported with Accelerate: use FSDP2")
    if is_fsdp2 and not any(map(is_dtensor, optimizer.parameters())):
        raise ValueError(f"with FSDP2 the model must be sharded before the optimizer is made: {_SHARD}")
    if is_fsdp2 and accelerator.scaler is not None:
        raise ValueError('`mixed_precision` must be "no" or "bf16" with FSDP2, got "fp16"')
    if optimizer.sampler.schedule.is_open and accelerator.scaler is not None:
        rule = '`mixed_precision` must be "no" or "bf16" with OpenSteps, got "fp16"'
        raise ValueError(f"{rule}: use torch.amp.GradScaler in a loop without Accelerate")
    rank, number = accelerator.process_index, accelerator.num_processes
    advice = "create the Accelerator before the sampler"
    common.check_process(optimizer.sampler, rank, number, "the accelerator", advice)
    device, own = next(optimizer.parameters()).device, accelerator.device
    if device.type != own.type or device.index not in (own.index, None, 0):
        advice = "call model.to(accelerator.device) or prepare the model first"
        raise ValueError(f"the model must be on {own} before the optimizer is created, got {device}: {advice}")
