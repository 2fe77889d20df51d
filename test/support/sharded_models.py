"""Small models, the ways to shard them over processes, and one training run that all of them must reproduce."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import variable_batch_size as vbs

MINIBATCH = 4
NUM_SAMPLES = 48
# on 2 to 4 cores: uneven shares, idle cores, and last rounds on all, some and one of the cores; in two epochs
SIZES = [MINIBATCH * n for n in (3, 1, 4, 7)]


class Attention(nn.Module):
    """Two heads, without a bias for the keys: its gradient is only rounding, which Adam would amplify."""

    def __init__(self, size):
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(size, size) for _ in range(3))
        self.key = nn.Linear(size, size, bias=False)
        self.head_size = size // 2

    def forward(self, x):
        heads = [part(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in (self.query, self.key)]
        value = self.value(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(*heads, value)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = Attention(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.tanh(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """Tied embeddings, blocks, a norm, and a head that starts out as the embedding."""

    def __init__(self, size=8, vocabulary=11, num_blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).mean(1)


def in_one_block():
    """A smaller one: what is tensor-parallel takes the longest."""
    return Transformer(num_blocks=1)


class Normed(nn.Module):
    """BatchNorm, an unused parameter and a frozen one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(24, 10), nn.Linear(10, 10)])
        self.norm = nn.BatchNorm1d(10)
        self.frozen = nn.Parameter(torch.ones(10), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(10, 11)

    def forward(self, x):
        x = self.blocks[0](self.embedding(x).flatten(1))
        return self.head(self.blocks[1](torch.tanh(self.norm(x) * self.frozen)))


def model_of(kind):
    torch.manual_seed(0)
    return kind()


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 11, (NUM_SAMPLES, 4), generator=generator), torch.randint(
        0, 11, (NUM_SAMPLES,), generator=generator
    )


# ----------------------------------------------------------------------------------------------- how it is sharded


def plain(model):
    return model, {}


def sharded(model, **options):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options), {}


def sharded_narrow(model):
    """Computes in bfloat16 and reduces in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def sharded_recomputed(model):
    """Blocks are recomputed in the backward pass (activation checkpointing)."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return sharded(model)


def sharded_compiled(model):
    model.blocks[0].compile(backend="aot_eager")
    return sharded(model)


def sharded_offloaded(model):
    """Parameters, gradients and the optimizer's state on the host."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def sharded_otherwise(model):
    """With a gradient divisor and a disabled reduction, left by another loop."""
    model, options = sharded(model)
    model.set_gradient_divide_factor(1.0)
    model.set_requires_gradient_sync(False)
    return model, options


def hybrid(model):
    """Two sets of two cores: a replica in each set, sharded over its cores."""
    return sharded(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")))


def _split(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ["attention.query", "attention.key", "attention.value", "up"]
    plan = {name: ColwiseParallel() for name in columns} | {
        name: RowwiseParallel() for name in ("attention.out", "down")
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def split(model):
    """Tensor parallel over pairs of processes, which share their samples."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "model"))
    return _split(model, mesh["model"]), {"process_group": mesh["data"]}


def sharded_and_split(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "model"))
    return sharded(_split(model, mesh["model"]), mesh=mesh["data"])[0], {"process_group": mesh["data"]}


def in_lockstep(model):
    """Lockstep for a plain model, as if its forward pass waited for all cores."""
    return model, {"lockstep": True}


def wrapped(model):
    return nn.parallel.DistributedDataParallel(model), {}


# ---------------------------------------------------------------------------------------------------------- optimizers


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4)


def zero(parameters):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if not dist.is_initialized():
        return sgd(parameters)
    return ZeroRedundancyOptimizer(list(parameters), torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)


# name of the run: (optimizer, inner optimizer, options)
RUNS = {
    "linear": (vbs.LinearRuleOptimizer, sgd, {}),
    "root": (vbs.RootRuleOptimizer, sgd, {"clip_grad_norm": 0.3}),
    "linear-momentum": (vbs.LinearRuleMomentumOptimizer, sgd, {"clip_grad_norm": 0.3}),
    "adascale": (vbs.AdaScaleOptimizer, sgd, {}),
    "adam": (vbs.AdamRuleOptimizer, adamw, {}),
}
MORE_RUNS = {
    "zero": (vbs.AdaScaleOptimizer, zero, {}),
    "nan": (vbs.LinearRuleOptimizer, sgd, {"skip_nonfinite": True}),
    "weighted": (vbs.AdaScaleOptimizer, sgd, {}),
    "scaled": (vbs.AdaScaleOptimizer, sgd, {"scale": 64.0}),
}
NAN_STEP = 2  # of 4 minibatches


