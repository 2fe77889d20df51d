"""Predictions of vbs simulate compared with runs on this machine: python bench/simulated.py [--cores 2]

The profile is measured before and after each run, because the load of the machine changes; the noise is that of the
run. One core is measured in CPU seconds, which other load does not affect.
"""

import argparse
import statistics
import time

import torch

import variable_batch_size as vbs
from variable_batch_size.lab.comparison.measure import measure
from variable_batch_size.lab.comparison.train import Training
from variable_batch_size.lab.comparison.workload import load_workload
from variable_batch_size.lab.planning.profile import Measured
from variable_batch_size.policies.builtin import parse_policy

POLICIES = ("64", "256", "autoscale:max_batch_size=512")
STEPS = 1500


def real(text, workload_name, clock):
    """Train with a policy on this core; returns the seconds, the progress and the noise over progress."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = load_workload(workload_name, None)
    training = Training(workload, workload.model(), "adascale", {"trace": parse_policy(text)})
    optimizer = training.optimizer
    noise, began = {}, clock()
    for _ in training.losses():
        if optimizer.updated and optimizer.steps_done % 20 == 0:
            noise[optimizer.progress] = optimizer.noise_scale
        if optimizer.steps_done == STEPS:
            break
    return clock() - began, optimizer.progress, noise


def profiled(workload_name, cores, size, clock):
    rows = measure(
        workload_name,
        cores=[cores],
        minibatch_sizes=[size],
        device="cpu",
        threads=1,
        rule="adascale",
        steps=40,
        clock=clock,
    )
    return next(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--workload", default="digits")
    options = parser.parse_args()
    workload = load_workload(options.workload, None)
    size = workload.minibatch_size
    clock = time.process_time if options.cores == 1 else time.perf_counter
    print(f"{'policy':<30}  real (s)  simulated (s)  ratio")
    for text in POLICIES:
        before = profiled(options.workload, options.cores, size, clock)
        if options.cores == 1:
            seconds, progress, noise = real(text, options.workload, clock)
        else:
            seconds, progress, noise = vbs.launch(
                real, (text, options.workload, clock), cores=options.cores, backend="gloo"
            )[0]
        after = profiled(options.workload, options.cores, size, clock)
        row = Measured(
            1, options.cores, size, *(statistics.mean(pair) for pair in zip(before[3:], after[3:], strict=True))
        )
        known = {p: n for p, n in noise.items() if 0 < n < float("inf")}
        run = vbs.planning.simulate(
            parse_policy(text),
            profile=vbs.planning.Profile((row,)),
            noise=vbs.planning.NoiseCurve(list(known), list(known.values())),
            availability=vbs.planning.Availability.constant(options.cores),
            minibatch_size=size,
            ref_batchsize=workload.ref_batchsize,
            progress=progress,
            capacity=len(workload.train) // size * size,
        )
        print(f"{text:<30}  {seconds:8.2f}  {run.seconds:13.2f}  {run.seconds / seconds:5.2f}", flush=True)


if __name__ == "__main__":
    main()
