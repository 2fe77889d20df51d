"""Branches of one training: each leg trains from a saved state with a rule at a batch size, in any process."""

import functools
import io
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, final

import torch

from variable_batch_size.files import read_json, write, write_json
from variable_batch_size.lab.comparison.compare import Work, outcome_of
from variable_batch_size.lab.comparison.experiment import Outcome
from variable_batch_size.lab.comparison.train import Training, device_of
from variable_batch_size.lab.comparison.workload import Workload, load_workload, source_of
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.rules.registry import make_rule
from variable_batch_size.rules.rule import Rule, Step

_TESTS = 5  # per leg
_POWER = "S^"


@final
class PowerRule(Rule):
    """lr = lr0 · S^a.

    >>> PowerRule(0.75).factor(Step(batch_size=512, minibatch_size=32, ref_batchsize=32))
    8.0
    """

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def factor(self, step: Step) -> float:
        return float(step.scale**self.exponent)


def arm_of(exponent: float) -> str:
    """The name of the branches with an exponent: that of the rule, if one has this exponent.

    >>> arm_of(1.0), arm_of(0.75)
    ('linear', 'S^0.75')
    """
    return {0.0: "constant", 0.5: "root", 1.0: "linear"}.get(exponent, f"{_POWER}{exponent:g}")


def rule_of(arm: str) -> Rule:
    return PowerRule(float(arm.removeprefix(_POWER))) if arm.startswith(_POWER) else make_rule(arm)


class Source(NamedTuple):
    """What all legs train."""

    workload: str
    source: str | None  # the SHA-256 of the file of a user's workload
    datadir: str | None
    device: str
    threads: int
    lr: float | None
    minibatch_size: int
    ref_batchsize: int
    num_samples: int  # of the full training, for the learning-rate schedule


class Leg(NamedTuple):
    """A part of a branch."""

    state: int  # samples of the training before the branch
    arm: str  # the rule, or S^ and an exponent
    batch_size: int
    seed: int
    begin: int  # samples of the branch before the leg
    end: int

    def __str__(self) -> str:
        return f"{self.arm} at {self.batch_size}, seed {self.seed}, samples {self.begin} to {self.end}"

    @property
    def file_name(self) -> str:
        return f"{self.state}-{self.arm}-{self.batch_size}-{self.seed}-{self.begin}-{self.end}"

    @property
    def samples(self) -> int:
        return self.end - self.begin


class Ran(NamedTuple):
    """The result of a leg."""

    curve: tuple[tuple[int, float], ...]  # samples of the branch, and the test loss
    seconds: float
    noise: float | None = None  # the noise scale in samples, if the rule measures it; NaN if no gradient norm is finite
    factor: float = 1.0  # the learning-rate factor at the end

    @property
    def loss(self) -> float:
        """The test loss at the end; infinite if the leg has diverged."""
        return self.curve[-1][1] if math.isfinite(self.curve[-1][1]) else math.inf


@functools.lru_cache(maxsize=1)  # legs are short
def _workload(name: str, source: str | None, datadir: str | None) -> Workload:
    if source_of(name) != source:
        raise ValueError(f"the file of {name} differs on this worker: copy the same one to all workers")
    torch.manual_seed(0)  # a workload may generate random data, which must be the same for all legs
    return load_workload(name, datadir)


def run_leg(source: Source, leg: Leg, before: bytes | None) -> tuple[Ran, bytes]:
    """Train from a state, or a new model if it is None, and return the result and the state at the end.

    All arms of a seed train on the same samples in the same order.
    """
    torch.set_num_threads(source.threads)
    began = time.monotonic()
    workload = _workload(source.workload, source.source, source.datadir)
    torch.manual_seed(leg.seed)
    model = workload.model().to(device_of(source.device))
    order = zlib.crc32(f"{leg.state} {leg.seed} {leg.begin}".encode())
    sampler = {"trace": leg.batch_size, "seed": order, "minibatch_size": source.minibatch_size}
    training = Training(workload, model, rule_of(leg.arm), sampler, source.lr, ref_batchsize=source.ref_batchsize)
    base_lrs = [group["lr"] for group in training.optimizer.inner.param_groups]
    curve = []
    if before is not None:
        _load(training, leg, before)
    if not leg.begin:
        curve.append((0, training.test()[0]))
    torch.manual_seed(order)
    for done in _tested(training, leg, base_lrs, source.num_samples):
        curve.append((leg.begin + done, training.test()[0]))
        if not math.isfinite(curve[-1][1]):
            break
    saved = io.BytesIO()
    torch.save([part.state_dict() for part in training.parts], saved)
    found = (time.monotonic() - began, _noise_of(training.optimizer), _factor_of(training.optimizer, leg.batch_size))
    return Ran(tuple(curve), *found), saved.getvalue()


def _noise_of(optimizer: CustomOptimizer) -> float | None:
    if not optimizer.rule.measures_noise:
        return None
    # where the norms are not finite, every update is skipped
    return math.nan if optimizer.steps_skipped == optimizer.steps_done else optimizer.noise_scale_in_samples


def _factor_of(optimizer: CustomOptimizer, batch_size: int) -> float:
    done, size = optimizer.steps_done, optimizer.sampler.minibatch_size
    return float(optimizer.rule.factor(Step(batch_size, size, optimizer.ref_batchsize, done)))


