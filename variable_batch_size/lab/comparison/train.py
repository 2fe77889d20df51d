"""Trains one run of an experiment: a rule on a trace with a seed."""

import itertools
import math
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset, TensorDataset

from variable_batch_size.checks import install
from variable_batch_size.cores import xla
from variable_batch_size.cores.launch import launch
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.files import DECISIONS, EXECUTED
from variable_batch_size.lab.comparison.experiment import DIVERGED, DONE, REFERENCE, Outcome, Results, Run, Settings
from variable_batch_size.lab.comparison.workload import Workload, load_workload
from variable_batch_size.optim.buffers import share_buffers
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.policies.policy import Policy
from variable_batch_size.rules.registry import make_rule
from variable_batch_size.rules.rule import Rule
from variable_batch_size.runs.log import Log, Metrics
from variable_batch_size.runs.sinks import JsonLines, TensorBoard
from variable_batch_size.schedules.policy_schedule import PolicySchedule
from variable_batch_size.traces.trace import Trace

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xla": "xla"}
_TEST_BATCH = 256
_one_at_a_time = threading.Lock()
T = TypeVar("T")


class Training:
    """A model in training, with arguments of its sampler, such as the trace, and options of its optimizer."""

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        rule: str | Rule,
        sampler: Any,
        lr: float | None = None,
        **options: Any,
    ) -> None:
        made = rule if isinstance(rule, Rule) else make_rule(rule)
        options = {"ref_batchsize": workload.ref_batchsize, "rule": made, "model": model, **options}
        self.workload, self.model, self.device = workload, model, next(model.parameters()).device
        self.sampler = CustomSampler(workload.train, **{"minibatch_size": workload.minibatch_size, **sampler})  # type: ignore[arg-type]
        self.optimizer = CustomOptimizer(inner_optimizer(workload, model, lr), self.sampler, **options)
        self.parts: list[Any] = [model, self.optimizer.inner, self.optimizer.rule]  # the objects with a state

    def losses(self) -> Iterator[torch.Tensor]:
        """Train epoch after epoch without end, and yield the loss of each minibatch after the optimizer's step."""
        dataset, loader = self.workload.train, DataLoader(self.workload.train, batch_sampler=self.sampler)
        for epoch in itertools.count():
            self.sampler.set_epoch(epoch)
            # indexing tensors once per minibatch is much faster than sample by sample
            pairs = (dataset[indices] for indices in self.sampler) if type(dataset) is TensorDataset else loader
            for inputs, targets in pairs:
                loss = self.workload.loss(self.model(inputs.to(self.device)), targets.to(self.device))
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                yield loss

    def train_on(self, samples: int, *, stops: int, after_step: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Train on some samples, and yield how many are done after each step that reaches one of several even stops."""
        num_stops = 0
        for _ in self.losses():
            if self.optimizer.is_accumulating:
                continue
            done = self.optimizer.samples_done
            after_step()
            if done * stops // samples > num_stops:
                num_stops = done * stops // samples
                yield done
            if done >= samples:
                return

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """The mean loss and metric over the test data, which is divided among the cores."""
        data, sums = self.workload.test, Metrics("loss", "metric", "samples", device=self.device)
        own = range(self.sampler.rank, len(data), self.sampler.num_replicas)  # type: ignore[arg-type]
        batches: Iterable[Any] = DataLoader(Subset(data, own), batch_size=_TEST_BATCH)
        if type(data) is TensorDataset:
            parts = (own[begin : begin + _TEST_BATCH] for begin in range(0, len(own), _TEST_BATCH))
            batches = (data[slice(part.start, part.stop, part.step)] for part in parts)
        share_buffers(self.model)
        self.model.eval()
        for inputs, targets in batches:
            outputs, targets = self.model(inputs.to(self.device)), targets.to(self.device)
            loss, metric = self.workload.loss(outputs, targets), self.workload.metric(outputs, targets)
            sums.add(loss=loss * len(inputs), metric=metric * len(inputs), samples=len(inputs))
        self.model.train()
        found = sums.read()
        return found["loss"] / found["samples"], found["metric"] / found["samples"]


def inner_optimizer(workload: Workload, model: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    """The optimizer of a workload, with another learning rate unless `lr` is None."""
    inner = workload.optimizer(model.parameters())
    for group in inner.param_groups:
        group["lr"] = group["lr"] if lr is None else lr
    return inner


def device_of(name: str) -> torch.device:
    return xla.device() if name == "xla" else torch.device(name)


def checked_workload(name: str, datadir: str | None, device: str | None, rules: Sequence[str]) -> Workload:
    """A workload; raises the error of every run for a missing device (None: on another machine) or a wrong rule."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, but torch.cuda.is_available() is False")
    if device == "xla" and not xla.is_installed():
        raise ValueError(f"--device xla needs torch_xla: {install('xla')}")
    workload = load_workload(name, datadir)
    sampler = CustomSampler(dataset_size=1, trace=1, minibatch_size=1, num_replicas=1, rank=0)
    for rule in rules:
        inner, made = inner_optimizer(workload, workload.model(), None), make_rule(rule)
        try:
            CustomOptimizer(inner, sampler, rule=made, ref_batchsize=1)
        except ValueError as error:
            raise ValueError(f"the rule {rule} does not support this workload: {error}") from None
    return workload


