"""prepare: replaces ``accelerator.prepare`` for a variable batch size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, send_to_device
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from variable_batch_size.cores.detect import communicator_for
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.integrations.common import load_state, state_of
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.proxy import optimizers_of
from variable_batch_size.optim.wrappers import wrapped_by_framework


class UpdateCountingOptimizer(Optimizer):
    """Stands where a framework wants its optimizer, after something else has run all minibatches of the step.

    Its ``step()`` changes nothing, and sees that there was an update.

    Args:
        variable: who makes the updates.
    """

    # Accelerate then takes it as it is, and asks it whether the step was skipped
    _is_accelerate_prepared = True

    def __init__(self, variable: CustomOptimizer) -> None:
        self.variable = variable
        self._steps_seen = variable.steps_made
        # sets up hooks and profiling as Optimizer.__init__ does, without a second set of param_groups and state
        super().__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.variable.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.variable.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.variable.defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step was made without an update, as its gradient was not finite."""
        return not self.variable.updated

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """See that a step was made since the latest call."""
        if self.variable.steps_made != self._steps_seen + 1:
            raise RuntimeError(
                f"{self.variable.steps_made - self._steps_seen} steps were made where the loop counts one: whoever "
                "replaces `training_step` must call that of its base"
            )
        self._steps_seen = self.variable.steps_made

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: there are no gradients after a step."""

    def state_dict(self) -> dict[str, Any]:
        return state_of(self.variable)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_state(self.variable, state_dict)


logger = logging.getLogger(__name__)

_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.XLA)


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """Prepare a model, an optimizer of this library, its loader and its schedulers, and return them in the same order.

        model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)
        for epoch in vbs.epochs(optimizer, 10):
            for data, target in loader:
                accelerator.backward(loss_fn(model(data), target))
                optimizer.step()
                scheduler.step()  # makes a step for each update

    The optimizer stays what it is. The loader of its sampler, which deals to the processes already, puts minibatches on
    the device. ``save_state`` and ``load_state`` of the accelerator have all of it. Anything else, as a loader for
    validation, goes to ``accelerator.prepare``.

    Args:
        accelerator: that of the run.
        objects: the optimizer, and any of the others. The model may have been prepared before; its parameters must be
            on the accelerator's device when the optimizer is made.
    """
    optimizers = [thing for thing in objects if isinstance(thing, CustomOptimizer)]
    if len(optimizers) != 1:
        raise ValueError(f"one of the objects must be an optimizer of this library, got {len(optimizers)}")
    (optimizer,) = optimizers
    _refuse_settings(accelerator, optimizer)
    # the model first, as the optimizer must see how it is wrapped
    ready = [accelerator.prepare(thing) if isinstance(thing, torch.nn.Module) else thing for thing in objects]
    parameters = list(optimizer.parameters())
    wrapped_by_framework(optimizer._wrappers, communicator_for(parameters, optimizer.sampler.process_group))
    optimizer.register_step_pre_hook(_refuse_other_loaders)
    accelerator.register_for_checkpointing(SavedOptimizer(optimizer))
    ready = [_prepared(accelerator, optimizer, thing) for thing in ready]
    return ready[0] if len(ready) == 1 else tuple(ready)


def _prepared(accelerator: Accelerator, optimizer: CustomOptimizer, thing: Any) -> Any:
    if thing is optimizer or isinstance(thing, torch.nn.Module):
        return thing
    if isinstance(thing, LRScheduler):
        if all(thing.optimizer is not one for one in (optimizer, optimizer.inner, *optimizers_of(optimizer.inner))):
            raise ValueError(f"{type(thing).__name__} is of another optimizer than the one that is prepared")
        accelerator.register_for_checkpointing(thing)
        return SchedulerOfUpdates(thing, optimizer)
    if any(getattr(thing, name, None) is optimizer.sampler for name in ("batch_sampler", "dataset")):
        return LoaderToDevice(thing, optimizer.sampler, accelerator.device)
    return accelerator.prepare(thing)


class SavedOptimizer:
    """An optimizer as the accelerator saves and loads it."""

    def __init__(self, optimizer: CustomOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The state, and what the run is; it should be asked for between two steps."""
        if self._optimizer.is_accumulating:
            logger.warning(
                "save_state() was called within a step, whose first minibatches are run again when the run goes on: "
                "what they have drawn from random generators and left in buffers is saved, too; call it where "
                "`optimizer.updated`"
            )
        return state_of(self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of the same run."""
        load_state(self._optimizer, state)


class LoaderToDevice:
    """A loader that puts what it yields on a device, and is dealt its minibatches by its sampler alone."""

    def __init__(self, loader: DataLoader[Any], sampler: MinibatchSource, device: torch.device) -> None:
        if loader.generator is None:
            # else it would draw a number from the generator of the run whenever it is set up, also where a run goes on
            loader.generator = torch.Generator().manual_seed(sampler.seed)
        self.loader = loader
        self.device = device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for minibatch in self.loader:
            yield send_to_device(minibatch, self.device)


class SchedulerOfUpdates:
    """A scheduler that is told of every minibatch, and makes a step for each update."""

    def __init__(self, scheduler: LRScheduler, optimizer: CustomOptimizer) -> None:
        self.scheduler = scheduler
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def step(self, *args: Any) -> None:
        """Call it after each ``optimizer.step()``."""
        if self._optimizer.updated:
            self.scheduler.step(*args)


def _refuse_settings(accelerator: Accelerator, optimizer: CustomOptimizer) -> None:
    """Raise if the accelerator has what the trace decides, or what would not be right with it."""
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"`gradient_accumulation_steps` must be 1, got {accelerator.gradient_accumulation_steps}: the trace says "
            "how many minibatches make up a step"
        )
    if accelerator.scaler is not None:
        raise ValueError(
            f'`mixed_precision` must be "no" or "bf16", got "{accelerator.mixed_precision}": its scaler would leave '
            "out minibatches"
        )
    if accelerator.distributed_type not in _KINDS:
        raise ValueError(f"{accelerator.distributed_type.value} reduces gradients by itself: prepare none of it")
    sampler = optimizer.sampler
    if (sampler.rank, sampler.num_replicas) != (accelerator.process_index, accelerator.num_processes):
        raise ValueError(
            f"the accelerator takes this for process {accelerator.process_index} of {accelerator.num_processes}, but "
            f"the sampler for {sampler.rank} of {sampler.num_replicas}: make the Accelerator first, then the sampler"
        )
    device = next(optimizer.parameters()).device
    if device.type != accelerator.device.type or device.index not in (accelerator.device.index, None, 0):
        raise ValueError(
            f"the model must be on {accelerator.device} when the optimizer is made, got {device}: call "
            "model.to(accelerator.device), or prepare the model, before that"
        )


def _refuse_other_loaders(optimizer: Any, args: Any, kwargs: Any) -> None:
    if getattr(optimizer.sampler, "has_been_read", True) is False:
        raise RuntimeError(
            "step() was called for a minibatch that the optimizer's sampler has not dealt: train with the "
            "DataLoader(dataset, batch_sampler=sampler) of that sampler"
        )
