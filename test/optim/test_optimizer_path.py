"""The Python cost of step(): calls and files in the path of a gradient, in the simplest run."""

import sys
from itertools import islice

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

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def calls_of_steps():
    """The calls for each minibatch of a run in one process, with a linear rule and four parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    sampler = vbs.CustomSampler(1000, 16 * MINIBATCHES, minibatch_size=16)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, ref_batchsize=32)
    sampler.set_epoch(0)
    found = []
    for _ in islice(sampler, STEPS * MINIBATCHES):
        model(torch.ones(16, 4)).sum().backward()
        found.append(calls_of(optimizer.step))
        assert optimizer.updated == (len(found) % MINIBATCHES == 0)
    return found


def test_accumulating_makes_at_most_20_calls_in_8_files():
    for number, calls in enumerate(calls_of_steps()):
        is_settled = number >= MINIBATCHES  # the first step creates the buckets
        if is_settled and (number + 1) % MINIBATCHES:
            assert len(calls) <= 20, calls
            assert len({file for file, _ in calls}) <= 8, calls


def test_updating_makes_at_most_75_calls_in_14_files():
    for calls in calls_of_steps()[2 * MINIBATCHES - 1 :: MINIBATCHES]:
        assert len(calls) <= 75, calls
        assert len({file for file, _ in calls}) <= 14, calls
