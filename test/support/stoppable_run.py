"""A small training run that saves checkpoints and can be stopped at any minibatch; also a script that can be killed.

python test/support/stoppable_run.py DIRECTORY --backend gloo --cores 2 --diary DIRECTORY/diary --result weights.pt
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from held import Hold
from torch import nn
from torch.utils.data import DataLoader, Dataset

import variable_batch_size as vbs
from variable_batch_size.cores.detect import running_cores

MINIBATCH = 4
NUM_SAMPLES = 150
NUM_EPOCHS = 3
SIZES = tuple(MINIBATCH * n for n in (3, 1, 5, 2, 7, 1, 4, 6, 2, 3, 8, 1, 9, 2, 4, 5, 1, 3, 10, 2, 6, 4, 7, 3, 5, 2))
NUM_STEPS = 25  # of the three epochs
LOG_STEPS = 4
STOPS_ON_CORES = [(1, 1), (12, 1), (19, 0)]

RULES = {
    "linear": vbs.LinearRuleOptimizer,
    "momentum": vbs.LinearRuleMomentumOptimizer,
    "adascale": vbs.AdaScaleOptimizer,
    "adamscale": functools.partial(vbs.AdamScaleOptimizer, min_updates=1),
}


@dataclass(frozen=True)
class Settings:
    """What a run is.

    Attributes:
        rule: one of `RULES`.
        options: further arguments of the optimizer.
        dropout: of the network.
        noise: whether samples are shifted by random numbers, like an augmentation.
        num_workers: of the loader.
        keeps_workers: whether they persist between epochs.
        start_method: how they are started; torch's default if None.
        every_steps: between two checkpoints.
        repeats: a factor of the length of the run.
        trace: the batch sizes instead of the default.
        seconds_per_minibatch: an additional delay.
        holds: by the name of a session, when core 0 waits to be killed or released: at "save" n, before its n-th
            checkpoint is complete, or at "step" n, after n steps of the session.
    """

    rule: str = "linear"
    options: Mapping[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    noise: bool = False
    num_workers: int = 0
    keeps_workers: bool = False
    start_method: str | None = None
    every_steps: int = 1
    repeats: int = 1
    trace: tuple[int, ...] | None = None
    seconds_per_minibatch: float = 0.0
    holds: Mapping[str, tuple[str, int]] = field(default_factory=dict)


class Numbered(Dataset):
    """Samples with their index."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(NUM_SAMPLES, 6, generator=generator)
        self.y = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