def train(settings: Settings, run: Run, directory: Path, *, datadir: str | None, updates: int | None) -> Outcome:
    """Execute a run in the directory of its experiment; it ends after `updates`, or by the settings if that is None."""
    shutil.rmtree(Results(directory).run_directory(run), ignore_errors=True)
    args = (settings, run, directory, datadir, updates)
    return on_cores(_train_on_core, args, cores=settings.cores, device=settings.device)


def on_cores(function: Callable[..., T], args: tuple[Any, ...], *, cores: int, device: str) -> T:
    """Call a function on each core, in this process if there is only one, and return the result of core 0."""
    if cores == 1 and device != "xla":
        return function(*args)
    return launch(function, args, cores=cores, backend=_BACKENDS[device])[0]  # type: ignore[no-any-return]


def _train_on_core(settings: Settings, run: Run, directory: Path, datadir: str | None, updates: int | None) -> Outcome:
    torch.set_num_threads(settings.threads)
    with _one_at_a_time:  # virtual XLA cores are threads and share the random generators
        _seed(run.seed)  # a workload may draw its data
        workload = load_workload(settings.workload, datadir)
        _seed(run.seed)
        model = workload.model().to(device_of(settings.device))
    results = Results(directory)
    trace = Trace.constant(settings.ref_batchsize) if run.trace == REFERENCE else results.trace(run.trace)
    sampler = {"trace": trace, "seed": run.seed, "minibatch_size": settings.minibatch_size, "on_end": settings.on_end}
    options: dict[str, Any] = {"ref_batchsize": settings.ref_batchsize, "exact": settings.exact}
    options["measure_noise"] = isinstance(trace, Policy) and trace.needs_noise
    training = Training(workload, model, run.rule, sampler, settings.lr, **options)
    optimizer = training.optimizer

    def fraction() -> float:
        """The completed fraction of the training, at most 1."""
        if updates is not None:
            return min(1.0, optimizer.steps_done / updates)
        if settings.until == "progress" and run.trace != REFERENCE:
            return min(1.0, optimizer.progress / settings.progress_goal)
        return min(1.0, optimizer.samples_done / settings.num_samples)

    began = time.monotonic()
    status, tests = _fit(training, settings, fraction, results.run_directory(run))
    schedule = training.sampler.schedule
    if status == DONE and isinstance(schedule, PolicySchedule) and training.sampler.rank == 0:
        executed = schedule.trace[: optimizer.steps_done]
        executed.write(results.run_directory(run) / EXECUTED, comment=schedule.description)
    (losses, metrics), done = zip(*tests, strict=True), optimizer.steps_done
    reason = f"no gradient was finite before update {done}"
    for name, value in (("metric", metrics[-1]), ("test loss", losses[-1])):
        reason = reason if math.isfinite(value) else f"the {name} is {value} after {done} updates"
    best = max if settings.is_higher_better else min
    return Outcome(
        status=status,
        reason="" if status == DONE else reason,
        updates=done,
        samples=optimizer.samples_done,
        progress=optimizer.progress,
        final_loss=losses[-1] if math.isfinite(losses[-1]) else None,
        final_metric=metrics[-1] if math.isfinite(metrics[-1]) else None,
        best_metric=best(filter(math.isfinite, metrics), default=None),
        seconds=time.monotonic() - began,
    )


def _seed(seed: int) -> None:
    """Seed all random generators, including those that data sets use."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _fit(
    training: Training, settings: Settings, fraction: Callable[[], float], directory: Path
) -> tuple[str, list[tuple[float, float]]]:
    """Train to the end with logs in the directory; returns the status, and the loss and the metric of each test."""
    optimizer, schedule = training.optimizer, training.workload.schedule
    scheduler = LambdaLR(optimizer, lambda _: 1.0 if schedule is None else schedule(fraction()))
    samples_per_test = settings.num_samples / settings.num_tests
    num_steps = settings.num_samples / float(training.sampler.schedule.trace.sizes.mean())
    log_steps = settings.log_steps or max(1, round(num_steps / 500))  # about 500 records
    steps, decisions = JsonLines(directory / "steps.jsonl"), JsonLines(directory / DECISIONS)
    if training.sampler.rank == 0:
        optimizer.on_decision(decisions)
    tests: list[tuple[float, float]] = []
    samples_before, progress_at_test = 0, 0.0
    with Log(optimizer, every=log_steps, to=[steps, TensorBoard(directory / "tensorboard")]) as log, closing(decisions):
        for loss in training.losses():
            log.step(loss)
            if optimizer.is_accumulating:
                continue
            scheduler.step()
            is_due = optimizer.samples_done // samples_per_test > samples_before // samples_per_test
            samples_before = optimizer.samples_done
            if not is_due and fraction() < 1:
                continue
            tests.append(training.test())
            log.write(test_loss=tests[-1][0], metric=tests[-1][1])
            if optimizer.progress == progress_at_test or not all(map(math.isfinite, tests[-1])):
                return DIVERGED, tests
            if fraction() == 1:
                return DONE, tests
            progress_at_test = optimizer.progress
    raise AssertionError("minibatches never end")
