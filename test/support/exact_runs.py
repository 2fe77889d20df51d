"""Small training runs in exact mode with all features, for any number of cores, which can be stopped."""

import contextlib
import dataclasses
import hashlib
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import variable_batch_size as vbs
from variable_batch_size.cores.detect import running_cores

MINIBATCH = 4
NUM_SAMPLES = 61
NUM_EPOCHS = 3
BAD_SAMPLE = 7  # its loss is multiplied in the second epoch by the `burst` of the scenario


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What a run is.

    Attributes:
        name: in the ids of tests.
        seed: of the trace and the weights.
        rule: an optimizer of the library.
        inner: "sgd" or "adamw".
        net: "mlp", "conv" or "tokens"; the last has a weight for each minibatch.
        options: further arguments of the optimizer.
        num_workers: of the loader.
        burst: the factor of the loss of one sample, once.
    """

    name: str
    seed: int
    rule: type[vbs.CustomOptimizer]
    inner: str
    net: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_workers: int = 0
    burst: float = 1.0


SCENARIOS = [
    Scenario("sgd", 0, vbs.LinearRuleOptimizer, "sgd", "mlp"),
    Scenario("convolution", 1, vbs.RootRuleOptimizer, "sgd", "conv", {"clip_grad_norm": 0.5}),
    Scenario("adamw, tokens", 2, vbs.AdamRuleOptimizer, "adamw", "tokens", {"scale": 1000.0}),
    Scenario("adascale", 3, vbs.AdaScaleOptimizer, "sgd", "mlp", {"clip_grad_norm": 1.0, "smooth_steps": 3}),
    Scenario("adascale, tokens", 4, vbs.AdaScaleOptimizer, "sgd", "tokens", {"scale": 2.0**14}),
    Scenario("adamscale", 5, vbs.AdamScaleOptimizer, "adamw", "conv", {"max_factor": 3.0, "min_updates": 1}),
    Scenario("momentum", 6, vbs.LinearRuleMomentumOptimizer, "sgd", "mlp", {"measure_noise": True}, num_workers=1),
    Scenario("burst", 7, vbs.LinearRuleOptimizer, "adamw", "mlp", {"clip_grad_norm": 1.0}, burst=2.0**45),
    Scenario("overflow", 8, vbs.AdaScaleOptimizer, "sgd", "conv", burst=float("inf")),
]


def drawn(seed):
    """A random scenario."""
    rng = random.Random(seed)
    inner = rng.choice(["sgd", "adamw"])
    kinds = [vbs.LinearRuleOptimizer, vbs.RootRuleOptimizer, vbs.AdaScaleOptimizer, vbs.LinearRuleMomentumOptimizer]
    options = {
        "clip_grad_norm": rng.choice([None, 0.3]),
        "scale": rng.choice([1.0, 2.0**10, 37.0]),
        "smooth_steps": rng.choice([0, 4]),
        "skip_nonfinite": True,
    }
    return Scenario(
        f"drawn {seed}",
        seed,
        rng.choice(kinds + [vbs.AdamRuleOptimizer, vbs.AdamScaleOptimizer] * (inner == "adamw")),
        inner,
        rng.choice(["mlp", "conv", "tokens"]),
        options,
        burst=rng.choice([1.0, 2.0**13, 2.0**-30, 0.0, float("nan")]),
    )


# ---------------------------------------------------------------------------------------------------- networks and data


class Tokens(nn.Module):
    """An embedding and a head with initial weights 0, so that the embedding has no gradient in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(6, 11)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.embedding(tokens))))


def network(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "tokens":
        return Tokens()
    if kind == "conv":
        layers = [nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, 3))
    return nn.Sequential(nn.Linear(12, 9), nn.LayerNorm(9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 3, bias=False))


