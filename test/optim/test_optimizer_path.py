"""The Python cost of step(): calls and files in the path of a gradient, in the simplest run."""

import gc
import sys
from itertools import islice

import pytest
import torch
from torch import nn

import variable_batch_size as vbs

STEPS = 3
MINIBATCHES = 4  # of a step


def calls_of(function):
    """The file and name of every called Python function, including torch's, but without inner.step()."""
    found, inner = [], []
    code_of_inner = torch.optim.SGD.step.__code__

    def profile(frame, event, arg):
        code = frame.f_code
        if event == "call" and not inner:
            if code is code_of_inner:
                inner.append(frame)
            else:
                found.append((code.co_filename, code.co_name))
        elif event == "return" and frame in inner:
            inner.clear()

    gc.disable()  # finalizers and callbacks of what other tests have left are calls, too
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def calls_of_steps(rule):
    """The calls for each minibatch of a run in one process, with four parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    sampler = vbs.CustomSampler(1000, 16 * MINIBATCHES, minibatch_size=16)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.Optimizer(inner, sampler, rule=rule, ref_batchsize=32)
    sampler.set_epoch(0)
    found = []
    for _ in islice(sampler, STEPS * MINIBATCHES):
        model(torch.ones(16, 4)).sum().backward()
        found.append(calls_of(optimizer.step))
        assert optimizer.updated == (len(found) % MINIBATCHES == 0)
    return found


@pytest.mark.parametrize(("rule", "most_calls", "most_files"), [("linear", 18, 7), ("adascale", 26, 8)])
def test_accumulating_makes_few_calls_in_few_files(rule, most_calls, most_files):
    for number, calls in enumerate(calls_of_steps(rule)):
        is_settled = number >= MINIBATCHES  # the first step creates the buckets
        if is_settled and (number + 1) % MINIBATCHES:
            assert len(calls) <= most_calls, calls
            assert len({file for file, _ in calls}) <= most_files, calls


@pytest.mark.parametrize(("rule", "most_calls", "most_files"), [("linear", 70, 14), ("adascale", 195, 18)])
def test_updating_makes_few_calls_in_few_files(rule, most_calls, most_files):
    for calls in calls_of_steps(rule)[2 * MINIBATCHES - 1 :: MINIBATCHES]:
        assert len(calls) <= most_calls, calls
        assert len({file for file, _ in calls}) <= most_files, calls
