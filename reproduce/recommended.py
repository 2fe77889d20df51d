"""How good `vbs recommend` is: its rules on 9 workloads × 3 traces beside the full comparison over all rules.

python reproduce/recommended.py --first-seeds 0 10 --workers 16 --datadir DIR --out recommended.csv

The truth is the mean of the final metric over three seeds of every rule for the optimizer. Each of --first-seeds has
its own truth and recommendation; the regret is also measured against the truth over all seeds. DIR has the files of
MNIST and, for the workload on a GPU, the folder cifar-10-batches-py; without it, there are 6 workloads. --others uses
the 4 workloads that were added last instead, --traces only some of the traces. Finished runs are kept in --directory,
and the same command makes the missing ones.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
SEEDS, BUDGET, LARGEST = 3, 0.1, 8  # the largest batch size over the reference
TRACES = ("ramp", "jumps", "spot")
# the goals
WITHIN = {True: 0.2, False: 0.01}  # points of accuracy, or nats
SHARE, COVERED, COST = 0.9, (0.85, 0.95), 0.1


def sizes_of(trace: str, ref_batchsize: int, num_samples: int) -> list[int]:
    """A trace by its name: four stages that double, ten that alternate, or a spot market."""
    from variable_batch_size.traces.generators import spot_market

    if trace == "spot":
        devices = {"num_devices": LARGEST, "samples_per_device": ref_batchsize, "at_least": 1}
        steps = num_samples // ref_batchsize
        return list(map(int, spot_market(**devices, leave=0.02, arrive=0.02, num_steps=steps, seed=1).sizes))
    scales = [1, 2, 4, 8] if trace == "ramp" else [1, LARGEST] * 5
    each = math.ceil(num_samples / len(scales))
    return [ref_batchsize * scale for scale in scales for _ in range(math.ceil(each / (ref_batchsize * scale)))]


@functools.cache
def loaded(name: str) -> tuple[Any, list[str], str]:
    """A workload, the rules for its optimizer, and the class name of that."""
    import torch

    from variable_batch_size.experimental.recommend.recommend import candidates
    from variable_batch_size.lab.comparison.workload import load_workload

    torch.set_num_threads(1)
    workload = load_workload(f"recommended_workloads:{name}", None)
    inner = workload.optimizer(workload.model().parameters())
    return workload, candidates(type(inner).__name__, inner.param_groups), type(inner).__name__


def device_of(name: str) -> str:
    import torch
    from recommended_workloads import WITH_CIFAR10

    return "cuda" if name in WITH_CIFAR10 and torch.cuda.is_available() else "cpu"


def train(name: str, trace: str, rule: str, seed: int) -> dict[str, Any]:
    """One run of the full comparison."""
    import torch

    from variable_batch_size.lab.comparison.train import Training

    began, (workload, _, _) = time.process_time(), loaded(name)
    torch.manual_seed(seed)
    model, num_samples = workload.model().to(device_of(name)), workload.num_samples
    sizes: Any = workload.ref_batchsize
    if trace != "reference":
        sizes = sizes_of(trace, workload.ref_batchsize, num_samples)
    run = Training(workload, model, rule, {"trace": sizes, "seed": seed, "on_end": "hold"})
    base = [group["lr"] for group in run.optimizer.inner.param_groups]
    for loss in run.losses():
        if run.optimizer.is_accumulating:
            continue
        done = run.optimizer.samples_done / num_samples
        if done >= 1 or not math.isfinite(loss.detach()):
            break
        if workload.schedule is not None:
            for group, lr in zip(run.optimizer.inner.param_groups, base, strict=True):
                group["lr"] = lr * workload.schedule(done)
    loss, metric = run.test()
    return {"loss": loss, "metric": metric, "seconds": time.process_time() - began}


def recommend(name: str, trace: str, first_seed: int, directory: str) -> dict[str, Any]:
    """The recommendation of `vbs recommend`."""
    from variable_batch_size.experimental.recommend import recommend as module
    from variable_batch_size.experimental.recommend.branching import InThisProcess, Legs, Source
    from variable_batch_size.lab.comparison.workload import source_of
    from variable_batch_size.traces.trace import Trace

    workload, rules, _ = loaded(name)
    where = f"recommended_workloads:{name}"
    sizes = (workload.minibatch_size, workload.ref_batchsize, workload.num_samples)
    source = Source(where, source_of(where), None, device_of(name), 1, None, *sizes)
    drawn = Trace.from_sequence(sizes_of(trace, *sizes[1:]))
    plan = module.plan_of(drawn, source, rules, seeds=SEEDS, budget=BUDGET, first_seed=first_seed)
    branches = Path(directory) / f"branches-{name}-{trace}-{first_seed}"
    legs = Legs(source, branches, InThisProcess(), lambda leg, ran: None)
    found = module.recommend(source, plan, legs, lambda line: None)
    exponent = found.exponent
    assert exponent is not None
    return {
        "rule": found.rule,
        "level_with": list(found.level_with),
        "exponent": list(exponent),
        "exponents": [list(state.exponent or ()) for state in found.states],
        "lead": list(found.lead),
        "cost": found.samples / plan.comparison,
        "seconds": found.seconds,
        "failed_at_start": found.failed_at_start,
        # to try other ways to decide
        "states": [[list(state.segment), state.rungs, state.references] for state in found.states],
        "trunk": found.trunk,
        "leads": {rule: found.leads(rule) for rule in rules},
    }


Runs = dict[tuple[str, str, int], dict[str, Any]]


def metrics_of(name: str, trace: str, runs: Runs, seeds: Any) -> dict[str, float]:
    """The mean metric of each rule, with a sign that makes higher better; a rule with a diverged run is the worst."""
    workload, rules, _ = loaded(name)
    sign = 1 if workload.is_higher_better else -1
    means = {rule: sign * fmean(runs[trace, rule, seed]["metric"] for seed in seeds) for rule in rules}
    return {rule: mean if math.isfinite(mean) else -math.inf for rule, mean in means.items()}


def row_of(name: str, trace: str, first_seed: int, every: list[int], said: dict[str, Any], runs: Runs) -> Any:
    """The recommendation beside the truth, for a pair of a workload and a trace."""
    from variable_batch_size.experimental.recommend.recommend import EXPONENTS, arm_of, best_exponent

    (workload, rules, optimizer), seeds = loaded(name), range(first_seed, first_seed + SEEDS)

    def loss(trace: str, rule: str) -> float:
        return fmean(runs[trace, rule, seed]["loss"] for seed in seeds)

    metrics, of_all = (metrics_of(name, trace, runs, some) for some in (seeds, every))
    others = [seed for seed in every if seed not in seeds]
    elsewhere = metrics_of(name, trace, runs, others) if others else metrics
    best, worst, compared = (
        max(metrics, key=metrics.get),
        min(metrics, key=metrics.get),
        max(elsewhere, key=elsewhere.get),
    )  # type: ignore[arg-type]
    baseline, within = "linear" if optimizer == "SGD" else "root", WITHIN[workload.is_higher_better]
    regrets = {"": said["rule"], "_of_baseline": baseline, "_of_comparison": compared}
    found = {f"regret{whose}": metrics[best] - metrics[rule] for whose, rule in regrets.items()}
    true = best_exponent({exponent: loss(trace, arm_of(exponent)) for exponent in EXPONENTS})
    lead = loss(trace, said["rule"]) - loss("reference", "constant")
    seconds = [runs[trace, rule, seed]["seconds"] for rule in rules for seed in seeds]
    return {
        "workload": name,
        "trace": trace,
        "first_seed": first_seed,
        "optimizer": optimizer,
        "unit": workload.unit.strip(),
        "recommended": said["rule"],
        "undecided_with": " ".join(said["level_with"]),
        "best": best,
        "worst": worst,
        "baseline": baseline,
        "best_of_other_seeds": compared if others else "",
        **found,
        "regret_of_worst": metrics[best] - metrics[worst],
        "regret_by_all_seeds": max(of_all.values()) - of_all[said["rule"]],
        "baseline_by_all_seeds": max(of_all.values()) - of_all[baseline],
        **{f"is_small{whose}": found[f"regret{whose}"] <= within for whose in regrets},
        "is_small_by_all_seeds": max(of_all.values()) - of_all[said["rule"]] <= within,
        "baseline_is_small_by_all_seeds": max(of_all.values()) - of_all[baseline] <= within,
        **{f"is_worst{whose}": rule == worst for whose, rule in regrets.items()},
        "is_worst_by_all_seeds": said["rule"] == min(of_all, key=of_all.get),  # type: ignore[arg-type]
        "exponent": said["exponent"][0],
        "exponent_error": said["exponent"][1],
        "true_exponent": true,
        "covers_exponent": abs(true - said["exponent"][0]) <= said["exponent"][1] + 1e-9,
        "lead": said["lead"][0],
        "lead_error": said["lead"][1],
        "true_lead": lead,
        "covers_lead": abs(lead - said["lead"][0]) <= said["lead"][1],
        "cost": said["cost"],
        "seconds": said["seconds"],
        "seconds_of_comparison": sum(seconds) + sum(runs["reference", "constant", seed]["seconds"] for seed in seeds),
    }


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What was asked for, and what was found."""

    def share(column: str) -> float:
        return fmean(bool(row[column]) for row in rows)

    def verdict(holds: bool) -> str:
        return "holds" if holds else "DOES NOT HOLD"

    def covered(column: str) -> str:
        found, (low, high) = share(column), COVERED
        return f"{found:.0%}, asked for {low:.0%} to {high:.0%}: {verdict(low <= found <= high)}"

    cost = max(row["cost"] for row in rows)
    lines = [
        f"pairs of a workload and a trace: {len(rows)}",
        f"small regret: {share('is_small'):.0%} of pairs, asked for {SHARE:.0%}: {verdict(share('is_small') >= SHARE)}",
        f"  of the baseline, linear for SGD and root for others: {share('is_small_of_baseline'):.0%}",
        f"worst rule recommended: {share('is_worst'):.0%} of pairs, asked for none: {verdict(not share('is_worst'))}",
        f"  of the baseline: {share('is_worst_of_baseline'):.0%}",
        f"90 % interval of the exponent covers: {covered('covers_exponent')}",
        f"90 % interval of the loss at the end covers: {covered('covers_lead')}",
        f"largest cost: {cost:.1%} of the comparison, asked for at most {COST:.0%}: {verdict(cost <= COST)}",
    ]
    rows = [row for row in rows if row["best_of_other_seeds"]]
    if rows:
        lines += [
            f"where there are other seeds, in {len(rows)} pairs:",
            f"  a full comparison with them: small regret {share('is_small_of_comparison'):.0%}, worst rule "
            f"{share('is_worst_of_comparison'):.0%}",
            f"  against the truth over all seeds: small regret {share('is_small_by_all_seeds'):.0%}, of the baseline "
            f"{share('baseline_is_small_by_all_seeds'):.0%}, worst rule {share('is_worst_by_all_seeds'):.0%}",
        ]
    return lines


