"""Random programs of open steps: how many minibatches of which length each core has in each step."""

import contextlib
import random
import time
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn

import variable_batch_size as vbs

COUNTS = [5, 1, 7, 3, 8]  # minibatches of the steps of an epoch, of all that are read from the loader
LR, REF_BATCHSIZE, MINIBATCH_SIZE = 0.05, 8, 4


def net_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def loss_of(net, minibatch):
    data, target = (tensor.to(net[0].weight.dtype) for tensor in minibatch)
    return (net(data) - target).square().sum()


def program(seed, cores, num_steps=5):
    """For each step, the minibatches of each core; cores may have none, but not all of them."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(num_steps):
        steps.append([[] for _ in range(cores)])
        for _ in range(rng.randint(1, 3 * cores)):
            length = rng.randint(1, 5)
            shapes = [(length, 6), (length, 2)]
            minibatch = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
            steps[-1][rng.randrange(cores)].append(minibatch)
    return steps


def optimizer_of(net, trace=None, *, timeout=120, parameters_of=None, **options):
    sampler = vbs.CustomSampler(
        dataset_size=64, trace=trace or vbs.OpenSteps(timeout), minibatch_size=MINIBATCH_SIZE, shuffle=False
    )
    inner = torch.optim.SGD((parameters_of or net).parameters(), lr=LR, momentum=0.9)
    options = {"rule": "linear", "ref_batchsize": REF_BATCHSIZE, "model": net, **options}
    return vbs.Optimizer(inner, sampler, **options)


def rank_and_cores():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def plainly(steps, *, is_weighted, dtype=torch.float32):
    """The weights of plain PyTorch: every step is one batch of all samples, or the mean over its minibatches."""
    net = net_of(dtype)
    inner = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    for step in steps:
        minibatches = [minibatch for own in step for minibatch in own]
        inner.zero_grad()
        if is_weighted:
            batch = [torch.cat(parts) for parts in zip(*minibatches, strict=True)]
            (loss_of(net, batch) / len(batch[0])).backward()
        else:
            (sum(loss_of(net, minibatch) for minibatch in minibatches) / len(minibatches)).backward()
        inner.param_groups[0]["lr"] = LR * len(minibatches) * MINIBATCH_SIZE / REF_BATCHSIZE
        inner.step()
    return [p.detach() for p in net.parameters()]


def run(steps, *, is_weighted, dtype=torch.float32, wrap=None, by_hand=False, **options):
    """This core's part of a program, on any number of cores: those without a place in it have no minibatches."""
    (rank, cores), net = rank_and_cores(), net_of(dtype)
    plain = net
    if wrap == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    elif wrap == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        for layer in (net[0], net[2], net):
            fully_shard(layer)
    optimizer, sizes = optimizer_of(net, measure_noise=True, **options), []
    padding = [torch.full((2, 6), torch.nan), torch.zeros(2, 2)]
    for step in steps:
        own = [
            minibatch for place, minibatches in enumerate(step) if place % cores == rank for minibatch in minibatches
        ]
        weights = [len(data) if is_weighted else None for data, _ in own]
        if by_hand:
            for number, minibatch in enumerate(own):
                loss_of(plain, minibatch).backward()
                optimizer.step(weight=weights[number], last=number + 1 == len(own))
            if not own:
                optimizer.end_step()
        else:
            for minibatch in optimizer.minibatches(own, padding=padding):
                loss_of(net if wrap == "fully_shard" else plain, minibatch).backward()
                optimizer.step(weight=len(minibatch[0]) if is_weighted else None)
        sizes.append(optimizer.batch_size)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in plain.parameters()]
    weights = [p.detach().clone() for p in weights]
    noise = optimizer.noise
    return {"weights": weights, "sizes": sizes, "noise": noise and (noise.variance, noise.square_norm)}


def run_all(seeds, *, is_sharded=True):
    """Programs for as many cores as there are, in all the ways to run them."""
    cores, found = rank_and_cores()[1], []
    for seed in seeds:
        for is_weighted in (False, True):
            for how in ways(is_sharded):
                found.append(run(program(seed, cores), is_weighted=is_weighted, **how))
    return found


def ways(is_sharded=True):
    plain = [{"dtype": torch.float64}, {"by_hand": True}]
    return [*plain, *([{"wrap": "ddp"}, {"wrap": "fully_shard"}] if is_sharded else [])]


def run_exactly(steps):
    return run(steps, is_weighted=True, exact=True)


