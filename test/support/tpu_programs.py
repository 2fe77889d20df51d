"""Short trainings whose programs are compiled for TPUs, several in one launch, which takes 10 s."""

import os
import sys
import threading
from functools import partial
from pathlib import Path

import exact_on_xla
import scenarios
import spmd_runs
import torch
import weighted_scenarios
from sharded_models import Normed

import variable_batch_size as vbs
from variable_batch_size.comparison.programs import ended_after
from variable_batch_size.cores import launch, xla
from variable_batch_size.planning import tpu_compiler

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import language_model

STEPS = 5  # all programs are compiled in the first three
_one_at_a_time = threading.Lock()  # cores are threads, and share a generator


def with_batch_norm(name):
    with _one_at_a_time:
        torch.manual_seed(0)
        model = scenarios.Net()
    scenarios.train(model, "xla", *scenarios.RUNS[name])


def weighted(name):
    weighted_scenarios.train("xla", *weighted_scenarios.RUNS[name], dtype=torch.float32)


def exact(name):
    exact_on_xla.train(*exact_on_xla.RUNS[name])


def gpt():
    """The GPT of the example, weighted by tokens, with the Adam rule and clipping."""
    with _one_at_a_time:
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


def run_all(names, directory, donates):
    """Train each for a few steps on this core; returns the programs that each has compiled."""
    found, seen = {}, set()
    if donates:
        os.environ["XLA_ENABLE_PARAM_ALIASING"] = "1"  # as on a TPU
    for name in names:
        with ended_after(STEPS):
            (REPLICATED | SHARDED)[name]()
        wait_for_all(name)
        files = [path for path in tpu_compiler.dumped_in(directory) if path not in seen]
        found[name] = files
        seen |= {*files}
        wait_for_all(f"{name}, read")  # before the next training compiles
    return found


def wait_for_all(name):
    if not xla.is_spmd():
        xla._module("core.xla_model").rendezvous(name)


def dumped(directory, *, cores, spmd=False):
    """The programs of all trainings: name → files."""
    names = list(SHARDED if spmd else REPLICATED)
    with launch.environment({"XLA_FLAGS": tpu_compiler.dump_flags(directory), "PJRT_DEVICE": "CPU"}):
        return launch.launch(run_all, (names, directory, spmd or cores == 1), cores=cores, backend="xla", spmd=spmd)[0]