def tasks_of(names: list[str], traces: list[str], first_seeds: list[int]) -> dict[str, tuple[Any, ...]]:
    """The work by its name, the longest first."""
    found: dict[str, tuple[Any, ...]] = {
        f"{name}-{trace}-recommend-{first}": (name, trace, first)
        for name in names
        for first in first_seeds
        for trace in traces
    }
    for name in names:
        rules = loaded(name)[1]
        arms = [("reference", "constant"), *((trace, rule) for trace in traces for rule in rules)]
        for seed in seeds_of(first_seeds):
            found |= {f"{name}-{trace}-{rule}-{seed}": (name, trace, rule, seed) for trace, rule in arms}
    return found


def seeds_of(first_seeds: list[int]) -> list[int]:
    return [first + number for first in first_seeds for number in range(SEEDS)]


def work(key: str, arguments: tuple[Any, ...], directory: str) -> None:
    """Do a task, and keep its result."""
    made = train(*arguments) if len(arguments) == 4 else recommend(*arguments, directory)
    path = Path(directory) / f"{key}.json"
    path.with_suffix(".tmp").write_text(json.dumps(made))
    os.replace(path.with_suffix(".tmp"), path)


def make_all(tasks: dict[str, tuple[Any, ...]], options: argparse.Namespace) -> None:
    """Do the missing tasks in several processes; after --seconds, those that have not begun are left out."""
    began, missing = time.monotonic(), [key for key in tasks if not (options.directory / f"{key}.json").exists()]
    print(f"{len(tasks) - len(missing)} of {len(tasks)} runs are done", flush=True)
    if options.workers == 1:
        for key in missing:
            if time.monotonic() - began < options.seconds:
                work(key, tasks[key], str(options.directory))
        return
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[None], str] = {}
        done = 0
        while running or missing:
            while missing and len(running) < options.workers and time.monotonic() - began < options.seconds:
                key = missing.pop(0)
                running[pool.submit(work, key, tasks[key], str(options.directory))] = key
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key, done = running.pop(future), done + 1
                if future.exception():
                    print(f"{key} failed: {future.exception()!r}", flush=True)
                elif done % 20 == 0:
                    print(f"{done} done after {time.monotonic() - began:.0f} s, latest {key}", flush=True)


