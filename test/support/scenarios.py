"""Training runs that must give the same result on every type and number of cores; all of them in one launch."""

import copy

import torch
from small_runs import classified
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.cores.detect import communicator_for

MINIBATCH = 32
NUM_SAMPLES = 1200
REF_BATCHSIZE = 128
# 15 distinct sizes, 1 to 17 minibatches: uneven shares and idle cores, and a first step that some cores accumulate in
SIZES = [MINIBATCH * n for n in (9, 1, 3, 2, 8, 5, 17, 4, 16, 1, 7, 6, 10, 11, 2, 12, 13, 1, 9, 14)]
NUM_EPOCHS = 5


def names_on(backend: str, cores: int) -> list[str]:
    """The runs for some cores: all of them on one and two, on others only the most informative, or all in a long test.

    On several XLA cores, which are slow, AdaScale is the first run, before any graph is compiled.
    """
    first = ["adascale", "adamscale", "clipped"]
    if backend == "gloo":
        return {1: first[:1], 4: ["adascale", "adamscale", "adam rule"]}.get(cores, list(RUNS))
    if backend != "xla" or cores == 1:
        return list(RUNS)
    return {2: first, 4: [*first, *(name for name in RUNS if name not in first)], 8: first[:1]}[cores]


class Net(nn.Module):
    """Convolution, BatchNorm, a scalar parameter and one that is never used.

    Smooth, because rounding that moves one sample over the kink of a ReLU would change the result by 1e-4.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x))).flatten(1)) * self.temperature


def data() -> tuple[torch.Tensor, ...]:
    return classified(NUM_SAMPLES, 1, 6, 6, num_classes=10, dtype=torch.float32).tensors


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def adamw_that_forgets(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with a first beta that its rule sets to 0 in the largest steps, from a scale of 10/3 on."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, betas=(0.7, 0.999))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The head has a higher learning rate, and its own gain."""
    head = list(model.head.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    return torch.optim.SGD([{"params": rest}, {"params": head, "lr": 0.04}], lr=0.02, momentum=0.9)


# name of the run: (optimizer, inner optimizer, options)
RUNS = {
    "sgd": (vbs.LinearRuleOptimizer, sgd, {}),
    "adamw": (vbs.LinearRuleOptimizer, adamw, {}),
    "clipped": (vbs.LinearRuleOptimizer, sgd, {"clip_grad_norm": 0.5}),
    "momentum rule": (vbs.LinearRuleMomentumOptimizer, sgd, {}),
    "adascale": (vbs.AdaScaleOptimizer, two_groups, {}),
    "adamscale": (vbs.AdamScaleOptimizer, adamw, {"min_updates": 1}),
    "adam rule": (vbs.AdamRuleOptimizer, adamw_that_forgets, {"clip_grad_norm": 0.5}),
}


def models() -> dict[str, nn.Module]:
    """One model per run, all with the same weights; made before the launch, when no other random numbers are drawn."""
    made = {}
    for name in (*RUNS, "idle", "nan", "resumed"):
        torch.manual_seed(0)
        made[name] = Net()
    return made


def device_of(backend: str) -> torch.device:
    if backend == "xla":
        import torch_xla

        return torch_xla.device()
    return torch.device("tpu" if backend == "tpu" else "cpu")


def num_graphs(backend: str) -> int:
    if backend == "xla":
        import torch_xla.debug.metrics as metrics

        return metrics.counter_value("UncachedCompile") or 0
    return 0


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def num_transfers(backend: str) -> int:
    if backend == "xla":
        import torch_xla.debug.metrics as metrics

        return (metrics.metric_data("TransferFromDeviceTime") or (0,))[0]
    return 0


def train_epoch(model, sampler, optimizer, device, log=None, backend="cpu"):
    x, y = data()
    for indices in sampler:
        loss = nn.functional.cross_entropy(model(x[indices].to(device)), y[indices].to(device))
        loss.backward()
        transfers = num_transfers(backend)
        is_complete = optimizer.step()
        if log is not None:
            log.append(
                {
                    "has_updated": is_complete,
                    "batch_size": optimizer.batch_size,
                    "is_idle": optimizer.is_idle,
                    "graphs": num_graphs(backend),
                    "transfers": num_transfers(backend) - transfers,
                    "factors": [optimizer.factor(group) for group in range(len(optimizer.param_groups))],
                }
            )


def train(model, backend, kind, inner, options):
    device = device_of(backend)
    model = model.to(device)
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=SIZES, minibatch_size=MINIBATCH)
    communicator_for(model.parameters()).flush()  # the counters of BatchNorm are a graph of the user's on XLA
    graphs_before = num_graphs(backend)
    optimizer = kind(inner(model), sampler, ref_batchsize=REF_BATCHSIZE, model=model, **options)
    log = []
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        train_epoch(model, sampler, optimizer, device, log, backend)
    measured = range(len(optimizer.param_groups)) if optimizer.rule.measures_noise else ()
    noise = [vars(optimizer.rule.noise(group)) for group in measured]
    return {
        "state": state_of(model),
        "log": log,
        "graphs_before": graphs_before,
        "noise": noise,
        "progress": getattr(optimizer, "progress", None),
    }