def read_data():
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(*(torch.randn(96, width, generator=generator) for width in (6, 2)))


def train(folder=None, *, stop=None, trace=None, exact=True, epochs=2):
    """Two epochs whose steps have COUNTS minibatches, which the cores read in shares that differ."""
    (rank, cores), net, seen = rank_and_cores(), net_of(), []
    loader = vbs.DataLoader(read_data(), vbs.OpenSteps() if trace is None else trace, minibatch_size=4)
    inner = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    optimizer = vbs.Optimizer(inner, loader, rule="adascale", ref_batchsize=8, model=net, exact=exact)
    records = []
    optimizer.attach(vbs.Log(optimizer, every=1, to=[records.append]))
    if folder is not None:
        optimizer.attach(vbs.Checkpoint(folder, model=net, optimizer=optimizer, every_steps=1))
    for _ in optimizer.epochs(epochs):
        read = iter(loader)
        for number in [None] if trace is not None else COUNTS[optimizer.epoch_step :]:
            share = None if number is None else sum(place * place % cores == rank for place in range(number))
            own = islice(read, share)
            for data, target in own if trace is not None else optimizer.minibatches(own):
                seen += data[:, 0].tolist()
                loss = (net(data) - target).square().mean()
                loss.backward()
                optimizer.step(loss=loss)
            if optimizer.steps_done == stop:
                return {"seen": seen}
    return {"weights": [p.detach().clone() for p in net.parameters()], "seen": seen, "records": records}


def stop_at(folder, stop):
    return train(folder, stop=stop)


def hang(lockstep):
    """Core 1 never ends its first step."""
    net, rank = net_of(), dist.get_rank()
    sampler = vbs.CustomSampler(dataset_size=64, trace=vbs.OpenSteps(1.0), minibatch_size=4, lockstep=lockstep)
    inner = torch.optim.SGD(net.parameters(), lr=LR)
    optimizer, end = vbs.Optimizer(inner, sampler, rule="linear", ref_batchsize=8), time.monotonic() + 8
    with contextlib.suppress(ConnectionError):
        try:
            while time.monotonic() < end:
                net(torch.zeros(4, 6)).sum().backward()
                optimizer.step(last=rank == 0)
                time.sleep(0.02)
        except RuntimeError as error:
            return str(error)
    return ""


def mixed_weights():
    """Core 0 passes weights, core 1 does not."""
    net, rank = net_of(), dist.get_rank()
    optimizer = optimizer_of(net)
    try:
        net(torch.zeros(4, 6)).sum().backward()
        optimizer.step(weight=4 if rank == 0 else None, last=True)
    except ValueError as error:
        return str(error)
    return ""


def empty_step():
    """A step without a minibatch on any core, then one with some."""
    net = net_of()
    optimizer = optimizer_of(net)
    next(iter(optimizer.sampler))
    found = [optimizer.end_step(), optimizer.steps_done, optimizer.epoch_step]
    net(torch.zeros(4, 6)).sum().backward()
    found += [optimizer.step(last=True), optimizer.steps_done, optimizer.batch_size]
    return [*found, optimizer.sampler.schedule.samples_read(0)]  # with what was read in the step before


def begin_another_pass_on_one_core():
    net, rank = net_of(), dist.get_rank()
    optimizer = optimizer_of(net)
    optimizer.set_epoch(0)
    if rank == 0:
        next(iter(optimizer.sampler))
        optimizer.set_epoch(0)
    try:
        net(torch.zeros(4, 6)).sum().backward()
        optimizer.step(last=True)
    except RuntimeError as error:
        return str(error)
    return ""


def read_to_the_end(num_samples, most_reads):
    """Two epochs in which a core reads 1 to `most_reads` minibatches for a step: the samples that it has read."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    samples = torch.arange(float(num_samples))[:, None]
    loader = vbs.DataLoader(samples, vbs.OpenSteps(timeout=60), minibatch_size=1)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer = vbs.Optimizer(inner, loader, rule="constant", ref_batchsize=1, model=model)
    seen, rng = [], random.Random(loader.sampler.rank)
    for epoch in optimizer.epochs(2):
        iterator = iter(loader)
        while own := list(islice(iterator, rng.randint(1, most_reads))):
            seen += [(epoch, int(value)) for value in own]
            for minibatch in optimizer.minibatches(own):
                model(minibatch).sum().backward()
                optimizer.step()
    return {
        "seen": seen,
        "steps": optimizer.steps_done,
        "samples": optimizer.samples_done,
        "weight": model.weight.item(),
    }
