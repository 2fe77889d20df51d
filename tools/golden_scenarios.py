"""Small training runs of all features of the library, with data and weights derived from seeds.

Sums are in float32 unless a scenario sets another dtype, so that a different order of two operations is visible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from golden_recorder import Recorder, call, make, public
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

MINIBATCH = 4
NUM_SAMPLES = 43
REF_BATCHSIZE = 8
NUM_CLASSES = 5
# 1 to 7 minibatches: full, uneven and idle ranks on 2 to 4 cores; an epoch holds 10, so that there are three
TRACE = [MINIBATCH * n for n in (3, 1, 4, 2, 7, 1, 5, 3, 1)]
NUM_EPOCHS = 3
CHAINED = ("resumed", "checkpoint")  # prefix of scenarios that are resumed from the previous number of cores

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


class Wide(nn.Module):
    """More elements than one all-reduce handles at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 2**19, bias=False), nn.Linear(2**19, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)) / 1000)


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


def train(
    recorder: Recorder,
    *,
    net: Callable[[], nn.Module] = Normed,
    dtype: torch.dtype | None = None,
    way: Way = plain,
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]] = vectors,
    inner: Callable[[nn.Module], Any] = sgd,
    rule: Callable[[], Any] = lambda: make("LinearRule"),
    sampler: dict[str, Any] | None = None,
    num_epochs: int = NUM_EPOCHS,
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] = mean_loss,
    weight: Callable[[torch.Tensor], Any] | None = None,
    before_step: Callable[[Minibatch], None] | None = None,
    backward: Callable[[Minibatch, torch.Tensor], None] = lambda minibatch, loss: loss.backward(),
    scheduler: Callable[[Any], Callable[[], None] | None] | None = None,
    passes_model: bool = True,
    **options: Any,
) -> None:
    """A typical loop over epochs.

    Args:
        way: shards the model over processes; returns additional arguments of the sampler.
        sampler: further arguments of the sampler.
        weight: the weight of a minibatch, from its targets.
        before_step: called before the first minibatch of each step.
        backward: the backward pass, with modifications of gradients after it.
        scheduler: attaches a scheduler to an optimizer, or returns a function that is called after each of its steps.
        passes_model: whether the model is passed to the optimizer.
        options: of the optimizer.
    """
    x, y = (tensor.to(recorder.device) for tensor in data())
    model, more = way(seeded(net(), dtype).to(recorder.device))
    given = {"dataset_size": NUM_SAMPLES, "trace": TRACE, "minibatch_size": MINIBATCH, **more, **(sampler or {})}
    minibatches = make("CustomSampler", **given)
    inners = inner(model)
    options = {"model": model if passes_model else None, **options}
    optimizer = make("CustomOptimizer", inners, minibatches, rule=rule(), ref_batchsize=REF_BATCHSIZE, **options)
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
    is_bad = minibatch.epoch == 1 and 7 in minibatch.numbers
    (loss * torch.tensor(float("nan") if is_bad else 1.0, device=loss.device)).backward()


def with_burst(minibatch: Minibatch, loss: torch.Tensor) -> None:
    (loss * (2.0**45 if minibatch.epoch == 1 and 7 in minibatch.numbers else 1.0)).backward()


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


def freeze_in_turns(minibatch: Minibatch) -> None:
    minibatch.model.first.requires_grad_(minibatch.optimizer.steps_done % 5 not in (2, 3))


def evaluate(minibatch: Minibatch) -> None:
    minibatch.model.eval()
    with torch.no_grad():
        minibatch.model(minibatch.x * 2)
    minibatch.model.train()


def share_buffers(minibatch: Minibatch) -> None:
    if minibatch.optimizer.steps_done % 4 == 3:
        public("share_buffers")(minibatch.model)


def add_group(minibatch: Minibatch) -> None:
    """Add the bias of the head to the optimizer from the third step on."""
    bias, groups = minibatch.model.head.bias, minibatch.optimizer.param_groups
    if minibatch.optimizer.steps_done == 2 and all(p is not bias for group in groups for p in group["params"]):
        minibatch.optimizer.add_param_group({"params": [bias], "lr": 0.11})


def without_bias(model: nn.Module) -> Any:
    return torch.optim.SGD([p for p in model.parameters() if p is not model.head.bias], lr=0.05, momentum=0.9)


def step_lr(optimizer: Any) -> Callable[[], None]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    return lambda: scheduler.step() if optimizer.updated else None


