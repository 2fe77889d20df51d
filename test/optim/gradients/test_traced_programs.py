"""The graphs that XLA would compile for a run: a fixed set, the same on idle and busy cores; tested without XLA."""

import functools
import threading

import pytest
import torch
from noted_programs import NotingCore, Programs
from threaded_cores import run_on
from torch import nn
from torch.utils import _python_dispatch as dispatcher

import variable_batch_size as vbs
from variable_batch_size.optim import flow
from variable_batch_size.optim import optimizer as module

FIRST = [12, 4, 8, 20]  # samples in minibatches of 4: on three cores even and uneven shares, and idle cores
LATER = [24, 4, 28, 8, 32]
MOST = 6  # as docs/tpus.md has it
MOST_EXACT = 9  # separate graphs measure and broadcast units, add minibatches, and sum them over cores

ADAMS = {"adam", "adam:half-life", "adamscale", "surge"}
RUNS = {rule: {"rule": rule} for rule in (*vbs.rules.RULES, "adam:half-life", "legw:60") if rule != "legw"}
if not hasattr(torch.optim, "Muon"):  # before torch 2.9
    del RUNS["muon"]
RUNS |= {
    "weights": {"rule": "linear", "is_weighted": True},
    "weights and AdaScale": {"rule": "adascale", "is_weighted": True},
    "learning rate of 1": {"rule": "linear", "lr": 0.25},  # of 32 samples; a constant in a separate graph in plain mode
    "smooth steps": {"rule": "linear", "smooth_steps": 3},
    "bounded factor": {"rule": "linear", "max_factor": 2.0},
    "clipping": {"rule": "linear", "clip_grad_norm": 0.5},
    "measured noise": {"rule": "root", "measure_noise": True},
    "skipped steps": {"rule": "constant", "skip_nonfinite": True},
    "exact": {"rule": "linear", "exact": True},
    "exact and AdaScale": {"rule": "adascale", "exact": True},
    "exact and weights": {"rule": "linear", "exact": True, "is_weighted": True},
    "AdaScale on the device": {"rule": "adascale", "is_on_device": True},
    "weights and AdaScale on the device": {"rule": "adascale", "is_weighted": True, "is_on_device": True},
    "surge on the device": {"rule": "surge", "is_on_device": True, "smooth_steps": 3},
}


def inner_for(rule, model, lr, is_on_device):
    if rule == "muon":
        return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=lr)
    if rule in ADAMS and not is_on_device:
        return torch.optim.AdamW(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(core, here, *, rule, lr=0.01, is_weighted=False, is_on_device=False, **options):
    """The graphs before the first minibatch; then for each step whether the core is idle, the graphs of minibatches
    that do not complete it, and those of the minibatch that does."""
    programs = Programs()
    here.core = NotingCore(core, programs)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    data = torch.randn(400, 3)
    inner = inner_for(rule, model, lr, is_on_device)
    sampler = vbs.CustomSampler(
        dataset_size=400, trace=FIRST + LATER, minibatch_size=4, num_replicas=core.num_replicas, rank=core.rank
    )
    with torch.enable_grad(), programs:
        # AdamScale measures from the first update on: later ones would begin with new graphs
        rule = vbs.rules.AdamScaleRule(min_updates=1) if rule == "adamscale" else vbs.rules.make_rule(rule)
        optimizer = vbs.CustomOptimizer(inner, sampler, ref_batchsize=8, rule=rule, model=model, **options)
        assert (optimizer._flow.way == "on the device") == is_on_device
        if core.num_replicas == 1:
            assert not programs.current  # otherwise it would be part of the first minibatch's graph
        programs.current = []  # several cores compare their settings, on the host
        before, steps, accumulating = started(programs), [], []
        for batch in sampler:
            (model(data[batch]).square().mean() / 100).backward()
            optimizer.step(weight=3.0 + batch[0] % 2 if is_weighted else None)
            if optimizer.is_accumulating:
                accumulating += started(programs)
            else:
                steps.append((optimizer.is_idle, accumulating, started(programs)))
                accumulating = []
    assert not programs.current
    return before, steps


def started(programs):
    """The graphs since the last call, without empty ones."""
    found, programs.found = programs.found, []
    return [program for program in found if program]


@pytest.fixture(scope="module")
def found_on():
    """The graphs of each core, for a run of `RUNS` and a number of cores."""
    here = threading.local()

    @functools.cache
    def run(name, cores):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "communicator_for", lambda *_: here.core)
            if RUNS[name].get("is_on_device"):
                patch.setattr(flow, "_HOSTS", ())  # as on XLA
            return run_on(cores, lambda core: train(core, here, **RUNS[name]))

    return run


each_run = pytest.mark.parametrize("name", RUNS)


@pytest.mark.parametrize(
    ("cores", "name"), [*((3, name) for name in RUNS), (1, "linear"), (1, "adamscale"), (1, "exact and AdaScale")]
)
def test_new_batch_size_needs_no_new_graph(found_on, name, cores):
    for before, steps in found_on(name, cores):
        assert len(steps) == len(FIRST + LATER)
        known = [set(before)]
        for _, accumulating, completing in steps:
            known.append(known[-1].union(accumulating, completing))
        assert known[-1] == known[len(FIRST)]
        assert 3 <= len(known[-1]) <= (MOST_EXACT if "exact" in name else MOST)


@each_run
def test_idle_and_busy_cores_complete_a_step_with_the_same_graphs(found_on, name):
    (_, first), *others = found_on(name, 3)
    assert [is_idle for is_idle, _, _ in first] == [False] * len(first)
    num_idle = 0
    for _, steps in others:
        for (is_idle, accumulating, completing), (_, _, of_first) in zip(steps, first, strict=True):
            assert completing == of_first
            num_idle += is_idle
            assert not (is_idle and accumulating)
    assert num_idle == 2 + 1 + 2 + 1  # of two cores, in steps of 4 and 8 samples


@each_run
def test_every_core_accumulates_with_the_same_graphs(found_on, name):
    accumulating = [
        tuple(programs) for _, steps in found_on(name, 3)[:2] for _, programs, _ in steps[len(FIRST) :] if programs
    ]
    assert len(accumulating) > 5
    one_minibatch = min(accumulating, key=len)
    for programs in accumulating:
        assert programs == one_minibatch * (len(programs) // len(one_minibatch))


def test_modes_of_threads_that_overlap_leave_none_behind():
    """Otherwise no later test of the process would compile anything."""

    def overlap(core):
        with Programs():
            core.sum([torch.ones(1)])
            if core.rank:
                core.sum([torch.ones(1)])
        if not core.rank:
            core.sum([torch.ones(1)])

    run_on(2, overlap)
    assert not dispatcher.is_in_torch_dispatch_mode()