def train_plainly(model, inner, *, sums_gradients=False, clip=None):
    """The same updates by plain PyTorch: every step as one accumulation of all its minibatches, without the library."""
    x, y = data()
    optimizer = inner(model)
    ref_lr, ref_weight_decay = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]
    for minibatches in steps_of_samples():
        n = len(minibatches)
        optimizer.zero_grad()
        for indices in minibatches:
            loss = nn.functional.cross_entropy(model(x[indices]), y[indices])
            (loss if sums_gradients else loss / n).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        group = optimizer.param_groups[0]
        if sums_gradients:
            group["lr"], group["weight_decay"] = ref_lr * MINIBATCH / REF_BATCHSIZE, ref_weight_decay * n
        else:
            group["lr"] = ref_lr * n * MINIBATCH / REF_BATCHSIZE
        optimizer.step()
    return state_of(model)


def adascale_plainly(model, *, is_adam=False):
    """AdaScale by plain PyTorch and the formulas written out: all minibatch gradients held, averages as sums."""
    x, y = data()
    optimizer = adamw(model) if is_adam else two_groups(model)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    ref_lrs = [group["lr"] for group in optimizer.param_groups]
    weights, history, gains = [], [[] for _ in groups], []
    for minibatches in steps_of_samples():
        n, batch_size = len(minibatches), len(minibatches) * MINIBATCH
        is_measurable = not is_adam or len(gains) > 0  # before its first update Adam has no second moment
        gradients = []
        for indices in minibatches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
            gradients.append([[p.grad for p in group if p.grad is not None] for group in groups])
        decay = max(0.95, 1 - batch_size / REF_BATCHSIZE / 1000)
        if n > 1 and is_measurable:
            weights = [weight * decay for weight in weights] + [1 - decay]
        for number, group in enumerate(groups):
            used = [p for p in group if p.grad is not None]
            scales = [divisor(optimizer, p) if is_adam else torch.ones(()) for p in used]
            mean = [torch.stack([g[number][i] for g in gradients]).mean(0) for i in range(len(used))]
            if n > 1 and is_measurable:
                mean_of_squares = sum(square(g[number], scales) for g in gradients) / n
                square_of_mean = square(mean, scales)
                variance = (mean_of_squares - square_of_mean) * batch_size / (n - 1)
                history[number].append((variance, square_of_mean - variance / batch_size + variance / len(x)))
            for p, g in zip(used, mean, strict=True):
                p.grad = g
        gains.append([])
        for number, estimates in enumerate(history):
            if not estimates:
                gain = min(1.0, batch_size / REF_BATCHSIZE)
            else:
                weighted = [(w * v, w * g) for w, (v, g) in zip(weights, estimates, strict=True)]
                variance, square_norm = (sum(column) / sum(weights) for column in zip(*weighted, strict=True))
                square_norm = max(square_norm, 0.0)
                gain = (variance / REF_BATCHSIZE + square_norm) / (variance / batch_size + square_norm)
            gains[-1].append(gain**0.5 if is_adam else gain)
            optimizer.param_groups[number]["lr"] = ref_lrs[number] * gains[-1][-1]
        optimizer.step()
    return state_of(model), gains


def square(gradients, scales):
    return sum(((g / s).double() ** 2).sum().item() for g, s in zip(gradients, scales, strict=True))


def divisor(optimizer, p):
    state = optimizer.state[p]
    if not state:
        return torch.ones(())
    group = optimizer.param_groups[0]
    found = (state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"])).sqrt() + group["eps"]
    return found.where(found >= 0.1 * found.square().mean().sqrt(), torch.inf)


def steps_of_samples() -> list[list[list[int]]]:
    """The minibatches of every step of all epochs on one core."""
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=SIZES, minibatch_size=MINIBATCH, num_replicas=1, rank=0)
    steps = []
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        minibatches = iter(sampler)
        for step in sampler.schedule.steps(epoch):
            steps.append([next(minibatches) for _ in range(sampler.schedule.num_minibatches(step))])
    return steps


