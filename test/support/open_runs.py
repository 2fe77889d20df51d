"""Random programs of open steps: the number and lengths of the minibatches of each core in each step."""

import copy
import operator
import random
import time
from itertools import islice

import torch
import torch.distributed as dist
from small_runs import sgd
from torch import nn

import variable_batch_size as vbs

COUNTS = [5, 1, 7, 3, 8]  # minibatches of the steps of an epoch, of all that are read from the loader
# so low that rounding does not grow: at 0.05 the weights of most programs diverge, those of plain PyTorch in another
# order of the minibatches as well
LR, REF_BATCHSIZE, MINIBATCH_SIZE = 0.001, 8, 4
DECAY = 0.9  # of the averages of the noise


def net_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def loss_of(net, minibatch):
    data, target = (tensor.to(next(net.parameters()).dtype) for tensor in minibatch)
    return (net(data) - target).square().sum()


def program(seed, cores, num_steps=5, *, bad_steps=()):
    """For each step, the minibatches of each core; cores may have none, but not all of them.

    In the bad steps, one minibatch has a value that is not finite.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    steps = []
    for number in range(num_steps):
        steps.append([[] for _ in range(cores)])
        for _ in range(rng.randint(1, 3 * cores)):
            length = rng.randint(4, 8)  # fewer samples make BatchNorm amplify rounding
            shapes = [(length, 6), (length, 2)]
            minibatch = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
            steps[-1][rng.randrange(cores)].append(minibatch)
        if number in bad_steps:
            minibatch[1][0, 0] = torch.inf
    return steps


def optimizer_of(net, trace=None, *, timeout=120, **options):
    sampler = vbs.CustomSampler(
        dataset_size=64, trace=trace or vbs.OpenSteps(timeout), minibatch_size=MINIBATCH_SIZE, shuffle=False
    )
    options = {"rule": "linear", "ref_batchsize": REF_BATCHSIZE, "model": net, **options}
    return vbs.Optimizer(sgd(net, lr=LR, momentum=0.9), sampler, **options)


def rank_and_cores():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def plainly(steps, *, is_weighted, dtype=torch.float64, rule="linear"):
    """Plain PyTorch: weights, noise, and the buffers of each core. Steps that are not finite are skipped.

    A step is the mean over all samples, or over its minibatches, each with its own BatchNorm statistics.
    """
    net, average = net_of(dtype), torch.zeros(3, dtype=torch.float64)
    inner = sgd(net, lr=LR, momentum=0.9)
    buffers = [copy.deepcopy([*net.buffers()]) for _ in steps[0]]
    for step in steps:
        gradients, weights, before = [], [], copy.deepcopy(buffers)
        for own, of_core in zip(step, buffers, strict=True):
            _copy(of_core, net.buffers())
            for minibatch in own:
                found = torch.autograd.grad(loss_of(net, minibatch), [*net.parameters()])
                gradients.append(torch.cat([part.flatten() for part in found]))
                weights.append(float(len(minibatch[0])) if is_weighted else 1.0)
            _copy(net.buffers(), of_core)
        mean, number = sum(gradients) / sum(weights), len(gradients)
        if not mean.isfinite().all():
            buffers = before
            continue
        batch_size = sum(weights) if is_weighted else number * MINIBATCH_SIZE
        if number > 1:
            of_each = sum(float(one.square().sum()) / weight for one, weight in zip(gradients, weights, strict=True))
            square = float(mean.square().sum())
            variance = (of_each / sum(weights) - square) * batch_size / (number - 1)
            latest = torch.tensor([variance, square - variance / batch_size, 1.0], dtype=torch.float64)
            average = DECAY * average + (1 - DECAY) * latest
        scale = number * MINIBATCH_SIZE / REF_BATCHSIZE
        factor = {"linear": scale, "root": scale**0.5, "constant": 1.0}[rule]
        vector_to_gradients(mean, net.parameters())
        inner.param_groups[0]["lr"] = LR * factor
        inner.step()
    noise = (average[:2] / average[2]).tolist() if average[2] else None
    sizes = [MINIBATCH_SIZE * sum(map(len, step)) for step in steps]
    return {"weights": [p.detach() for p in net.parameters()], "noise": noise, "buffers": buffers, "sizes": sizes}


def vector_to_gradients(vector, parameters):
    for p in parameters:
        part, vector = vector[: p.numel()], vector[p.numel() :]
        p.grad = part.view_as(p).clone()


def _copy(values, targets):
    for value, target in zip(values, targets, strict=True):
        target.copy_(value)


def run(steps, *, is_weighted, dtype=torch.float64, wrap=None, by_hand=False, scales=False, **options):
    """This core's part of a program, on any number of cores: those without a place in it have no minibatches."""
    (rank, cores), net = rank_and_cores(), net_of(dtype)
    plain = net
    if wrap == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    elif wrap == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        for layer in (net[0], net[3], net):
            fully_shard(layer)
    # without measurements, only cores with a GradScaler would look for values that are not finite
    measuring = {} if scales else {"measure_noise": True, "smoothing": DECAY}
    optimizer, sizes = optimizer_of(net, **measuring, **options), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scales)
    padding = [torch.full((2, 6), torch.nan), torch.zeros(2, 2)]

    def train_on(minibatch, **how):
        scaler.scale(loss_of(net, minibatch)).backward()
        scaler.step(optimizer, weight=len(minibatch[0]) if is_weighted else None, **how)
        scaler.update()

    for step in steps:
        own = [
            minibatch for place, minibatches in enumerate(step) if place % cores == rank for minibatch in minibatches
        ]
        if by_hand:
            for number, minibatch in enumerate(own):
                train_on(minibatch, last=number + 1 == len(own))
            if not own:
                optimizer.end_step()
        else:
            for minibatch in optimizer.minibatches(own, padding=padding):
                train_on(minibatch)
        sizes.append(optimizer.batch_size)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in plain.parameters()]
    weights = [p.detach().clone() for p in weights]
    found = {"weights": weights, "sizes": sizes, "buffers": [buffer.clone() for buffer in plain.buffers()]}
    if scales:
        return found
    noise = optimizer.noise
    return {**found, "noise": noise and [noise.variance, noise.square_norm]}


