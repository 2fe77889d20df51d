"""Linear rule and AdaScale on a GPU: time and memory of an update, compared with a plain loop and FairScale."""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gpt
import torch
import torchvision
from measure import in_turn, print_comparison, print_machine
from peers import fairscale_adascale
from torch import nn

import variable_batch_size as vbs

MODELS = ("resnet18", "resnet50", "gpt")
SHAPES = {"resnet18": (128, 32), "resnet50": (64, 224)}
UPDATES = 8


class Workload:
    """A model on a fixed minibatch of random data, in bf16 autocast: images channels-last, or text of 1024 tokens."""

    def __init__(self, name: str, *, fused: bool = False) -> None:
        self.rules = {"LinearRuleOptimizer": vbs.LinearRuleOptimizer, "AdaScaleOptimizer": vbs.AdaScaleOptimizer}
        if name == "gpt":
            self.minibatch = 8
            self.model: nn.Module = gpt.GPT().cuda()
            self.x = torch.randint(0, gpt.VOCABULARY, (self.minibatch, gpt.CONTEXT + 1), device="cuda")
            self.loss = lambda model: gpt.loss(model, self.x)
            self.total = lambda model: gpt.loss(model, self.x, reduction="sum")
            self.optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)
            self.rules["AdamScaleOptimizer"] = vbs.AdamScaleOptimizer
            return
        self.minibatch, size = SHAPES[name]
        self.model = getattr(torchvision.models, name)(num_classes=1000).cuda().to(memory_format=torch.channels_last)
        x = torch.randn(self.minibatch, 3, size, size, device="cuda")
        self.x = x.to(memory_format=torch.channels_last)
        self.y = torch.randint(0, 1000, (self.minibatch,), device="cuda")
        self.loss = self.loss_of_images
        self.optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=fused)

    def loss_of_images(self, model: nn.Module) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return nn.functional.cross_entropy(model(self.x), self.y)

    def plain(self, accumulate: int, *, waits: bool = False) -> Callable[[], None]:
        """A hand-written loop; with `waits`, it reads the gradient's norm first and skips non-finite updates."""
        model = copy.deepcopy(self.model)
        optimizer, parameters = self.optimizer(model), list(model.parameters())

        def update() -> None:
            for _ in range(accumulate):
                (self.loss(model) / accumulate).backward()
            if not waits or torch.stack(torch._foreach_norm([p.grad for p in parameters])).norm().isfinite():
                optimizer.step()
            optimizer.zero_grad()

        return update

    def ours(self, kind: Any, accumulate: int, **options: Any) -> Callable[[], None]:
        model = copy.deepcopy(self.model)
        size = self.minibatch * accumulate
        sampler = vbs.CustomSampler(dataset_size=10**9, trace=size, minibatch_size=self.minibatch)
        sampler.must_be_read = False  # the loop reads no loader
        options |= {"model": model} if options.get("measure_noise") == "norm layers" else {}
        optimizer = kind(self.optimizer(model), sampler, ref_batchsize=size, **options)

        def update() -> None:
            for _ in range(accumulate):
                self.loss(model).backward()
                optimizer.step()

        return update

    def weighted(self, accumulate: int, **options: Any) -> Callable[[], None]:
        """The loss summed over all tokens, and their number as a tensor on the device, as from a mask."""
        model = copy.deepcopy(self.model)
        size = self.minibatch * accumulate
        sampler = vbs.CustomSampler(dataset_size=10**9, trace=size, minibatch_size=self.minibatch)
        sampler.must_be_read = False  # the loop reads no loader
        optimizer = vbs.LinearRuleOptimizer(self.optimizer(model), sampler, ref_batchsize=size, **options)

        def update() -> None:
            for _ in range(accumulate):
                self.total(model).backward()
                optimizer.step(weight=(self.x[:, 1:] >= 0).sum())

        return update

    def fairscale(self, kind: Any, accumulate: int) -> Callable[[], None]:
        model = copy.deepcopy(self.model)
        optimizer = kind(self.optimizer(model), world_size=1, scale=1.0, num_gradients_to_accumulate=accumulate)

        def update() -> None:
            for _ in range(accumulate):
                self.loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        return update


