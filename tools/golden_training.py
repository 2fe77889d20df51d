"""Models, data and optimizers of small training runs, ways to shard them, and the loop over minibatches.

Data and weights are derived from seeds. Sums are in float32 unless a scenario sets another dtype, so that a different
order of two operations is visible.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from golden_recorder import Recorder
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs

MINIBATCH = 4
NUM_SAMPLES = 43
REF_BATCHSIZE = 8
NUM_CLASSES = 5
BAD_SAMPLE = 18  # is in the third minibatch of the second epoch
# 1 to 7 minibatches: full, uneven and idle ranks on 2 to 4 cores; an epoch holds 10, so that there are three
TRACE = [MINIBATCH * n for n in (3, 1, 4, 2, 7, 1, 5, 3, 1)]
NUM_EPOCHS = 3

PAIRS = (2, 4)
ALL_CORES = (0, 1, 2, 3, 4)  # gloo processes; 0 for one process without a process group
MOST_CORES = (0, 2, 3)  # for scenarios that do not depend on the number


# ------------------------------------------------------------------------------------------------------- models, data


class Normed(nn.Module):
    """Linear layers, BatchNorm, a scalar parameter, and one that is never used."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(7, 12)
        self.norm = nn.BatchNorm1d(12)
        self.dropout = nn.Dropout(dropout)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Linear(2, 3)
        self.head = nn.Linear(12, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.norm(self.first(x))))) * self.temperature


class Branched(nn.Module):
    """A branch that is only used in minibatches whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.head = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.head(self.sometimes(hidden) if x.detach()[0, 0] > 0 else hidden)


class Tokens(nn.Module):
    """Predicts a class for each of six tokens; the embedding may have sparse gradients."""

    def __init__(self, sparse: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, 6, sparse=sparse)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, NUM_CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.embedding(tokens))))


class Tied(Tokens):
    """The head has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Mixed(nn.Module):
    """Parameters of float32 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 9), nn.Linear(9, NUM_CLASSES).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)).to(torch.bfloat16))


class Wide(nn.Module):
    """More elements than one all-reduce handles at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 2**19, bias=False), nn.Linear(2**19, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)) / 1000)


class RMSNormOfMine(nn.Module):
    """Of a class that the library does not know."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class Norms(nn.Module):
    """Normalization layers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.group, self.root = nn.Linear(7, 8), nn.GroupNorm(2, 8), nn.RMSNorm(8)
        self.mine, self.head = RMSNormOfMine(8), nn.Linear(8, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mine(self.root(torch.tanh(self.group(self.first(x))))))


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    """Residual blocks to be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class NormedTower(Tower):
    """With BatchNorm, an unused parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((7,), 1.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x) * self.frozen)


def seeded(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """With weights from a separate generator, because virtual XLA cores share the others."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
    return model.to(dtype) if dtype else model


def vectors(dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 7, generator=generator)
    return x.to(dtype or x.dtype), torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=generator)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and targets, which some samples lack (-100)."""
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randint(0, NUM_CLASSES, (NUM_SAMPLES, 6), generator=generator) for _ in range(2))
    lengths = torch.randint(0, 7, (NUM_SAMPLES,), generator=generator)
    y[torch.arange(6) >= lengths[:, None]] = -100
    return x, y


def mean_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x).float().flatten(0, -2), y.flatten())


def sum_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum")


# --------------------------------------------------------------------------------------------------------- optimizers


