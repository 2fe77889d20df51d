"""Log and Metrics: a record of the run every N steps, and named sums over all cores."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from variable_batch_size.checks import check_positive
from variable_batch_size.cores import live, xla
from variable_batch_size.cores.detect import communicator_for, device_for_sums, everyone_for
from variable_batch_size.data import evaluation
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.optim.proxy import OptimizerProxy

logger = logging.getLogger(__name__)


class Metrics:
    """Named sums that are accumulated on each core's device and all-reduced when they are read.

        metrics = vbs.Metrics("correct", "seen", device=device)
        for data, target in vbs.EvaluationLoader(test_set, minibatch_size=256):
            metrics.add(correct=(model(data).argmax(1) == target).sum(), seen=len(target))
        sums = metrics.read()
        accuracy = sums["correct"] / sums["seen"]

    Cores may add different numbers of times, or never. Sums are in double precision, so that counts are exact. On XLA
    :meth:`add` ends the minibatch, as ``optimizer.step()`` does: an evaluation loop needs nothing else for that. In a
    training loop, add after ``optimizer.step()``, or use :class:`Log` for the loss. What is added for a padding
    minibatch of an :class:`EvaluationLoader` does not count.

    Args:
        names: of the sums, in the same order on all cores.
        device: of the values to be added; the CPU works on cores of any kind.
        process_group: the cores, as in :class:`DataLoader`.
    """

    def __init__(self, *names: str, device: torch.device | str, process_group: Any = None) -> None:
        if not names or len(set(names)) < len(names):
            raise ValueError(f"`names` must be one or more different names, got {names!r}")
        self._names = names
        self._device = device_for_sums(torch.device(device))
        # Apple's GPUs have no double precision
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self._communicator = communicator_for([torch.zeros(1).to(self._device)], process_group)
        self.reset()

    def reset(self) -> None:
        """Start again from 0."""
        # made on the host: on an XLA device it would be a graph of its own
        self._sums = {name: torch.zeros(1, dtype=self._dtype).to(self._device) for name in self._names}
        self._host_sums = dict.fromkeys(self._names, 0.0)
        self._cores = live.members()

    @torch.no_grad()
    def add(self, **values: torch.Tensor | float) -> None:
        """Add to some of the sums: numbers, or tensors of one element, without waiting for the device."""
        for name, value in values.items():
            if name not in self._sums:
                raise ValueError(f"{name!r} must be one of {', '.join(map(repr, self._names))}")
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ValueError(f"{name!r} must be one number, got a tensor of the shape {tuple(value.shape)}")
        for name, value in values.items() if evaluation.counts() else ():
            if not isinstance(value, torch.Tensor):
                self._host_sums[name] += float(value)
            else:
                self._sums[name] = self._sums[name] + value.detach().to(self._device, self._dtype).view(1)
        self._communicator.flush()

    def read(self) -> dict[str, float]:
        """The sums over all cores since the start, with one all-reduce. Every core must call it."""
        host = torch.tensor(list(self._host_sums.values()), dtype=self._dtype).to(self._device)
        of_device, of_host = self._communicator.total(*self._sums.values(), host).chunk(2)
        total = of_device + of_host
        if self._cores - live.members() and self._communicator.rank == 0:
            logger.warning("the sums of %s lack the values of cores that have left", ", ".join(self._names))
        return dict(zip(self._names, total.tolist(), strict=True))

    def restore(self, sums: Mapping[str, float]) -> None:
        """Continue from sums that :meth:`read` has returned, on any number of cores. Every core must call it."""
        if set(sums) != set(self._names):
            raise ValueError(f"the sums must be of {', '.join(self._names)}, got {', '.join(sums)}")
        self.reset()
        if self._communicator.rank == 0:
            self._host_sums = {name: float(sums[name]) for name in self._names}


Record = dict[str, Any]
_LOSSES_AT_ONCE = 32


class Log(Part, AbstractContextManager["Log"]):
    """Passes a record of the run, a dictionary, to every sink on core 0 every N steps.

        log = vbs.Log(optimizer, every=50, to=[vbs.JsonLines("runs/a/log.jsonl"), vbs.TensorBoard("runs/a")])
        optimizer.attach(log)
        for epoch in optimizer.epochs(10):
            for data, target in loader:
                loss = loss_fn(model(data), target)
                loss.backward()
                optimizer.step(loss=loss)

    Without ``attach``, call ``log.step(loss)`` after each ``optimizer.step()``.

    A sink is any callable that takes a record, such as ``wandb.log``. A record has ``epoch``; ``step``, ``samples`` and
    ``progress``, completed so far in the run; ``batch_size``, ``lr``, ``factor``, ``gradient_norm`` and ``cores`` of
    the latest step; and ``loss``, ``samples_per_second`` and ``idle_share`` (of cores × steps) since the previous
    record. If minibatches have weights, it has their sum in the run as ``weight``; the losses passed to :meth:`step`
    are then sums, and ``loss`` is their sum divided by that of the weights. If cores do not share steps by round robin,
    it has lists of each core's minibatches and seconds per minibatch. The page on long runs describes all keys.

    The loss stays on the device until a record is due. Then it is all-reduced and read: the only wait for the device.

    Args:
        optimizer: of the run.
        every: steps between two records.
        to: the sinks. They are constructed on every core and called on core 0 only, so they should open files only
            when first called.
    """

    def __init__(self, optimizer: CustomOptimizer, *, every: int, to: Iterable[Callable[[Record], Any]]) -> None:
        check_positive(every=every)
        if not isinstance(optimizer, CustomOptimizer):
            raise ValueError(f"`optimizer` must be a CustomOptimizer, got {type(optimizer).__name__}")
        sinks = list(to) if isinstance(to, Iterable) else [to]  # the characters of a str are not functions
        if not isinstance(to, Iterable) or not all(map(callable, sinks)):
            raise ValueError(f"`to` must be a list of functions, such as [vbs.JsonLines(path), print], got {to!r}")
        self.every = every
        self._optimizer, self._schedule, self._sinks = optimizer, optimizer.sampler.schedule, sinks
        parameters = list(optimizer.parameters())
        self._communicator = communicator_for(parameters, optimizer.sampler.process_group)
        self._everyone = everyone_for(parameters, optimizer.sampler.process_group)
        self._device = parameters[0].device
        self._steps_seen = optimizer.steps_made
        # made on the host: on an XLA device they would be a graph, as would one that is used twice
        self._zeros = [torch.zeros(()).to(self._device) for _ in range(_LOSSES_AT_ONCE + 1)]
        self._losses_of_step: list[torch.Tensor] = []  # of this core's minibatches since the last completed step
        self._weight_seen = optimizer.minibatch_weights.since
        self._shares = optimizer.sampler.shares
        self._is_known = self._shares is None and not self._schedule.is_open  # the batch size decides who runs what
        self._is_attached = False
        self._restart()
        optimizer.record_grad_norm(every=every)

    def _restart(self) -> None:
        """Reset what is summed over the completed steps since the last record."""
        self._losses: list[torch.Tensor] = []  # of single minibatches
        self._loss = self._zeros[-1]  # the sum of those before
        self._num_samples = self._num_idle = self._num_core_steps = self._num_own = 0
        self._shared_before = (0, 0.0) if self._shares is None else (self._shares.num_run, self._shares.seconds)
        self._started_at = time.monotonic()

    def step(self, loss: torch.Tensor | float) -> None:
        """Record the loss of a minibatch on which ``backward()`` was called, but without a loss scale.

        Call it after every ``optimizer.step()``, unless the log is attached to the optimizer.
        """
        if self._is_attached:
            raise RuntimeError("log.step() was called, but the log is attached to the optimizer, which calls it")
        self._record(loss)

    def _record(self, loss: torch.Tensor | float) -> None:
        optimizer = self._optimizer
        loss = loss if isinstance(loss, torch.Tensor) else torch.tensor(float(loss)).to(self._device)
        if loss.dim():
            kind = "sum" if optimizer.minibatch_weights.is_weighted else "mean"
            raise ValueError(f"`loss` must be the {kind} over a minibatch, got the shape {tuple(loss.shape)}")
        if not optimizer.is_idle:
            self._losses_of_step.append(loss.detach())
        if optimizer.steps_made == self._steps_seen:
            return
        self._steps_seen = optimizer.steps_made
        self._count_step()
        if optimizer.steps_done % self.every == 0:
            self._write_step()

    def on_attach(self, optimizer: OptimizerProxy) -> None:
        """Called by :meth:`CustomOptimizer.attach`."""
        if optimizer is not self._optimizer:
            raise ValueError("the log belongs to another optimizer: attach it there")
        self._is_attached = True

    def after_minibatch(self, plan: StepPlan, loss: torch.Tensor | float | None) -> None:
        """Called by the optimizer to which the log is attached."""
        if loss is None:
            raise ValueError("`loss` must be passed if a log is attached: optimizer.step(loss=loss)")
        self._record(loss)

    def write(self, **values: Any) -> None:
        """Pass a record with your own values, such as a test accuracy, and the position of the run to the sinks.

        Scalars of torch and numpy become plain numbers, as most sinks expect.
        """
        plain = {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in values.items()}
        self._send({**self._position(self._optimizer.weight_done), **plain})

    def close(self) -> None:
        """Close the sinks that can be closed."""
        for sink in self._sinks:
            if hasattr(sink, "close"):
                sink.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _count_step(self) -> None:
        optimizer, cores = self._optimizer, self._schedule.num_replicas
        size = self._schedule.minibatch_size_of(optimizer.batch_size)
        num_minibatches = optimizer.batch_size // size
        is_weighted = optimizer.minibatch_weights.is_weighted  # losses are then sums, which count as they are
        factor = 1 if is_weighted else size // self._schedule.minibatch_size
        own = optimizer.num_own
        given = len(self._losses_of_step)
        if optimizer.sampler.is_elastic:  # it may have run those of a core that has left
            own = given
        if given < own:
            raise RuntimeError(
                f"log.step() was called for {given} of this core's {own} minibatches in a step of batch size "
                f"{optimizer.batch_size}: call it after every optimizer.step(), not only if that returns True"
            )
        counted = self._losses_of_step[given - own :]  # those before belong to a step that was not completed
        self._losses += [loss * factor for loss in counted] if factor > 1 else counted
        self._losses_of_step = []
        while len(self._losses) >= _LOSSES_AT_ONCE:
            self._add_losses()
        self._num_samples += optimizer.batch_size
        self._num_own += own
        self._num_core_steps += cores
        self._num_idle += max(0, cores - num_minibatches) if self._is_known else not own

    def _add_losses(self) -> None:
        """Add the losses of single minibatches to their sum."""
        self._loss, self._losses = self._sum_of_losses(), self._losses[_LOSSES_AT_ONCE:]

    @torch.no_grad()
    def _sum_of_losses(self) -> torch.Tensor:
        """The sum with the losses of single minibatches, always the same number of them, as a single XLA graph.

        It is a separate graph because cores have different numbers of minibatches, but must run the same graph where
        they communicate.
        """
        losses = [*self._losses, *self._zeros[len(self._losses) :]][:_LOSSES_AT_ONCE]
        loss = self._loss + torch.stack([loss.float() for loss in losses]).sum()
        self._communicator.flush()
        return loss

    def state_dict(self) -> dict[str, float]:
        """The sums over all cores since the last record; empty if there was no step. Every core must call it."""
        if not self._num_core_steps:
            return {}
        loss, _, *of_cores, cores, weight = self._totals()
        return {
            "loss": loss if self._optimizer.minibatch_weights.is_weighted else loss * self._schedule.minibatch_size,
            "weight": weight - self._weight_seen,
            "samples": self._num_samples,
            "idle": sum(of_cores[:cores]) if of_cores else self._num_idle,
            "core_steps": self._num_core_steps,
            "seconds": time.monotonic() - self._started_at,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from the sums of a run that was saved on any number of cores, before the first step."""
        self._restart()
        if not state:
            return
        is_first = self._communicator.rank == 0  # the sums of the others are added to its own
        weights = self._optimizer.minibatch_weights
        loss = state["loss"] if weights.is_weighted else state["loss"] / self._schedule.minibatch_size
        self._loss = torch.tensor(loss if is_first else 0.0).to(self._device)
        self._weight_seen = weights.since - state["weight"]
        self._num_samples, self._num_core_steps = int(state["samples"]), int(state["core_steps"])
        self._num_idle = int(state["idle"]) if is_first or self._is_known else 0
        self._started_at -= state["seconds"]

    def _write_step(self) -> None:
        optimizer = self._optimizer
        loss, norm, *of_cores, cores, weight = self._totals()
        seconds = time.monotonic() - self._started_at
        record = {
            **self._position(optimizer.minibatch_weights.before + weight),
            "loss": self._mean_loss(loss, weight),
            "batch_size": optimizer.batch_size,
            "lr": optimizer.current_lr(),
            "factor": optimizer.factor(),
            "gradient_norm": norm / cores,
            "samples_per_second": self._num_samples / seconds,
            "idle_share": (sum(of_cores[:cores]) if of_cores else self._num_idle) / self._num_core_steps,
            "cores": cores,
        }
        if self._shares is not None:
            shares, spent = of_cores[cores : 2 * cores], of_cores[2 * cores :]
            per_minibatch = [round(one / max(share, 1), 6) for one, share in zip(spent, shares, strict=True)]
            record |= {"minibatches_of_cores": [round(share) for share in shares], "seconds_of_cores": per_minibatch}
        record |= optimizer.report()
        optimizer.note_loss(record["loss"])
        record |= {"graphs": xla.num_programs()} if self._device.type == "xla" else {}
        record |= {"exact": 1} if optimizer.exact else {}
        record |= {"late_gain": 1} if optimizer.description.get("gain") == "one step late" else {}
        self._send(record)
        self._restart()

    def _totals(self) -> Any:
        """The sums over all cores since the last record, and what :meth:`_total` returns after them; waits once."""
        norm_here = torch.tensor(math.nan) if self._optimizer.gradient_norm is None else self._optimizer.gradient_norm
        # the norm is the same on all cores: summed with the loss, it needs no collective of its own
        numbers = [self._sum_of_losses(), norm_here.float().to(self._device)]
        if not self._is_known:
            numbers.append(self._own_share())
        return self._total(numbers)

    def _own_share(self) -> torch.Tensor:
        """Since the last record: the idle steps, the minibatches and their seconds, in this core's places in tables."""
        table = torch.zeros(3, self._schedule.num_replicas)
        num_before, seconds_before = self._shared_before
        own = [float(self._num_idle), 0.0, 0.0]
        if self._shares is not None:
            own[1:] = self._shares.num_run - num_before, self._shares.seconds - seconds_before
        table[:, self._communicator.rank] = torch.tensor(own)
        return table.flatten().to(self._device)

    def _total(self, numbers: list[torch.Tensor]) -> Any:
        """The sums of the loss and of other numbers over all cores, the number of cores, and the weight; waits once."""
        weights, cores = self._optimizer.minibatch_weights, self._schedule.num_replicas
        is_elastic = self._optimizer.sampler.is_elastic
        if is_elastic:  # cores may leave before or during the sum; those that were added have summed fewer weights
            numbers = [*numbers, torch.tensor([1.0, self._num_own]).to(self._device)]
        elif weights.unread is not None:
            numbers = [*numbers, weights.unread]
        loss, *rest = self._communicator.total(*numbers).tolist()
        if is_elastic:
            num_minibatches, cores = rest.pop(), round(rest.pop())
            loss *= self._num_samples / self._schedule.minibatch_size / max(1, num_minibatches)
            return [loss, *rest, cores, weights.since]
        unread = rest.pop() if weights.unread is not None else 0.0
        return [loss, *rest, cores, weights.known + unread / cores]

    def _mean_loss(self, loss: float, weight: float) -> float:
        if not self._optimizer.minibatch_weights.is_weighted:
            return loss * self._schedule.minibatch_size / self._num_samples
        added, self._weight_seen = weight - self._weight_seen, weight
        return loss / added if added else math.nan

    def _position(self, weight: float) -> Record:
        optimizer = self._optimizer
        done = {"step": optimizer.steps_done, "samples": optimizer.samples_done, "progress": optimizer.progress}
        weighted = {"weight": weight} if optimizer.minibatch_weights.is_weighted else {}
        return {"epoch": optimizer.epoch, **done, **weighted}

    def _send(self, record: Record) -> None:
        for sink in self._sinks if self._everyone.rank == 0 else ():
            sink(record)