def largest_difference(found, expected, rank):
    """Of the weights, the buffers, the batch sizes and, relative to its value, of the noise."""
    pairs = [*zip(found["weights"], expected["weights"], strict=True)]
    pairs += zip(found["buffers"], expected["buffers"][rank], strict=True)
    differences = [float((one - other).abs().max()) for one, other in pairs]
    differences += map(abs, map(operator.sub, found["sizes"], expected["sizes"]))
    if "noise" in found and expected["noise"] is not None:
        of_variance = max(1.0, abs(expected["noise"][0]))
        noises = zip(found["noise"], expected["noise"], strict=True)
        differences += [abs(one - other) / of_variance for one, other in noises]
    return float(torch.tensor(differences).max())  # NaN if one is


WAYS = [{}, {"dtype": torch.float32}, {"by_hand": True, "scales": True, "rule": "root"}]
WRAPPED = [{"wrap": "ddp"}, {"wrap": "fully_shard"}, {"wrap": "fully_shard", "scales": True, "rule": "constant"}]


def ways():
    return WAYS + (WRAPPED if rank_and_cores()[1] > 1 else [])


def random_case(seed, num_steps):
    """A program for as many cores as there are, and whether its minibatches have weights; some have a bad step."""
    bad_steps = [seed % num_steps] if seed % 3 == 0 else []
    return program(seed, rank_and_cores()[1], num_steps, bad_steps=bad_steps), bool(seed % 2)


def expected_of(steps, is_weighted, how):
    of_way = {name: value for name, value in how.items() if name in ("dtype", "rule")}
    return plainly(steps, is_weighted=is_weighted, **of_way)


def differences(seeds, num_steps=5):
    """For random programs, in all ways to run them: the dtype, and the largest difference from plain PyTorch."""
    found = []
    for seed in seeds:
        steps, is_weighted = random_case(seed, num_steps)
        for how in ways():
            result, expected = run(steps, is_weighted=is_weighted, **how), expected_of(steps, is_weighted, how)
            found.append((how.get("dtype", torch.float64), largest_difference(result, expected, rank_and_cores()[0])))
    return found


def run_exactly(steps):
    return run(steps, is_weighted=True, dtype=torch.float32, exact=True)


