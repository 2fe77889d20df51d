"""Training runs on a CPU and on TorchTPU's device, with a batch size that is new in most steps."""

import scenarios
import torch
from count_reads import CountReads
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import variable_batch_size as vbs
from variable_batch_size.optim.attachments import Follower

MINIBATCH = 8
REF_BATCHSIZE = 32
# 17 batch sizes of 1 to 17 minibatches; programs may be compiled in the first steps. These have one minibatch, a few
# and many, as TorchTPU starts another program when many operations are deferred
WARM_UP = 7
SIZES = [MINIBATCH * n for n in (3, 1, 2, 1, 4, 9, 3, 1, 17, 5, 8, 16, 6, 7, 2, 10, 11, 12, 1, 13, 14, 15)]
NUM_STEPS = len(SIZES)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def capturable_adamw(model):
    is_capturable = next(model.parameters()).device.type != "cpu"  # which a CPU refuses
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, capturable=is_capturable)


def fused_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3, fused=True)


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, fused=True)


# name: rule, inner optimizer, options of the optimizer
RUNS = {
    "linear": ("linear", sgd, {}),
    "root": ("root", sgd, {}),
    "constant": ("constant", sgd, {}),
    "linear_momentum": ("linear_momentum", sgd, {}),
    "legw": ("legw:500", sgd, {}),
    "adascale": ("adascale", sgd, {}),
    "adam": ("adam", adamw, {}),
    "adam, capturable": ("adam", capturable_adamw, {}),
    "adam, half-life": ("adam:half-life", adamw, {}),
    "adamscale": ("adamscale", adamw, {}),
    "surge": ("surge", adamw, {}),
    "smooth": ("linear", sgd, {"smooth_steps": 3}),
    "smooth adascale": ("adascale", sgd, {"smooth_steps": 3, "max_factor": 4.0}),
    "clipped": ("linear", sgd, {"clip_grad_norm": 0.5}),
    "careful": ("linear", sgd, {"skip_nonfinite": True}),
    "measured": ("linear", sgd, {"measure_noise": True}),
    "bucket views": ("linear", sgd, {"gradient_as_bucket_view": True}),
    "seeded": ("linear", sgd, {"seed_minibatches": True}),
}
FUSED = {
    name: (rule, {sgd: fused_sgd, adamw: fused_adamw}[inner], {"smooth_steps": 3, **options})
    for name, (rule, inner, options) in RUNS.items()
    if name not in ("adam, capturable", "bucket views", "seeded", "smooth", "smooth adascale")
}
MANY_SIZES = [MINIBATCH * n for n in (*(s // MINIBATCH for s in SIZES[:WARM_UP]), *range(48, 0, -1))]
WEIGHTED = {"weighted": RUNS["linear"], "weighted adascale": RUNS["adascale"], "weighted adam": RUNS["adam"]}
SCHEDULES = {
    "cosine, samples": lambda scheduler, optimizer: Follower(scheduler, "samples", REF_BATCHSIZE).follow(optimizer.run),
    "cosine, progress": lambda scheduler, optimizer: Follower(scheduler, "progress", 1).follow(optimizer.run),
}


def cosine(optimizer):
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, T_max=400)]
    return SequentialLR(optimizer, parts, milestones=[4])


def network():
    torch.manual_seed(0)
    return scenarios.Net()


def train(device, rule, inner, options=None, *, trace=SIZES, weight=None, follow=None, asks=True):
    """One run: the weights, the factors, and the programs that each step has compiled and the reads it has made."""
    num_steps = len(trace) if isinstance(trace, list) else NUM_STEPS
    model, (x, y) = network().to(device), scenarios.data()
    sampler = vbs.CustomSampler(dataset_size=100_000, trace=trace, minibatch_size=MINIBATCH)
    settings = {"min_updates": 1} if rule == "adamscale" else {}
    optimizer = vbs.CustomOptimizer(
        inner(model),
        sampler,
        rule=vbs.rules.make_rule(rule, **settings),
        ref_batchsize=REF_BATCHSIZE,
        model=model,
        **(options or {}),
    )
    scheduler = None if follow is None else cosine(optimizer)
    programs, reads, factors, lrs, before = [], [0], [], [], num_programs(device)
    for number, indices in enumerate(sampler):
        samples = [index % len(x) for index in indices]
        losses = cross_entropy(model(x[samples].to(device)), y[samples].to(device), reduction="none")
        tokens = 1 + number % 5
        (losses.mean() if weight is None else losses.mean() * tokens).backward()
        with CountReads() as count:
            optimizer.step(weight=None if weight is None else weight(tokens, device))
            if scheduler is not None:
                follow(scheduler, optimizer)
        reads[-1] += count.num_reads
        if optimizer.steps_done > len(programs):
            now = num_programs(device)
            programs.append(now - before)
            before = now
            reads.append(0)
            if asks:  # which reads
                factors.append(optimizer.factor())
                lrs.append(optimizer.current_lr())
        if optimizer.steps_done == num_steps:
            break
    return {
        "state": scenarios.state_of(model),
        "programs": programs,
        "reads": reads[:-1],
        "factors": factors,
        "lrs": lrs,
        "sizes": list(sampler.schedule.trace)[:num_steps],
    }


def num_programs(device):
    if device != "tpu":
        return 0
    import torch_tpu_on_cpu

    return torch_tpu_on_cpu.num_programs()


def number(tokens, device):
    return tokens


def tensor(tokens, device):
    return torch.tensor(float(tokens)).to(device)


def largest_difference(state, other):
    """Of weights: TorchTPU 0.2.0 does not update the statistics of BatchNorm as the CPU does, with plain PyTorch.

    Each process counts its own minibatches there.
    """
    names = [name for name in state if "running" not in name and "tracked" not in name]
    return max((state[name] - other[name]).abs().max().item() for name in names)