def one_cycle(optimizer: Any) -> Callable[[], None]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=40)
    return lambda: scheduler.step() if optimizer.updated else None


def by_progress(optimizer: Any) -> None:
    optimizer.attach(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30), per="progress")


def by_samples(optimizer: Any) -> None:
    optimizer.attach(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), per="samples")


def by_weight(optimizer: Any) -> None:
    optimizer.attach(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), per="tokens", every=20)


def num_tokens(targets: torch.Tensor) -> int:
    return int((targets >= 0).sum())


def num_tokens_on_device(targets: torch.Tensor) -> torch.Tensor:
    return (targets >= 0).sum()


# ------------------------------------------------------------------------------------------------- loops of other kinds


def closures(recorder: Recorder) -> None:
    model, optimizer, sampler, x, y = _usual(recorder, "AdaScaleRule")
    for epoch in optimizer.epochs(2):
        del epoch
        for numbers in sampler:

            def closure(numbers: list[int] = numbers) -> torch.Tensor:
                loss = mean_loss(model, x[numbers], y[numbers])
                loss.backward()
                return loss

            recorder.step(numbers, None, closure=closure)


def left_early(recorder: Recorder) -> None:
    """Epochs out of order, left before a given step: after a backward pass or, if possible, after a minibatch."""
    model, optimizer, sampler, x, y = _usual(recorder, "LinearRule", on_end="cycle")
    for epoch, last in ((2, 0), (0, 2), (0, 1), (1, 0), (3, 99)):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for numbers in sampler:
            loss = mean_loss(model, x[numbers], y[numbers])
            loss.backward()
            is_end = optimizer.epoch_step == last
            if not is_end or optimizer.get_bs() >= 2 * MINIBATCH * sampler.num_replicas:
                recorder.step(numbers, loss)
            if is_end:
                break


def logged(recorder: Recorder, rule: str = "AdaScaleRule", **options: Any) -> None:
    """With a log, sums over all cores and hooks around step()."""
    model, optimizer, sampler, x, y = _usual(recorder, rule, **options)
    records: list[Any] = []
    calls = [0, 0]
    optimizer.register_step_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    optimizer.register_step_post_hook(lambda *_: calls.__setitem__(1, calls[1] + 1))
    log = make("Log", optimizer, every=2, to=[records.append])
    metrics = public("Metrics")("seen", "right", device=recorder.device)
    for _ in optimizer.epochs(2):
        for numbers in sampler:
            loss = mean_loss(model, x[numbers], y[numbers])
            loss.backward()
            recorder.step(numbers, loss)
            log.step(loss)
            metrics.add(seen=len(numbers), right=(model(x[numbers]).argmax(-1) == y[numbers]).sum())
        log.write(accuracy=0.5)
    log.close()
    recorder.run |= {"log": records, "calls": calls, "metrics": metrics.read()}


def _usual(recorder: Recorder, rule: str, trace: Any = TRACE, **options: Any) -> Any:
    """Model, optimizer, sampler and data of a custom loop."""
    kept = {name: options.pop(name) for name in ("on_end", "seed", "shuffle") if name in options}
    x, y = (tensor.to(recorder.device) for tensor in vectors())
    model = seeded(Normed(options.pop("dropout", 0.0))).to(recorder.device)
    sampler = make("CustomSampler", dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=MINIBATCH, **kept)
    inner = options.pop("inner", sgd)(model)
    optimizer = make(
        "CustomOptimizer", inner, sampler, rule=make(rule), ref_batchsize=REF_BATCHSIZE, model=model, **options
    )
    recorder.begin(model, optimizer, inner)
    return model, optimizer, sampler, x, y


def named_optimizers(recorder: Recorder) -> None:
    """A short run with each optimizer that is named after a rule."""
    inners = {"AdamRuleOptimizer": adamw, "AdamScaleOptimizer": adamw}
    for name, options in {
        "LinearRuleOptimizer": {},
        "RootRuleOptimizer": {},
        "ConstantOptimizer": {},
        "LinearRuleMomentumOptimizer": {},
        "LEGWRuleOptimizer": {"warmup_samples": 50},
        "AdamRuleOptimizer": {"form": "half-life", "scales_weight_decay": False},
        "AdaScaleOptimizer": {"starts_with_mean": True},
        "AdamScaleOptimizer": {"starts_with_mean": True},
    }.items():
        x, y = (tensor.to(recorder.device) for tensor in vectors())
        model = seeded(Normed()).to(recorder.device)
        sampler = make("CustomSampler", TensorDataset(x, y), TRACE, minibatch_size=MINIBATCH, seed=3)
        inner = inners.get(name, sgd)(model)
        optimizer = make(name, inner, sampler, ref_batchsize=REF_BATCHSIZE, model=model, **options)
        recorder.begin(model, optimizer, inner)
        recorder.run[name] = [optimizer.get_lr(), optimizer.get_bs(), sampler.get_epochtrace(0), len(sampler)]
        for numbers in sampler:
            loss = mean_loss(model, x[numbers], y[numbers])
            loss.backward()
            recorder.step(numbers, loss)


