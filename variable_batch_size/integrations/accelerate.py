"""prepare: replaces ``accelerator.prepare`` for a variable batch size."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from variable_batch_size.checks import imported_extra
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.integrations import common
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.proxy import OptimizerProxy, optimizers_of

with imported_extra("accelerate", "variable_batch_size.integrations.accelerate needs accelerate", "accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, send_to_device

_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.XLA)


class UpdateCountingOptimizer(OptimizerProxy):
    """The optimizer as a framework saves it, whose ``step()`` only checks that exactly one update has been made."""

    # Accelerate then uses it as it is, and reads `step_was_skipped`
    _is_accelerate_prepared = True

    def __init__(self, variable: CustomOptimizer) -> None:
        self.inner = self._variable = variable
        self._steps_seen = variable.steps_made
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
        return common.state_of(self._variable)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        common.load_state(self._variable, state_dict)


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
            accelerator's device when the optimizer is created.
    """
    optimizers = [thing for thing in objects if isinstance(thing, CustomOptimizer)]
    if len(optimizers) != 1:
        raise ValueError(f"pass exactly one optimizer of this library to prepare(), got {len(optimizers)}")
    (optimizer,) = optimizers
    _check_accelerator(accelerator, optimizer)
    # the model first: the optimizer must find its wrappers
    ready = [accelerator.prepare(thing) if isinstance(thing, torch.nn.Module) else thing for thing in objects]
    common.find_wrappers_of_framework(optimizer)
    accelerator.register_for_checkpointing(UpdateCountingOptimizer(optimizer))
    ready = [_prepared(accelerator, optimizer, thing) for thing in ready]
    return ready[0] if len(ready) == 1 else tuple(ready)


def _prepared(accelerator: Accelerator, optimizer: CustomOptimizer, thing: Any) -> Any:
    if thing is optimizer or isinstance(thing, torch.nn.Module):
        return thing
    if isinstance(thing, LRScheduler):
        if all(thing.optimizer is not one for one in (optimizer, optimizer.inner, *optimizers_of(optimizer.inner))):
            raise ValueError(f"{type(thing).__name__} schedules another optimizer than the one passed to prepare()")
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
    if accelerator.scaler is not None:
        rule = f'`mixed_precision` must be "no" or "bf16", got "{accelerator.mixed_precision}"'
        reason = "optimizer.step() and accelerator.clip_grad_norm_() would use gradients that are not unscaled"
        raise ValueError(f"{rule}: {reason}. Use torch.amp.GradScaler in a loop without Accelerate")
    if accelerator.distributed_type not in _TYPES:
        kind = accelerator.distributed_type.value
        raise ValueError(f"{kind} reduces gradients by itself and is not supported with Accelerate")
    common.refuse_open_steps(optimizer.sampler, "Accelerate")
    rank, number = accelerator.process_index, accelerator.num_processes
    advice = "create the Accelerator before the sampler"
    common.check_process(optimizer.sampler, rank, number, "the accelerator", advice)
    device, own = next(optimizer.parameters()).device, accelerator.device
    if device.type != own.type or device.index not in (own.index, None, 0):
        advice = "call model.to(accelerator.device) or prepare the model first"
        raise ValueError(f"the model must be on {own} before the optimizer is created, got {device}: {advice}")
