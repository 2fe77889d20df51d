"""Training runs on the devices of XLA's SPMD mode, which are one core, and the same runs in one plain process."""

import random

import torch
from sharded_models import MORE_RUNS, RUNS, Normed, Transformer, model_of
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.cores import xla

MINIBATCH = 8
NUM_SAMPLES = 176
# 1 to 7 minibatches; all graphs are compiled after the first three steps
SIZES = [MINIBATCH * n for n in (3, 1, 4, 2, 7, 5)]
NAN_STEP = 4
NUM_EPOCHS = 2


class Small(Transformer):
    """A model with one block, because compilation takes most of the time."""

    def __init__(self):
        super().__init__(num_blocks=1)


def data():
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_SAMPLES, 4)
    return torch.randint(0, 11, shape, generator=generator), torch.randint(0, 11, shape[:1], generator=generator)


# ------------------------------------------------------------------------------------------------- over the devices


def mesh_of(name):
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as runtime

    number = runtime.global_runtime_device_count()
    return spmd.Mesh(list(range(number)), (number, 1), (name, "model"))


def shard_like(tensor, mesh):
    """Shard the first dimension, also if it is not a multiple of the devices."""
    import torch_xla.distributed.spmd as spmd

    spmd.mark_sharding(tensor, mesh, (mesh.axis_names[0], *[None] * (tensor.dim() - 1)))
    return tensor


def plain(model):
    return model, None


def tied(model):
    """Tie the embeddings again: moving the model to XLA duplicates shared parameters."""
    if model.head.bias is None:
        model.head.weight = model.embedding.weight
    return model


def copied(model):
    """Replicated parameters; only the samples are sharded."""
    return tied(model.to("xla")), mesh_of("data")


def laid_out(model):
    """Sharded matrices, and vectors that are replicated by default."""
    mesh, model = mesh_of("data"), tied(model.to("xla"))
    for p in model.parameters():
        if p.dim() > 1:
            shard_like(p, mesh)
    return model, mesh


def wrapped(model):
    """All parameters sharded, with a wrapper around each block and one around the model."""
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    mesh = mesh_of("fsdp")
    for place, block in enumerate(model.blocks):
        model.blocks[place] = SpmdFullyShardedDataParallel(block, mesh=mesh)
    model = SpmdFullyShardedDataParallel(model, mesh=mesh)
    return tied(model), mesh


def layouts_of(tensors):
    import torch_xla

    return [torch_xla._XLAC._get_xla_sharding_spec(tensor) for tensor in tensors]


# -------------------------------------------------------------------------------------------------------------- a run


def state_of(model):
    return {name.replace("_orig_module.", ""): value.cpu().clone() for name, value in model.state_dict().items()}


def any_sizes(seed):
    """Random batch sizes of an epoch, whose last step may be incomplete."""
    draw = random.Random(seed)
    return [MINIBATCH * draw.randint(1, 9) for _ in range(draw.randint(3, 12))]


def made(way, kind, name, sizes=SIZES):
    """A model sharded in some way, with its optimizer."""
    optimizer_class, inner, options = (RUNS | MORE_RUNS)[name]
    model, mesh = globals()[way](model_of(kind))
    sampler = vbs.CustomSampler(
        dataset_size=NUM_SAMPLES, trace=sizes * NUM_EPOCHS, minibatch_size=MINIBATCH, on_end="cycle"
    )
    if "clip_grad_norm" in options:
        # not a divisor of the momentum: XLA compiles another graph if two constants are the same
        options = options | {"clip_grad_norm": 0.31}
    inner = inner(list(model.parameters()))
    return model, mesh, sampler, optimizer_class(inner, sampler, ref_batchsize=8, model=model, **options)


def backward(model, mesh, x, y, *, is_sum=False, factor=1.0):
    if mesh is not None:
        x, y = shard_like(x.to("xla"), mesh), shard_like(y.to("xla"), mesh)
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum" if is_sum else "mean")
    (loss * factor).backward()
    return loss


