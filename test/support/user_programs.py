"""Random programs of user actions around a minibatch, run with the library and with a plain loop.

A program depends only on its seed: the actions for a minibatch depend on its index in the run, never on its core.
"""

import random
from dataclasses import dataclass

import torch
from torch import nn

import variable_batch_size as vbs

MINIBATCH = 4
NUM_SAMPLES = 90
REF_BATCHSIZE = 8


@dataclass
class Program:
    """The actions of a user.

    Args:
        seed: of the weights and data.
        sizes: the trace.
        epochs: which epochs are trained, in which order.
        deeds: the modifications of each minibatch's gradient, by its index in the run.
        events: the actions before a step, by its index in the run.
        is_adam: whether the inner optimizer is AdamW instead of SGD with momentum and weight decay.
    """

    seed: int
    sizes: list[int]
    epochs: list[int]
    deeds: list[str]
    events: dict[int, str]
    is_adam: bool


def draw(seed: int, *, deeds=None, events=None) -> Program:
    rng = random.Random(seed)
    sizes = [MINIBATCH * rng.choice([1, 1, 2, 3, 4, 5, 7]) for _ in range(40)]
    schedule = vbs.Schedule(vbs.Trace.of(sizes), dataset_size=NUM_SAMPLES, minibatch_size=MINIBATCH)
    last = schedule.num_epochs - 2
    epochs = [rng.randint(0, last) for _ in range(rng.randint(1, 3))]  # including skipped and repeated ones
    deeds = [rng.choice(deeds or list(DEEDS)) for _ in range(97)]
    numbers = rng.sample(range(30), rng.randint(0, 6))
    found = {number: rng.choice(events or list(EVENTS)) for number in numbers}
    return Program(seed, sizes, epochs, deeds, found, is_adam=rng.random() < 0.4)


class Network(nn.Module):
    """Convolution, BatchNorm and a head, an unused parameter, and one that only some minibatches use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(12, 3)
        self.sometimes = nn.Linear(12, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, is_used: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.conv(x))).flatten(1)
        return self.head(hidden) + (self.sometimes(hidden) if is_used else 0)


def make(program: Program, device: torch.device) -> tuple[nn.Module, nn.Parameter, torch.Tensor, torch.Tensor]:
    """The model, a parameter that may be added to the optimizer later, and the data."""
    generator = torch.Generator().manual_seed(program.seed)
    dtype = torch.float32 if device.type == "xla" else torch.float64
    model = Network().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.5)
    extra = nn.Parameter(torch.full((3,), 0.25, dtype=dtype).to(device))
    x = torch.randn(NUM_SAMPLES, 1, 3, 3, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
    return model.to(device), extra, x.to(device), y.to(device)


def inner_of(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    if program.is_adam:
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)


# ---------------------------------------------------------------------------------------------------------- minibatches


def once(model, loss):
    loss.backward()


def twice(model, loss):
    (0.3 * loss).backward(retain_graph=True)
    (0.7 * loss).backward()


def create_graph(model, loss):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a reference cycle, which accumulating the gradient breaks
        loss.backward(create_graph=True)


def clamped(model, loss):
    loss.backward()
    for p in with_gradient(model):
        p.grad = p.grad.clamp(-0.05, 0.05)


def masked(model, loss):
    loss.backward()
    for p in with_gradient(model):
        p.grad = p.grad * (p.detach() > 0)


def scaled(model, loss):
    loss.backward()
    for p in with_gradient(model):
        p.grad *= 3


def without_head(model, loss):
    loss.backward()
    model.head.weight.grad = None


def without_any(model, loss):
    loss.backward()
    for p in model.parameters():
        p.grad = None


def assigned(model, loss):
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    for p, gradient in zip(parameters, found, strict=True):
        p.grad = gradient


def one_tensor_for_all_time(model, loss):
    """A buffer of the user that is reused for every minibatch."""
    loss.backward()
    buffer = model.__dict__.setdefault("own_buffer", torch.zeros_like(model.head.weight))
    if model.head.weight.grad is not None:
        buffer.copy_(model.head.weight.grad).mul_(2)
        model.head.weight.grad = buffer


def clipped(model, loss):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(with_gradient(model), 0.1)


def hooked(model, loss):
    hooks = [p.register_hook(lambda gradient: gradient * 0.5) for p in model.parameters() if p.requires_grad]
    loss.backward()
    for hook in hooks:
        hook.remove()


def unused(model, loss):
    """The forward pass skips a layer (see :func:`loss_of`)."""
    loss.backward()


DEEDS = {
    deed.__name__: deed
    for deed in (
        once,
        twice,
        create_graph,
        clamped,
        masked,
        scaled,
        without_head,
        without_any,
        assigned,
        one_tensor_for_all_time,
        clipped,
        hooked,
        unused,
    )
}


def with_gradient(model):
    return [p for p in model.parameters() if p.grad is not None]


def run_minibatch(program, number, model, extra, x, y):
    """Forward, backward, and the user's modifications of the gradients of this minibatch."""
    name = program.deeds[number % len(program.deeds)]
    loss = nn.functional.cross_entropy(model(x, is_used=name != "unused") * (1 + extra), y)
    if any(p.requires_grad for p in model.parameters()):
        DEEDS[name](model, loss)
    return loss


