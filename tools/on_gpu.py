"""Train on a GPU and on the CPU, and print how far the weights differ and whether the host has waited for the GPU.

PYTHONPATH=.:test/support python tools/on_gpu.py
"""

import argparse
import logging
import math
from functools import partial

import torch
from every_operator import results
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.cores import cuda_operations
from variable_batch_size.cores.communicator import SingleProcess

TRACE = [4 * n for n in (2, 1, 3, 6, 1, 2, 5, 4, 4, 1, 2, 8)] * 4
NUM_WARM = 40  # steps in which state is made, and 20 estimates, which begin with the tenth update for AdamScale
INNER = {
    "SGD": lambda groups, **form: torch.optim.SGD(groups, lr=0.05, momentum=0.9, **form),
    "Adam": lambda groups, **form: torch.optim.Adam(groups, lr=0.01, eps=0.01, weight_decay=0.01, **form),
    "AdamW": lambda groups, **form: torch.optim.AdamW(groups, lr=0.01, eps=0.01, **form),
}
RULES = ("linear", "root", "adascale", "surge", "adamscale", "adam")


class Training:
    """A small network on fixed data; the gradients of some steps are not finite."""

    def __init__(self, rule, inner, device, *, smooth_steps=0, **form):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.model.to(device, torch.float64)
        groups = [{"params": list(self.model[:2].parameters())}, {"params": list(self.model[3].parameters())}]
        self.sampler = vbs.CustomSampler(dataset_size=10_000, trace=TRACE, minibatch_size=4)
        self.optimizer = vbs.CustomOptimizer(
            INNER[inner](groups, **form),
            self.sampler,
            rule=vbs.rules.make_rule(rule),
            ref_batchsize=8,
            model=self.model,
            smooth_steps=smooth_steps,
            clip_grad_norm=1.0,
        )
        generator = torch.Generator().manual_seed(1)
        self.minibatches = torch.randn(sum(TRACE) // 4, 4, 6, generator=generator).to(device, torch.float64)
        self.device = device

    def run(self, bad=()):
        """The weights after all steps; raises if the host waits for the GPU after the first steps."""
        optimizer = self.optimizer
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        for number, _ in enumerate(self.sampler):
            if self.device == "cuda":
                torch.cuda.set_sync_debug_mode("error" if optimizer.steps_done >= NUM_WARM else "default")
            loss = self.model(self.minibatches[number]).square().mean()
            (loss * math.inf if optimizer.steps_done in bad else loss).backward()
            if optimizer.step():
                cosine.step()
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        return self.model.state_dict()


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    logging.disable(logging.WARNING)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    check_formulas()
    print(f"{'rule':12}{'inner':8}{'form':12}{'smooth':8}{'way':18}{'difference':14}{'skipped':10}waits")
    for rule in RULES:
        for inner in INNER:
            if rule in ("adamscale", "adam") and inner == "SGD":
                continue
            for form in ({"fused": True}, {}):
                for smooth_steps in (0, 3):
                    one(rule, inner, form, smooth_steps)
    print(f"\n{'other runs':46}{'difference':14}noise scale on the GPU, on the CPU")
    for name, program in OTHERS.items():
        (found, noise), (expected, truth) = program("cuda"), program("cpu")
        print(f"{name:46}{apart(found, expected):<14.1e}{noise:.6g}, {truth:.6g}")


def text_of(length):
    return torch.randint(0, 20, (length,), generator=torch.Generator().manual_seed(length))


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).to(device, torch.float64)


def samples(device):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(640, 6, dtype=torch.float64, generator=generator).to(device)


def with_open_steps(device, rule="linear", **options):
    """Steps of one to five minibatches of different lengths."""
    model, data = network(device), samples(device)
    sampler = vbs.CustomSampler(dataset_size=len(data), trace=vbs.OpenSteps(), minibatch_size=8)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.Optimizer(inner, sampler, rule=rule, ref_batchsize=8, model=model, **options)
    for number, indices in enumerate(sampler):
        parts = data[indices].split(8 - number % 5)
        for minibatch in optimizer.minibatches(parts * (1 + number % 3)):
            model(minibatch).square().sum().backward()
            optimizer.step(weight=len(minibatch))
    return model.state_dict(), optimizer.noise_scale


def with_noise(device, rule="surge", inner=torch.optim.AdamW, fused=False, **options):
    """Steps of one and two minibatches, in which noise is measured."""
    model, data = network(device), samples(device)
    sampler = vbs.CustomSampler(dataset_size=len(data), trace=[8, 16] * 20, minibatch_size=8)
    inner = inner(model.parameters(), lr=0.01, fused=fused, **({} if inner is torch.optim.SGD else {"eps": 0.01}))
    optimizer = vbs.Optimizer(inner, sampler, rule=rule, ref_batchsize=8, model=model, **options)
    for indices in sampler:
        model(data[indices]).square().mean().backward()
        optimizer.step()
    return model.state_dict(), optimizer.noise_scale