def _load(training: Training, leg: Leg, before: bytes) -> None:
    states = torch.load(io.BytesIO(before), weights_only=True, map_location=training.device)
    # the first leg of a branch follows another rule
    for part, state in zip(training.parts, states if leg.begin else states[:2], strict=False):
        part.load_state_dict(state)
    if not leg.begin and training.optimizer.rule.sums_gradients:
        num_minibatches = training.optimizer.ref_batchsize / training.sampler.minibatch_size
        for state in training.optimizer.inner.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].mul_(num_minibatches)  # from the mean of gradients to their sum


def _tested(training: Training, leg: Leg, base_lrs: Sequence[float], num_samples: int) -> Iterator[int]:
    """Train with the schedule of the workload, and yield the number of samples done whenever a test is due."""
    optimizer, schedule = training.optimizer, training.workload.schedule

    def schedule_lr() -> None:
        if schedule is not None:
            factor = schedule(min(1.0, (leg.state + leg.begin + optimizer.samples_done) / num_samples))
            for group, lr in zip(optimizer.inner.param_groups, base_lrs, strict=True):
                group["lr"] = lr * factor

    schedule_lr()
    return training.train_on(leg.samples, stops=_TESTS, after_step=schedule_lr)


class InThisProcess(AbstractContextManager["InThisProcess"]):
    """Does work when its outcome is requested; has the interface of LocalProcesses."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Work]] = []

    @property
    def is_full(self) -> bool:
        return bool(self._waiting)

    def start(self, run: Any, work: Work) -> None:
        self._waiting.append((run, work))

    def next_outcome(self) -> tuple[Any, Any]:
        run, work = self._waiting.pop(0)
        return run, outcome_of(work)

    def __exit__(self, *error: object) -> None:
        pass


class Legs:
    """Runs the legs whose results are not in the directory yet, and saves their results there.

    Args:
        source: what the legs train.
        directory: for the files of the legs.
        makers: LocalProcesses, OnExecutor or InThisProcess.
        on_end: called with each leg that has ended, including legs of an earlier process.
    """

    def __init__(self, source: Source, directory: Path, makers: Any, on_end: Callable[[Leg, Ran], None]) -> None:
        self._source, self._directory, self._makers, self._on_end = source, directory, makers, on_end

    def run(self, legs: Iterable[tuple[Leg, Leg | None]]) -> dict[Leg, Ran]:
        """Run legs, each from the end of the leg that it continues or branches from, which must have ended."""
        found: dict[Leg, Ran] = {}
        to_do = []
        for leg, before in legs:
            ran = self._read(leg)
            if ran is None:
                to_do.append((leg, before))
            else:
                found[leg] = ran
                self._on_end(leg, ran)
        num_running = 0
        while to_do or num_running:
            if to_do and not self._makers.is_full:
                leg, before = to_do.pop(0)
                state = None if before is None else self._file(before, "pt").read_bytes()
                self._makers.start(leg, (run_leg, (self._source, leg, state), {}))
                num_running += 1
                continue
            leg, outcome = self._makers.next_outcome()
            num_running -= 1
            if isinstance(outcome, Outcome):
                raise ValueError(f"{leg} failed: {outcome.reason}")
            found[leg] = self._write(leg, *outcome)
            self._on_end(leg, found[leg])
        return found

    def moved(
        self, name: str, spans: Mapping[str, Sequence[tuple[Leg, Leg] | None]], first: str
    ) -> dict[str, list[float]]:
        """How far each arm has moved in the direction of the first arm, with each seed.

        A span is two legs of an arm with the same seed. Its displacement is the change of the weights between their
        ends; a span of None, after a branch has diverged, gives NaN. The result is the mean of its scalar products with
        the displacements of the first arm with all *other* seeds: noise is independent between seeds, so it does not
        count as progress. The momentum at the start of a branch is common to all seeds, so spans should start after it
        has decayed. The result is kept in a file, because the states of legs may be deleted.
        """
        path = self._directory / f"{name}.json"
        if path.exists():
            return dict(read_json(path))
        model = _workload(self._source.workload, self._source.source, self._source.datadir).model()
        names = [name for name, _ in model.named_parameters()]  # without buffers

        def weights(leg: Leg) -> torch.Tensor:
            state = torch.load(self._file(leg, "pt"), weights_only=True, map_location="cpu")[0]
            return torch.cat([state[name].flatten().double() for name in names])

        def displacement(span: tuple[Leg, Leg]) -> torch.Tensor:
            return weights(span[1]) - weights(span[0])

        along = [displacement(span) for span in spans[first] if span is not None]

        def product(seed: int, span: tuple[Leg, Leg] | None) -> float:
            if span is None:
                return math.nan
            mine = displacement(span)
            return fmean(float(mine @ other) for number, other in enumerate(along) if number != seed)

        found = {arm: [product(*numbered) for numbered in enumerate(own)] for arm, own in spans.items()}
        write_json(path, found)
        return found

    def forget(self, legs: Iterable[Leg]) -> None:
        """Delete the states of legs that nothing continues."""
        for leg in legs:
            self._file(leg, "pt").unlink(missing_ok=True)

    def _file(self, leg: Leg, suffix: str) -> Path:
        return self._directory / f"{leg.file_name}.{suffix}"

    def _read(self, leg: Leg) -> Ran | None:
        try:
            found = read_json(self._file(leg, "json"))
            curve = tuple((samples, loss) for samples, loss in found["curve"])
            return Ran(curve, found["seconds"], found["noise"], found["factor"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _write(self, leg: Leg, ran: Ran, state: bytes) -> Ran:
        self._directory.mkdir(parents=True, exist_ok=True)
        write(self._file(leg, "pt"), lambda temporary: temporary.write_bytes(state))
        write_json(self._file(leg, "json"), ran._asdict())
        return ran
