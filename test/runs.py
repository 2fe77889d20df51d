"""A small training run that saves checkpoints and can be stopped at any minibatch; also a script, to be killed.

python test/runs.py DIRECTORY --backend gloo --cores 2 --result weights.pt
"""

import argparse
import contextlib
import itertools
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import variable_batch_size as vbs

MINIBATCH = 4
NUM_SAMPLES = 150
NUM_EPOCHS = 3
SIZES = [MINIBATCH * n for n in (3, 1, 5, 2, 7, 1, 4, 6, 2, 3, 8, 1, 9, 2, 4, 5, 1, 3, 10, 2, 6, 4, 7, 3, 5, 2)]
NUM_STEPS = 25  # of the three epochs
LOG_STEPS = 4
STOPS_ON_CORES = [(1, 1), (6, 0), (12, 1), (19, 0)]

RULES = {
    "linear": vbs.LinearRuleOptimizer,
    "momentum": vbs.LinearRuleMomentumOptimizer,
    "adascale": vbs.AdaScaleOptimizer,
    "adamscale": vbs.AdamScaleOptimizer,
}


class Numbered(Dataset):
    """Samples that know their number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(NUM_SAMPLES, 6, generator=generator)
        self.y = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


class Noisy(Numbered):
    """The same, moved a little by every generator there is in the process, as an augmentation does."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x, y, index = super().__getitem__(index)
        return x + 0.1 * (torch.randn(6) + random.gauss(0, 1) + float(np.random.randn())), y, index


class Stopped(Exception):
    """The machine is gone."""


def network(dropout: float = 0.0, unused: int = 1) -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))
    # from a generator of its own: XLA cores are threads that share the global one
    generator = torch.Generator().manual_seed(0)
    for layer in (net[0], net[4]):
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    net.register_parameter("unused", nn.Parameter(torch.ones(unused)))  # also something to make the file longer
    return net


def seed_generators(rank: int, device: torch.device) -> None:
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    np.random.seed(100 + rank)
    if device.type == "xla":
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(100 + rank, str(device))


def run(
    directory,
    *,
    stop_at=None,
    rule="linear",
    device="cpu",
    dropout=0.0,
    dataset=Numbered,
    num_workers=0,
    every_steps=1,
    trace=tuple(SIZES),
    num_epochs=NUM_EPOCHS,
    seconds_per_minibatch=0.0,
    on_step=None,
    samples=None,
    log_to=None,
    unused=1,
    **options,
):
    """Go on from what is in the directory, to the end or to ``stop_at = (steps, minibatches of the next step)``.

    Returns the state at the end, and this core's samples of every step, in addition to those of earlier sessions.
    """
    device = torch.device(device) if isinstance(device, str) else device
    model = network(dropout, unused).to(device)
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=list(trace), minibatch_size=MINIBATCH)
    seed_generators(sampler.rank, device)
    if rule == "adamscale":
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    optimizer = RULES[rule](inner, sampler, ref_batchsize=16, model=model, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    per_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=num_workers)
    checkpoint = vbs.Checkpoint(
        directory, model=model, optimizer=optimizer, schedulers=[scheduler, per_epoch], every_steps=every_steps
    )
    log = None if log_to is None else vbs.Log(optimizer, every=LOG_STEPS, to=[log_to])
    samples = {} if samples is None else samples
    minibatches = []
    for epoch in checkpoint.epochs(num_epochs):
        for x, y, numbers in loader:
            time.sleep(seconds_per_minibatch)
            if stop_at is not None and (optimizer.steps_done, len(minibatches)) >= stop_at:
                raise Stopped
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            minibatches.append(numbers.tolist())
            steps_before = optimizer.steps_done
            optimizer.step()
            if optimizer.steps_done > steps_before:
                samples[epoch, optimizer.epoch_step] = [] if optimizer.is_idle else list(itertools.chain(*minibatches))
                minibatches = []
                scheduler.step()
            if log is not None:
                log.step(loss)
            checkpoint.step()
            if on_step is not None:
                on_step(optimizer)
        torch.rand(3)  # what an evaluation may do
        per_epoch.step()
    return {
        "model": {name: value.cpu().clone() for name, value in model.state_dict().items()},
        "optimizer": torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.cpu().clone(), optimizer.state_dict()),
        "samples": samples,
        "drawn": [torch.rand(1).item(), random.random(), float(np.random.rand())],
    }


