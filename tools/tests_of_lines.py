"""For a fault in some lines of a file, run only the tests that execute those lines, the fastest first."""

import ast
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from coverage import Coverage

MEASURED, OUTPUT = Path("measured.json"), Path("output.txt")  # in the working directory


def lines_run_with(source: str, mutant: str) -> range:
    """The lines of the statement with a fault; for the head of a function, those of its body."""
    pairs = enumerate(zip(source.splitlines(), mutant.splitlines(), strict=False), start=1)
    line = next((number for number, (before, after) in pairs if before != after), 1)
    around = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    around = [node for node in around if node.lineno <= line <= node.end_lineno]
    node = min(around, key=lambda node: node.end_lineno - node.lineno, default=ast.Pass(lineno=line, end_lineno=line))
    if isinstance(node, ast.FunctionDef):
        return range(node.body[0].lineno, node.end_lineno + 1)
    return range(node.lineno, (line if hasattr(node, "body") else node.end_lineno) + 1)


class Measurement:
    """A pytest plugin that records the time of each test and the lines of a file that it executes.

    Lines executed in other processes, or in a fixture shared by several tests, are not recorded for all tests.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._tests = path, []
        self._coverage = Coverage(data_file=None, config_file=False, include=[str(path)])
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        start, children = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = yield
        fixtures = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values()]
        shares = any(fixture.baseid and fixture.scope != "function" for fixture in fixtures)
        is_seen = not shares and children == resource.getrusage(resource.RUSAGE_CHILDREN)
        self._tests.append({"name": item.nodeid, "seconds": time.monotonic() - start, "is_seen": is_seen})
        return done

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        lines = self._coverage.get_data().contexts_by_lineno(str(self._path))
        MEASURED.write_text(json.dumps({"tests": self._tests, "lines": lines}), encoding="utf-8")


class Choice:
    """A pytest plugin that runs some tests in order, and exits the process if one takes far longer than before."""

    def __init__(self, tests: list[dict]) -> None:
        self._seconds = {test["name"]: test["seconds"] for test in tests}
        self._limit(10.0)  # to import them

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self._seconds if name in found]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._limit(self._seconds[item.nodeid])
        return (yield)

    def _limit(self, seconds: float) -> None:
        """Exit the process after ten times the recorded CPU time and a little more."""
        signal.setitimer(signal.ITIMER_PROF, 10 + 10 * seconds)
        signal.setitimer(signal.ITIMER_REAL, 120 + 10 * seconds)  # where it waits


class Tests:
    """The tests of a file, which are run once to record the lines that each of them executes.

    Args:
        path: the file.
        arguments: the arguments of pytest for its tests.
    """

    def __init__(self, path: Path, arguments: list[str]) -> None:
        if not passes(arguments, lambda: Measurement(path)):
            sys.exit(f"the tests of {path} fail without a fault, see {OUTPUT.absolute()}")
        measured = json.loads(MEASURED.read_text(encoding="utf-8"))
        self._lines = {int(line): set(names) for line, names in measured["lines"].items()}
        self._seen = sorted((test for test in measured["tests"] if test["is_seen"]), key=lambda test: test["seconds"])
        self._unseen = [test for test in measured["tests"] if not test["is_seen"]]

    def that_run(self, lines: range) -> list[dict]:
        """The tests that execute one of the lines, the fastest first, then those that are not fully recorded."""
        names = set().union(*(self._lines.get(line, set()) for line in lines))
        return [test for test in self._seen if {"", test["name"]} & names] + self._unseen  # "" executes it on import

    def notice(self, lines: range) -> bool:
        """Whether one of the tests that execute the lines fails, or takes far longer than before."""
        tests = self.that_run(lines)
        files = list(dict.fromkeys(test["name"].split("::")[0] for test in tests))
        return bool(tests) and not passes(files, lambda: Choice(tests))


def passes(arguments: list[str], plugin: Callable[[], object]) -> bool:
    """Whether tests pass, in a fork of this process."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with OUTPUT.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--tb=native"]
            os._exit(int(pytest.main([*options, *arguments], plugins=[plugin()])))
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # leftover child processes of a faulty test
    return os.waitstatus_to_exitcode(status) in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
