"""One run of an experiment: a rule on a trace from a seed."""

from __future__ import annotations

import itertools
import math
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from variable_batch_size.checks import install
from variable_batch_size.comparison.experiment import DIVERGED, DONE, REFERENCE, Outcome, Run, Settings
from variable_batch_size.comparison.results import Results
from variable_batch_size.comparison.workload import Workload, load_workload
from variable_batch_size.cores import xla
from variable_batch_size.cores.launch import launch
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.buffers import share_buffers
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.policies.policy import Policy
from variable_batch_size.rules.registry import make_rule
from variable_batch_size.runs.log import Log, Metrics
from variable_batch_size.runs.sinks import JsonLines, TensorBoard
from variable_batch_size.schedules.live import PolicySchedule
from variable_batch_size.traces.trace import Trace

_NUM_RECORDS = 500
_SAMPLES_PER_TEST = 256

_one_at_a_time = threading.Lock()


def train(
    settings: Settings, run: Run, directory: Path, *, datadir: str | None = None, updates: int | None = None
) -> Outcome:
    """Make a run, on as many cores as the settings say, and return how it ended.

    Args:
        settings: of the experiment.
        run: which of its runs.
        directory: of the experiment; what an unfinished run has left there is made anew.
        datadir: where the workload finds its data.
        updates: how many to make; None to end as the settings say.
    """
    shutil.rmtree(Results(directory).run_directory(run), ignore_errors=True)
    args = (settings, run, directory, datadir, updates)
    if settings.device != "xla" and settings.cores == 1:
        return _train_on_this_core(*args)
    backend = {"cpu": "gloo", "cuda": "nccl", "xla": "xla"}[settings.device]
    outcome: Outcome = launch(_train_on_this_core, args, cores=settings.cores, backend=backend)[0]
    return outcome


def _train_on_this_core(
    settings: Settings, run: Run, directory: Path, datadir: str | None, updates: int | None
) -> Outcome:
    torch.set_num_threads(settings.threads)
    device = device_of(settings.device)
    with _one_at_a_time:  # virtual XLA cores are threads and share the random generators
        _seed(run.seed)  # a workload may draw its data
        workload = load_workload(settings.workload, datadir)
        _seed(run.seed)
        model = workload.model().to(device)
    trace = Trace.constant(settings.ref_batchsize) if run.trace == REFERENCE else Results(directory).trace(run.trace)
    sampler = CustomSampler(
        workload.train,  # type: ignore[arg-type]
        trace=trace,
        minibatch_size=settings.minibatch_size,
        seed=run.seed,
        on_end=settings.on_end,
    )
    inner = inner_optimizer(workload, model, settings.lr)
    optimizer = CustomOptimizer(
        inner,
        sampler,
        rule=make_rule(run.rule),
        ref_batchsize=settings.ref_batchsize,
        model=model,
        exact=settings.exact,
        measure_noise=isinstance(trace, Policy) and trace.needs_noise,
    )
    training = _Training(settings, workload, model, optimizer, _goal(settings, run, updates))
    return training.run(Results(directory).run_directory(run))


def inner_optimizer(workload: Workload, model: torch.nn.Module, lr: float | None) -> torch.optim.Optimizer:
    """The optimizer of a workload, with another learning rate if one is given."""
    inner = workload.optimizer(model.parameters())
    for group in inner.param_groups:
        group["lr"] = group["lr"] if lr is None else lr
    return inner


