"""``vbs cluster``: share a pool of cores among jobs by what each core is worth: simulate, run, status."""

import argparse
import logging
import re
import signal
import sys
from pathlib import Path
from typing import Any

from variable_batch_size.experimental.cluster import report, simulate
from variable_batch_size.experimental.cluster.processes import LocalPool, Pool
from variable_batch_size.experimental.cluster.run import ClusterRun, read_state
from variable_batch_size.files import write_text
from variable_batch_size.lab.command.options import described, positive, print_text, selected
from variable_batch_size.lab.planning import reports

_NODES = re.compile(r"(\d+)x(\d+)")


def nodes(text: str) -> list[int]:
    """The type of an option such as 16x4: 16 nodes of 4 cores."""
    found = _NODES.fullmatch(text)
    if not found or not int(found[1]) or not int(found[2]):
        raise argparse.ArgumentTypeError(f"expected nodes x cores, as in 16x4, got {text!r}")
    return [int(found[2])] * int(found[1])


def add_cluster(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    arriving = actions.add_parser("simulate", **described("simulate arriving jobs, with recorded times and noise"))
    add = arriving.add_argument
    add("jobs", metavar="JOBS", nargs="+", help="CSV files: name, time, application, num_replicas, batch_size")
    add("--nodes", type=nodes, required=True, metavar="NxC", help="nodes and the cores of each, as in 16x4")
    help = "has a folder for each application: files of the Pollux artifact, or a hints.json (default: where JOBS is)"
    add("--profiles", metavar="DIR", help=help)
    help = f"one of {', '.join(simulate.POLICIES)}; may be repeated (default: goodput, fifo, equal, shortest)"
    add("--policy", action="append", choices=list(simulate.POLICIES), metavar="POLICY", help=help)
    add("--interval-seconds", type=float, default=60.0, metavar="T", help="between decisions (default: 60)")
    add("--restart-seconds", type=float, default=30.0, metavar="T", help="to restart a resized job (default: 30)")
    help = "exponent of the speed-ups; smaller is fairer (default: -1)"
    add("--power", type=float, default=-1.0, metavar="P", help=help)
    add("--out", metavar="DIR", help="for a page, the table and all jobs (default: none)")

    run = actions.add_parser("run", **described("run the jobs of a TOML file on Ray, and resize them"))
    add = run.add_argument
    add("jobs", metavar="JOBS.toml", help="the jobs; jobs that are added later arrive when the file is saved")
    where = run.add_mutually_exclusive_group()
    where.add_argument("--address", metavar="ADDRESS", help="of a Ray cluster (default: a local one)")
    where.add_argument("--local", type=positive, metavar="C", help="use C cores of this machine without Ray")
    add("--cores", type=positive, metavar="C", help="cores of a local Ray cluster (default: all of this machine)")
    add("--out", default="cluster", metavar="DIR", help="for logs, the state and a page (default: cluster)")

    status = actions.add_parser("status", **described("show the jobs of a pool that vbs cluster run has started"))
    help = "the --out of vbs cluster run (default: cluster)"
    status.add_argument("out", nargs="?", default="cluster", metavar="DIR", help=help)


def run_cluster(options: argparse.Namespace) -> None:
    {"simulate": _simulate, "run": _run, "status": _status}[options.action](options)


def _simulate(options: argparse.Namespace) -> None:
    policies = dict.fromkeys(options.policy or ["goodput", "fifo", "equal", "shortest"])
    given = selected(options, "interval_seconds", "restart_seconds", "power")
    means: dict[str, list[float]] = {policy: [] for policy in policies}
    for path in options.jobs:
        jobs = simulate.read_jobs(path)
        profiles = options.profiles or Path(path).parent
        applications = simulate.read_applications(profiles, [job.application for job in jobs])
        outcomes = [
            simulate.simulate_cluster(jobs, applications, options.nodes, policy=policy, **given) for policy in policies
        ]
        for outcome in outcomes:
            means[outcome.policy].append(outcome.mean)
        on = f"on {len(options.nodes)}x{options.nodes[0]} cores"
        print_text(f"{path}: {reports.counted(len(jobs), 'job')} {on}")
        print_text(reports.as_text(report.outcomes_table(outcomes)))
        if options.out is not None:
            folder = Path(options.out) / (Path(path).stem if len(options.jobs) > 1 else "")
            _write_outcomes(folder, outcomes, options)
    if len(options.jobs) > 1:
        shown = ", ".join(f"{policy} {sum(found) / len(found) / 3600:.3f} h" for policy, found in means.items())
        print_text(f"mean over {len(options.jobs)} files: {shown}")


def _write_outcomes(directory: Path, outcomes: Any, options: argparse.Namespace) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    facts = {
        "nodes": f"{len(options.nodes)} with {options.nodes[0]} cores each",
        "seconds between decisions": f"{options.interval_seconds:g}",
        "seconds of a restart": f"{options.restart_seconds:g}",
    }
    write_text(directory / "table.csv", reports.csv_text(report.outcomes_table(outcomes)))
    write_text(directory / "jobs.csv", reports.csv_text(report.jobs_table(outcomes)))
    page = report.outcomes_page(outcomes, facts=facts, command=options.command)
    write_text(directory / "index.html", page)
    print_text(f"wrote {directory / 'index.html'}")


def _run(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    pool: Pool
    if options.local is not None:
        pool = LocalPool(options.local)
    else:
        from variable_batch_size.experimental.cluster.ray import RayPool

        pool = RayPool(options.address, cores=options.cores)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # jobs save and exit, as after Ctrl-C
    try:
        run = ClusterRun(Path(options.jobs), pool, Path(options.out), command=options.command)
        has_completed = run.run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        pool.close()
    _show(run.state())
    if not has_completed:
        failed = ", ".join(job.spec.name for job in run.jobs if job.state == "failed")
        raise ValueError(f"jobs were given up: {failed}; see {options.out}/logs")


def _status(options: argparse.Namespace) -> None:
    _show(read_state(Path(options.out)))


def _show(state: Any) -> None:
    print_text(report.state_lead(state))
    print_text(reports.as_text(report.state_table(state)))
