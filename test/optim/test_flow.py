"""How the numbers of a step reach the rule: on the device the results are those of reading at once."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import variable_batch_size as vbs
from variable_batch_size.optim import flow

TRACE = [4 * n for n in (2, 1, 3, 6, 1, 2, 5, 4, 4, 1, 2, 8)]
BAD = (0, 3, 4, 9)  # steps with a gradient that is not finite
INNER = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, fused=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.01, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True, fused=True),
}
RULES = ("adascale", "adamscale", "surge", "linear", "legw:20")


@pytest.fixture
def on_device(monkeypatch):
    """Treats the CPU as an accelerator."""
    monkeypatch.setattr(flow, "_HOSTS", ())


class Run:
    """A training on random data, in double precision, whose gradients are not finite in some steps."""

    def __init__(self, rule="adascale", inner="momentum", *, dtype=torch.float64, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        groups = [{"params": list(self.model[:2].parameters())}, {"params": list(self.model[3].parameters())}]
        self.sampler = vbs.CustomSampler(dataset_size=1000, trace=TRACE, minibatch_size=4)
        rule = vbs.make_rule(rule)
        self.dtype, self.inner = dtype, INNER[inner](groups)
        options = {"model": self.model, "ref_batchsize": 8, "skip_nonfinite": True, **options}
        self.optimizer = vbs.CustomOptimizer(self.inner, self.sampler, rule=rule, **options)

    def steps(self, *, bad=BAD, weights=None, first=0):
        """Train, and yield what is known after each step."""
        generator = torch.Generator().manual_seed(1)
        done, optimizer = 0, self.optimizer
        data = {step: [] for step in range(len(TRACE))}
        for step, size in enumerate(TRACE):
            for _ in range(size // 4):
                data[step].append((torch.randn(4, 6, generator=generator), torch.rand((), generator=generator)))
        self.sampler.set_epoch(0, first)
        minibatches = iter(self.sampler)
        for step in range(first, len(TRACE)):
            for number, (x, w) in enumerate(data[step]):
                next(minibatches)
                loss = self.model(x.to(self.dtype)).square().mean() * (1 + w)
                weight = None if weights is None else float(math.ceil(5 * w)) * (step != 6)
                (loss * math.inf if step in bad and number == 0 else loss).backward()
                done += optimizer.step(weight=weight)
            yield self.found()

    def found(self):
        optimizer = self.optimizer
        numbers = {
            "lr": [optimizer.current_lr(group) for group in (0, 1)] if optimizer.updated else None,
            "updated": optimizer.updated,
            "skipped": optimizer.steps_skipped,
            "progress": optimizer.progress,
            "report": optimizer.report(),
        }
        return copy.deepcopy({**numbers, "model": self.model.state_dict(), "inner": self.inner.state_dict()["state"]})


def assert_same(one, other, tolerance=1e-12):
    assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def pairs():
    return [
        (rule, inner)
        for rule in RULES
        for inner in INNER
        if not (rule == "adamscale" and inner in ("sgd", "momentum")) and not (rule == "legw:20" and inner != "sgd")
    ]


@pytest.mark.parametrize("options", [{}, {"smooth_steps": 3, "max_factor": 2.5, "clip_grad_norm": 0.5}])
@pytest.mark.parametrize("weights", [None, "weighted"])
@pytest.mark.parametrize(("rule", "inner"), pairs())
def test_numbers_on_the_device_are_those_read_at_once(monkeypatch, rule, inner, weights, options):
    expected = list(Run(rule, inner, **options).steps(weights=weights))
    monkeypatch.setattr(flow, "_HOSTS", ())
    run = Run(rule, inner, **options)
    assert run.optimizer._flow.way == "on the device"
    for found, one in zip(run.steps(weights=weights), expected, strict=True):
        assert_same(found, one)
    assert run.optimizer.steps_skipped == len(BAD) + (weights is not None)
