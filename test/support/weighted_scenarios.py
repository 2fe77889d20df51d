"""Training on padded text of very different lengths, weighted by tokens, on every type and number of cores."""

import functools
import math
import threading

import numpy as np
import torch
from scenarios import device_of
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs

MINIBATCH = 2
REF_BATCHSIZE = 6
VOCABULARY = 7
PADDING = -1
# 1 to 8 minibatches: uneven shares and idle cores
TRACE = [MINIBATCH * n for n in (5, 1, 3, 2, 7, 4, 1, 6, 8)]
# from a sample of 25 tokens to one of a single token, without a target
LENGTHS = [25, 2, 1, 3, 9, 1, 4, 19, 2, 2, 24, 3, 1, 1, 1, 1, 6, 2] + [13, 1, 5, 2, 3, 21, 2, 2] * 7
NOTHING = range(2 * 22, 2 * 23)  # the samples of step 6, which has one minibatch
for sample in (*NOTHING, 2 * 13, 2 * 13 + 1):  # and a minibatch of step 4
    LENGTHS[sample] = 1
LOG_STEPS = 2

WEIGHTS = {
    "int": int,
    "float": float,
    "numpy int64": np.int64,
    "numpy float32": np.float32,
    "numpy array": lambda count: np.array([count]),
    "int64": torch.tensor,
    "float32": lambda count: torch.tensor(count, dtype=torch.float32),
    "one element": lambda count: torch.tensor([count]),
}