def erratic():
    """A policy whose decisions change from step to step, and depend on the measured noise."""
    return vbs.policies.FunctionPolicy(
        lambda seen: MINIBATCH * (2 + int(7 * seen.steps_done + 10 * (seen.noise_scale or 0)) % 4), every=1, lead=1
    )


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def state_of(model):
    """The full state of the model, under the names of the plain model."""
    names = {
        name: name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "") for name in model.state_dict()
    }
    return {names[name]: whole(value) for name, value in model.state_dict().items()}


def loss_of(model, x, y, *, is_sum=False):
    return nn.functional.cross_entropy(model(x), y, reduction="sum" if is_sum else "mean")


def train(spread, kind, name, *, until=None, **sampler_options):
    """One of the runs, on a model sharded in one of the ways; returns the results."""
    optimizer_class, inner, options = (RUNS | MORE_RUNS)[name]
    options = dict(options)
    scaler = torch.amp.GradScaler("cpu", init_scale=options.get("scale", 1.0), enabled="scale" in options)
    options.pop("scale", None)
    model, more = spread(model_of(kind))
    sampler = vbs.CustomSampler(
        dataset_size=NUM_SAMPLES, trace=SIZES, minibatch_size=MINIBATCH, **more, **sampler_options
    )
    groups = list(model.parameters())
    optimizer = optimizer_class(inner(groups), sampler, ref_batchsize=8, model=model, **options)
    optimizer.record_grad_norm(every=1)
    norms, updates, noise = [], [], []
    x, y = data()
    for epoch in range(sampler.schedule.num_epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        num_run = 0  # minibatches of the step so far
        for indices in sampler:
            loss = loss_of(model, x[indices], y[indices], is_sum=name == "weighted")
            # NaN on all cores in one step; in all others NaN of padding minibatches, which must have no effect
            is_nan = name == "nan" and optimizer.steps_done == NAN_STEP
            if is_nan or (name == "nan" and will_stand_in(optimizer, sampler, num_run)):
                loss = loss * torch.nan
            scaler.scale(loss).backward()
            weight = 1.0 + float(y[indices].float().sum()) if name == "weighted" else None
            scaler.step(optimizer, weight=weight)
            scaler.update()
            num_run = num_run + 1 if optimizer.is_accumulating else 0
            if not optimizer.is_accumulating:
                updates.append(optimizer.updated)
                norms.append(float(optimizer.gradient_norm))
                if optimizer.rule.measures_noise:
                    found = optimizer.noise
                    noise.append((optimizer.noise_scale, optimizer.gain()) if found else (0.0, 0.0))
    return {"state": state_of(model), "norms": norms, "updates": updates, "noise": noise, "steps": optimizer.steps_done}


def will_stand_in(optimizer, sampler, num_run):
    """Whether the next minibatch is padding, after some of this core's minibatches in the step."""
    return sampler.rank + num_run * sampler.num_replicas >= sampler.schedule.num_minibatches(optimizer.steps_done)


def reference(kind, names):
    return {name: train(plain, kind, name) for name in names}


def all_of(cases):
    """Several runs in one launch: (way, model, name) → its results, or the error."""
    results = {}
    for way, kind, name in cases:
        try:
            results[way, kind.__name__, name] = train(globals()[way], kind, name)
        except (ValueError, RuntimeError) as error:
            results[way, kind.__name__, name] = str(error)
    return copy.deepcopy(results)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def go(directory, way, kind, name, *, until=None, forget=False, **how):
    """Resume a run, if there is one, train to the end or up to a step, and save; returns the state after that."""
    optimizer_class, inner, options = (RUNS | MORE_RUNS)[name]
    options = dict(options)
    options.pop("scale", None)
    model, more = globals()[way](model_of(kind))
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=SIZES, minibatch_size=MINIBATCH, **more)
    optimizer = optimizer_class(inner(list(model.parameters())), sampler, ref_batchsize=8, model=model, **options)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=until, **how)
    if forget:
        optimizer.inner.state.clear()
    x, y = data()
    for _ in checkpoint.epochs(sampler.schedule.num_epochs):
        for indices in sampler:
            loss_of(model, x[indices], y[indices]).backward()
            optimizer.step()
            checkpoint.step()
            if optimizer.steps_done == until and not optimizer.is_accumulating:
                return state_of(model)
    return state_of(model)


def largest_difference(state, other):
    names = [name for name in other if "running" not in name and "tracked" not in name]
    return max((state[name] - other[name]).abs().max().item() for name in names)
