"""One run on CIFAR-10 with a trace and a rule: trained, tested during training, resumed after interruptions."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cifar10
import torch
from experiment import Progress, Row, curve_of
from torch import nn

import variable_batch_size as vbs

NUM_TESTS, NUM_SMALL_TESTS = 25, 4
ENDLESS = 10_000  # epochs, for an infinite trace


@dataclass(frozen=True)
class Run:
    """The settings of one run.

    Attributes:
        trace: the batch size of every step.
        rule: its name.
        lr: at `ref_batchsize`.
        schedule: the factor of `lr` as a function of the steps at `ref_batchsize`.
        num_steps: the run ends after this number of steps at `ref_batchsize`.
        momentum, weight_decay: of SGD.
        ref_batchsize, minibatch_size: in images.
        follows: what the schedule and the end depend on: "progress", or "samples".
        smooth_steps: the number of steps over which a jump of the learning rate is distributed.
        on_end: what happens after the last row of the trace.
    """

    trace: vbs.traces.TraceLike
    rule: str
    lr: float
    schedule: Callable[[int], float]
    num_steps: float
    momentum: float = 0.9
    weight_decay: float = 5e-4
    ref_batchsize: int = 128
    minibatch_size: int = 128
    follows: str = "progress"
    smooth_steps: int = 0
    on_end: Literal["stop", "hold", "cycle"] = "stop"

    def done(self, optimizer: vbs.CustomOptimizer) -> float:
        """In steps at the reference batch size."""
        return optimizer.progress if self.follows == "progress" else optimizer.samples_done / self.ref_batchsize


def add_options(parser: argparse.ArgumentParser, *, network: str = "v1") -> None:
    parser.add_argument("--datadir", type=Path, help="folder that contains torchvision's cifar-10-batches-py")
    parser.add_argument("--network", choices=["v1", "v2"], default=network, help="version of the ResNet-18")
    parser.add_argument(
        "--compile",
        choices=["none", "default", "reduce-overhead"],
        default="none",
        help="mode of torch.compile for the forward and backward pass of a minibatch",
    )


def train(run: Run, options: argparse.Namespace, folder: Path, *, seed: int) -> Row:
    """Train until the run is done.

    Returns:
        its updates, samples and progress, the test accuracy in percent, the seconds since this process started the run,
        and the curve of the accuracy.
    """
    started, device = time.monotonic(), torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    train_set, test_set = _data(options, device)
    crops = cifar10.Crops(train_set)
    torch.manual_seed(seed)
    model = cifar10.tiny() if options.small else cifar10.resnet18(options.network)
    model.to(device, memory_format=torch.channels_last)
    forward: Any = model if options.compile == "none" else torch.compile(model, mode=options.compile)

    sampler = vbs.CustomSampler(
        train_set, trace=run.trace, minibatch_size=run.minibatch_size, seed=seed, on_end=run.on_end
    )
    inner = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum, weight_decay=run.weight_decay)
    rule = vbs.rules.make_rule(run.rule)
    optimizer = vbs.CustomOptimizer(
        inner, sampler, rule=rule, ref_batchsize=run.ref_batchsize, model=model, smooth_steps=run.smooth_steps
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, run.schedule)
    optimizer.attach(scheduler, per=run.follows)
    checkpoint = vbs.Checkpoint(folder, model=model, optimizer=optimizer, every_seconds=240, keep=1)
    is_done = run.done(optimizer) >= run.num_steps
    most_tests = NUM_SMALL_TESTS if options.small else NUM_TESTS
    num_tests = _tests_due(run, optimizer, most_tests)
    sinks = [vbs.JsonLines(folder / "records.jsonl"), Progress(folder.name, run.follows, _goal(run))]
    with vbs.Log(optimizer, every=10 if options.small else 50, to=sinks) as log:
        for _ in checkpoint.epochs(sampler.schedule.num_epochs or ENDLESS):
            for indices in sampler if not is_done else ():
                x, y = crops(indices)
                with cifar10.autocast(device):
                    loss = nn.functional.cross_entropy(forward(x), y)
                loss.backward()
                has_updated = optimizer.step()
                log.step(loss)
                if not has_updated:
                    continue
                is_done = run.done(optimizer) >= run.num_steps
                if num_tests < (num_tests := _tests_due(run, optimizer, most_tests)):
                    noise = {"noise_scale": optimizer.noise_scale} if rule.measures_noise else {}
                    log.write(accuracy=cifar10.accuracy(model, test_set), factor=optimizer.factor(), **noise)
                checkpoint.step()
                if is_done:
                    break
            if is_done:
                break
    keys = ("step", "samples", "progress", "accuracy", "factor", *["noise_scale"] * rule.measures_noise)
    return {
        "updates": optimizer.steps_done,
        "samples": optimizer.samples_done,
        "progress": optimizer.progress,
        "accuracy": cifar10.accuracy(model, test_set),
        "seconds": time.monotonic() - started,
        "curve": curve_of(folder, *keys),
    }


def _tests_due(run: Run, optimizer: vbs.CustomOptimizer, most: int) -> int:
    """The number of tests due so far; the last test is due at the end."""
    return min(most, int(most * run.done(optimizer) / run.num_steps))


def _data(options: argparse.Namespace, device: torch.device) -> tuple[cifar10.Images, cifar10.Images]:
    if options.small:
        return cifar10.made_up(320, device, seed=1), cifar10.made_up(50, device, seed=2)
    if options.datadir is None:
        raise SystemExit("--datadir must be the folder that contains cifar-10-batches-py; --small needs no data")
    return cifar10.read(options.datadir, cifar10.TRAIN, device), cifar10.read(options.datadir, cifar10.TEST, device)


def _goal(run: Run) -> float:
    return run.num_steps if run.follows == "progress" else run.num_steps * run.ref_batchsize