def minibatches_of(workload: Workload, optimizer: CustomOptimizer, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """The minibatches of all epochs, one after the other."""
    sampler, dataset = optimizer.sampler, workload.train
    assert isinstance(sampler, CustomSampler)
    loader = DataLoader(dataset, batch_sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        # tensors are cut at once, which is much faster than sample by sample
        pairs = (dataset[indices] for indices in sampler) if type(dataset) is TensorDataset else loader
        for inputs, targets in pairs:
            yield inputs.to(device), targets.to(device)


def refuse_impossible(workload: Workload, device: str | None, rules: Sequence[str]) -> None:
    """Say at once what every run would fail by: a device that is not there, a rule for another kind of optimizer.

    Args:
        workload: of the runs.
        device: its kind; None where the runs are made on other machines.
        rules: their names.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch can use, and there is none")
    if device == "xla" and not xla.is_installed():
        raise ValueError(f"--device xla needs torch_xla: {install('xla')}")
    sampler = CustomSampler(dataset_size=1, trace=1, minibatch_size=1, num_replicas=1, rank=0)
    for name in rules:
        inner, rule = inner_optimizer(workload, workload.model(), None), make_rule(name)
        try:
            CustomOptimizer(inner, sampler, rule=rule, ref_batchsize=1)
        except ValueError as error:
            raise ValueError(f"the rule {name} does not go with this workload: {error}") from None


def _seed(seed: int) -> None:
    """Give all random generators a seed, those of data sets included."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def device_of(name: str) -> torch.device:
    """The device of a kind that this core runs on."""
    return xla.device() if name == "xla" else torch.device(name)


Goal = Callable[[CustomOptimizer], float]


def _goal(settings: Settings, run: Run, updates: int | None) -> Goal:
    """What tells from the optimizer which fraction of the training is done."""
    if updates is not None:
        return lambda optimizer: optimizer.steps_done / updates
    if settings.until == "progress" and run.trace != REFERENCE:
        return lambda optimizer: optimizer.progress / settings.progress_goal
    return lambda optimizer: optimizer.samples_done / settings.num_samples


class _Training:
    """A run on this core."""

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        model: torch.nn.Module,
        optimizer: CustomOptimizer,
        goal: Goal,
    ) -> None:
        self._settings = settings
        self._workload = workload
        self._model = model
        self._optimizer = optimizer
        self._goal = goal
        self._device = next(model.parameters()).device
        self._lrs = [group["lr"] for group in optimizer.param_groups]
        self._fraction = 0.0
        self._tests: list[tuple[float, float]] = []  # losses and metrics

    def run(self, directory: Path) -> Outcome:
        """Train to the end with a log in the directory, and return how it was."""
        optimizer = self._optimizer
        samples_per_test = self._settings.num_samples / self._settings.num_tests
        started_at = time.monotonic()
        samples_before = 0
        progress_at_test = 0.0
        self._set_lr()
        sinks: list[Callable[[dict[str, Any]], None]] = [
            JsonLines(directory / "steps.jsonl"),
            TensorBoard(directory / "tensorboard"),
        ]
        decisions = JsonLines(directory / "decisions.jsonl")
        if optimizer.sampler.rank == 0:
            optimizer.on_decision(decisions)
        with Log(optimizer, every=self._log_steps(), to=sinks) as log, closing(decisions):
            for inputs, targets in minibatches_of(self._workload, optimizer, self._device):
                loss = self._workload.loss(self._model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                log.step(loss)
                if optimizer.is_accumulating:
                    continue
                self._fraction = self._goal(optimizer)
                self._set_lr()
                is_due = optimizer.samples_done // samples_per_test > samples_before // samples_per_test
                samples_before = optimizer.samples_done
                if not is_due and self._fraction < 1:
                    continue
                self._tests.append(self._test())
                log.write(test_loss=self._tests[-1][0], metric=self._tests[-1][1])
                if optimizer.progress == progress_at_test or not all(map(math.isfinite, self._tests[-1])):
                    return self._outcome(DIVERGED, time.monotonic() - started_at)
                if self._fraction >= 1:
                    self._write_decided(directory)
                    return self._outcome(DONE, time.monotonic() - started_at)
                progress_at_test = optimizer.progress
        raise AssertionError("minibatches never end")

    def _write_decided(self, directory: Path) -> None:
        """The trace that a policy has made of the run."""
        schedule = self._optimizer.sampler.schedule
        if isinstance(schedule, PolicySchedule) and self._optimizer.sampler.rank == 0:
            executed = schedule.trace[: self._optimizer.steps_done]
            executed.write(directory / "executed.csv", comment=schedule.description)

    def _set_lr(self) -> None:
        if self._workload.schedule is not None:
            factor = self._workload.schedule(min(1.0, self._fraction))
            for group, lr in zip(self._optimizer.param_groups, self._lrs, strict=True):
                group["lr"] = lr * factor

    @torch.no_grad()
    def _test(self) -> tuple[float, float]:
        """The mean loss and metric over the test data, of which each core takes a part."""
        sampler = self._optimizer.sampler
        num_samples = len(self._workload.test)  # type: ignore[arg-type]
        part = Subset(self._workload.test, range(sampler.rank, num_samples, sampler.num_replicas))
        sums = Metrics("loss", "metric", "samples", device=self._device)
        share_buffers(self._model)
        self._model.eval()
        for inputs, targets in DataLoader(part, batch_size=_SAMPLES_PER_TEST):
            outputs, targets = self._model(inputs.to(self._device)), targets.to(self._device)
            loss, metric = self._workload.loss(outputs, targets), self._workload.metric(outputs, targets)
            sums.add(loss=loss * len(inputs), metric=metric * len(inputs), samples=len(inputs))
        self._model.train()
        found = sums.read()
        return found["loss"] / found["samples"], found["metric"] / found["samples"]

    def _outcome(self, status: str, seconds: float) -> Outcome:
        optimizer = self._optimizer
        losses, metrics = zip(*self._tests, strict=True)
        if not math.isfinite(losses[-1]):
            reason = f"the test loss is {losses[-1]} after {optimizer.steps_done} updates"
        elif not math.isfinite(metrics[-1]):
            reason = f"the metric is {metrics[-1]} after {optimizer.steps_done} updates"
        else:
            reason = f"no gradient was finite before update {optimizer.steps_done}"
        best = max if self._settings.is_higher_better else min
        return Outcome(
            status=status,
            reason="" if status == DONE else reason,
            updates=optimizer.steps_done,
            samples=optimizer.samples_done,
            progress=optimizer.progress,
            final_loss=losses[-1] if math.isfinite(losses[-1]) else None,
            final_metric=metrics[-1] if math.isfinite(metrics[-1]) else None,
            best_metric=best((metric for metric in metrics if math.isfinite(metric)), default=None),
            seconds=seconds,
        )

    def _log_steps(self) -> int:
        if self._settings.log_steps is not None:
            return self._settings.log_steps
        num_steps = self._settings.num_samples / float(self._optimizer.sampler.schedule.trace.sizes.mean())
        return max(1, round(num_steps / _NUM_RECORDS))
