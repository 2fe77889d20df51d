"""Runs whose model, optimizer and loader are copied or pickled together before or within a pass, on any cores."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs

SIZES = [16, 32, 8, 24, 16]
NUM_SAMPLES = sum(SIZES)
COPIES = {"copied": copy.deepcopy, "pickled": lambda parts: pickle.loads(pickle.dumps(parts))}


def model_of(kind=None):
    """Weights from a separate generator: virtual XLA cores are threads, which share the others."""
    model, generator = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)), torch.Generator()
    for layer in (model[0], model[3]):
        nn.init.uniform_(layer.weight, -0.5, 0.5, generator=generator.manual_seed(0))
    nn.init.zeros_(model[0].bias)
    nn.init.zeros_(model[3].bias)
    return DistributedDataParallel(model) if kind == "ddp" else model


def dataset():
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(NUM_SAMPLES, 4, generator=generator), torch.arange(96) % 3)


def samples():
    return iter(dataset())


def policy(situation):
    return 8 * (1 + situation.steps_done % 3)


def loader_of(kind, **where):
    how = {"minibatch_size": 8, **where}
    if kind == "stream":
        return torch.utils.data.DataLoader(
            vbs.Stream(samples, trace=SIZES * 2, dataset_size=NUM_SAMPLES, **how), batch_size=None
        )
    if kind == "open":
        return vbs.DataLoader(dataset(), vbs.OpenSteps(), **how)
    if kind == "policy":
        return vbs.DataLoader(dataset(), policy, **how)
    return vbs.DataLoader(dataset(), SIZES * 2, assign=kind or "round robin", **how)


def made(*, rule="linear", loader=None, model=None, process_group=None, device="cpu", **options):
    """A model, its optimizer and its loader."""
    network, loader = model_of(model).to(device), loader_of(loader, process_group=process_group)
    inner = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    if model == "two optimizers":
        inner = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (network[:2], network[2:])]
    options = {"rule": rule, "ref_batchsize": 16, "model": network, **options}
    return network, vbs.Optimizer(inner, loader, **options), loader


def train(parts, until=None):
    """Train for two epochs, or until there are this many steps; returns the weights."""
    model, optimizer, loader = parts
    device = next(model.parameters()).device
    for _ in optimizer.epochs(2):
        for number, (x, y) in enumerate(loader):
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step(last=bool(number % 2) if optimizer.sampler.schedule.is_open else None)
            if until is not None and optimizer.steps_done == until:
                return None
    return [p.detach().cpu().clone() for p in model.parameters()]


def largest_differences(how, **options):
    """For copies before a pass and within one: from the weights of the original, and of a run that is not copied."""
    expected, found = train(made(**options)), []
    for until in (0, 2):
        parts = made(**options)
        if until:
            train(parts, until)
        copied = COPIES[how](parts)
        one, other = train(copied), train(parts)
        found += [_difference(one, other), _difference(other, expected)]
    return found


def _difference(ones, others):
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


CASES = {
    "round robin": {"rule": "adascale"},
    "exact": {"exact": True},
    "as free": {"loader": "as free", "exact": True},
    "by speed": {"loader": "by speed", "exact": True},
    "policy": {"loader": "policy", "rule": "adascale"},
    "stream": {"loader": "stream"},
    "open steps": {"loader": "open", "exact": True},
    "ddp": {"model": "ddp"},
    "two optimizers": {"model": "two optimizers"},
    "norm layers": {"measure_noise": "norm layers"},
}


def run_all():
    """Each case, copied and pickled; and copies with groups of their own."""
    found = {(name, how): largest_differences(how, **options) for name, options in CASES.items() for how in COPIES}
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for how in COPIES:
        found["mesh", how] = largest_differences(how, process_group=mesh)
    found["group", "copied"] = largest_differences("copied", process_group=dist.new_group())
    return found


def on_xla_cores():
    import torch_xla

    return [largest_differences(how, rule="adascale", device=torch_xla.device()) for how in COPIES]


def refusals():
    """The errors of pickles that cannot be loaded: with a group of their own, and of another core."""
    parts, found = made(process_group=dist.new_group()), []
    for one in parts[1:]:
        try:
            pickle.dumps(one)
        except RuntimeError as error:
            found.append(str(error))
    pickled = [None] * dist.get_world_size()
    dist.all_gather_object(pickled, pickle.dumps(made()))
    try:
        pickle.loads(pickled[dist.get_rank() - 1])
    except RuntimeError as error:
        found.append(str(error))
    return found, pickled[1]
