"""An experiment: the runs it is made of, and how each of them ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from variable_batch_size.rules.registry import RULES as rules_by_name
from variable_batch_size.schedules.batch_sizes import OnEnd
from variable_batch_size.traces.generators import spot_market
from variable_batch_size.traces.trace import Trace

REFERENCE = "reference"
"""The name of the yardstick's trace: always the reference batch size."""

POLICY = "policy:"
"""What the name of a trace begins with that a policy decides."""

UNTIL = ("samples", "progress")

DONE, DIVERGED, FAILED = "done", "diverged", "failed"

RULES = tuple(rules_by_name)

MEASURING_RULES = tuple(name for name in RULES if rules_by_name[name].measures_noise)
"""Rules whose progress can end a run."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs of an experiment have in common.

    Args:
        workload: its name.
        source: the SHA-256 of the file of a user's workload; None for others.
        optimizer: of the workload, in words.
        train_size: samples of the training data.
        test_size: samples of the test data.
        metric_name: of the workload.
        unit: of the metric.
        is_higher_better: as to the metric.
        device: ``cpu``, ``cuda`` or ``xla``.
        cores: how many of them share a run.
        threads: of the CPU for each core.
        minibatch_size: samples that one core runs at once.
        ref_batchsize: batch size of the yardstick.
        lr: learning rate at that batch size; that of the workload if None.
        num_samples: how many samples the yardstick trains on, and all other runs where `until` is ``samples``.
        until: when runs end: after as many ``samples``, or after as much ``progress``, as the yardstick.
        on_end: what follows the last row of a trace.
        num_tests: how often the model is tested within `num_samples`.
        log_steps: steps from one record to the next; about 500 records for each run if None.
        exact: whether the weights are the same to the last bit on any number of cores.
    """

    workload: str
    source: str | None
    optimizer: str
    train_size: int
    test_size: int
    metric_name: str
    unit: str
    is_higher_better: bool
    device: str
    cores: int
    threads: int
    minibatch_size: int
    ref_batchsize: int
    lr: float | None
    num_samples: int
    until: str
    on_end: OnEnd
    num_tests: int
    log_steps: int | None
    exact: bool = False

    @property
    def progress_goal(self) -> int:
        """The updates of the yardstick."""
        return math.ceil(self.num_samples / self.ref_batchsize)


@dataclass(frozen=True, order=True)
class Run:
    """One run of an experiment: a rule on a trace from a seed, which stands for the order of data and the weights."""

    trace: str
    rule: str
    seed: int

    def __str__(self) -> str:
        return f"{self.trace}, {self.rule}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Args:
        status: ``done``, ``diverged`` or ``failed``.
        reason: why it did not end well.
        updates: steps that were done.
        samples: that were trained on.
        progress: the sum of the factors of the learning rate, which with AdaScale are gains.
        final_loss: the mean test loss at the end.
        final_metric: the metric at the end.
        best_metric: the best it was at any test.
        seconds: by the clock.
    """

    status: str
    reason: str = ""
    updates: int | None = None
    samples: int | None = None
    progress: float | None = None
    final_loss: float | None = None
    final_metric: float | None = None
    best_metric: float | None = None
    seconds: float | None = None


def runs_of(traces: Sequence[str], rules: Sequence[str], num_seeds: int) -> list[Run]:
    """All runs of an experiment: the yardstick, then every combination."""
    seeds = range(num_seeds)
    return [Run(REFERENCE, "constant", seed) for seed in seeds] + [
        Run(trace, rule, seed) for trace in traces for rule in rules for seed in seeds
    ]


def default_traces(ref_batchsize: int, num_samples: int, dataset_size: int) -> dict[str, Trace]:
    """Two traces that fit a workload: a ramp and a spot market, from the reference batch size to 16 times that.

    The ramp doubles its batch size after each fifth of the samples. In the market up to 16 devices of the reference
    batch size come and go.
    """
    most = max(1, min(16, dataset_size // ref_batchsize))
    sizes = [ref_batchsize * min(2**stage, most) for stage in range(5)]
    ramp = np.repeat(sizes, [math.ceil(num_samples / len(sizes) / size) for size in sizes])
    market = spot_market(
        num_devices=most,
        samples_per_device=ref_batchsize,
        num_steps=math.ceil(num_samples / ref_batchsize),
        at_least=1,
        leave=0.03,
        arrive=0.03,
        seed=0,
    )
    is_needed = market.sizes.cumsum() - market.sizes < num_samples
    return {"ramp": Trace.from_sequence(ramp), "spot": Trace.from_sequence(market.sizes[is_needed])}