def with_token_budget(device, fused=False):
    lengths = [5, 3, 9, 2, 30, 4, 4, 12, 6, 5] * 30
    budget = vbs.TokenBudget(lengths, trace="0:128 8:256", tokens=64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).to(device, torch.float64)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
    optimizer = vbs.Optimizer(inner, budget, rule="adascale", ref_batchsize=128, model=model)
    for indices in budget:
        texts = [text_of(lengths[index]).to(device) for index in indices]
        inputs, targets = (torch.cat([text[part] for text in texts]) for part in (slice(-1), slice(1, None)))
        nn.functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
        optimizer.step(weight=len(targets))
    return model.state_dict(), optimizer.noise_scale


def with_grad_scaler(device, rule="linear", fused=False, measure_noise=True, **options):
    """Steps of one to four minibatches with scales that grow; some minibatches are left out, some are not finite."""
    model, data = network(device), samples(device)
    model.insert(2, nn.BatchNorm1d(8, device=device, dtype=torch.float64))
    sampler = vbs.CustomSampler(dataset_size=len(data), trace=[8, 32, 16, 24] * 5, minibatch_size=8)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
    optimizer = vbs.Optimizer(
        inner, sampler, rule=rule, ref_batchsize=8, model=model, measure_noise=measure_noise, **options
    )
    scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=5)
    for number, indices in enumerate(sampler):
        loss = model(data[indices]).square().mean()
        if number % 7 == 3 or number % 11 == 1:
            optimizer.step()
            continue
        scaler.scale(loss * math.inf if number % 9 == 4 else loss).backward()
        if number % 3 == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    counts = {"scale": torch.tensor(scaler.get_scale()), "skipped": torch.tensor(optimizer.steps_skipped)}
    return model.state_dict() | counts, optimizer.noise_scale


OTHERS = {
    "open steps, noise measured": partial(with_open_steps, measure_noise=True),
    "open steps, exact": partial(with_open_steps, measure_noise=True, exact=True),
    "open steps, AdaScale one step late": partial(with_open_steps, rule="adascale"),
    "token budget, AdaScale": with_token_budget,
    "token budget, AdaScale, fused": partial(with_token_budget, fused=True),
    "noise by norm layers": partial(with_noise, measure_noise="norm layers"),
    "noise by norm layers, AdaScale, fused": partial(
        with_noise, rule="adascale", measure_noise="norm layers", fused=True
    ),
    "noise in the norm of AdamW, AdaScale, fused": partial(
        with_noise, rule="adascale", measure_noise="own norm", fused=True
    ),
    "noise in the norm of AdamW": partial(with_noise, measure_noise="own norm"),
    "GradScaler": with_grad_scaler,
    "GradScaler, fused, clipped": partial(with_grad_scaler, fused=True, clip_grad_norm=1.0),
    "GradScaler, exact": partial(with_grad_scaler, exact=True),
    "GradScaler, AdaScale": partial(with_grad_scaler, rule="adascale"),
    "GradScaler, AdaScale, fused": partial(with_grad_scaler, rule="adascale", fused=True),
    "GradScaler, AdaScale, noise by norm layers": partial(
        with_grad_scaler, rule="adascale", measure_noise="norm layers"
    ),
}


def check_formulas():
    """Raise unless the kernels of all operators have the same results as operations on tensors."""
    if not cuda_operations.are_available(torch.device("cuda")):
        print("Formulas are operations of torch: this version compiles no kernels")
        return
    tensors = results(SingleProcess().as_operation, "cpu", torch.float64)
    kernels = results(cuda_operations.as_operation, "cuda", torch.float64)
    torch.testing.assert_close(kernels, tensors, equal_nan=True, rtol=1e-14, atol=0)
    print(f"Formulas are a kernel, with the same {sum(map(len, tensors))} results as operations on tensors")


def apart(found, expected):
    return max((found[name].cpu().double() - expected[name].double()).abs().max().item() for name in expected)


def one(rule, inner, form, smooth_steps):
    training = Training(rule, inner, "cuda", smooth_steps=smooth_steps, **form)
    host = Training(rule, inner, "cpu", smooth_steps=smooth_steps, **form)
    way = training.optimizer._flow.way
    name = "fused" if form else "default"
    bad = (4, 7, 11) if training.optimizer.skip_nonfinite else ()
    head = f"{rule:12}{inner:8}{name:12}{smooth_steps:<8}{way:18}"
    try:
        found = training.run(bad)
    except RuntimeError as error:
        torch.cuda.set_sync_debug_mode("default")
        print(f"{head}{error}")
        return
    expected = host.run(bad)
    skipped = f"{training.optimizer.steps_skipped}/{host.optimizer.steps_skipped}"
    print(f"{head}{apart(found, expected):<14.1e}{skipped:10}none")


if __name__ == "__main__":
    main()
