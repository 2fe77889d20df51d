"""Runs whose cores share steps as they are free, or by speed, with one core that is slower than the others."""

import time

import torch
import torch.distributed as dist
from torch import nn

import variable_batch_size as vbs

SIZES = [64, 16, 8, 128, 64, 96, 40, 8, 8, 72]
NUM_STEPS = 24


def dataset(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    draw = (torch.randn(640, width, generator=generator, dtype=dtype) for width in (6, 2))
    return torch.utils.data.TensorDataset(*draw)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def run(assign="round robin", *, slow=1, workers=0, folder=None, stop=None, exact=False):
    """Two epochs; returns the weights, the noise, and of each step of this session the share and the indices read."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    net, records, shares = model(), [], []
    loader = vbs.DataLoader(dataset(), SIZES, minibatch_size=8, assign=assign, num_workers=workers, on_end="cycle")
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    options = {"model": net, "exact": exact, "seed_minibatches": True}
    optimizer = vbs.Optimizer(inner, loader, rule="adascale", ref_batchsize=32, **options)
    optimizer.attach(vbs.Log(optimizer, every=4, to=[records.append]))
    if folder is not None:
        optimizer.attach(vbs.Checkpoint(folder, model=net, optimizer=optimizer, every_steps=3))
    for _ in optimizer.epochs(2):
        for data, target in loader:
            time.sleep(0.003 if rank == slow else 0)
            loss = nn.functional.mse_loss(net(data), target)
            loss.backward()
            if optimizer.step(loss=loss):
                shares.append(optimizer.num_own)
            if optimizer.steps_done == stop:
                break
        if optimizer.steps_done == stop:
            break
    weights = {name: value for name, value in net.state_dict().items() if name.split(".")[-1] in ("weight", "bias")}
    noise = (optimizer.noise.variance, optimizer.noise.square_norm)
    return {"weights": weights, "noise": noise, "shares": shares, "records": records}


def run_all(root):
    """Each case of the tests, on these cores."""
    cases = {
        "as free": run("as free"),
        "as free, read ahead": run("as free", workers=2),
        "as free, exact": run("as free", exact=True),
        "by speed": run("by speed", workers=1),
        "by speed, exact": run("by speed", exact=True),
        "stopped": run("as free", folder=root / "stopped", stop=7, exact=True),
    }
    cases["resumed"] = run("as free", folder=root / "stopped", exact=True)
    return cases


def refusals():
    """The errors of options that cannot be combined with shares."""
    found = []
    options = [{"lockstep": True}, {"max_minibatch_size": 16}, {"trace": vbs.policies.PerCore(2)}]
    for option in options:
        try:
            how = {"trace": SIZES, **option}
            vbs.CustomSampler(dataset_size=640, minibatch_size=8, assign="as free", **how)
        except ValueError as error:
            found.append(str(error))
    return found


def read_twice_as_often_on_one_core():
    """Core 0 begins one pass more than core 1, so that the cores share different counters."""
    net = model()
    sampler = vbs.CustomSampler(dataset_size=640, trace=SIZES, minibatch_size=8, assign="as free", on_end="cycle")
    optimizer = vbs.Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), sampler, rule="linear", ref_batchsize=32)
    sampler.set_epoch(1)
    if dist.get_rank() == 0:
        sampler.set_epoch(0)
        sampler.set_epoch(1)
    try:
        for _ in sampler:
            net(torch.zeros(8, 6)).sum().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def read_far_ahead():
    try:
        vbs.DataLoader(dataset(), SIZES, minibatch_size=8, assign="as free", num_workers=5)
    except ValueError as error:
        return str(error)
    return ""
