"""Synthetic results of runs, for tests of reports."""

import dataclasses
import json

from variable_batch_size.lab.comparison.experiment import REFERENCE, Outcome, Results, Run, Settings
from variable_batch_size.lab.comparison.verdict import Arm
from variable_batch_size.traces.trace import Trace

SETTINGS = Settings(
    workload="digits",
    source=None,
    optimizer="SGD(lr=0.05)",
    train_size=1440,
    test_size=357,
    metric_name="accuracy",
    unit=" %",
    is_higher_better=True,
    device="cpu",
    cores=1,
    threads=1,
    minibatch_size=16,
    ref_batchsize=16,
    lr=None,
    num_samples=1000,
    until="samples",
    on_end="stop",
    num_tests=20,
    log_steps=None,
)

RECORDS = [
    {"step": 1, "samples": 16, "progress": 1.0, "loss": 2.0, "lr": 0.1, "batch_size": 16},
    {"step": 1, "samples": 16, "progress": 1.0, "metric": 90.0, "test_loss": 1.0},
    {"step": 2, "samples": 48, "progress": 2.5, "loss": 1.0, "lr": 0.2, "batch_size": 32},
    {"step": 2, "samples": 48, "progress": 2.5, "metric": 95.0, "test_loss": 0.5},
]

NO_CURVES = {"training": {}, "tests": {}}

# names with markup; those of traces and rules are also folder names, and therefore without /
HOSTILE_FOLDER = "<img src=x onerror='window.isAttacked=1'>&lt;\""
HOSTILE = f"</script></title></td><script>window.isAttacked=1</script>{HOSTILE_FOLDER}"


def ended(final, updates=2):
    """The outcome of a run: a final metric, or a status other than done."""
    if isinstance(final, str):
        return Outcome(status=final, reason="so it is")
    return Outcome(
        status="done", updates=updates, samples=48, progress=2.5, final_metric=final, best_metric=final, seconds=3.0
    )


def arm(rule, *finals, trace="ramp", updates=2):
    """All seeds of a rule on a trace with these outcomes."""
    outcomes = ((Run(trace, rule, seed), ended(final, updates)) for seed, final in enumerate(finals))
    return Arm(trace, rule, tuple(outcomes))


def write_results(directory, outcomes, *, settings=SETTINGS, command="vbs compare", records=RECORDS):
    """Write the results of an experiment whose runs all have the same records.

    Args:
        directory: for them.
        outcomes: by run.
        settings: of all runs.
        command: the command shown in the report.
        records: the lines of ``steps.jsonl``.
    """
    results = Results(directory)
    traces = {run.trace: Trace.from_sequence([16, 32]) for run in outcomes if run.trace != REFERENCE}
    origin = {"command": command, "versions": {"torch": "2.9.0"}, "commit": None}
    results.write_experiment(settings, origin, traces, outcomes)
    for run, outcome in outcomes.items():
        results.write(run, outcome)
        write_records(results, run, records)
    return results


def write_records(results, run, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    (results.run_directory(run) / "steps.jsonl").write_text(text)


def write_hostile_results(directory):
    """Write results in which every text contains markup."""
    settings = dataclasses.replace(SETTINGS, workload=HOSTILE, metric_name=HOSTILE, unit=HOSTILE)
    outcomes = {
        Run(REFERENCE, "constant", 0): ended(97.0),
        Run(HOSTILE_FOLDER, HOSTILE_FOLDER, 0): ended(98.0),
        Run(HOSTILE_FOLDER, "root", 0): Outcome(status="failed", reason=HOSTILE),
    }
    return write_results(directory, outcomes, settings=settings, command=HOSTILE)