# ------------------------------------------------------------------------------------------------ runs that are resumed


def resumed(recorder: Recorder, **options: Any) -> None:
    """Part of a run that moves from one number of cores to the next through ``state_dict`` in the middle of a step."""
    model, optimizer, sampler, x, y = _usual(recorder, "AdaScaleRule", on_end="cycle", **options)
    path = recorder.directory / "state.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    first_epoch, first_step, last = optimizer.epoch, optimizer.epoch_step, optimizer.steps_done + 7
    for epoch in itertools.count(first_epoch):
        sampler.set_epoch(epoch, first_step if epoch == first_epoch else 0)
        optimizer.set_epoch(epoch, first_step if epoch == first_epoch else 0)
        for numbers in sampler:
            is_end = optimizer.steps_done == last
            # in the middle of the step that follows, if all ranks have more than one minibatch of it
            if not is_end or optimizer.get_bs() >= 2 * MINIBATCH * sampler.num_replicas:
                loss = mean_loss(model, x[numbers], y[numbers])
                loss.backward()
                recorder.step(numbers, loss)
            if is_end:
                _save_state(path, model, optimizer, sampler.rank)
                return


def _save_state(path: Any, model: nn.Module, optimizer: Any, rank: int) -> None:
    if dist.is_initialized():
        dist.barrier()  # wait until the others have read the state
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(state, path)