class StreamReader(nn.Module):
    """Predicts each token from the mean of the previous ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 5)
        self.hidden = nn.Linear(5, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.tokens(tokens.clamp(min=0))
        counts = torch.arange(1, tokens.shape[1] + 1, device=tokens.device, dtype=embedded.dtype)
        return self.head(torch.tanh(self.hidden(embedded.cumsum(1) / counts.view(1, -1, 1))))


_one_at_a_time = threading.Lock()  # because cores in threads share a generator


def reader(dtype=torch.float64) -> nn.Module:
    with _one_at_a_time:
        torch.manual_seed(0)
        return StreamReader().to(dtype)


@functools.cache
def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def padded(samples: list[int], length: int | None = None) -> torch.Tensor:
    """Samples as a batch, padded to the longest, or to a length."""
    length = length or max(LENGTHS[sample] for sample in samples)
    rows = [
        nn.functional.pad(text, (0, length - len(text)), value=PADDING) for text in map(texts().__getitem__, samples)
    ]
    return torch.stack(rows)


def loss_of(model: nn.Module, tokens: torch.Tensor, reduction: str) -> torch.Tensor:
    targets = tokens[:, 1:].flatten()
    if not len(targets):
        return model(tokens).sum() * 0
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets, ignore_index=PADDING, reduction=reduction)


def num_targets(samples: list[int]) -> int:
    return sum(LENGTHS[sample] - 1 for sample in samples)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)


def sgd_at_rest(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, lr=0.0)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


# name of the run: rule, inner optimizer, options of the optimizer
RUNS = {
    "linear": ("linear", sgd, {}),
    "root": ("root", sgd, {}),
    "linear_momentum": ("linear_momentum", sgd, {}),
    "adam": ("adam", adamw, {}),
    "adam:half-life": ("adam:half-life", adamw, {}),
    "adascale": ("adascale", sgd, {}),
    "adamscale": ("adamscale", adamw, {}),
    "surge": ("surge", adamw, {}),
    "clipped": ("linear", sgd, {"clip_grad_norm": 0.2}),
    "careful": ("linear", sgd, {"skip_nonfinite": True}),
    "careless": ("linear", sgd, {"skip_nonfinite": False}),
    "measured": ("linear", sgd, {"measure_noise": True}),
    "measured at rest": ("linear", sgd_at_rest, {"measure_noise": True}),
    "adascale at rest": ("adascale", sgd_at_rest, {}),
}
ON_EAGER_DEVICES = {
    "scaled": ("linear", sgd, {"scale": 1024.0}),
    "scaled adascale": ("adascale", sgd, {"scale": 1024.0}),
    "kept": ("linear", sgd, {"gradient_as_bucket_view": True}),
    "kept adascale": ("adascale", sgd, {"gradient_as_bucket_view": True}),
    "exact": ("linear", sgd, {"exact": True}),
    "exact adascale": ("adascale", sgd, {"exact": True}),
}
ALL_RUNS = {**RUNS, **ON_EAGER_DEVICES}
# what distinguishes the others is distributed over two processes as over four
ON_FOUR_PROCESSES = [
    *("linear", "adam", "adascale", "clipped", "measured", "measured at rest", "adascale at rest"),
    *("scaled adascale", "kept adascale", "exact"),
]
IN_SINGLE_TOO = ("linear", "linear_momentum", "adam", "adascale", "adamscale", "kept adascale", "exact adascale")


def train(backend, rule, inner, options, *, dtype=torch.float64, weight=int):
    """One run, with the minibatch weights passed as `weight` converts them."""
    device = device_of(backend)
    options = dict(options)
    scaler = torch.amp.GradScaler("cpu", init_scale=options.get("scale", 1.0), enabled="scale" in options)
    options.pop("scale", None)
    model = reader(dtype).to(device)
    sampler = vbs.CustomSampler(dataset_size=len(LENGTHS), trace=TRACE, minibatch_size=MINIBATCH, shuffle=False)
    optimizer = vbs.CustomOptimizer(
        inner(model),
        sampler,
        rule=vbs.rules.make_rule(rule, **({"min_updates": 1} if rule == "adamscale" else {})),
        ref_batchsize=REF_BATCHSIZE,
        model=model,
        **options,
    )
    records, updates, gains = [], [], []
    log = vbs.Log(optimizer, every=LOG_STEPS, to=[records.append])
    for samples in sampler:
        # XLA compiles for every shape
        tokens = padded(samples, max(LENGTHS) if backend == "xla" else None).to(device)
        loss = loss_of(model, tokens, "sum")
        scaler.scale(loss).backward()
        before = optimizer.steps_done
        scaler.step(optimizer, weight=weight(num_targets(samples)))
        scaler.update()
        log.step(loss)
        if optimizer.steps_done > before:
            updates.append(optimizer.updated)
            gains.append(optimizer.factor())
    measures = optimizer.rule.measures_noise or options.get("measure_noise", False)
    return {
        "state": {name: value.cpu().double() for name, value in model.state_dict().items()},
        "weight_done": optimizer.weight_done,
        "updates": updates,
        "factors": gains,
        "noise": vars(optimizer.noise) if measures else None,
        "records": records,
    }


# what a rule computes on the host does not depend on XLA, and what a core measures does not depend on their number
ON_ONE_XLA_CORE = [name for name in RUNS if name not in ("root", "adam:half-life", "surge")]
ON_TWO_XLA_CORES = ["linear", "adam", "adascale", "careful", "measured", "measured at rest", "adascale at rest"]


def run_all(backend, cores):
    """All runs that cores of a backend need; XLA uses single precision."""
    on_xla = {1: ON_ONE_XLA_CORE, 2: ON_TWO_XLA_CORES, 4: RUNS}
    in_single = on_xla[cores] if backend == "xla" else IN_SINGLE_TOO if cores < 4 else ()
    results = {(name, torch.float32): train(backend, *ALL_RUNS[name], dtype=torch.float32) for name in in_single}
    if backend != "xla":
        in_double = ON_FOUR_PROCESSES if cores == 4 else ALL_RUNS
        results |= {(name, torch.float64): train(backend, *ALL_RUNS[name]) for name in in_double}
    if backend != "xla" and cores < 4:
        results |= {kind: train(backend, *RUNS["adascale"], weight=weight) for kind, weight in WEIGHTS.items()}
    return results


# ---------------------------------------------------------------------------------------------------- by plain PyTorch


def steps_of_samples() -> list[list[list[int]]]:
    """The minibatches of every step."""
    starts = [sum(TRACE[:step]) for step in range(len(TRACE))]
    return [
        [list(range(first, first + MINIBATCH)) for first in range(start, start + size, MINIBATCH)]
        for start, size in zip(starts, TRACE, strict=True)
    ]


def all_of(minibatches: list[list[int]]) -> list[int]:
    return [sample for samples in minibatches for sample in samples]


@functools.cache
def train_plainly(rule, *, clip=None):
    """Every step as one padded batch with the mean loss over all tokens; also returns the expected losses of a log."""
    model = reader()
    optimizer = sgd(model)
    group, lr, weight_decay = optimizer.param_groups[0], 0.05, 1e-3
    losses = []
    for minibatches in steps_of_samples():
        samples = all_of(minibatches)
        num_tokens, scale = num_targets(samples), len(samples) / REF_BATCHSIZE
        if not num_tokens:
            losses.append((0.0, 0))
            continue
        optimizer.zero_grad()
        total = loss_of(model, padded(samples), "sum")
        losses.append((total.item(), num_tokens))
        (total / num_tokens).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        group["lr"] = lr * (math.sqrt(scale) if rule == "root" else scale)
        if rule == "linear_momentum":
            for p in model.parameters():
                p.grad *= len(minibatches)
            group["lr"], group["weight_decay"] = lr * MINIBATCH / REF_BATCHSIZE, weight_decay * len(minibatches)
        optimizer.step()
    parts = [losses[first : first + LOG_STEPS] for first in range(0, len(losses) - LOG_STEPS + 1, LOG_STEPS)]
    logged = [sum(loss for loss, _ in part) / sum(count for _, count in part) for part in parts]
    return {name: value.double() for name, value in model.state_dict().items()}, logged


@functools.cache
def train_by_means(rule, inner):
    """The library with equal minibatch weights, and losses that compensate for it."""
    model = reader()
    trace = [size for step, size in enumerate(TRACE) if step != 6]
    sampler = vbs.CustomSampler(
        dataset_size=len(LENGTHS), trace=trace, minibatch_size=MINIBATCH, num_replicas=1, rank=0
    )
    optimizer = vbs.CustomOptimizer(inner(model), sampler, rule=vbs.rules.make_rule(rule), ref_batchsize=REF_BATCHSIZE)
    read = iter(sampler)  # as a loop must
    for step, minibatches in enumerate(steps_of_samples()):
        if step == 6:
            continue
        share = len(minibatches) / num_targets(all_of(minibatches))
        for samples in minibatches:
            next(read)
            (loss_of(model, padded(samples), "sum") * share).backward()
            optimizer.step()
    return {name: value.double() for name, value in model.state_dict().items()}


@functools.cache
def noise_plainly(rule, inner):
    """AdaScale, AdamScale and the surge rule by plain PyTorch and the formulas, with all minibatch gradients stored."""
    model = reader()
    optimizer = inner(model)
    group, parameters = optimizer.param_groups[0], list(model.parameters())
    lr, estimates, shares, factors, tokens_seen, samples_seen = optimizer.defaults["lr"], [], [], [], 0, 0
    for minibatches in steps_of_samples():
        samples = all_of(minibatches)
        counts = [num_targets(minibatch) for minibatch in minibatches]
        size, num_tokens, num_used = len(samples), sum(counts), sum(count > 0 for count in counts)
        if not num_tokens:
            continue
        sums = [torch.autograd.grad(loss_of(model, padded(s), "sum"), parameters) for s in minibatches]
        mean = [sum(parts) / num_tokens for parts in zip(*sums, strict=True)]
        is_measurable = rule != "adamscale" or bool(factors)  # before its first update Adam has no second moment
        divisors = [divisor_of(optimizer, p) if rule == "adamscale" and factors else 1.0 for p in parameters]
        if is_measurable:
            tokens_seen, samples_seen = tokens_seen + num_tokens, samples_seen + size
        if is_measurable and num_used > 1:
            each = sum(
                square(gradients, divisors) / count for gradients, count in zip(sums, counts, strict=True) if count
            )
            of_mean = square(mean, divisors)
            variance = (each / num_tokens - of_mean) * num_tokens / (num_used - 1)
            decay = max(0.0, 1 - size / REF_BATCHSIZE / 1000)
            shares = [share * decay for share in shares] + [1 - decay]
            estimates.append((variance, of_mean - variance / num_tokens))
        scale, gain = size / REF_BATCHSIZE, min(1.0, size / REF_BATCHSIZE)
        if estimates:
            weighted = [(share * v, share * g) for share, (v, g) in zip(shares, estimates, strict=True)]
            variance, signal = (sum(column) / sum(shares) for column in zip(*weighted, strict=True))
            per_sample, signal = tokens_seen / samples_seen, max(signal, 0.0)
            reference = variance / (REF_BATCHSIZE * per_sample) + signal
            gain = reference / (variance / (size * per_sample) + signal)
        factors.append({"adascale": gain, "adamscale": math.sqrt(gain), "surge": gain / math.sqrt(scale)}[rule])
        group["lr"] = lr * factors[-1]
        for p, gradient in zip(parameters, mean, strict=True):
            p.grad = gradient
        optimizer.step()
    return dict(model.state_dict()), factors


def square(gradients, divisors):
    return sum(((g / divisor) ** 2).sum().item() for g, divisor in zip(gradients, divisors, strict=True))


def divisor_of(optimizer, p):
    state, group = optimizer.state[p], optimizer.param_groups[0]
    divisor = (state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"])).sqrt() + group["eps"]
    return divisor.where(divisor >= 0.1 * divisor.square().mean().sqrt(), torch.inf)
