"""AdaScale on CIFAR-10 with a continuously changing batch size: Johnson et al. 2020, elastic training.

python reproduce/elastic_cifar10.py --datadir DIR --jobs 5    # a GPU: 5 to 10 minutes

Batches of 128 to 4,096 images: in jumps, and on a spot market with devices that come and go. The schedule follows
progress.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cifar10_run
import experiment
import results

import variable_batch_size as vbs

# ---------------------------------------------------------------- from the paper, but for the length and the traces
NUM_STEPS = 11_730  # at the batch size 128: 30 epochs
BATCHSIZE = 128
LR, DECAY = 0.08, 0.0133  # lr = 0.08 · 0.0133^(progress / 11,730)
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
NETWORK = "v2"  # the ResNet-18 of the committed result
# --------------------------------------------------------------------------------------------------------- traces
SCALES = (1, 8, 2, 32, 4, 16)  # in turn, repeatedly
SAMPLES_AT_A_SCALE = 49_152  # 12 steps of the largest
MARKET = {"num_devices": 32, "at_least": 1, "arrive": 0.03, "leave": 0.05, "seed": 3}
# ----------------------------------------------------------------------------------------------------- tolerance
OFF_ACCURACY = 0.5  # of AdaScale from SGD at a constant 128, in percent
# --------------------------------------------------------------------------------------------------- --small, ours
SMALL_STEPS, SMALL_BATCHSIZE, SMALL_SCALES, SMALL_SAMPLES = 24, 8, (1, 4, 2), 32


def traces(options: argparse.Namespace) -> dict[str, vbs.traces.TraceLike]:
    scales, batchsize = (SMALL_SCALES, SMALL_BATCHSIZE) if options.small else (SCALES, BATCHSIZE)
    samples = SMALL_SAMPLES if options.small else SAMPLES_AT_A_SCALE
    starts = tuple(samples * number for number in range(len(scales)))
    sizes = tuple(scale * batchsize for scale in scales)
    jumps = vbs.traces.Stages(starts, sizes, samples * len(scales), "samples").trace()
    market: dict[str, Any] = {**MARKET, **({"num_devices": 4} if options.small else {})}
    return {
        "constant": batchsize,
        "jumps": jumps,
        "market": vbs.traces.spot_market(
            **market, samples_per_device=batchsize, num_steps=50 if options.small else 5000
        ),
    }


def decay(step: int, *, num_steps: int) -> float:
    return float(DECAY ** (step / num_steps))


def runs(options: argparse.Namespace) -> dict[str, Any]:
    what = [("SGD", "constant", "constant")]
    what += [(rule, trace, rule.lower()) for trace in ("jumps", "market") for rule in ("AdaScale", "linear")]
    return {
        f"{name}-{trace}" + ("" if len(options.seeds) == 1 else f"-seed-{seed}"): partial(_train, seed, trace, rule)
        for name, trace, rule in what
        for seed in options.seeds
    }


def _train(seed: int, trace: str, rule: str, options: argparse.Namespace, folder: Path) -> experiment.Row:
    batchsize = SMALL_BATCHSIZE if options.small else BATCHSIZE
    num_steps = SMALL_STEPS if options.small else NUM_STEPS
    run = cifar10_run.Run(
        trace=traces(options)[trace],
        rule=rule,
        lr=LR,
        schedule=partial(decay, num_steps=num_steps),
        num_steps=num_steps,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        ref_batchsize=batchsize,
        minibatch_size=batchsize,
        on_end="cycle",
    )
    row = cifar10_run.train(run, options, folder, seed=seed)
    return {"rule": rule, "trace": trace, "seed": seed, **row}


def judge(options: argparse.Namespace, rows: dict[str, experiment.Row]) -> list[results.Claim]:
    if options.small:
        return [
            results.Claim(row["run"], "progress", "until 24", row["progress"], SMALL_STEPS, 2 * SMALL_STEPS)
            for row in rows.values()
        ]
    claims = []
    sgd = _mean(rows, "constant", "constant")
    for trace in ("jumps", "market"):
        adascale, linear = (_mean(rows, rule, trace) for rule in ("adascale", "linear"))
        claims.append(
            results.Claim(f"AdaScale-{trace}", "test accuracy, %", "that of SGD", adascale, sgd - OFF_ACCURACY, 100.0)
        )
        claims.append(results.Claim(f"linear-{trace}", "test accuracy, %", "below AdaScale", linear, 0.0, adascale))
    return claims


def _mean(rows: dict[str, experiment.Row], rule: str, trace: str) -> float:
    found = [row["accuracy"] for row in rows.values() if (row["rule"], row["trace"]) == (rule, trace)]
    return sum(found) / len(found)


def draw(rows: dict[str, experiment.Row], curves: list[experiment.Row], path: Path) -> None:
    """Test accuracy over progress."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for number, name in enumerate(rows):
        points = [point for point in curves if point["run"] == name]
        label = f"{name}: {rows[name]['updates']:,} updates, {rows[name]['accuracy']:.1f} %"
        style = "--" if "linear" in name else "-"
        axes.plot(
            [point["progress"] for point in points],
            [point["accuracy"] for point in points],
            style,
            color=f"C{number}",
            label=label,
        )
    axes.set(xlabel="progress, steps at the batch size 128", ylabel="test accuracy, %", ylim=(40, 97))
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


EXPERIMENT = experiment.Experiment("elastic_cifar10", __doc__, runs, judge, draw)

if __name__ == "__main__":
    parser = experiment.parser_of(EXPERIMENT)
    cifar10_run.add_options(parser, network=NETWORK)
    sys.exit(experiment.main(EXPERIMENT, parser))
