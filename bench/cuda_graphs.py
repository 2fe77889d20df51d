"""One captured minibatch for every batch size: torch.compile and CUDA graphs under a trace of 48 sizes."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from measure import in_turn, print_comparison, print_machine
from torch import nn
from torch._dynamo.utils import counters
from torchvision.models import resnet18

import variable_batch_size as vbs

MINIBATCH = 128
# every size from 1 to 48 minibatches once, in mixed order
SIZES = [MINIBATCH * int(n) for n in np.random.RandomState(0).permutation(np.arange(1, 49))]


def forward_backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def eager(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    return partial(forward_backward, model, x, y)


def compiled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    return partial(forward_backward, torch.compile(model, mode="reduce-overhead"), x, y)


def captured(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    """Forward, backward and accumulation as one CUDA graph: gradients stay in place for the entire run."""
    gradients = [p.grad for p in model.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward_backward(model, x, y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward_backward(model, x, y)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert p.grad is gradient
        gradient.zero_()  # left over from the warm-up
    return graph.replay


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], float]:
    """A hand-written loop: eager, loss / n, lr × n."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)

    def replay() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for size in SIZES:
            number = size // MINIBATCH
            for _ in range(number):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x), y)
                (loss / number).backward()
            optimizer.param_groups[0]["lr"] = 1e-5 * number
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return replay


def ours(kind: Any, capture: Any, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], float]:
    sampler = vbs.CustomSampler(dataset_size=10**9, trace=SIZES, minibatch_size=MINIBATCH, on_end="cycle")
    sampler.must_be_read = False  # the loop reads no loader
    inner = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    optimizer = kind(inner, sampler, ref_batchsize=MINIBATCH, gradient_as_bucket_view=capture is captured)
    minibatch = capture(model, x, y)

    def replay() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for size in SIZES:
            for _ in range(size // MINIBATCH):
                minibatch()
                optimizer.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print_machine()
    print(
        f"{torch.cuda.get_device_name()}; ResNet-18, 128 images of 32², {len(set(SIZES))} sizes in {len(SIZES)} steps\n"
    )
    torch.backends.cudnn.benchmark = True
    model = resnet18(num_classes=10).cuda()
    x, y = torch.randn(MINIBATCH, 3, 32, 32, device="cuda"), torch.randint(0, 10, (MINIBATCH,), device="cuda")
    makers: dict[str, Any] = {"plain loop, eager": plain}
    for rule, kind in (("linear", vbs.LinearRuleOptimizer), ("AdaScale", vbs.AdaScaleOptimizer)):
        for name, capture in (("eager", eager), ("torch.compile", compiled), ("CUDA graph", captured)):
            makers[f"{rule}, {name}"] = partial(ours, kind, capture)
    models = {name: copy.deepcopy(model) for name in makers}
    sides = {name: make(models[name], x, y) for name, make in makers.items()}
    for replay in sides.values():
        replay()
    graphs = counters["stats"]["unique_graphs"]
    seconds = in_turn(sides, repeats=options.repeats, warmup=0)  # each side has already made one replay
    print_comparison(seconds, peer="plain loop, eager")
    print(
        f"graphs that torch.compile made: {graphs} in the first replay, {counters['stats']['unique_graphs']} after all"
    )


if __name__ == "__main__":
    main()
