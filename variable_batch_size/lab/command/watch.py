"""``vbs watch``: a page with the curves of runs while they train."""

import argparse
import math
import sys
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from variable_batch_size.lab.command.options import positive, print_text
from variable_batch_size.lab.planning import reports
from variable_batch_size.lab.planning.forecast import RunSoFar, basis_of, forecast, named_policy, with_largest
from variable_batch_size.lab.watch.server import LOOPBACK, Server, Watcher
from variable_batch_size.traces.trace import parse_count
from variable_batch_size.urls import is_url, local_path

_PORT = 8765
_MOST_STEPS = 300_000  # whose forecast takes less than a minute


def add_watch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = "directories or URLs of runs, with log.jsonl, executed.csv or decisions.jsonl"
    add("runs", nargs="+", metavar="RUN", help=help)
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--steps", type=positive, metavar="N", help="steps at which the runs end, to estimate when")
    goal.add_argument("--samples", type=positive, metavar="N", help="the same, in samples")
    goal.add_argument("--tokens", type=positive, metavar="N", help="the same, in tokens")
    goal.add_argument("--progress", type=_positive_number, metavar="P", help="the same, in progress")
    help = f"the address to serve on; on any but {LOOPBACK}, others can see the page if they have its token"
    add("--host", default=LOOPBACK, metavar="ADDRESS", help=f"{help} (default: {LOOPBACK})")
    add("--port", type=_port, metavar="P", help=f"port of the page (default: {_PORT}, or a free one)")
    add("--open", action="store_true", help="open the page in a browser")


def _positive_number(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text[:9]) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def run_watch(options: argparse.Namespace) -> None:
    for run in options.runs:
        if not is_url(run) and not local_path(run).is_dir():
            problem = "is not one" if local_path(run).exists() else "does not exist: start the run first"
            raise ValueError(f"a run must be a directory or a URL, but {run} {problem}")
    goals = {"step": options.steps, "samples": options.samples, "tokens": options.tokens, "progress": options.progress}
    watcher = Watcher(options.runs, {name: goal for name, goal in goals.items() if goal is not None})
    server = _server(watcher, options)
    try:
        print_text(f"watching {', '.join(options.runs)} on {server.url}, until Ctrl-C")
        sys.stdout.flush()
        if options.open:
            webbrowser.open(server.url)
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        watcher.close()


def _server(watcher: Watcher, options: argparse.Namespace) -> Server:
    """On the default port, or on a free one if that is taken."""
    ports = (_PORT, 0) if options.port is None else (options.port,)
    for port in ports:
        try:
            return Server(watcher, answer_forecast, host=options.host, port=port)
        except OSError as error:
            refusal = OSError(f"cannot serve on --host {options.host} --port {port}: {error}")
    raise refusal


def answer_forecast(directory: str, query: Mapping[str, str]) -> Any:
    """The answer to a form of the page: a sentence and a table."""
    run = RunSoFar.read(directory)
    counts = {name: parse_count(query[name]) for name in ("samples", "max_batch_size") if query.get(name)}
    if "samples" not in counts:
        raise ValueError("`samples` must be given: the samples of the whole run, at which it ends if unchanged")
    names = query.get("policies", "").split()
    names += [with_largest(run, counts["max_batch_size"])] if "max_batch_size" in counts else []
    policies = {name: named_policy(name) for name in names}
    smallest = min([run.batch_size, *(int(name) for name in names if name.isdecimal() and int(name))])
    if (steps := (counts["samples"] - run.samples) // smallest) > _MOST_STEPS:
        advice = f"`vbs simulate --from {directory}` has no limit"
        raise ValueError(
            f"the rest must have at most {_MOST_STEPS:,} steps to be forecast here, got {steps:,}; {advice}"
        )
    cores = list(dict.fromkeys(parse_count(text) for text in query.get("cores", "").split()))
    try:
        price = float(query["price"]) if query.get("price") else None
    except ValueError:
        raise ValueError(f"`price` must be a number, got {query['price']!r}") from None
    runs = forecast(run, policies, cores=cores, samples=counts["samples"], price=price)
    return {"lead": f"{basis_of(run)} {reports.verdict(runs)}", "table": reports.simulation_table(runs)}