def write(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="processes, each with one thread (default: 1)")
    parser.add_argument("--first-seeds", type=int, nargs="+", default=[0], metavar="N", help="of each set of three")
    parser.add_argument("--datadir", help="the directory of MNIST and cifar-10-batches-py, for three more workloads")
    parser.add_argument("--others", action="store_true", help="other workloads instead")
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="only these workloads")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES, help="only these traces")
    parser.add_argument("--directory", type=Path, default=Path("runs/recommended"), help="for finished runs")
    parser.add_argument("--out", type=Path, help="a CSV file for the pairs; all runs go into NAME_runs.csv beside it")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after this time")
    options = parser.parse_args()
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    # also for the processes that are started
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import recommended_workloads
    import torch

    if options.datadir:
        os.environ[recommended_workloads.DATADIR] = options.datadir
    names = [*recommended_workloads.NAMES, *(recommended_workloads.WITH_MNIST if options.datadir else ())]
    if options.datadir and (Path(options.datadir) / "cifar-10-batches-py").exists():
        names += recommended_workloads.WITH_CIFAR10
    names = list(recommended_workloads.OTHERS) if options.others else names
    if not hasattr(torch.optim, "Muon"):
        names = [name for name in names if name != "gpt_muon"]
    unknown = set(options.only or ()) - set(names)
    if unknown:
        parser.error(f"--only: no workload is named {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    names = [name for name in names if options.only is None or name in options.only]
    options.directory.mkdir(parents=True, exist_ok=True)
    tasks = tasks_of(names, options.traces, options.first_seeds)
    make_all(tasks, options)
    found = {}
    for key in tasks:
        path = options.directory / f"{key}.json"
        if path.exists():
            found[key] = json.loads(path.read_text())
    return report(names, options.first_seeds, tasks, found, options.out)


def report(
    names: list[str], first_seeds: list[int], tasks: dict[str, tuple[Any, ...]], found: dict[str, Any], out: Path | None
) -> int:
    """Print and write all pairs whose runs are complete; 1 if some are missing."""
    rows, every = [], seeds_of(first_seeds)
    for name in names:
        runs = {tasks[key][1:]: found[key] for key in found if len(tasks[key]) == 4 and tasks[key][0] == name}
        rules = loaded(name)[1]
        for trace in TRACES:
            needed = [("reference", "constant"), *((trace, rule) for rule in rules)]
            whole = [seed for seed in every if all((*arm, seed) in runs for arm in needed)]
            for first in first_seeds:
                said = found.get(f"{name}-{trace}-recommend-{first}")
                if said is not None and set(range(first, first + SEEDS)) <= set(whole):
                    rows.append(row_of(name, trace, first, whole, said, runs))
    for row in rows:
        regrets = (
            f"regret {row['regret']:.4g}, baseline {row['regret_of_baseline']:.4g}, worst {row['regret_of_worst']:.4g}"
        )
        pair = f"{row['workload']:15}{row['trace']:7}{row['first_seed']:<4}"
        print(f"{pair}{row['recommended']:16}best {row['best']:16}{regrets} {row['unit']}")
    for first in first_seeds:
        own = [row for row in rows if row["first_seed"] == first]
        if own:
            print("\n".join([f"seeds {first} to {first + SEEDS - 1}", *summary(own)]))
    if len(first_seeds) > 1 and rows:
        print("\n".join(["all sets of seeds", *summary(rows)]))
    if rows and out is not None:
        write(rows, out)
        kinds = ("workload", "trace", "rule", "seed")
        made = [{**dict(zip(kinds, tasks[key], strict=True)), **found[key]} for key in found if len(tasks[key]) == 4]
        write(made, out.with_name(f"{out.stem}_runs.csv"))
    num_pairs = sum(len(task) == 3 for task in tasks.values())
    print(f"{len(found)} of {len(tasks)} runs are done, {len(rows)} of {num_pairs} pairs")
    return int(len(rows) < num_pairs)


if __name__ == "__main__":
    sys.exit(main())