class Noisy(Numbered):
    """The same, shifted slightly by every generator of the process."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x, y, index = super().__getitem__(index)
        return x + 0.1 * (torch.randn(6) + random.gauss(0, 1) + float(np.random.randn())), y, index


class Stopped(Exception):
    """Simulates a lost machine."""


def network(dropout: float = 0.0) -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))
    # from a separate generator: XLA cores are threads that share the global one
    generator = torch.Generator().manual_seed(0)
    for layer in (net[0], net[4]):
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    net.register_parameter("unused", nn.Parameter(torch.ones(1)))
    return net


def seed_generators(rank: int, device: torch.device) -> None:
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    np.random.seed(100 + rank)
    if device.type == "xla":
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(100 + rank, str(device))


class Session:
    """A run from the checkpoint in the directory to its end, or until it is stopped.

    Attributes:
        samples: this core's samples of every completed step, by epoch and step.
    """

    def __init__(self, directory, settings=None, *, device="cpu", log_to=None):
        self.settings = settings = settings or Settings()
        self.device = torch.device(device)
        self.model = network(settings.dropout).to(self.device)
        trace = list(settings.trace or SIZES * settings.repeats)
        sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=MINIBATCH)
        seed_generators(sampler.rank, self.device)
        kind = RULES[settings.rule]
        self.optimizer = kind(self._inner(), sampler, ref_batchsize=16, model=self.model, **settings.options)
        self.per_step = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.98)
        self.per_epoch = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.loader = DataLoader(
            Noisy() if settings.noise else Numbered(),
            batch_sampler=sampler,
            num_workers=settings.num_workers,
            persistent_workers=settings.keeps_workers,
            multiprocessing_context=settings.start_method,
            worker_init_fn=vbs.leave_sigterm_to_parent if settings.start_method else None,
        )
        self.checkpoint = vbs.Checkpoint(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            schedulers=[self.per_step, self.per_epoch],
            every_steps=settings.every_steps,
        )
        self.log = None if log_to is None else vbs.Log(self.optimizer, every=LOG_STEPS, to=[log_to])
        self.samples = {}

    def _inner(self):
        if self.settings.rule == "adamscale":
            return torch.optim.AdamW(self.model.parameters(), lr=0.01)
        return torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)

    def train(self, *, stop_at=None, after_step=lambda session, step: None):
        """Train to the end or to ``stop_at = (steps, minibatches of the next step)``.

        After each step, before a possible save, ``after_step`` is called with its epoch and number.
        """
        optimizer, minibatches = self.optimizer, []
        for epoch in self.checkpoint.epochs(NUM_EPOCHS * self.settings.repeats):
            for x, y, numbers in self.loader:
                time.sleep(self.settings.seconds_per_minibatch)
                if stop_at is not None and (optimizer.steps_done, len(minibatches)) >= stop_at:
                    raise Stopped
                loss = nn.functional.cross_entropy(self.model(x.to(self.device)), y.to(self.device))
                loss.backward()
                minibatches.append(numbers.tolist())
                steps_before = optimizer.steps_done
                optimizer.step()
                if optimizer.steps_done > steps_before:
                    step = (epoch, optimizer.epoch_step)
                    self.samples[step] = [] if optimizer.is_idle else list(itertools.chain(*minibatches))
                    minibatches = []
                    self.per_step.step()
                    after_step(self, step)
                if self.log is not None:
                    self.log.step(loss)
                self.checkpoint.step()
            torch.rand(3)  # as an evaluation might do
            self.per_epoch.step()

    def result(self):
        """The final state, the samples, and the next random number of every generator."""
        copied = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.cpu().clone(), self.optimizer.state_dict())
        return {
            "model": {name: value.cpu().clone() for name, value in self.model.state_dict().items()},
            "optimizer": copied,
            "samples": self.samples,
            "drawn": [torch.rand(1).item(), random.random(), float(np.random.rand())],
        }


def run(directory, settings=None, **how):
    """A session to the end of the run; returns its result."""
    session = Session(directory, settings, **how)
    session.train()
    return session.result()


def run_and_stop(directory, stop_at, settings=None, *, device="cpu"):
    """Run until the machine is lost, then resume to the end on another; the samples are those of both."""
    first = Session(directory, settings, device=device)
    with contextlib.suppress(Stopped):
        first.train(stop_at=stop_at)
    wait_for_all_cores(device)  # like a new process; core 0 may be writing
    result = run(directory, settings, device=device)
    return {**result, "samples": {**first.samples, **result["samples"]}}


def wait_for_all_cores(device):
    vbs.Metrics("nothing", device=device).read()


def run_all(backend, directory, stopped_alone):
    """All results of several cores that tests need, in one launch."""
    device = device_of(backend)
    records = []
    results = {"whole": run(directory / "whole", device=device, log_to=records.append), "records": records}
    with contextlib.suppress(Stopped):
        Session(directory / "left", device=device).train(stop_at=(12, 1))
    results["dropout"] = run(directory / "dropout", Settings(dropout=0.5), device=device)
    results["resumed"] = [
        run_and_stop(
            directory / f"stopped-{number}",
            stop_at,
            Settings(dropout=0.5, every_steps=1 + number),
            device=device,
        )
        for number, stop_at in enumerate(STOPS_ON_CORES)
    ]
    results["from alone"] = run(stopped_alone, device=device)
    results["metrics"] = count(device)
    results["metrics on the host"] = count(torch.device("cpu"))
    results["buffers"] = shared_buffers(device)
    return results


def count(device):
    """Each core counts something different, and the last one nothing."""
    rank, num_replicas = running_cores()
    metrics = vbs.Metrics("loss", "correct", "seen", device=device)
    before = metrics.read()
    for number in range(3 if rank < num_replicas - 1 or num_replicas == 1 else 0):
        outputs = torch.full((4,), float(rank + number)).to(device)
        metrics.add(correct=(outputs > 0).sum(), seen=4, loss=outputs.mean())
    first, second = metrics.read(), metrics.read()
    metrics.reset()
    return {"before": before, "first": first, "second": second, "after": metrics.read()}


def shared_buffers(device):
    model = nn.BatchNorm1d(3)
    model.running_mean += running_cores()[0] + 7
    model.num_batches_tracked += running_cores()[0] + 5
    model = model.to(device)
    vbs.share_buffers(model)
    return {name: value.cpu() for name, value in model.named_buffers()}


def same(one, other):
    """Whether two nested states are bitwise equal."""
    flat, spec = torch.utils._pytree.tree_flatten(one)
    other_flat, other_spec = torch.utils._pytree.tree_flatten(other)
    return spec == other_spec and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(flat, other_flat, strict=True)
    )


def _parameters_of_both(one, other):
    """The parameters of two models in pairs; BatchNorm statistics are local to each core."""
    return [(one[name], other[name]) for name, _ in network().named_parameters()]


def largest_difference(one, other):
    """The largest difference between the parameters of two models."""
    return max((a.double() - b.double()).abs().max().item() for a, b in _parameters_of_both(one, other))


def same_parameters(one, other):
    """Whether the parameters of two models are bitwise equal."""
    return all(torch.equal(a, b) for a, b in _parameters_of_both(one, other))


def device_of(backend):
    if backend == "xla":
        import torch_xla

        return torch_xla.device()
    return torch.device("cpu")


# --------------------------------------------------------------------------------------------------------- as a script


class Diary:
    """The progress of a core for observers: lines of JSON in a separate file, each flushed immediately."""

    def __init__(self, directory: Path, session: str) -> None:
        self._rank, cores = running_cores()
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"{session}-{self._rank}.jsonl").open("a", buffering=1)
        self._write({"pid": os.getpid(), "cores": cores})

    def after_step(self, session: Session, step: tuple[int, int]) -> None:
        self._write({"steps_done": session.optimizer.steps_done, "step": step, "samples": session.samples[step]})

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")


def read_diary(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a core's diary; none before it exists."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def hold_of(diary: Path, session: str) -> Hold:
    """Where core 0 of a session waits."""
    return Hold(diary / f"hold-{session}")


def held_in_session(settings, name, diary, after_step):
    """Prepare the hold of a session, if it has one; returns what is to be called after each step."""
    moment, number = settings.holds.get(name, (None, 0))
    if moment is None or running_cores()[0] != 0:
        return after_step
    hold = hold_of(diary, name)
    if moment == "save":
        hold.at_rename(".pt.tmp", number=number)

    def and_hold(session: Session, step: tuple[int, int]) -> None:
        after_step(session, step)
        if moment == "step" and len(session.samples) == number:
            hold.here()

    return and_hold


def main_of_a_core(flags):
    name = flags.session or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    diary = Diary(Path(flags.diary), name)
    session = Session(flags.directory, Settings(**json.loads(flags.settings)), device=device_of(flags.backend))
    session.train(after_step=held_in_session(session.settings, name, Path(flags.diary), diary.after_step))
    if running_cores()[0] == 0:
        torch.save(session.result()["model"], flags.result)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--backend", default="gloo", help='"none" for this process alone')
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--result", required=True)
    parser.add_argument("--settings", default="{}", help="as JSON")
    parser.add_argument("--diary", required=True, help="the directory for what each core tells of itself")
    parser.add_argument("--session", help="its name in the diary; by default the number of torchrun's attempt")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.backend == "none":
        main_of_a_core(flags)
    else:
        vbs.launch(main_of_a_core, (flags,), cores=flags.cores, backend=flags.backend)


if __name__ == "__main__":
    main()
