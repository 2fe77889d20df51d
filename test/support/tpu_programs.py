"""Short trainings whose programs are compiled for TPUs, several in one launch."""

import gc
import sys
from functools import partial
from pathlib import Path

import exact_on_xla
import scenarios
import spmd_runs
import torch
import weighted_scenarios
from sharded_models import Normed

import variable_batch_size as vbs
from variable_batch_size.cores import launch, xla
from variable_batch_size.experimental.tpu import tpu_compiler
from variable_batch_size.experimental.tpu.programs import ended_after, stand_for

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import language_model

STEPS = 5  # all programs are compiled in the first three


def with_batch_norm(name):
    torch.manual_seed(0)
    model = scenarios.Net()
    scenarios.train(model, "xla", *scenarios.RUNS[name])


def weighted(name):
    weighted_scenarios.train("xla", *weighted_scenarios.RUNS[name], dtype=torch.float32)


def exact(name):
    exact_on_xla.train(*exact_on_xla.RUNS[name])


def gpt():
    """The GPT of the example, weighted by tokens, with the Adam rule and clipping."""
    torch.manual_seed(0)
    model = language_model.GPT(97)
    device, size = xla.device(), 4
    model.to(device)
    sampler = vbs.CustomSampler(dataset_size=4096, trace=[16, 8, 32, 4, 24, 16], minibatch_size=size)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = vbs.AdamRuleOptimizer(inner, sampler, ref_batchsize=8, model=model, clip_grad_norm=1.0)
    for indices in sampler:
        tokens = torch.tensor(indices).view(-1, 1) + torch.arange(language_model.CONTEXT + 1)
        loss, weight = language_model.loss_and_weight(model, (tokens % 97).to(device))
        loss.backward()
        optimizer.step(weight=weight)


REPLICATED = {
    "linear": partial(with_batch_norm, "sgd"),
    "clipped": partial(with_batch_norm, "clipped"),
    "linear momentum": partial(with_batch_norm, "momentum rule"),
    "adascale": partial(with_batch_norm, "adascale"),
    "adamscale": partial(with_batch_norm, "adamscale"),
    "adam": partial(with_batch_norm, "adam rule"),
    "weighted linear": partial(weighted, "linear"),
    "weighted adascale": partial(weighted, "adascale"),
    "gpt": gpt,
    "exact adascale": partial(exact, "adascale"),
    "exact weighted": partial(exact, "adamw, weights"),
}
SHARDED = {
    "spmd adascale": partial(spmd_runs.train, "laid_out", spmd_runs.Small, "adascale"),
    "spmd batch norm": partial(spmd_runs.train, "laid_out", Normed, "linear"),
    "fsdpv2 adascale": partial(spmd_runs.train, "wrapped", spmd_runs.Small, "adascale"),
    "fsdpv2 weighted": partial(spmd_runs.train, "wrapped", spmd_runs.Small, "weighted"),
}


def run_all(names, directory, cores):
    """Train each for a few steps; returns the programs that each has compiled."""
    found, seen = {}, set()
    stand_for(cores)
    for name in names:
        with ended_after(STEPS):
            (REPLICATED | SHARDED)[name]()
        found[name] = [path for path in tpu_compiler.dumped_in(directory) if path not in seen]
        leave_nothing_traced()
        seen.update(tpu_compiler.dumped_in(directory))
    return found


def leave_nothing_traced():
    """Run what is left of the step that was not finished: the next all-reduce would depend on the one in it."""
    gc.collect()
    communicator = xla.XlaDevices()
    communicator.sum([one := torch.ones(1).to(xla.device())])
    communicator.flush()
    assert one.item() == 1


def dumped(directory, *, cores, spmd=False):
    """The programs of all trainings: name → files."""
    names = list(SHARDED if spmd else REPLICATED)
    with launch.environment({"XLA_FLAGS": tpu_compiler.dump_flags(directory), "PJRT_DEVICE": "CPU"}):
        work = (names, directory, cores)
        return launch.launch(run_all, work, cores=cores if spmd else 1, backend="xla", spmd=spmd)[0]
