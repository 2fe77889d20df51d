"""What users rely on stands in the files of test/frozen; ``python test/test_frozen.py`` writes them after a change."""

import argparse
import inspect
import json
import logging
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import variable_batch_size as vbs
from variable_batch_size.lab.command.main import COMMANDS, module_of
from variable_batch_size.stability import is_experimental

FROZEN = Path(__file__).parent / "frozen"


def names():
    """The public names with their signatures, those of methods included; not what is experimental."""
    lines = []
    for place, module in [
        ("vbs", vbs),
        *((f"vbs.{name}", getattr(vbs, name)) for name in ("policies", "rules", "traces")),
    ]:
        for name in sorted(set(module.__all__) - {"__version__", "planning", "Workload"}):
            thing = getattr(module, name)
            if is_experimental(thing) or inspect.ismodule(thing):
                continue
            lines.append(f"{place}.{name}{_signature(thing)}")
            if inspect.isclass(thing):
                lines += [f"{place}.{name}.{member}" for member in _members(thing)]
    return lines


def _signature(thing):
    """Names, kinds and defaults of arguments, without annotations, which the type checker holds."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    plain = [value.replace(annotation=value.empty) for value in signature.parameters.values()]
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(inspect.Signature(plain)))


def _members(kind):
    for name in sorted(vars(kind)):
        member = inspect.getattr_static(kind, name)
        if name.startswith("_"):
            continue
        if inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod)):
            yield f"{name}{_signature(getattr(kind, name))}"
        elif isinstance(member, property):
            yield name


def commands():
    """The options of the stable commands, with their defaults and choices."""
    lines = []
    for name in COMMANDS:
        parser = argparse.ArgumentParser(prog=name, add_help=False)
        getattr(module_of(name), f"add_{name}")(parser)
        lines += _options(parser, f"vbs {name}")
    return lines


def _options(parser, command):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _options(below, f"{command} {name}")
        elif action.dest != "help":
            how = "/".join(action.option_strings) or action.metavar or action.dest
            number = {None: "", 0: " (flag)"}.get(action.nargs, f" {action.nargs}")
            choices = f" of {', '.join(map(str, action.choices))}" if action.choices else ""
            is_required = " required" if action.required and action.option_strings else ""
            yield f"{command} {how}{number}{choices}{is_required} = {action.default}"


def files():
    """The keys of log records, of an executed trace, of decisions and of a checkpoint, and the exit codes."""
    lines = [f"exit code of a stopped run = {vbs.EXIT_STOPPED}"]
    for name, rule, trace in (
        ("trace, linear", "linear", [32, 64, 32, 64]),
        ("policy, adascale", "adascale", vbs.policies.CriticalBatch(every=1)),
    ):
        with tempfile.TemporaryDirectory() as directory:
            lines += [f"{name}: {line}" for line in _of_a_run(Path(directory), rule, trace)]
    return lines


def _of_a_run(directory, rule, trace):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    loader = vbs.DataLoader(torch.randn(256, 4), trace=trace, minibatch_size=16)
    optimizer = vbs.Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader, rule=rule, ref_batchsize=32, model=model
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.inner, 2)
    optimizer.attach(scheduler, per="samples")
    checkpoint = vbs.Checkpoint(directory / "run", model=model, optimizer=optimizer)
    log = vbs.Log(optimizer, every=1, to=[vbs.JsonLines(directory / "run" / "log.jsonl")])
    optimizer.attach(log, checkpoint)
    for _ in optimizer.epochs(1):
        for data in loader:
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step(loss=loss)
    for path in sorted((directory / "run").iterdir()):
        if path.suffix == ".csv":
            columns = next(line for line in path.read_text().splitlines() if not line.startswith("#"))
            yield f"{path.name}: {columns}"
        elif path.suffix in (".json", ".jsonl"):
            records = [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else []
            keys = sorted({key for record in records or [json.loads(path.read_text())] for key in record})
            yield f"{path.name}: {', '.join(keys)}"
        elif path.suffix == ".pt":
            for key in _keys(torch.load(path, weights_only=True)):
                yield f"{path.name}: {key}"


def _keys(state, place=""):
    """The nested keys of our own state; those of torch's are its own."""
    for key, value in state.items():
        yield f"{place}{key}"
        if (
            isinstance(value, dict)
            and key not in ("model", "state", "generators")
            and all(isinstance(k, str) for k in value)
        ):
            yield from _keys(value, f"{place}{key}.")


WRITERS = {"names.txt": names, "commands.txt": commands, "files.txt": files}


@pytest.mark.parametrize("name", WRITERS)
def test_what_users_rely_on_is_as_it_was(name):
    assert WRITERS[name]() == (FROZEN / name).read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    logging.disable()
    FROZEN.mkdir(exist_ok=True)
    for name in sys.argv[1:] or WRITERS:
        (FROZEN / name).write_text("\n".join(WRITERS[name]()) + "\n", encoding="utf-8")
