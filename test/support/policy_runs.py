"""Runs with policies on any number of cores, and their replays."""

import scenarios
import torch
import torch.distributed as dist
from small_runs import classified
from torch import nn
from torch.utils.data import DataLoader

import variable_batch_size as vbs

MINIBATCH, REF_BATCHSIZE, NUM_SAMPLES, NUM_EPOCHS = 8, 16, 400, 2
STOPPED = {"num_epochs": 3}  # for decisions after each of two stops

POLICIES = {
    "autoscale": lambda: vbs.Autoscale(max_batch_size=160, every=6, lead=4),
    "per core": lambda: vbs.policies.PerCore(16, every=6, lead=4),
    "norm test": lambda: vbs.policies.NormTest(eta=0.3, max_batch_size=200, max_growth=1.6, every=6, lead=4),
    "critical batch": lambda: vbs.policies.CriticalBatch(cost=0.4, max_batch_size=96, every=6, lead=4),
    "on plateau": lambda: vbs.policies.OnPlateau(patience=1, factor=1.5, every=6, lead=4),
    "function": lambda: vbs.policies.FunctionPolicy(_sawtooth, every=6, lead=4),
}


def _sawtooth(situation):
    return MINIBATCH * (1 + situation.steps_done % 7)


def network():
    """Weights from a separate generator: virtual XLA cores are threads, which share the others."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 3)
    return model


def _slow_down_updates(model, optimizer):
    """By the clock of the policy, a minibatch takes 1 s, and an update three more.

    By the clocks of other cores an update takes no time: if they decided, they would choose smaller batches.
    """
    seconds, of_update = [0.0], 0 if optimizer.sampler.rank else 3
    model.register_forward_hook(lambda *_: seconds.append(seconds.pop() + 1))
    optimizer.inner.register_step_post_hook(lambda *_: seconds.append(seconds.pop() + of_update))
    optimizer._driver.clock = lambda: seconds[0]


def train(trace, *, backend="gloo", directory=None, workers=0, stop_after=None, num_epochs=NUM_EPOCHS, exact=False):
    """Train to the end, stop, or resume; returns the weights and the batch sizes of all steps."""
    device = scenarios.device_of(backend)
    model, data = network().to(device), classified(NUM_SAMPLES, 6, num_classes=3)
    sampler = vbs.CustomSampler(data, trace=trace, minibatch_size=MINIBATCH)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=REF_BATCHSIZE, model=model, exact=exact)
    if isinstance(trace, vbs.Policy):  # its decisions must not depend on the machine
        _slow_down_updates(model, optimizer)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=1 if stop_after else None)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    with vbs.Log(optimizer, every=2, to=[]) as log:
        for _ in checkpoint.epochs(num_epochs):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
                loss.backward()
                optimizer.step()
                log.step(loss)
                checkpoint.step()
                if stop_after and optimizer.steps_done >= stop_after and not optimizer.is_accumulating:
                    return None
    weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return weights, list(sampler.schedule.trace)[: optimizer.steps_done]


def run_all(backend, names, stopped=None, stop_after=None):
    """Policies with their replays on these cores; and a run stopped on other cores, resumed and stopped again."""
    torch.set_num_threads(1)
    results = {}
    for name in names:
        workers = 2 if name == "autoscale" and backend == "gloo" else 0
        weights, rows = train(POLICIES[name](), backend=backend, workers=workers)
        results[name] = {"weights": weights, "rows": rows, "replayed": train(rows, backend=backend)[0]}
    if backend == "gloo":
        results["exact"] = train(POLICIES["norm test"](), exact=True)
    if stopped is not None:
        train(POLICIES["autoscale"](), directory=stopped, stop_after=stop_after, **STOPPED)
    return results


# ----------------------------------------------------------------- cores that change, gradients of a known noise scale

NOISE_SCALE, ACCUMULATING, UPDATING = 256.0, 1.0, {1: 1.5, 2: 4.0}  # in samples; seconds, by number of cores


def train_where_cores_change(directory, num_steps, every):
    """Steps on one and on two cores in turn, each time resumed from the checkpoint, by a clock of exact times.

    Returns:
        the cores and the batch size of each step.
    """
    rank, alone, made = dist.get_rank(), dist.new_group([0]), []
    for first in range(0, num_steps, every):
        cores = 1 + first // every % 2
        if rank < cores:
            made += _train_on(cores, alone if cores == 1 else None, directory, first + every)
        dist.barrier()
    return made


def _train_on(cores, process_group, directory, stop_after):
    model = nn.Linear(100, 1, bias=False).double()
    policy = vbs.Autoscale(max_batch_size=1024)
    sampler = vbs.CustomSampler(200_000, policy, minibatch_size=MINIBATCH, process_group=process_group)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=REF_BATCHSIZE, model=model)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=None)
    seconds, made = [0.0], []
    optimizer._driver.clock = lambda: seconds[0]
    inner.register_step_post_hook(lambda *_: seconds.append(seconds.pop() + UPDATING[cores] - ACCUMULATING))
    generator = torch.Generator().manual_seed(stop_after + sampler.rank)
    spread = (NOISE_SCALE / MINIBATCH) ** 0.5  # of a minibatch's mean around 1, the true gradient
    for _ in checkpoint.epochs(1):
        for _ in sampler:
            seconds[0] += ACCUMULATING
            model.weight.grad = 1 + spread * torch.randn(model.weight.shape, generator=generator, dtype=torch.float64)
            optimizer.step()
            if not optimizer.is_accumulating:
                made.append((cores, optimizer.batch_size))
                if optimizer.steps_done == stop_after:
                    checkpoint.save()
                    return made
    raise AssertionError("the epoch must be longer")
