"""Log and Metrics: a record of the run every N steps, and named sums over all cores."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from variable_batch_size.checks import check_positive
from variable_batch_size.cores import xla
from variable_batch_size.cores.detect import communicator_for, device_for_sums, everyone_for
from variable_batch_size.optim.optimizer import CustomOptimizer


class Metrics:
    """Sums of named quantities, kept on each core's device and added up over all cores when they are read.

        metrics = vbs.Metrics("correct", "seen", device=device)
        for data, target in test_loader:
            metrics.add(correct=(model(data).argmax(1) == target).sum(), seen=len(target))
        sums = metrics.read()
        accuracy = sums["correct"] / sums["seen"]

    Cores may add different numbers of times, or never. Sums are in double precision, so that counts are exact. On XLA
    :meth:`add` ends the minibatch, as ``optimizer.step()`` does: a loop that evaluates needs nothing else to do so.
    In a training loop add after ``optimizer.step()``, or let :class:`Log` take the loss.

    Args:
        names: of the quantities, in the same order on all cores.
        device: on which the values to be added are; also the CPU where the cores are others.
        process_group: the cores, as :class:`CustomSampler` takes it.
    """

    def __init__(self, *names: str, device: torch.device | str, process_group: Any = None) -> None:
        if not names or len(set(names)) < len(names):
            raise ValueError(f"`names` must be one name or more, each of them once, got {names!r}")
        self._names = names
        self._device = torch.device(device)
        # double precision is not to be had on Apple's GPUs
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self._device_for_sums = device_for_sums(self._device)
        self._communicator = communicator_for([torch.zeros(1).to(self._device_for_sums)], process_group)
        self.reset()

    def reset(self) -> None:
        """Start again from 0."""
        # made on the host: zeros made on an XLA device would be a program of their own
        self._sums = {name: torch.zeros(1, dtype=self._dtype).to(self._device) for name in self._names}
        self._host_sums = dict.fromkeys(self._names, 0.0)

    @torch.no_grad()
    def add(self, **values: torch.Tensor | float) -> None:
        """Add to some of the sums: a tensor of one element, which is not waited for, or a number."""
        for name, value in values.items():
            if name not in self._sums:
                raise ValueError(f"{name!r} must be one of {', '.join(map(repr, self._names))}")
            if not isinstance(value, torch.Tensor):
                self._host_sums[name] += float(value)
            elif value.numel() != 1:
                raise ValueError(f"{name!r} must be one number, got a tensor of the shape {tuple(value.shape)}")
            else:
                self._sums[name] = self._sums[name] + value.detach().to(self._device, self._dtype).view(1)
        self._communicator.flush()

    def read(self) -> dict[str, float]:
        """The sums over all cores since the start, by one reduction. Every core must call it."""
        host = torch.tensor(list(self._host_sums.values()), dtype=self._dtype).to(self._device)
        own = torch.cat(list(self._sums.values())) + host
        total = self._communicator.total(own.to(self._device_for_sums))
        return dict(zip(self._names, total.tolist(), strict=True))

    def restore(self, sums: Mapping[str, float]) -> None:
        """Go on from sums that :meth:`read` gave, on any number of cores. Every core must call it."""
        if set(sums) != set(self._names):
            raise ValueError(f"the sums must be of {', '.join(self._names)}, got {', '.join(sums)}")
        self.reset()
        if self._communicator.rank == 0:
            self._host_sums = {name: float(sums[name]) for name in self._names}


Record = dict[str, Any]

_LOSSES_AT_ONCE = 32


class Log:
    """Gives a record of the run to every sink on core 0: a dictionary, every N steps.

        log = vbs.Log(optimizer, every=50, to=[vbs.JsonLines("runs/a/log.jsonl"), vbs.TensorBoard("runs/a"), print])
        ...
            loss.backward()
            optimizer.step()
            log.step(loss)

    A sink is whatever can be called with a record; so ``wandb.log`` is one. A record has

    - ``epoch``; ``step``, ``samples`` and ``progress``, those done so far in the run; ``batch_size``, ``lr`` and
      ``factor`` of the latest step; ``gradient_norm``, that of its mean gradient before clipping, NaN if there is none;
    - ``loss``, ``samples_per_second`` and ``idle_share`` over all steps since the record before, or since the start:
      the mean of the minibatches' losses on all cores without stand-ins, and without those of a step that was left
      unfinished; by the clock, whatever else was done in that time; and the share of cores × steps without work;
    - ``weight``, where minibatches have weights: the sum so far in the run, as the tokens seen. The losses given to
      :meth:`step` are then sums, and ``loss`` is their sum over that of the weights;
    - ``seconds_accumulating`` and ``seconds_updating`` with a policy;
    - ``gain`` and ``noise_scale`` where the noise is measured; ``graphs``, the programs compiled so far, on XLA;
      ``exact``, which is 1, in exact mode.

    The loss stays on the device until a record is due. Then all cores sum it, and it is read: the one wait.

    Args:
        optimizer: of the run.
        every: steps from one record to the next.
        to: the sinks. They are made on every core and called on core 0 alone, so they open files when first called.
    """

    def __init__(self, optimizer: CustomOptimizer, *, every: int, to: Iterable[Callable[[Record], Any]]) -> None:
        check_positive(every=every)
        self.every = every
        self._optimizer = optimizer
        self._schedule = optimizer.sampler.schedule
        self._sinks = list(to)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._communicator = communicator_for(parameters, optimizer.sampler.process_group)
        self._is_first = everyone_for(parameters, optimizer.sampler.process_group).rank == 0
        self._device = parameters[0].device
        self._steps_seen = optimizer.steps_made
        # made on the host, as what is made on an XLA device is a program of its own; and several, as is one used twice
        self._zeros = [torch.zeros(()).to(self._device) for _ in range(_LOSSES_AT_ONCE + 1)]
        self._losses_of_step: list[torch.Tensor] = []  # of this core's minibatches since the latest complete step
        # of the complete steps since the latest record
        self._losses: list[torch.Tensor]  # those of single minibatches
        self._loss: torch.Tensor  # the sum of those before
        self._num_samples: int
        self._num_steps: int
        self._num_idle: int
        self._started_at: float
        self._weight_seen = optimizer.minibatch_weights.since
        self._restart()
        optimizer.record_grad_norm(every=every)

    def step(self, loss: torch.Tensor | float) -> None:
        """Take in a minibatch's loss, as ``backward()`` was called on it, but without a loss scale.

        Call it after every ``optimizer.step()``.
        """
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

    def write(self, **values: Any) -> None:
        """Give the sinks a record of your own, such as a test accuracy, with the position of the run.

        Numbers of torch and numpy become plain ones, which is what most sinks take.
        """
        plain = {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in values.items()}
        self._send({**self._position(self._optimizer.weight_done), **plain})

    def close(self) -> None:
        """Close the sinks that can be closed."""
        for sink in self._sinks:
            if hasattr(sink, "close"):
                sink.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _restart(self) -> None:
        self._losses = []
        self._loss = self._zeros[-1]
        self._num_samples = 0
        self._num_steps = 0
        self._num_idle = 0
        self._started_at = time.monotonic()

    def _count_step(self) -> None:
        num_minibatches = self._optimizer.batch_size // self._schedule.minibatch_size
        own = len(range(self._communicator.rank, num_minibatches, self._schedule.num_replicas))
        given = len(self._losses_of_step)
        if given < own:
            raise RuntimeError(
                f"log.step() was called for {given} of the {own} minibatches that this core has in a step of batch "
                f"size {self._optimizer.batch_size}: call it after every optimizer.step(), not only if that is True"
            )
        # what came before these belongs to a step that was left unfinished
        self._losses += self._losses_of_step[given - own :]
        self._losses_of_step = []
        while len(self._losses) >= _LOSSES_AT_ONCE:
            self._add_losses()
        self._num_samples += self._optimizer.batch_size
        self._num_steps += 1
        self._num_idle += max(0, self._schedule.num_replicas - num_minibatches)

    @torch.no_grad()
    def _add_losses(self) -> None:
        """Add the losses of single minibatches to their sum; always as many, for it to be one program on XLA.

        And a program of its own, because cores have different numbers of minibatches, while all of them must run the
        same one where they come together.
        """
        losses = [*self._losses, *self._zeros[len(self._losses) :]][:_LOSSES_AT_ONCE]
        self._loss = self._loss + torch.stack([loss.float() for loss in losses]).sum()
        self._losses = self._losses[_LOSSES_AT_ONCE:]
        self._communicator.flush()

    def _write_step(self) -> None:
        optimizer, cores = self._optimizer, self._schedule.num_replicas
        norm_there = torch.tensor(math.nan) if optimizer.gradient_norm is None else optimizer.gradient_norm
        # the norm is the same on all cores: summed beside the loss, it travels with it
        self._add_losses()
        loss, norm, weight = self._read(torch.stack([self._loss, norm_there.float().to(self._device)]))
        seconds = time.monotonic() - self._started_at
        record = {
            **self._position(optimizer.minibatch_weights.before + weight),
            "loss": self._mean_loss(loss, weight),
            "batch_size": optimizer.batch_size,
            "lr": optimizer.current_lr(),
            "factor": optimizer.factor(),
            "gradient_norm": norm / cores,
            "samples_per_second": self._num_samples / seconds,
            "idle_share": self._num_idle / (cores * self._num_steps),
        }
        record |= optimizer.report()
        optimizer.note_loss(record["loss"])
        if self._device.type == "xla":
            record["graphs"] = xla.num_programs()
        if optimizer.exact:
            record["exact"] = 1
        self._send(record)
        self._restart()

    def _read(self, numbers: torch.Tensor) -> list[float]:
        """The sums of numbers over all cores, and behind them the weight since the start, by one wait."""
        weights = self._optimizer.minibatch_weights
        if weights.unread is None:
            return [*self._communicator.total(numbers).tolist(), weights.known]
        *sums, unread = self._communicator.total(torch.cat([numbers.to(weights.unread), weights.unread])).tolist()
        return [*sums, weights.known + unread / self._schedule.num_replicas]

    def _mean_loss(self, loss: float, weight: float) -> float:
        if not self._optimizer.minibatch_weights.is_weighted:
            return loss * self._schedule.minibatch_size / self._num_samples
        added, self._weight_seen = weight - self._weight_seen, weight
        return loss / added if added else math.nan

    def _position(self, weight: float) -> Record:
        optimizer = self._optimizer
        position = {
            "epoch": optimizer.epoch,
            "step": optimizer.steps_done,
            "samples": optimizer.samples_done,
            "progress": optimizer.progress,
        }
        return {**position, "weight": weight} if optimizer.minibatch_weights.is_weighted else position

    def _send(self, record: Record) -> None:
        if self._is_first:
            for sink in self._sinks:
                sink(record)