def checkpointed(
    recorder: Recorder,
    *,
    rule: str = "AdaScaleRule",
    policy: Callable[[], Any] | None = None,
    num_steps: int = 6,
    saves: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Part of a run that moves from one number of cores to the next through a checkpoint, within an epoch."""
    trace = policy() if policy else TRACE
    kept = {} if policy else {"on_end": "cycle"}
    model, optimizer, sampler, x, y = _usual(recorder, rule, trace, **kept, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    metrics = public("Metrics")("seen", device=recorder.device)
    saves = {"every_steps": 2, "every_seconds": 0.5, **(saves or {})}
    folder = recorder.directory / "run"
    checkpoint = make(
        "Checkpoint", folder, model=model, optimizer=optimizer, schedulers=[scheduler], metrics=[metrics], **saves
    )
    recorder.run["resumed_at"] = [optimizer.epoch, optimizer.epoch_step, optimizer.steps_done]
    last = optimizer.steps_done + num_steps
    with contextlib.closing(checkpoint.epochs(100)) as epochs:
        for _ in epochs:
            for numbers in sampler:
                loss = mean_loss(model, x[numbers], y[numbers])
                loss.backward()
                recorder.step(numbers, loss)
                if optimizer.updated:
                    scheduler.step()
                metrics.add(seen=len(numbers))
                checkpoint.step()
                if optimizer.steps_done == last and not optimizer.is_accumulating:
                    break
            if optimizer.steps_done == last:
                break
    recorder.run["seen"] = metrics.read()  # which waits for all ranks, including the writer
    recorder.run["executed"] = list(public("Trace").of(folder / "executed.csv"))


# ------------------------------------------------------------------------------------------------------------- policies


def decided(recorder: Recorder, policy: Callable[[], Any], *, num_workers: int = 0, rule: str = "AdaScaleRule") -> None:
    """Batch sizes decided by a policy, with the recorder's clock."""
    x, y = vectors()
    model = seeded(Normed())
    chosen = policy()
    sampler = make("CustomSampler", dataset_size=NUM_SAMPLES, trace=chosen, minibatch_size=2, seed=5)
    inner = sgd(model)
    optimizer = make("CustomOptimizer", inner, sampler, rule=make(rule), ref_batchsize=4, model=model)
    recorder.begin(model, optimizer, inner)
    numbered = TensorDataset(x, y, torch.arange(NUM_SAMPLES))
    loader = DataLoader(numbered, batch_sampler=sampler, num_workers=num_workers)
    records: list[Any] = []
    log = make("Log", optimizer, every=2, to=[records.append])
    for epoch in optimizer.epochs(2):
        for inputs, targets, numbers in loader:
            loss = mean_loss(model, inputs, targets)
            loss.backward()
            recorder.step(numbers, loss)
            log.step(loss)
        if isinstance(chosen, public("OnPlateau")):
            call(getattr(sampler, "policy", None) or chosen, "tell", 1.0 + 0.1 * epoch)
    recorder.run["log"] = records


def sawtooth(situation: Any) -> float:
    return 2 * (1 + situation.steps_done % 7)


ASKED = {"every": 4, "lead": 3}
POLICIES: dict[str, Callable[[], Any]] = {
    "autoscale": lambda: make("Autoscale", max_batch_size=40, **ASKED),
    "per core": lambda: make("PerCore", 6, **ASKED),
    "norm test": lambda: make("NormTest", eta=0.4, max_batch_size=30, max_growth=1.6, **ASKED),
    "critical batch": lambda: make("CriticalBatch", cost=0.4, max_batch_size=24, **ASKED),
    "on plateau": lambda: make("OnPlateau", patience=1, factor=1.5, **ASKED),
    "function": lambda: make("FunctionPolicy", sawtooth, **ASKED),
}


# -------------------------------------------------------------------------------------------------------------- streams


def numbered_samples() -> Iterator[dict[str, Any]]:
    x, y = vectors()
    for number in range(NUM_SAMPLES):
        yield {"x": x[number], "y": y[number], "number": number}


def streamed(
    recorder: Recorder, *, num_workers: int = 0, trace: Any = None, num_epochs: int = 1, **options: Any
) -> None:
    trace = [MINIBATCH * n for n in (3, 1, 4, 2)] if trace is None else trace()
    stream = make("Stream", numbered_samples, trace=trace, minibatch_size=MINIBATCH, **options)
    loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
    model = seeded(Normed())
    inner = sgd(model)
    optimizer = make(
        "CustomOptimizer", inner, stream, rule=make("AdaScaleRule"), ref_batchsize=REF_BATCHSIZE, model=model
    )
    recorder.begin(model, optimizer, inner)
    for _ in optimizer.epochs(num_epochs):
        for minibatch in loader:
            loss = mean_loss(model, minibatch["x"], minibatch["y"])
            loss.backward()
            recorder.step(minibatch["number"], loss)


def loaded(recorder: Recorder) -> None:
    """A loader with persistent workers."""
    model, optimizer, sampler, x, y = _usual(recorder, "LinearRule")
    numbered = TensorDataset(x, y, torch.arange(NUM_SAMPLES))
    loader = DataLoader(numbered, batch_sampler=sampler, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for inputs, targets, numbers in loader:
            loss = mean_loss(model, inputs, targets)
            loss.backward()
            recorder.step(numbers, loss)


def orders(recorder: Recorder) -> None:
    """The samples assigned to each of several ranks, without training."""
    path = recorder.directory / "trace.csv"
    sizes = [8 * random.Random(4).choice(range(1, 30)) for _ in range(60)]
    path.write_text("step,batchsize\n" + "".join(f"{step},{size}\n" for step, size in enumerate(sizes)))
    found = {}
    for cores in range(1, 8):
        for name, options in {
            "usual": {},
            "in order": {"shuffle": False, "seed": 1},
            "lockstep": {"lockstep": True, "on_end": "hold"},
            "cycle": {"seed": 2**40, "on_end": "cycle"},
        }.items():
            for rank in range(cores):
                ranks = {"num_replicas": cores, "rank": rank}
                sampler = make("CustomSampler", dataset_size=1003, trace=path, minibatch_size=8, **ranks, **options)
                for epoch, first_step in ((0, 0), (1, 3)):
                    sampler.set_epoch(epoch, first_step)
                    drawn = torch.tensor(list(sampler))
                    found[f"{name}, {rank} of {cores}, epoch {epoch}"] = [
                        len(sampler),
                        drawn,
                        sampler.get_epochtrace(1),
                    ]
    recorder.run["orders"] = {
        name: repr([size, int(drawn.sum()), _fold(drawn), trace]) for name, (size, drawn, trace) in found.items()
    }


def _fold(numbers: torch.Tensor) -> int:
    """A number that depends on the order."""
    places = torch.arange(1, numbers.numel() + 1)
    return int((numbers.flatten() * places % 1_000_003).sum())


# ------------------------------------------------------------------------------------------------------------ scenarios


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A run.

    Args:
        function: makes it, with a recorder.
        cores: on how many gloo processes it is made; 0 is one process without a process group.
        on_xla: whether it is also made on virtual XLA cores.
    """

    function: Callable[[Recorder], None]
    cores: tuple[int, ...]
    on_xla: bool = False


def rule(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: make(name, **options)


def _of(
    function: Callable[..., None], cores: tuple[int, ...] = MOST_CORES, on_xla: bool = False, **how: Any
) -> Scenario:
    return Scenario(functools.partial(function, **how), cores, on_xla)


ADASCALE = rule("AdaScaleRule")
WEIGHTED = {"net": Tokens, "data": texts, "loss": sum_loss}
DROPPED = functools.partial(Normed, 0.3)

RULES = {
    "linear": _of(train, ALL_CORES, on_xla=True),
    "linear, adamw": _of(train, ALL_CORES, inner=adamw, on_xla=True),
    "linear, foreach": _of(train, ALL_CORES, inner=functools.partial(sgd, foreach=True)),
    "root": _of(train, ALL_CORES, rule=rule("RootRule"), inner=functools.partial(sgd, nesterov=True)),
    "constant": _of(train, ALL_CORES, rule=rule("ConstantRule")),
    "linear momentum": _of(train, ALL_CORES, rule=rule("LinearMomentumRule"), on_xla=True),
    "linear momentum, clipped": _of(train, ALL_CORES, rule=rule("LinearMomentumRule"), clip_grad_norm=0.2),
    "adascale": _of(train, ALL_CORES, rule=ADASCALE, inner=two_groups, on_xla=True),
    "adascale, mean first": _of(train, ALL_CORES, rule=rule("AdaScaleRule", starts_with_mean=True)),
    "adam": _of(
        train, ALL_CORES, rule=rule("AdamRule"), inner=functools.partial(adamw, betas=(0.7, 0.99)), on_xla=True
    ),
    "adam, half-life": _of(train, ALL_CORES, rule=rule("AdamRule", form="half-life"), inner=adamw),
    "adam, decay as it is": _of(train, ALL_CORES, rule=rule("AdamRule", scales_weight_decay=False), inner=adamw),
    "adamscale": _of(train, ALL_CORES, rule=rule("AdamScaleRule"), inner=adamw, on_xla=True),
    "legw": _of(train, ALL_CORES, rule=rule("LEGWRule", warmup_samples=120)),
    "surge": _of(train, ALL_CORES, rule=rule("SurgeRule"), inner=adamw),
    "muon and adam": _of(
        train,
        ALL_CORES,
        rule=lambda: [make("MuonRule"), make("AdamRule")],
        inner=muon_and_adamw,
        net=Tower,
        clip_grad_norm=0.5,
    ),
    "adascale of each": _of(train, ALL_CORES, rule=lambda: [make("AdaScaleRule"), make("LinearRule")], inner=two_sgd),
    "one rule for two": _of(train, ALL_CORES, rule=ADASCALE, inner=two_sgd),
    "named optimizers": _of(named_optimizers, ALL_CORES),
}

OPTIONS = {
    "no model": _of(train, ALL_CORES, passes_model=False),
    "clipped": _of(train, ALL_CORES, clip_grad_norm=0.2, on_xla=True),
    "clipped adascale": _of(train, rule=ADASCALE, clip_grad_norm=0.2),
    "smooth": _of(train, smooth_steps=3),
    "smooth and bounded adascale": _of(train, rule=ADASCALE, smooth_steps=2, max_factor=1.2),
    "bounded": _of(train, max_factor=1.5),
    "nan skipped": _of(train, ALL_CORES, backward=with_nan, skip_nonfinite=True, on_xla=True),
    "nan skipped by adascale": _of(train, ALL_CORES, backward=with_nan, rule=ADASCALE),
    "nan not skipped": _of(train, backward=with_nan),
    "measured": _of(train, ALL_CORES, measure_noise=True, inner=two_groups),
    "measured momentum": _of(train, rule=rule("LinearMomentumRule"), measure_noise=True),
    "weighted": _of(train, ALL_CORES, **WEIGHTED, weight=num_tokens, on_xla=True),
    "weighted, skipping": _of(train, **WEIGHTED, weight=num_tokens, skip_nonfinite=True, clip_grad_norm=0.3),
    "weighted on device": _of(train, ALL_CORES, **WEIGHTED, weight=num_tokens_on_device, scheduler=by_weight),
    "weighted momentum": _of(train, **WEIGHTED, weight=num_tokens, rule=rule("LinearMomentumRule")),
    "weighted adascale": _of(train, ALL_CORES, **WEIGHTED, weight=num_tokens, rule=ADASCALE, on_xla=True),
    "weighted adamscale": _of(
        train, **WEIGHTED, weight=lambda y: float(num_tokens(y)), rule=rule("AdamScaleRule"), inner=adamw
    ),
    "weights of zero": _of(train, **WEIGHTED, weight=lambda targets: num_tokens(targets) // 9, rule=ADASCALE),
    "seeded dropout": _of(train, ALL_CORES, net=DROPPED, seed_minibatches=True),
    "dropout": _of(train, net=DROPPED),
    "exact": _of(train, ALL_CORES, exact=True, net=DROPPED),
    "exact, clipped": _of(train, exact=True, clip_grad_norm=0.2, smooth_steps=2, inner=adamw),
    "exact adascale": _of(train, ALL_CORES, exact=True, rule=ADASCALE, inner=two_groups, on_xla=True),
    "exact adamscale": _of(train, exact=True, rule=rule("AdamScaleRule"), inner=adamw, max_factor=3.0),
    "exact momentum, measured": _of(train, exact=True, rule=rule("LinearMomentumRule"), measure_noise=True),
    "exact weighted": _of(train, ALL_CORES, exact=True, **WEIGHTED, weight=num_tokens, rule=ADASCALE),
    "exact burst": _of(train, ALL_CORES, exact=True, backward=with_burst, clip_grad_norm=1.0),
    "exact burst adascale": _of(train, exact=True, backward=with_burst, rule=ADASCALE, clip_grad_norm=1.0),
    "exact nan": _of(train, exact=True, backward=with_nan, skip_nonfinite=True),
    "exact, unused at times": _of(train, exact=True, net=Branched, rule=ADASCALE),
    "exact, bfloat16": _of(train, exact=True, net=Tower, dtype=torch.bfloat16, data=lambda: vectors(torch.bfloat16)),
    "exact, float64": _of(train, exact=True, dtype=torch.float64, data=lambda: vectors(torch.float64)),
    "exact, edited": _of(train, exact=True, backward=edited),
    "kept": _of(train, keep_gradients=True),
    "kept adascale": _of(train, ALL_CORES, keep_gradients=True, rule=ADASCALE, inner=two_groups),
    "kept weighted": _of(train, keep_gradients=True, **WEIGHTED, weight=num_tokens, rule=ADASCALE),
    "kept, clipped": _of(train, keep_gradients=True, clip_grad_norm=0.2, inner=adamw),
    "kept nan": _of(train, keep_gradients=True, backward=with_nan, skip_nonfinite=True),
    "lockstep": _of(train, ALL_CORES, way=lockstep, rule=ADASCALE),
    "lockstep, skipping": _of(train, way=lockstep, backward=with_nan, skip_nonfinite=True),
    "lockstep, exact": _of(train, way=lockstep, exact=True, **WEIGHTED, weight=num_tokens, rule=ADASCALE),
}

PARAMETERS = {
    "frozen in turns": _of(train, ALL_CORES, before_step=freeze_in_turns),
    "frozen in turns, adascale": _of(train, before_step=freeze_in_turns, rule=ADASCALE, inner=two_groups),
    "frozen in turns, exact": _of(train, before_step=freeze_in_turns, exact=True),
    "group added": _of(train, before_step=add_group, inner=without_bias),
    "group added, adascale": _of(train, ALL_CORES, before_step=add_group, inner=without_bias, rule=ADASCALE),
    "group added, exact": _of(train, before_step=add_group, inner=without_bias, exact=True),
    "group added, kept": _of(train, before_step=add_group, inner=without_bias, keep_gradients=True),
    "unused at times": _of(train, ALL_CORES, net=Branched),
    "unused at times, adascale": _of(train, net=Branched, rule=ADASCALE, inner=adamw),
    "sparse": _of(
        train, net=functools.partial(Tokens, True), data=texts, inner=functools.partial(sgd, momentum=0, weight_decay=0)
    ),
    "sparse adascale": _of(
        train,
        ALL_CORES,
        net=functools.partial(Tokens, True),
        data=texts,
        inner=functools.partial(sgd, momentum=0, weight_decay=0),
        rule=ADASCALE,
    ),
    "bfloat16": _of(train, net=Tower, dtype=torch.bfloat16, data=lambda: vectors(torch.bfloat16)),
    "bfloat16 adascale": _of(
        train, net=Tower, dtype=torch.bfloat16, data=lambda: vectors(torch.bfloat16), rule=ADASCALE, clip_grad_norm=0.5
    ),
    "float64": _of(train, dtype=torch.float64, data=lambda: vectors(torch.float64), rule=ADASCALE),
    "large": _of(
        train,
        (0, 2),
        net=Wide,
        inner=functools.partial(sgd, momentum=0),
        rule=ADASCALE,
        num_epochs=1,
        data=lambda: (vectors()[0], vectors()[1] % 2),
    ),
}

LOOPS = {
    "edited gradients": _of(train, ALL_CORES, backward=edited),
    "edited gradients, adascale": _of(train, backward=edited, rule=ADASCALE),
    "zero_grad between": _of(train, ALL_CORES, backward=zeroed_before, rule=ADASCALE),
    "evaluated between": _of(train, before_step=evaluate, net=DROPPED, seed_minibatches=True, skip_nonfinite=True),
    "shared buffers": _of(train, before_step=share_buffers),
    "step lr": _of(train, scheduler=step_lr),
    "one cycle": _of(train, scheduler=one_cycle, rule=ADASCALE),
    "by progress": _of(train, scheduler=by_progress, rule=ADASCALE),
    "by samples": _of(train, scheduler=by_samples, inner=adamw, rule=rule("AdamRule")),
    "hold": _of(train, sampler={"on_end": "hold", "shuffle": False}, num_epochs=5),
    "cycle": _of(train, sampler={"on_end": "cycle", "seed": 9}, num_epochs=5),
    "constant trace": _of(train, sampler={"trace": 3 * MINIBATCH}, num_epochs=2),
    "closures": _of(closures, ALL_CORES),
    "left early": _of(left_early, ALL_CORES),
    "logged": _of(logged, ALL_CORES),
    "logged, exact": _of(logged, exact=True, dropout=0.2),
    "resumed": _of(resumed, ALL_CORES),
    "resumed, exact": _of(resumed, ALL_CORES, exact=True, dropout=0.3),
    "resumed, adam": _of(resumed, ALL_CORES, inner=adamw, measure_noise=True, smooth_steps=3),
    "checkpoint": _of(checkpointed, ALL_CORES),
    "checkpoint, exact": _of(
        checkpointed, ALL_CORES, exact=True, dropout=0.3, rule="LinearRule", saves={"asynchronous": True}
    ),
    "checkpoint, sharded format": _of(
        checkpointed, ALL_CORES, inner=adamw, rule="AdamRule", saves={"format": "sharded"}
    ),
    "checkpoint, autoscale": _of(checkpointed, ALL_CORES, policy=lambda: make("Autoscale", max_batch_size=40, **ASKED)),
    "checkpoint, per core": _of(checkpointed, ALL_CORES, policy=lambda: make("PerCore", 8, **ASKED), num_steps=9),
    **{f"policy {name}": _of(decided, ALL_CORES, policy=policy) for name, policy in POLICIES.items()},
    "policy, linear rule": _of(decided, policy=POLICIES["function"], rule="LinearRule"),
    "policy, workers": _of(
        decided, (0, 2), policy=lambda: make("FunctionPolicy", sawtooth, every=4, lead=8), num_workers=2
    ),
    "stream": _of(streamed, ALL_CORES),
    "stream, workers": _of(streamed, (0, 3), num_workers=2),
    "stream, epochs": _of(streamed, dataset_size=23, num_epochs=2),
    "stream, policy": _of(
        streamed, trace=lambda: make("FunctionPolicy", lambda seen: 4 + 4 * (seen.steps_done % 3), every=2, lead=2)
    ),
    "stream that ends": _of(streamed, trace=lambda: 4 * MINIBATCH),
    "loader workers": _of(loaded, (0, 2, 4)),
    "orders": _of(orders, (0,)),
}

SHARDED = {
    "ddp": _of(train, (1, 2, 3, 4), net=Tower, way=ddp, rule=ADASCALE),
    "ddp, BatchNorm": _of(train, (2, 3), net=NormedTower, way=ddp),
    "ddp, exact": _of(train, PAIRS, net=Tower, way=ddp, exact=True),
    "fully_shard": _of(train, (1, 2, 3, 4), net=Tower, way=sharded),
    "fully_shard, BatchNorm": _of(train, (2, 3), net=NormedTower, way=sharded, clip_grad_norm=0.3),
    "fully_shard adascale": _of(train, (2, 3, 4), net=Tower, way=sharded, rule=ADASCALE, inner=two_groups),
    "fully_shard momentum": _of(
        train, PAIRS, net=Tower, way=sharded, rule=rule("LinearMomentumRule"), clip_grad_norm=0.3
    ),
    "fully_shard adam": _of(train, PAIRS, net=Tower, way=sharded, rule=rule("AdamRule"), inner=adamw),
    "fully_shard nan": _of(train, PAIRS, net=Tower, way=sharded, backward=with_nan, skip_nonfinite=True),
    "fully_shard nan adascale": _of(train, PAIRS, net=NormedTower, way=sharded, backward=with_nan, rule=ADASCALE),
    "fully_shard weighted": _of(
        train, PAIRS, net=Tower, way=sharded, rule=ADASCALE, loss=sum_loss, weight=lambda y: 1 + int(y.sum())
    ),
    "fully_shard measured": _of(train, PAIRS, net=Tower, way=sharded, measure_noise=True),
    "fully_shard frozen": _of(train, PAIRS, net=Tower, way=sharded, before_step=freeze_in_turns),
    "fully_shard bfloat16": _of(train, PAIRS, net=Tower, way=sharded_narrow, rule=ADASCALE),
    "fully_shard once": _of(train, PAIRS, net=Tower, way=sharded, reduce_once=True),
    "fully_shard once, adascale": _of(train, PAIRS, net=NormedTower, way=sharded, rule=ADASCALE, reduce_once=True),
    "fully_shard once, weighted": _of(
        train,
        PAIRS,
        net=Tower,
        way=sharded,
        rule=ADASCALE,
        reduce_once=True,
        loss=sum_loss,
        weight=lambda y: 1 + int(y.sum()),
    ),
    "fully_shard policy": _of(
        train,
        PAIRS,
        net=Tower,
        way=sharded,
        rule=ADASCALE,
        sampler={"trace": lambda seen: MINIBATCH * (1 + seen.steps_done % 3)},
    ),
    "hsdp": _of(train, (4,), net=Tower, way=hybrid, clip_grad_norm=0.3),
    "hsdp adascale": _of(train, (4,), net=Tower, way=hybrid, rule=ADASCALE),
    "hsdp once": _of(train, (4,), net=NormedTower, way=hybrid, rule=ADASCALE, reduce_once=True),
    "tensor parallel": _of(train, PAIRS, net=Tower, way=tensor_parallel, clip_grad_norm=0.3),
    "tensor parallel adascale": _of(train, PAIRS, net=Tower, way=tensor_parallel, rule=ADASCALE),
    "tensor parallel nan": _of(train, PAIRS, net=Tower, way=tensor_parallel, backward=with_nan, skip_nonfinite=True),
    "tensor parallel weighted": _of(
        train, PAIRS, net=Tower, way=tensor_parallel, rule=ADASCALE, loss=sum_loss, weight=lambda y: 1 + int(y.sum())
    ),
    "fully_shard and tensor parallel": _of(
        train, PAIRS, net=Tower, way=sharded_and_parallel, rule=ADASCALE, clip_grad_norm=0.3
    ),
    "zero": _of(train, (2, 3, 4), net=Tower, inner=zero),
    "zero adascale": _of(train, PAIRS, net=Tower, inner=zero, rule=ADASCALE, clip_grad_norm=0.3),
    "zero, exact": _of(train, PAIRS, net=Tower, inner=zero, exact=True),
}

SCENARIOS: dict[str, Scenario] = {**RULES, **OPTIONS, **PARAMETERS, **LOOPS, **SHARDED}


def run(name: str, recorder: Recorder) -> dict[str, Any]:
    """Make a run; returns its record."""
    torch.manual_seed(1000 + (dist.get_rank() if dist.is_initialized() else 0))
    random.seed(1000)
    with warnings.catch_warnings(), recorder.recording():
        warnings.simplefilter("ignore")
        SCENARIOS[name].function(recorder)
        return recorder.end()