# --------------------------------------------------------------------------------------------------------------- events


def freeze(model, optimizer, extra):
    model.conv.requires_grad_(False)


def unfreeze(model, optimizer, extra):
    model.conv.requires_grad_(True)


def convert(model, optimizer, extra):
    model.float().double()


def change_layout(model, optimizer, extra):
    model.to(memory_format=torch.channels_last)


def add_group(model, optimizer, extra):
    if not any(extra is p for group in optimizer.param_groups for p in group["params"]):
        optimizer.add_param_group({"params": [extra]})


def evaluate(model, optimizer, extra):
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 1, 3, 3, dtype=extra.dtype, device=extra.device))
    model.train()


def zero(model, optimizer, extra):
    """Call zero_grad() by habit; there is nothing to zero."""
    optimizer.zero_grad()


EVENTS = {event.__name__: event for event in (freeze, unfreeze, convert, change_layout, add_group, evaluate, zero)} | {
    "leave": None
}  # the epoch, after a backward pass without step()


# ----------------------------------------------------------------------------------------------------------------- runs


def run(program, device="cpu", rule=None):
    """Run with the library on this core; returns the weights."""
    device = torch.device(device) if isinstance(device, str) else device
    model, extra, x, y = make(program, device)
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=program.sizes, minibatch_size=MINIBATCH, seed=1)
    schedule = sampler.schedule
    optimizer = vbs.CustomOptimizer(
        inner_of(program, model), sampler, rule=rule or vbs.rules.LinearRule(), ref_batchsize=REF_BATCHSIZE, model=model
    )
    num_steps = first_minibatch = 0  # in the run, and before the step
    gains = []
    for epoch in program.epochs:
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        within = 0
        for indices in sampler:
            step = schedule.steps(epoch)[optimizer.epoch_step]
            if not within:
                event = program.events.get(num_steps)
                if event == "leave":
                    num_steps += 1
                    run_minibatch(program, 0, model, extra, x[indices], y[indices])
                    break
                if event is not None:
                    EVENTS[event](model, optimizer, extra)
            number = first_minibatch + (sampler.rank + within * sampler.num_replicas) % schedule.num_minibatches(step)
            run_minibatch(program, number, model, extra, x[indices], y[indices])
            within += 1
            before = optimizer.steps_done
            optimizer.step()
            if optimizer.steps_done > before:
                num_steps, within = num_steps + 1, 0
                first_minibatch += schedule.num_minibatches(step)
                gains.append(optimizer.factor())
    return weights_of(model, extra), gains


def run_many(programs, backend, rule=None):
    """Several programs in one launch."""
    import scenarios

    return [run(program, scenarios.device_of(backend), rule) for program in programs]


def run_plainly(program):
    """The same without the library: each minibatch's gradient separately, then their mean."""
    model, extra, x, y = make(program, torch.device("cpu"))
    sampler = vbs.CustomSampler(
        dataset_size=NUM_SAMPLES, trace=program.sizes, minibatch_size=MINIBATCH, seed=1, num_replicas=1, rank=0
    )
    optimizer = inner_of(program, model)
    num_steps = num_minibatches = 0
    for epoch in program.epochs:
        sampler.set_epoch(epoch)
        minibatches = iter(sampler)
        for step in sampler.schedule.steps(epoch):
            event = program.events.get(num_steps)
            num_steps += 1
            if event == "leave":
                break
            if event is not None:
                EVENTS[event](model, optimizer, extra)
            gradients = []
            for _ in range(sampler.schedule.num_minibatches(step)):
                indices = next(minibatches)
                clear(model, extra)
                run_minibatch(program, num_minibatches, model, extra, x[indices], y[indices])
                num_minibatches += 1
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                gradients.append({p: p.grad.detach().clone() for p in parameters if p.grad is not None})
            clear(model, extra)
            update_with_mean(optimizer, gradients, sampler.schedule.batch_size(step) / REF_BATCHSIZE)
            clear(model, extra)
    return weights_of(model, extra)


def update_with_mean(optimizer, gradients, scale):
    for group in optimizer.param_groups:
        for p in group["params"]:
            found = [of_minibatch[p] for of_minibatch in gradients if p in of_minibatch]
            p.grad = sum(found[1:], start=found[0]) / len(gradients) if found else None
        group["lr"] *= scale
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] /= scale


def clear(model, extra):
    for p in (*model.parameters(), extra):
        p.grad = None


def weights_of(model, extra):
    return {**{name: p.detach().cpu().clone() for name, p in model.named_parameters()}, "extra": extra.detach().cpu()}


def largest_difference(weights, other):
    return max((weights[name].double() - other[name].double()).abs().max().item() for name in other)
