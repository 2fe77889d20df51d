"""One run of the small GPT with a trace and a rule: trained, tested during training, resumed after interruptions."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from characters import GPT, Text, loss_of, text_of_python
from experiment import Progress, Row, curve_of

import variable_batch_size as vbs

NUM_TESTS, NUM_SMALL_TESTS = 40, 4
TEST_WINDOWS, SMALL_TEST_WINDOWS = 1024, 16


@dataclass(frozen=True)
class Run:
    """The settings of one run.

    Attributes:
        trace: the batch size of every step, in windows of the text.
        rule: its name.
        lr: at `ref_batchsize`.
        betas: of AdamW, without weight decay.
        schedule: the factor of the learning rate as a function of the windows so far.
        ref_batchsize, minibatch_size: in windows.
        num_samples: the windows of the entire run.
    """

    trace: vbs.Trace
    rule: str
    lr: float
    betas: tuple[float, float]
    schedule: Callable[[int], float]
    ref_batchsize: int
    minibatch_size: int
    num_samples: int


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, metavar="FILE", help="any text (default: Python's standard library)")


def train(run: Run, options: argparse.Namespace, folder: Path, *, seed: int) -> Row:
    """Train until the trace ends.

    Returns:
        its updates and samples, the test loss in nats per character, the seconds since this process started the run,
        and the curve of the test loss, at the same numbers of samples in all runs.
    """
    started, device = time.monotonic(), torch.device(options.device)
    context = 16 if options.small else 128
    whole = options.text.read_text() if options.text else text_of_python()
    text = Text(whole[:20_000] if options.small else whole, device, context=context)
    torch.manual_seed(seed)
    size = {"width": 16, "heads": 2, "layers": 1} if options.small else {"width": 256, "heads": 4, "layers": 4}
    model = GPT(**size, context=context).to(device)

    sampler = vbs.CustomSampler(text, trace=run.trace, minibatch_size=run.minibatch_size, seed=seed)
    inner = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=run.betas, weight_decay=0.0)
    optimizer = vbs.CustomOptimizer(
        inner, sampler, rule=vbs.rules.make_rule(run.rule), ref_batchsize=run.ref_batchsize, clip_grad_norm=1.0
    )
    per = run.minibatch_size
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: run.schedule(step * per))
    optimizer.attach(scheduler, per="samples", every=per)
    checkpoint = vbs.Checkpoint(folder, model=model, optimizer=optimizer, every_seconds=120, keep=1)
    num_tests, windows = (NUM_SMALL_TESTS, SMALL_TEST_WINDOWS) if options.small else (NUM_TESTS, TEST_WINDOWS)
    tested = optimizer.samples_done * num_tests // run.num_samples
    sinks = [vbs.JsonLines(folder / "records.jsonl"), Progress(folder.name, "samples", run.num_samples)]
    with vbs.Log(optimizer, every=50, to=sinks) as log:
        for _ in checkpoint.epochs(sampler.schedule.num_epochs or 1):
            for indices in sampler:
                loss = loss_of(model, text(indices))
                loss.backward()
                has_updated = optimizer.step()
                log.step(loss)
                if not has_updated:
                    continue
                if tested < (tested := optimizer.samples_done * num_tests // run.num_samples):
                    log.write(test_loss=text.test_loss(model, num_windows=windows))
                checkpoint.step()
    return {
        "updates": optimizer.steps_done,
        "samples": optimizer.samples_done,
        "test_loss": text.test_loss(model, num_windows=4 * windows),
        "seconds": time.monotonic() - started,
        "curve": curve_of(folder, "step", "samples", "test_loss"),
    }