def seconds_of(update: Callable[[], None]) -> Callable[[], float]:
    def run() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(UPDATES):
            update()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / UPDATES

    return run


def peak_memory(make: Callable[[], Callable[[], None]]) -> float:
    """Peak memory of an update in MiB, including model and state."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    update = make()
    for _ in range(3):
        update()
    torch.cuda.reset_peak_memory_stats()
    update()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def compare(name: str, accumulate: int, peer: Any, options: argparse.Namespace) -> None:
    workload = Workload(name, fused=options.fused)
    makers = {
        "plain loop": partial(workload.plain, accumulate),
        "plain loop again": partial(workload.plain, accumulate),
        "plain loop that waits": partial(workload.plain, accumulate, waits=True),
        **{rule: partial(workload.ours, kind, accumulate) for rule, kind in workload.rules.items()},
    }
    if options.kept:
        makers["linear, kept gradients"] = partial(
            workload.ours, vbs.LinearRuleOptimizer, accumulate, gradient_as_bucket_view=True
        )
    if options.more:
        linear = partial(workload.ours, vbs.LinearRuleOptimizer, accumulate)
        makers["linear, noise measured"] = partial(linear, measure_noise=True)
        makers["linear, seeded"] = partial(linear, seed_minibatches=True)
        makers["linear, exact"] = partial(linear, exact=True)
        if name == "gpt":
            makers["linear, norm layers"] = partial(linear, measure_noise="norm layers")
            makers["linear, weights"] = partial(workload.weighted, accumulate)
            makers["linear, weights and noise"] = partial(workload.weighted, accumulate, measure_noise=True)
    if accumulate > 1 and peer is not None and name != "gpt":  # FairScale's AdaScale needs two gradients, and SGD
        makers["FairScale AdaScale"] = partial(workload.fairscale, peer, accumulate)
    if unknown := set(options.sides) - set(makers):
        raise SystemExit(f"--sides: there is no {sorted(unknown)}, only {sorted(makers)}")
    if options.sides:
        makers = {side: make for side, make in makers.items() if side.startswith("plain") or side in options.sides}
    gradient = sum(p.numel() * p.element_size() for p in workload.model.parameters()) / 2**20
    form = "fused" if options.fused else "default form of the optimizer"
    print(f"\n{name}, {workload.minibatch} samples, accumulation {accumulate}, gradient {gradient:.0f} MiB, {form}")
    peak_memory(makers["plain loop"])  # the first run also benchmarks algorithms, which takes extra memory
    memory = {side: peak_memory(make) for side, make in makers.items()}
    updates = {side: seconds_of(make()) for side, make in makers.items()}
    print_comparison(in_turn(updates, repeats=options.repeats, warmup=4), peer="plain loop")
    for side, peak in memory.items():
        extra = (peak - memory["plain loop"]) / gradient
        print(f"{side:28}{peak:8.0f} MiB at the peak, plain {extra:+.2f} gradients")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--fairscale", metavar="FILE", help="FairScale's adascale.py, if it is not installed")
    parser.add_argument("--fused", action="store_true", help="all sides with fused=True")
    parser.add_argument("--kept", action="store_true", help="also gradient_as_bucket_view")
    parser.add_argument("--more", action="store_true", help="also weights, noise, seeds per minibatch and exact sums")
    parser.add_argument("--sides", nargs="+", default=[], help="only these sides and the plain loop, by name")
    options = parser.parse_args()
    print_machine()
    print(torch.cuda.get_device_name(), flush=True)
    torch.backends.cudnn.benchmark = True
    peer = fairscale_adascale(options.fairscale)
    for name in options.models:
        for accumulate in options.accumulate:
            compare(name, accumulate, peer, options)


if __name__ == "__main__":
    main()