def run_and_stop(directory, stop_at, **how):
    """Run until the machine is gone, then to the end on the next one; the samples are those of both."""
    samples = {}
    with contextlib.suppress(Stopped):
        run(directory, stop_at=stop_at, samples=samples, **how)
    wait_for_all_cores(how.get("device", "cpu"))  # as a new process would, core 0 may be writing
    return run(directory, samples=samples, **how)


def wait_for_all_cores(device):
    vbs.Metrics("nothing", device=device).read()


def run_all(backend, directory, stopped_alone):
    """Everything that tests ask of several cores, in one launch."""
    device = device_of(backend)
    records = []
    results = {"whole": run(directory / "whole", device=device, log_to=records.append), "records": records}
    with contextlib.suppress(Stopped):
        run(directory / "left", stop_at=(12, 1), device=device)
    results["dropout"] = run(directory / "dropout", device=device, dropout=0.5)
    results["resumed"] = [
        run_and_stop(directory / f"stopped-{number}", stop_at, device=device, dropout=0.5, every_steps=1 + number)
        for number, stop_at in enumerate(STOPS_ON_CORES)
    ]
    results["from alone"] = run(stopped_alone, device=device)
    results["metrics"] = count(device)
    results["buffers"] = shared_buffers(device)
    return results


def count(device):
    """Each core counts something else, and the last one nothing."""
    from variable_batch_size.cores.running import running_cores

    rank, num_replicas = running_cores()
    metrics = vbs.Metrics("loss", "correct", "seen", device=device)
    before = metrics.read()
    for number in range(3 if rank < num_replicas - 1 or num_replicas == 1 else 0):
        outputs = torch.full((4,), float(rank + number)).to(device)
        metrics.add(correct=(outputs > 0).sum(), seen=4, loss=outputs.mean())
    first, second = metrics.read(), metrics.read()
    metrics.reset()
    return {"before": before, "first": first, "second": second, "after": metrics.read()}


def shared_buffers(device):
    from variable_batch_size.cores.running import running_cores

    model = nn.BatchNorm1d(3)
    model.running_mean += running_cores()[0] + 7
    model.num_batches_tracked += running_cores()[0] + 5
    model = model.to(device)
    vbs.share_buffers(model)
    return {name: value.cpu() for name, value in model.named_buffers()}


def same(one, other):
    """Whether two nested states are equal to the last bit."""
    flat, spec = torch.utils._pytree.tree_flatten(one)
    other_flat, other_spec = torch.utils._pytree.tree_flatten(other)
    return spec == other_spec and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(flat, other_flat, strict=True)
    )


def largest_difference(one, other):
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def device_of(backend):
    if backend == "xla":
        import torch_xla

        return torch_xla.device()
    return torch.device("cpu")


# --------------------------------------------------------------------------------------------------------- as a script


def main_of_a_core(flags):
    from variable_batch_size.cores.running import running_cores

    rank, _ = running_cores()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    started = Path(flags.directory) / "started"

    def tell(optimizer):
        if not started.exists() or rank:
            return
        (started / f"{attempt}.steps").write_text(str(optimizer.steps_done))

    if started.exists():
        temporary = started / f"{attempt}-{rank}.part"
        temporary.write_text(str(os.getpid()))
        temporary.rename(started / f"{attempt}-{rank}.pid")
    result = run(
        flags.directory,
        device=device_of(flags.backend),
        seconds_per_minibatch=flags.seconds_per_minibatch,
        on_step=tell,
        unused=flags.unused,
        every_steps=flags.every_steps,
        trace=SIZES * flags.times,
        num_epochs=NUM_EPOCHS * flags.times,
    )
    if rank == 0:
        torch.save(result["model"], flags.result)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--result", required=True)
    parser.add_argument("--seconds_per_minibatch", type=float, default=0.0)
    parser.add_argument("--unused", type=int, default=1)
    parser.add_argument("--every_steps", type=int, default=1)
    parser.add_argument("--times", type=int, default=1, help="how many times as long")
    flags = parser.parse_args()
    vbs.launch(main_of_a_core, (flags,), cores=flags.cores, backend=flags.backend)


if __name__ == "__main__":
    main()