def idle_cores_leave_no_mark(model, backend):
    """A run in which all cores but the first have only NaN padding minibatches; returns buffers before and after."""
    device = device_of(backend)
    model = nn.Sequential(model, nn.Dropout(0.5)).to(device)
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=MINIBATCH, minibatch_size=MINIBATCH)
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=REF_BATCHSIZE, model=model)
    before = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
    x, y = data()
    poison = torch.tensor([float("nan") if sampler.rank else 1.0]).to(device)
    for step, indices in enumerate(sampler):
        if step == 4:
            break
        (nn.functional.cross_entropy(model(x[indices].to(device)), y[indices].to(device)) * poison).backward()
        optimizer.step()
    after = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
    return {"before": before, "after": after, "state": state_of(model)}


def one_nan_minibatch(model, backend):
    """AdaScale over a trace of six steps, with NaN on the last core in step 3; returns the results."""
    device = device_of(backend)
    model = model.to(device)
    trace = [MINIBATCH * n for n in (4, 8, 3, 8, 5, 4)]
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=MINIBATCH)
    # by default, nothing is skipped where that would cost a wait: on accelerators, with an optimizer that is not fused
    options = {"skip_nonfinite": True} if backend == "tpu" else {}
    optimizer = vbs.AdaScaleOptimizer(sgd(model), sampler, ref_batchsize=REF_BATCHSIZE, model=model, **options)
    x, y = data()
    updates, progress = [], []
    for indices in sampler:
        is_poisoned = optimizer.steps_done == 3 and sampler.rank == sampler.num_replicas - 1
        poison = torch.tensor([float("nan") if is_poisoned else 1.0]).to(device)
        nn.functional.cross_entropy(model(x[indices].to(device) * poison), y[indices].to(device)).backward()
        before = optimizer.steps_done
        optimizer.step()
        if optimizer.steps_done > before:
            updates.append(optimizer.updated)
            progress.append(optimizer.progress)
    return {
        "updates": updates,
        "progress": progress,
        "state": state_of(model),
        "steps_skipped": optimizer.steps_skipped,
    }


def one_step_left_out(model):
    """The expected result: the same steps with AdaScale in one process, without step 3."""
    trace = [MINIBATCH * n for n in (4, 8, 3, 8, 5, 4)]
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=MINIBATCH, num_replicas=1, rank=0)
    minibatches = list(sampler)
    del minibatches[4 + 8 + 3 : 4 + 8 + 3 + 8]
    del trace[3]
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=MINIBATCH)
    optimizer = vbs.AdaScaleOptimizer(sgd(model), sampler, ref_batchsize=REF_BATCHSIZE)
    x, y = data()
    for indices, _ in zip(minibatches, sampler, strict=False):
        nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        optimizer.step()
    return state_of(model), optimizer.progress


def stop_in_the_middle(model, backend):
    """Half of epoch 1, and the state at that time, in the middle of an accumulation if there is one."""
    device = device_of(backend)
    model = model.to(device)
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=SIZES, minibatch_size=MINIBATCH)
    optimizer = vbs.AdaScaleOptimizer(two_groups(model), sampler, ref_batchsize=REF_BATCHSIZE, model=model)
    train_epoch(model, sampler, optimizer, device)
    sampler.set_epoch(1)
    optimizer.set_epoch(1)
    x, y = data()
    num_updates = 0
    for indices in sampler:
        nn.functional.cross_entropy(model(x[indices].to(device)), y[indices].to(device)).backward()
        num_updates += optimizer.step()
        if num_updates == 2:
            break
    to_cpu = torch.utils._pytree.tree_map_only
    return {
        "model": state_of(model),
        "optimizer": to_cpu(torch.Tensor, lambda t: t.cpu().clone(), optimizer.state_dict()),
    }


def go_on(model, saved, backend):
    """The rest of the run from a state saved anywhere."""
    device = device_of(backend)
    model.load_state_dict(saved["model"])
    model = model.to(device)
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=SIZES, minibatch_size=MINIBATCH)
    optimizer = vbs.AdaScaleOptimizer(two_groups(model), sampler, ref_batchsize=REF_BATCHSIZE, model=model)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # torch uses the tensors without a copy
    first_epoch, first_step = optimizer.epoch, optimizer.epoch_step
    for epoch in range(first_epoch, NUM_EPOCHS):
        sampler.set_epoch(epoch, first_step if epoch == first_epoch else 0)
        optimizer.set_epoch(epoch, first_step if epoch == first_epoch else 0)
        train_epoch(model, sampler, optimizer, device)
    return {"state": state_of(model), "steps_done": optimizer.steps_done, "samples_done": optimizer.samples_done}


def run_all(models, backend, names):
    torch.manual_seed(7)  # for dropout
    results = {name: train(models[name], backend, *RUNS[name]) for name in names}
    results["idle"] = idle_cores_leave_no_mark(models["idle"], backend)
    results["nan"] = one_nan_minibatch(models["nan"], backend)
    results["stopped"] = stop_in_the_middle(models["resumed"], backend)
    return results
