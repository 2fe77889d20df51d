"""A run with checkpoints in an object store, killed repeatedly while it saves; also a script.

python test/support/bucket_run.py s3://bucket/run KILLS EXCEPTIONS
"""

import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.runs.remote import RemoteDirectory

SIZES = [8, 24, 16, 8, 40, 8, 16, 32, 8, 24] * 8
SECONDS_OF_A_SAVE = 0.2  # approximately; the kill comes at a random time in it
SAVES_AT_MOST = 2


def train(directory, *, every_steps=20, before_save=lambda: None, asynchronous=False):
    """Train to the end, and return the weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    model.register_buffer("ballast", torch.ones(1_000_000))  # so that an upload takes a while
    data, target = torch.randn(sum(SIZES), 4), torch.randn(sum(SIZES), 3)
    sampler = vbs.CustomSampler(dataset_size=len(data), trace=SIZES, minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=8, model=model)
    how = {"every_steps": every_steps, "asynchronous": asynchronous}
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, **how)
    for _ in checkpoint.epochs(1):
        for indices in sampler:
            nn.functional.mse_loss(model(data[indices]), target[indices]).backward()
            if optimizer.step():
                before_save()
            checkpoint.step()
    return model.weight.detach()


def disturbed(address, number, chance):
    """Resume the run in a process, and send it a signal while it saves; returns whether it was still running."""
    reader, writer = os.pipe()
    saves = chance.randint(1, SAVES_AT_MOST)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGUSR1, signal.default_int_handler)  # not an OSError, which asyncio ignores in places
        begun = itertools.count(1)

        def before_save():
            while next(begun) > saves:  # even if the signal is late, the run has not ended before it
                time.sleep(0.01)
            os.write(writer, b".")

        try:
            train(address, every_steps=1, before_save=before_save)
        except KeyboardInterrupt:
            os._exit(3)
        os._exit(0)
    os.close(writer)
    for _ in range(saves):
        os.read(reader, 1)
    time.sleep(chance.random() * SECONDS_OF_A_SAVE)
    os.kill(child, number)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    return status != 0


def on_cores(address, cores):
    """The weights that each of several cores has after training to the end."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(cores):
            child = os.fork()
            if not child:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=cores)
                torch.save(train(address), f"{folder}/{rank}.pt")
                dist.destroy_process_group()
                os._exit(0)
            children.append(child)
        assert all(os.waitpid(child, 0)[1] == 0 for child in children)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(cores)]


def main(address, num_kills, num_exceptions):
    for module in ("s3fs", "aiobotocore.session", "aiohttp"):  # once, instead of in each forked process
        import_module(module)
    chance = random.Random(0)
    signals = [signal.SIGKILL] * num_kills + [signal.SIGUSR1] * num_exceptions
    chance.shuffle(signals)
    with tempfile.TemporaryDirectory() as folder:
        expected = train(folder)
    stopped = [disturbed(address, number, chance) for number in signals]
    weights = on_cores(address, 2)
    difference = max(float((weight - expected).abs().max()) for weight in weights)
    print(json.dumps({"stopped": sum(stopped), "difference": difference, "names": RemoteDirectory(address).names()}))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