def train(way, kind, name, sizes=SIZES):
    """One of the runs; returns the results."""
    before = 0 if way == "plain" else xla.num_programs()
    model, mesh, sampler, optimizer = made(way, kind, name, sizes)
    updates, noise, programs = [], [], []
    x, y = data()
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            factor = 1.0
            if name == "nan" and optimizer.steps_done == NAN_STEP:
                factor = torch.nan
            backward(model, mesh, x[indices], y[indices], is_sum=name == "weighted", factor=factor)
            weight = 1.0 + float(y[indices].float().sum()) if name == "weighted" else None
            optimizer.step(weight=weight)
            if not optimizer.is_accumulating:
                updates.append(optimizer.updated)
                programs.append(0 if mesh is None else xla.num_programs() - before)
                if optimizer.rule.measures_noise:
                    noise.append((optimizer.noise_scale, optimizer.gain()) if optimizer.noise else (0.0, 0.0))
    result = {"state": state_of(model), "updates": updates, "noise": noise, "programs": programs}
    if mesh is not None:
        trained = [p for p in model.parameters() if p in optimizer.inner.state]
        states = [optimizer.inner.state[p] for p in trained]
        moments = [state["exp_avg" if "exp_avg" in state else "momentum_buffer"] for state in states]
        result["layouts"] = layouts_of(trained)
        result["layouts of sums"] = layouts_of([optimizer._accumulator._sums[p] for p in trained])
        result["layouts of moments"] = layouts_of(moments)
    return result


def all_of(cases):
    """Several runs in one launch: (way, model, name) → its results."""
    return {(way, kind.__name__, name): train(way, kind, name) for way, kind, name in cases}


def all_with_any_sizes(way, kind, names):
    """Several runs in one launch, each with its own trace."""
    return [train(way, kind, name, any_sizes(seed)) for seed, name in enumerate(names)]


# -------------------------------------------------------------------------------------------------------- checkpoints


def go(directory, way, kind, name, *, until=None, **how):
    """Resume a run, if there is one, and train to the end or until some steps are saved; returns the final state."""
    model, mesh, sampler, optimizer = made(way, kind, name)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=1, **how)
    layouts = layouts_of([state["momentum_buffer"] for state in optimizer.inner.state.values()]) if mesh else []
    expected = layouts_of(optimizer.inner.state) if mesh else []
    x, y = data()
    with vbs.Log(optimizer, every=3, to=[vbs.JsonLines(f"{directory}/log.jsonl")]) as log:
        for _ in checkpoint.epochs(NUM_EPOCHS):
            for indices in sampler:
                loss = backward(model, mesh, x[indices], y[indices])
                optimizer.step()
                log.step(loss)
                checkpoint.step()
                if optimizer.steps_done == until and not optimizer.is_accumulating:
                    checkpoint.wait()
                    return state_of(model), layouts, expected
    return state_of(model), layouts, expected


def in_turns(directory, kind, name, turns):
    """A run that is saved and resumed with one sharding after another; returns the shardings after loading."""
    return [go(directory, way, kind, name, until=until, **how)[1:] for way, until, how in turns]


# ------------------------------------------------------------------------------------------------------------ refusals


def refusals():
    """The errors for unsupported options in SPMD mode."""
    model, _, sampler, optimizer = made("copied", Normed, "linear")

    def with_group():
        vbs.CustomSampler(dataset_size=8, trace=[8], minibatch_size=8, process_group=object())

    def exactly():
        vbs.LinearRuleOptimizer(optimizer.inner, sampler, ref_batchsize=8, exact=True)

    def in_parts():
        vbs.Checkpoint("unused", model=model, optimizer=optimizer, format="sharded")

    def in_threads():
        xla.run_on_devices(0, 1, print)

    wanted = {"group": with_group, "exact": exactly, "format": in_parts, "threads": in_threads}
    return {what: said_by(want) for what, want in wanted.items()}


def said_by(want):
    try:
        want()
    except ValueError as error:
        return str(error)
    return None