class Noisy(Dataset):
    """Samples with their index, shifted by random numbers of this process unless it is a loader worker."""

    def __init__(self, kind: str, num_workers: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._is_moved = kind != "tokens" and not num_workers
        self._x = torch.randn(NUM_SAMPLES, 12, generator=generator)
        self._y = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
        if kind == "tokens":
            self._x = torch.randint(0, 11, (NUM_SAMPLES, 7), generator=generator)
            self._y = torch.randint(0, 11, (NUM_SAMPLES, 7), generator=generator)
            lengths = torch.randint(0, 8, (NUM_SAMPLES,), generator=generator)
            self._y[torch.arange(7) >= lengths[:, None]] = -100  # ignored by cross_entropy

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        moved = 0.1 * (torch.randn(12) + random.gauss(0, 1)) if self._is_moved else 0
        return self._x[index] + moved, self._y[index], index


# -------------------------------------------------------------------------------------------------------------- the run


class Stopped(Exception):
    """Simulates a lost machine."""


def run(scenario, directory=None, *, exact=True, stop_after=None):
    """A digest of the weights after every step, to the end or for a number of steps."""
    torch.set_num_threads(1)
    model = network(scenario.net, scenario.seed)
    optimizer = _optimizer(scenario, model, exact)
    scale = scenario.options.get("scale")
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    seed_apart(optimizer.sampler.rank)
    dataset = Noisy(scenario.net, scenario.num_workers)
    loader = DataLoader(dataset, batch_sampler=optimizer.sampler, num_workers=scenario.num_workers)
    every = random.Random(scenario.seed).choice([1, 2, 3])
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=every)
    stop_at = None if stop_after is None else optimizer.steps_done + stop_after
    digests, losses = {}, []
    with contextlib.suppress(Stopped):
        for epoch in checkpoint.epochs(NUM_EPOCHS):
            for x, y, numbers in loader:
                if optimizer.steps_done == stop_at:
                    raise Stopped
                loss, weight = _loss(scenario, model, x, y, epoch, numbers)
                scaler.scale(loss).backward()
                before = optimizer.steps_done
                scaler.step(optimizer, weight=weight)
                scaler.update()
                losses.append(loss.item())
                if optimizer.steps_done > before:
                    digests[optimizer.steps_done] = digest_of(model, optimizer)
                    _evaluate(model, dataset, optimizer.steps_done)
                checkpoint.step()
            torch.rand(5)
    return {"digests": digests, "losses": losses, "steps_skipped": optimizer.steps_skipped, "model": model.state_dict()}


def _optimizer(scenario, model, exact):
    rng = random.Random(scenario.seed)
    trace = [MINIBATCH * rng.choice([1, 1, 2, 3, 4, 5, 7, 9]) for _ in range(40)]
    sampler = vbs.CustomSampler(
        dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=MINIBATCH, seed=scenario.seed, on_end="cycle"
    )
    if scenario.inner == "sgd":
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = {name: value for name, value in scenario.options.items() if name != "scale"}
    return scenario.rule(inner, sampler, ref_batchsize=8, model=model, exact=exact, **options)


def seed_apart(rank):
    """Seed the generators of the cores differently."""
    torch.manual_seed(1000 + rank)
    random.seed(1000 + rank)


def _loss(scenario, model, x, y, epoch, numbers):
    """The loss of a minibatch, and its weight."""
    factor = scenario.burst if epoch == 1 and BAD_SAMPLE in numbers else 1.0
    if scenario.net == "tokens":
        outputs = model(x)
        return cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="sum") * factor, int((y >= 0).sum())
    x = x * (1 + 0.1 * random.random()) + 0.1 * torch.randn_like(x)
    return cross_entropy(model(x), y) * factor, None


@torch.no_grad()
def _evaluate(model, dataset, steps_done):
    if steps_done % 3 == 0:
        model.eval()
        x, _, _ = next(iter(DataLoader(dataset, batch_size=30, shuffle=True)))
        model(x)
        model.train()


def digest_of(model, optimizer):
    """A digest of the bytes of all parameters and of the inner optimizer's state."""
    digest = hashlib.sha256()
    for p in model.parameters():
        state = optimizer.inner.state[p]
        for tensor in (p, *(state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor))):
            digest.update(tensor.detach().contiguous().numpy().tobytes())
    digest.update(repr([optimizer.progress, optimizer.steps_skipped, optimizer.samples_done]).encode())
    return digest.hexdigest()


def run_all(scenarios, root, stops, wholes):
    """Each scenario from start to end, and once more resumed from its checkpoint in `root`.

    Args:
        scenarios: to be run.
        root: with a directory for each.
        stops: the steps after which each is left for other cores; None to run to the end.
        wholes: which of them also run from start to end here.
    """
    found = {}
    for scenario, stop, is_whole in zip(scenarios, stops, wholes, strict=True):
        whole = run(scenario) if is_whole else {}
        part = run(scenario, Path(root) / scenario.name, stop_after=stop)
        vbs.Metrics("nothing", device="cpu").read()  # wait for core 0, which may be writing
        found[scenario.name] = {**whole, "part": part["digests"], "rank": running_cores()[0]}
    return found
