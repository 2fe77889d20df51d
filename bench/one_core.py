"""Autoscale on one core: noise from normalization layers compared with noise from steps of several minibatches.

python bench/one_core.py [--seeds 4] [--target 2.6]

A small GPT on characters trains with AdamW, from one minibatch in a step on, until its test loss reaches a target.
Without normalization layers, Autoscale must try two minibatches to learn the noise. Time is CPU time, which other load
affects least, also for Autoscale. Goal: with normalization layers it takes no longer.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import torch
from measure import print_comparison, print_machine

import variable_batch_size as vbs

sys.path.append(str(Path(__file__).parent.parent / "reproduce"))
import characters

MINIBATCH, CONTEXT, EVERY, MOST_STEPS = 2, 64, 20, 20_000
SIDES = {"noise of minibatches": True, "noise of norm layers": "norm layers"}


def seconds_to(target: float, text: characters.Text, *, measure_noise: bool | str, seed: int) -> float:
    """The CPU seconds until the target, without tests."""
    torch.manual_seed(seed)
    model = characters.GPT(width=64, heads=4, layers=3, context=CONTEXT)
    policy = vbs.policies.Autoscale(max_batch_size=64 * MINIBATCH)
    sampler = vbs.CustomSampler(dataset_size=len(text), trace=policy, minibatch_size=MINIBATCH, seed=seed)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"rule": "root", "ref_batchsize": MINIBATCH, "measure_noise": measure_noise, "model": model}
    optimizer = vbs.Optimizer(inner, sampler, **options)  # type: ignore[arg-type]
    optimizer._driver.clock = time.process_time  # type: ignore[union-attr]
    sizes, spent, began = [], 0.0, time.process_time()
    for epoch in itertools.count():
        optimizer.set_epoch(epoch)
        for indices in sampler:
            characters.loss_of(model, text(indices)).backward()
            if not optimizer.step():
                continue
            sizes.append(optimizer.batch_size)
            if optimizer.steps_done % EVERY == 0:
                spent += time.process_time() - began
                loss = text.test_loss(model, num_windows=256)
                if loss <= target or optimizer.steps_done >= MOST_STEPS:
                    mean = f"mean batch size {np.mean(sizes):.0f}, {sizes[-1]} at the end"
                    print(f"seed {seed}, {measure_noise}: {spent:.1f} s, {len(sizes)} steps, {mean}", flush=True)
                    return spent
                began = time.process_time()
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--target", type=float, default=2.6, help="test loss in nats per character")
    options = parser.parse_args()
    print_machine()
    torch.set_num_threads(1)
    text = characters.Text(characters.text_of_python(), torch.device("cpu"), context=CONTEXT)
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for seed in range(options.seeds):
        for name, measure_noise in list(SIDES.items())[:: 1 if seed % 2 else -1]:
            seconds[name].append(seconds_to(options.target, text, measure_noise=measure_noise, seed=seed))
    print_comparison({name: np.array(values) for name, values in seconds.items()}, peer=next(iter(SIDES)))


if __name__ == "__main__":
    main()
