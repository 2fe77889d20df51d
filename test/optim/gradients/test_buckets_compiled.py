"""Devices that compile a program for each shape, such as TorchTPU: a new batch size brings no operation that is new.

Tested without such a device, as operations are recorded on the CPU: `make torchtpu` counts the programs.
"""

import pytest
import torch
import torch_tpu_runs as runs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from variable_batch_size.cores import devices
from variable_batch_size.optim import flow

FIRST = (3, 1, 2, 1, 4, 3, 1)  # minibatches; until then, numbers are read at once, and operations may be new
SIZES = [runs.MINIBATCH * n for n in (*FIRST, 9, 5, 1, 8, 6, 7, 2, 10)]
assert len(FIRST) == runs.WARM_UP

RUNS = {**runs.RUNS, **runs.WEIGHTED, **{f"{name}, fused": run for name, run in runs.FUSED.items()}}
RUNS.pop("adam, capturable")  # which a CPU refuses


class Operations(TorchDispatchMode):
    """The operations so far, with what TorchTPU makes part of their programs: shapes, sizes and indices, no numbers."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kinds = {argument.name: str(argument.type) for argument in function._schema.arguments}
        named = dict(zip(kinds, args, strict=False)) | (kwargs or {})
        parts = {name: [part_of_program(leaf, kinds[name]) for leaf in tree_leaves(named[name])] for name in named}
        self.found.add((function, str(parts)))
        return function(*args, **(kwargs or {}))


def part_of_program(value, kind):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    return value if "int" in kind else type(value)


def new_operations(monkeypatch, name):
    """How many operations each step has that no earlier one had."""
    monkeypatch.setattr(flow, "_HOSTS", ())  # numbers take the way that they take on a device
    monkeypatch.setattr(flow, "_NUM_AT_ONCE", 3)
    weight = runs.number if name in runs.WEIGHTED else None
    with Operations() as operations:
        monkeypatch.setattr(runs, "num_programs", lambda device: len(operations.found))
        return runs.train("cpu", *RUNS[name], trace=SIZES, weight=weight)["programs"]


@pytest.mark.parametrize("name", RUNS)
def test_a_new_batch_size_brings_no_new_operation_or_shape(monkeypatch, name):
    monkeypatch.setattr(devices, "compiles_for_shapes", lambda device: True)
    found = new_operations(monkeypatch, name)
    assert len(found) == len(SIZES)
    assert sum(found[len(FIRST) :]) == 0, found


def test_where_shapes_cost_nothing_the_norms_of_a_step_are_summed_together(monkeypatch):
    """Which the test above would see."""
    assert sum(new_operations(monkeypatch, "adascale")[len(FIRST) :]) > 0