def read_data():
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(*(torch.randn(96, width, generator=generator) for width in (6, 2)))


def train(folder=None, *, stop=None, trace=None, exact=True, epochs=2):
    """Two epochs whose steps have COUNTS minibatches, which the cores read in shares that differ."""
    (rank, cores), net, seen = rank_and_cores(), net_of(), []
    loader = vbs.DataLoader(read_data(), vbs.OpenSteps() if trace is None else trace, minibatch_size=4)
    optimizer = vbs.Optimizer(
        sgd(net, lr=LR, momentum=0.9), loader, rule="adascale", ref_batchsize=8, model=net, exact=exact
    )
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


def hang(how, hold):
    """Core 1 does not end its first step, or in lockstep does not begin it, until core 0 has given up."""
    net, rank = net_of(), dist.get_rank()
    lockstep = how.startswith("lockstep")
    sampler = vbs.CustomSampler(dataset_size=64, trace=vbs.OpenSteps(1.0), minibatch_size=4, lockstep=lockstep)
    optimizer = vbs.Optimizer(sgd(net, lr=LR), sampler, rule="linear", ref_batchsize=8, exact=how == "exact")
    try:
        if rank == 1 and how == "lockstep, late":
            hold.here()
            return ""
        own = [torch.zeros(4, 6)] if rank == 0 else _until_released(hold)
        for data in optimizer.minibatches(own):
            net(data).sum().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        hold.release()
    return ""


def _until_released(hold):
    while not hold.is_released():
        time.sleep(0.02)
        yield torch.zeros(4, 6)


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
    optimizer = vbs.Optimizer(sgd(model, lr=0.0001), loader, rule="constant", ref_batchsize=1, model=model)
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


def read_late():
    """Core 1 reads its first minibatch after the first step: the samples that each core has read."""
    model, rank, seen = nn.Linear(1, 1), dist.get_rank(), []
    loader = vbs.DataLoader(torch.arange(12.0)[:, None], vbs.OpenSteps(timeout=60), minibatch_size=1)
    optimizer = vbs.Optimizer(sgd(model, lr=0.0001), loader, rule="constant", ref_batchsize=1, model=model)
    for _ in optimizer.epochs(1):
        iterator, num_reads = iter(loader), 3 if rank == 0 else 0
        while (own := list(islice(iterator, num_reads))) or not num_reads:
            seen += map(int, own)
            for minibatch in optimizer.minibatches(own):
                model(minibatch).sum().backward()
                optimizer.step()
            num_reads = 2
    return seen


def log_of_a_core_without_minibatches():
    """Core 0 writes the log of weighted steps whose minibatches are all on core 1; the gradients of both."""
    net, rank, records = net_of(), dist.get_rank(), []
    optimizer = optimizer_of(net)
    optimizer.attach(vbs.Log(optimizer, every=1, to=[records.append]))
    for _ in range(2):
        for data in optimizer.minibatches([torch.ones(4, 6)] * 3 if rank else []):
            loss = net(data).sum() * 0 + 8
            loss.backward()
            optimizer.step(weight=4, loss=loss)
    return [record["loss"] for record in records], optimizer.minibatch_weights.is_weighted


def end_epochs_within_a_step():
    """Each core has 3 minibatches in an epoch and ends a step after 2."""
    net = net_of()
    optimizer = optimizer_of(net)
    for _ in optimizer.epochs(2):
        for number in range(3):
            net(torch.ones(4, 6)).sum().backward()
            optimizer.step(last=number == 1)
    return optimizer.steps_done, optimizer.samples_done


def reach_a_limit():
    """Only core 0 has minibatches, and both have more steps than the limit allows."""
    net, rank = net_of(), rank_and_cores()[0]
    optimizer = optimizer_of(net)
    for _ in optimizer.epochs(samples=8):
        for number in range(5):
            own = [torch.ones(4, 6)] if rank == 0 else []
            if number % 2:
                for data in optimizer.minibatches(own):
                    net(data).sum().backward()
                    optimizer.step()
            elif own:
                net(own[0]).sum().backward()
                optimizer.step(last=True)
            else:
                optimizer.end_step()
    return optimizer.samples_done