def sgd(model: nn.Module, **options: Any) -> Any:
    return torch.optim.SGD(
        model.parameters(), **{"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "foreach": False, **options}
    )


def adamw(model: nn.Module, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), **{"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.05, **options})


class SGDThatDecays(torch.optim.SGD):
    """Changes its own learning rate."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.95
        return result


def decaying(model: nn.Module) -> Any:
    return SGDThatDecays(model.parameters(), lr=0.05, momentum=0.9)


def zero_adamw(model: nn.Module) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(list(model.parameters()), torch.optim.AdamW, lr=3e-3, eps=1e-4)


def two_groups(model: nn.Module) -> Any:
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if all(p is not other for other in head)]
    return torch.optim.SGD([{"params": rest}, {"params": head, "lr": 0.08}], lr=0.05, momentum=0.9)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() != 2]


def muon_and_adamw(model: nn.Module) -> Any:
    muon = torch.optim.Muon(matrices(model), lr=0.02, weight_decay=0.1)
    return [muon, torch.optim.AdamW(others(model), lr=3e-3, eps=1e-4)]


def two_sgd(model: nn.Module) -> Any:
    return [torch.optim.SGD(matrices(model), lr=0.05, momentum=0.9), torch.optim.SGD(others(model), lr=0.02)]


def zero(model: nn.Module) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(list(model.parameters()), torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)


# ----------------------------------------------------------------------------------------------- ways to shard a model


def plain(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    return model, {}


def ddp(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    return nn.parallel.DistributedDataParallel(model), {}


def ddp_if_any(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    return ddp(model) if dist.is_initialized() else plain(model)


def lockstep(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    return model, {"lockstep": True}


def sharded(model: nn.Module, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options), {}


def sharded_narrow(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def hybrid(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    return sharded(model, mesh=_mesh(("replicated", "sharded")))


def tensor_parallel(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    mesh = _mesh(("data", "model"))
    return _parallelized(model, mesh["model"]), {"process_group": mesh["data"]}


def sharded_and_parallel(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    mesh = _mesh(("data", "model"))
    return sharded(_parallelized(model, mesh["model"]), mesh=mesh["data"])[0], {"process_group": mesh["data"]}


@functools.cache
def _mesh(names: tuple[str, str]) -> Any:
    """Pairs of processes."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=names)


def make_meshes() -> None:
    """Make the meshes before the first run, so that their collectives are not counted."""
    if dist.get_world_size() in PAIRS:
        for names in (("replicated", "sharded"), ("data", "model")):
            _mesh(names)


def _parallelized(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


# --------------------------------------------------------------------------------------------------------------- a run


@dataclasses.dataclass
class Minibatch:
    """The data that a scenario may read and change before a minibatch's backward pass."""

    model: nn.Module
    optimizer: Any
    x: torch.Tensor
    y: torch.Tensor
    epoch: int
    numbers: list[int]


Way = Callable[[nn.Module], tuple[nn.Module, dict[str, Any]]]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def train(
    recorder: Recorder,
    *,
    net: Callable[[], nn.Module] = Normed,
    dtype: torch.dtype | None = None,
    way: Way = plain,
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]] = vectors,
    inner: Callable[[nn.Module], Any] = sgd,
    rule: Callable[[], Any] = vbs.rules.LinearRule,
    sampler: dict[str, Any] | None = None,
    num_epochs: int = NUM_EPOCHS,
    loss: Loss = mean_loss,
    weight: Callable[[torch.Tensor], Any] | None = None,
    before_step: Callable[[Minibatch], None] | None = None,
    backward: Callable[[Minibatch, torch.Tensor], None] = lambda minibatch, loss: loss.backward(),
    scheduler: Callable[[Any], Callable[[], None] | None] | None = None,
    passes_model: bool = True,
    **options: Any,
) -> None:
    """A loop over epochs with ``set_epoch``, as it has been since the first version.

    Args:
        way: shards the model over processes; returns additional arguments of the sampler.
        sampler: further arguments of the sampler.
        weight: the weight of a minibatch, from its targets.
        before_step: called before the first minibatch of each step.
        backward: the backward pass, with modifications of gradients after it.
        scheduler: attaches a scheduler to an optimizer, or returns a function that is called after each step().
        passes_model: whether the model is passed to the optimizer.
        options: of the optimizer.
    """
    x, y = (tensor.to(recorder.device) for tensor in data())
    model, more = way(seeded(net(), dtype).to(recorder.device))
    given = {"dataset_size": NUM_SAMPLES, "trace": TRACE, "minibatch_size": MINIBATCH, **more, **(sampler or {})}
    minibatches = vbs.CustomSampler(**given)
    inners = inner(model)
    options = {"model": model if passes_model else None, **options}
    optimizer = vbs.CustomOptimizer(inners, minibatches, rule=rule(), ref_batchsize=REF_BATCHSIZE, **options)
    recorder.begin(model, optimizer, inners)
    after_step = scheduler(optimizer) if scheduler else None
    for epoch in range(num_epochs):
        minibatches.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for numbers in minibatches:
            minibatch = Minibatch(model, optimizer, x[numbers], y[numbers], epoch, numbers)
            if before_step and not optimizer.is_accumulating:
                before_step(minibatch)
            value = loss(model, minibatch.x, minibatch.y)
            backward(minibatch, value)
            recorder.step(numbers, value, **({} if weight is None else {"weight": weight(minibatch.y)}))
            if after_step:
                after_step()


# --------------------------------------------------------------------------------------- what a user does in the loop


def with_nan(minibatch: Minibatch, loss: torch.Tensor) -> None:
    """One sample of the second epoch has a non-finite loss."""
    is_bad = minibatch.epoch == 1 and BAD_SAMPLE in minibatch.numbers
    (loss * torch.tensor(float("nan") if is_bad else 1.0, device=loss.device)).backward()


def with_burst(minibatch: Minibatch, loss: torch.Tensor) -> None:
    (loss * (2.0**45 if minibatch.epoch == 1 and BAD_SAMPLE in minibatch.numbers else 1.0)).backward()


def edited(minibatch: Minibatch, loss: torch.Tensor) -> None:
    """Gradients clamped, masked, replaced, dropped or doubled, depending on the minibatch."""
    loss.backward(retain_graph=True)
    deed, model = sum(minibatch.numbers) % 5, minibatch.model
    for p in (p for p in model.parameters() if p.grad is not None):
        if deed == 0:
            p.grad.clamp_(-0.01, 0.01)
        elif deed == 1:
            p.grad = p.grad * (p.detach() > 0)
        elif deed == 2:
            p.grad = None
    if deed == 3:
        loss.backward()
    elif deed == 4:
        used = [p for p in model.parameters() if p.grad is not None]
        for p, gradient in zip(used, torch.autograd.grad(loss, used), strict=True):
            p.grad = gradient


def zeroed_before(minibatch: Minibatch, loss: torch.Tensor) -> None:
    """A backward pass of another loss first, whose gradient is dropped."""
    (loss * 3).backward(retain_graph=True)
    minibatch.optimizer.zero_grad()
    loss.backward()


def freeze_within(minibatch: Minibatch, loss: torch.Tensor) -> None:
    """After the first minibatch of the step of 7, the first layer is frozen; after that of the next step it is not."""
    loss.backward()
    if not minibatch.optimizer.is_accumulating:
        minibatch.model.first.requires_grad_(minibatch.optimizer.steps_done != 4)


def add_group_within(minibatch: Minibatch, loss: torch.Tensor) -> None:
    """After the first minibatch of the step of 7."""
    loss.backward()
    if minibatch.optimizer.is_accumulating and minibatch.optimizer.steps_done == 4:
        _add_bias(minibatch)


def leave_out(minibatch: Minibatch, loss: torch.Tensor) -> None:
    """Some minibatches have no backward pass."""
    if sum(minibatch.numbers) % 3:
        loss.backward()


def freeze_in_turns(minibatch: Minibatch) -> None:
    minibatch.model.first.requires_grad_(minibatch.optimizer.steps_done % 5 not in (2, 3))


def evaluate(minibatch: Minibatch) -> None:
    minibatch.model.eval()
    with torch.no_grad():
        minibatch.model(minibatch.x * 2)
    minibatch.model.train()


def share_buffers(minibatch: Minibatch) -> None:
    if minibatch.optimizer.steps_done % 4 == 3:
        vbs.share_buffers(minibatch.model)


def add_group(minibatch: Minibatch) -> None:
    """From the third step on."""
    if minibatch.optimizer.steps_done == 2:
        _add_bias(minibatch)


def _add_bias(minibatch: Minibatch) -> None:
    """Add the bias of the head to the optimizer, which lacks it."""
    bias, groups = minibatch.model.head.bias, minibatch.optimizer.param_groups
    if all(p is not bias for group in groups for p in group["params"]):
        minibatch.optimizer.add_param_group({"params": [bias], "lr": 0.11})


def two_sgd_without_bias(model: nn.Module) -> Any:
    own = [p for p in others(model) if p is not model.head.bias]
    return [torch.optim.SGD(matrices(model), lr=0.05, momentum=0.9), torch.optim.SGD(own, lr=0.02)]


def without_bias(model: nn.Module) -> Any:
    return torch.optim.SGD([p for p in model.parameters() if p is not model.head.bias], lr=0.05, momentum=0.9)


def step_lr(optimizer: Any) -> Callable[[], None]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    return lambda: scheduler.step() if optimizer.updated else None


def one_cycle(optimizer: Any) -> Callable[[], None]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=40)
    return lambda: scheduler.step() if optimizer.updated else None


def in_hook(optimizer: Any) -> None:
    """A scheduler that is stepped in a hook of the inner optimizer."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.inner, 0.9)
    optimizer.inner.register_step_post_hook(lambda *_: scheduler.step())


def by(per: str, **how: Any) -> Callable[[Any], None]:
    """Attaches a scheduler that follows a unit of the run."""

    def attach(optimizer: Any) -> None:
        scheduler = (
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
            if per == "progress"
            else torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        )
        optimizer.attach(scheduler, per=per, **how)

    return attach


def num_tokens(targets: torch.Tensor) -> int:
    return int((targets >= 0).sum())


def num_tokens_on_device(targets: torch.Tensor) -> torch.Tensor:
    return (targets >= 0).sum()
