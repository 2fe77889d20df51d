"""Loops of small runs of every kind: with loaders, checkpoints, policies, streams, open steps, several optimizers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from golden_recorder import Recorder, Track, flattened
from golden_training import (
    BAD_SAMPLE,
    MINIBATCH,
    NUM_CLASSES,
    NUM_SAMPLES,
    REF_BATCHSIZE,
    TRACE,
    Loss,
    Normed,
    Tokens,
    Way,
    adamw,
    mean_loss,
    num_tokens,
    plain,
    seeded,
    sgd,
    sum_loss,
    vectors,
)
from torch import nn
from torch.nn.functional import mse_loss, pad, softplus
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs


def usual(recorder: Recorder, rule: str, trace: Any = TRACE, **options: Any) -> Any:
    """Model, optimizer, sampler and data of a loop that indexes tensors."""
    of_sampler = ("on_end", "seed", "shuffle", "max_minibatch_size", "lockstep")
    kept = {name: options.pop(name) for name in of_sampler if name in options}
    x, y = (tensor.to(recorder.device) for tensor in vectors())
    model = seeded(Normed(options.pop("dropout", 0.0))).to(recorder.device)
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=MINIBATCH, **kept)
    inner = options.pop("inner", sgd)(model)
    options = {"rule": rule, "ref_batchsize": REF_BATCHSIZE, "model": model, **options}
    optimizer = vbs.CustomOptimizer(inner, sampler, **options)
    recorder.begin(model, optimizer, inner)
    return model, optimizer, sampler, x, y


def rank_and_cores() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def folder_of(recorder: Recorder) -> Path:
    """For the checkpoints of this number of cores."""
    return recorder.directory / f"{rank_and_cores()[1]} {dist.is_initialized()}"


def await_all(recorder: Recorder) -> None:
    """Wait for all ranks, without counting it."""
    if dist.is_initialized():
        with recorder.paused():
            dist.barrier()


def note_position(recorder: Recorder, what: str, optimizer: Any) -> None:
    at = [optimizer.epoch, optimizer.epoch_step, optimizer.has_completed_epoch, optimizer.is_accumulating]
    recorder.note(what, [*at, optimizer.steps_done, optimizer.samples_done, optimizer.progress])


# ------------------------------------------------------------------------------------------ sampler and tensors by hand


def closures(recorder: Recorder) -> None:
    model, optimizer, sampler, x, y = usual(recorder, "adascale")
    for _ in optimizer.epochs(2):
        for numbers in sampler:

            def closure(numbers: list[int] = numbers) -> torch.Tensor:
                loss = mean_loss(model, x[numbers], y[numbers])
                loss.backward()
                return loss

            recorder.step(numbers, None, closure=closure)


def left_early(recorder: Recorder) -> None:
    """Epochs out of order, left before a given step: after a backward pass or, if possible, after a minibatch."""
    model, optimizer, sampler, x, y = usual(recorder, "linear", on_end="cycle")
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


def positions(recorder: Recorder) -> None:
    """The position is set on the sampler or on the optimizer alone, on both, twice, and to the middle of an epoch."""
    model, optimizer, sampler, x, y = usual(recorder, "adascale", on_end="cycle")
    note_position(recorder, "before", optimizer)
    recorder.note("updates", [sampler.num_updates(number) for number in (1, 2, 7)])
    for who, epoch, first_step, num_steps in (
        ((), 0, 0, 99),  # the first pass needs no call
        ((sampler,), 1, 0, 2),
        ((optimizer,), 1, 2, 99),
        ((optimizer, sampler), 2, 1, 1),
        ((sampler, optimizer, sampler, optimizer), 2, 2, 99),
        ((optimizer,), 0, 1, 0),  # not read at all
        ((sampler,), 4, 0, 99),
    ):
        for one in who:
            one.set_epoch(epoch, first_step)
            note_position(recorder, f"set by {type(one).__name__}", optimizer)
        recorder.note("sizes", [len(sampler), optimizer.get_bs(), optimizer.batch_size, sampler.get_epochtrace(epoch)])
        if num_steps == 0:
            continue
        last = optimizer.steps_done + num_steps
        for numbers in sampler:
            loss = mean_loss(model, x[numbers], y[numbers])
            loss.backward()
            recorder.step(numbers, loss)
            if optimizer.steps_done == last:
                break
        note_position(recorder, "after", optimizer)


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
        sampler = vbs.CustomSampler(TensorDataset(x, y), TRACE, minibatch_size=MINIBATCH, seed=3)
        inner = inners.get(name, sgd)(model)
        optimizer = getattr(vbs, name)(inner, sampler, ref_batchsize=REF_BATCHSIZE, model=model, **options)
        recorder.begin(model, optimizer, inner)
        recorder.run[name] = [optimizer.get_lr(), optimizer.get_bs(), sampler.get_epochtrace(0), len(sampler)]
        for numbers in sampler:
            loss = mean_loss(model, x[numbers], y[numbers])
            loss.backward()
            recorder.step(numbers, loss)


def unread(recorder: Recorder) -> None:
    """A loop that reads no loader, with the right number of calls."""
    model, optimizer, sampler, x, y = usual(recorder, "adascale", inner=adamw, measure_noise=True)
    sampler.must_be_read = False
    for epoch in range(2):
        optimizer.set_epoch(epoch)
        for number in range(len(sampler)):
            numbers = [(number + 3 * place) % NUM_SAMPLES for place in range(MINIBATCH)]
            loss = mean_loss(model, x[numbers], y[numbers])
            loss.backward()
            recorder.step(numbers, loss)


def copied(recorder: Recorder) -> None:
    """A deep copy trains on its own from the middle of a run; a sampler and a state are pickled."""
    model, optimizer, sampler, x, y = usual(recorder, "adascale", on_end="cycle", smooth_steps=2)
    original = recorder.tracks[-1]

    def run(track: Track, epoch: int, num_steps: int) -> None:
        track.optimizer.set_epoch(epoch)
        last = track.optimizer.steps_done + num_steps
        for numbers in track.optimizer.sampler:
            loss = mean_loss(track.model, x[numbers], y[numbers])
            loss.backward()
            track.step(numbers, loss)
            if track.optimizer.steps_done == last:
                return

    run(original, 0, 3)
    other, its_optimizer = copy.deepcopy((model, optimizer))
    its = recorder.begin(other, its_optimizer, its_optimizer.inner)
    run(its, 0, 2)
    run(original, 1, 2)
    run(its, 1, 9)
    unpickled = pickle.loads(pickle.dumps(sampler))
    unpickled.set_epoch(0, 1)
    recorder.note("pickled sampler", list(unpickled))
    content = io.BytesIO()
    torch.save(optimizer.state_dict(), content)
    content.seek(0)
    optimizer.load_state_dict(torch.load(content, weights_only=True))
    run(original, 2, 9)


def logged(recorder: Recorder, rule: str = "adascale", **options: Any) -> None:
    """With a log, sums over all cores and hooks around step() and states."""
    model, optimizer, sampler, x, y = usual(recorder, rule, log_steps=3, **options)
    records: list[Any] = []
    calls = {
        "before step": 0,
        "after step": 0,
        "before saving": 0,
        "after saving": 0,
        "before load": 0,
        "after load": 0,
    }

    def count(what: str) -> Callable[..., None]:
        return lambda *_: calls.__setitem__(what, calls[what] + 1)

    optimizer.register_step_pre_hook(count("before step"))
    optimizer.register_step_post_hook(count("after step"))
    optimizer.register_state_dict_pre_hook(count("before saving"))
    optimizer.register_state_dict_post_hook(count("after saving"))
    optimizer.register_load_state_dict_pre_hook(count("before load"))
    optimizer.register_load_state_dict_post_hook(count("after load"))
    log = vbs.Log(optimizer, every=2, to=[records.append])
    metrics = vbs.Metrics("seen", "right", device=recorder.device)
    for _ in optimizer.epochs(2):
        for numbers in sampler:
            loss = mean_loss(model, x[numbers], y[numbers])
            loss.backward()
            recorder.step(numbers, loss)
            log.step(loss)
            metrics.add(seen=len(numbers), right=(model(x[numbers]).argmax(-1) == y[numbers]).sum())
        log.write(accuracy=0.5)
    log.close()
    optimizer.load_state_dict(optimizer.state_dict())
    recorder.run |= {"log": records, "calls": calls, "metrics": metrics.read(), "report": optimizer.report()}


# ---------------------------------------------------------------------------------------------- through the front door


@dataclasses.dataclass
class Turn:
    """A minibatch in :func:`front_door`."""

    recorder: Recorder
    model: nn.Module
    optimizer: Any
    x: torch.Tensor
    y: torch.Tensor
    numbers: list[int]
    epoch: int
    loss: Loss
    how: dict[str, Any]  # further arguments of step()

    def step(self, loss: torch.Tensor, by: Callable[..., Any] | None = None) -> Any:
        return self.recorder.step(self.numbers, loss, by, **self.how)


def plainly(turn: Turn) -> None:
    """A backward pass and a step, which is told the loss."""
    loss = turn.loss(turn.model, turn.x, turn.y)
    loss.backward()
    turn.how["loss"] = loss
    turn.step(loss)


Attach = Callable[[Any, nn.Module, Recorder], None]


def front_door(
    recorder: Recorder,
    *,
    net: Callable[[], nn.Module] = Normed,
    way: Way = plain,
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]] = vectors,
    inner: Callable[[nn.Module], Any] = sgd,
    rule: Any = "linear",
    loader: Mapping[str, Any] | None = None,
    makes_loader: Callable[..., Any] = vbs.DataLoader,
    runs: Sequence[Mapping[str, Any]] = ({"num_epochs": 2},),
    attach: Sequence[Attach] = (),
    loss: Loss = mean_loss,
    weight: Callable[[torch.Tensor], Any] | None = None,
    turn: Callable[[Turn], None] = plainly,
    after_step: Callable[[Any, nn.Module, Recorder], None] | None = None,
    leaves_after: Sequence[int] = (),
    leaves_within: Sequence[int] = (),
    killed_after: Sequence[int] = (),
    reads_ahead: bool = False,
    is_common: bool = False,
    **options: Any,
) -> None:
    """A loop with a loader and ``optimizer.epochs``, as in the documentation.

    Args:
        way: shards the model over processes; returns additional arguments of the loader.
        loader: further arguments of the loader.
        makes_loader: makes the loader, with the arguments of ``vbs.DataLoader``.
        runs: the arguments of ``optimizer.epochs``, called several times.
        attach: attach something to the optimizer.
        turn: what happens with a minibatch.
        after_step: called after each complete step.
        leaves_after: the numbers of steps after which the epoch is left.
        leaves_within: the numbers of steps in the middle of which it is left.
        killed_after: the numbers of steps after which the run is left, and resumed by new objects.
        reads_ahead: whether the loop reads the next minibatch before it runs one.
        is_common: see :class:`Track`.
        options: of the optimizer.
    """
    x, y = data()
    for until in (*killed_after, None):
        model, more = way(seeded(net()).to(recorder.device))
        given = {"trace": TRACE, "minibatch_size": MINIBATCH, **more, **(loader or {})}
        minibatches = makes_loader(TensorDataset(x, y, torch.arange(len(x))), **given)
        inners = inner(model)
        how = {"ref_batchsize": REF_BATCHSIZE, "model": model, **options}
        optimizer = vbs.Optimizer(inners, minibatches, rule=rule() if callable(rule) else rule, **how)
        recorder.begin(model, optimizer, inners, is_common=is_common)
        if recorder.device.type != "xla":
            recorder.clock.speed = 1.0 + optimizer.sampler.rank  # each core is slower than the one before
        for one in attach:
            one(optimizer, model, recorder)
        note_position(recorder, "begin", optimizer)
        recorder.note("minibatches", len(minibatches))

        def is_left(optimizer: Any = optimizer, until: int | None = until) -> bool:
            done = optimizer.steps_done
            if optimizer.is_accumulating:
                return done in leaves_within
            return done in leaves_after or done == until

        def run(epoch: int, own_x: torch.Tensor, own_y: torch.Tensor, numbers: torch.Tensor) -> None:
            model, optimizer = recorder.tracks[-1].model, recorder.tracks[-1].optimizer
            before, own_x, own_y = optimizer.steps_done, own_x.to(recorder.device), own_y.to(recorder.device)
            how = {} if weight is None else {"weight": weight(own_y)}
            turn(Turn(recorder, model, optimizer, own_x, own_y, numbers.tolist(), epoch, loss, how))
            if optimizer.steps_done > before and after_step:
                after_step(optimizer, model, recorder)

        for limits in runs:
            with contextlib.closing(optimizer.epochs(**limits)) as epochs:
                for epoch in epochs:
                    for minibatch in ahead(minibatches) if reads_ahead else minibatches:
                        run(epoch, *minibatch)
                        if is_left():
                            break
                    note_position(recorder, f"epoch {epoch}", optimizer)
                    if optimizer.steps_done == until:
                        break
            note_position(recorder, "end", optimizer)
        if folder_of(recorder).exists():
            await_all(recorder)
            if not optimizer.sampler.rank:
                note_files(recorder, folder_of(recorder))
            await_all(recorder)


def ahead(minibatches: Iterable[Any]) -> Iterator[Any]:
    """Read one more than is run."""
    iterator = iter(minibatches)
    following = next(iterator, None)
    while following is not None:
        present, following = following, next(iterator, None)
        yield present


def torch_loader(dataset: Any, num_workers: int = 0, persistent_workers: bool = False, **of_sampler: Any) -> Any:
    """Torch's own loader over a sampler."""
    sampler = vbs.CustomSampler(dataset, **of_sampler)
    return DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, persistent_workers=persistent_workers)


def log_every(number: int) -> Attach:
    def attach(optimizer: Any, model: nn.Module, recorder: Recorder) -> None:
        sink = recorder.run.setdefault("log", []).append
        optimizer.attach(vbs.Log(optimizer, every=number, to=[sink]))

    return attach


def log_to_file(number: int) -> Attach:
    def attach(optimizer: Any, model: nn.Module, recorder: Recorder) -> None:
        sink = vbs.JsonLines(folder_of(recorder) / "log.jsonl")
        optimizer.attach(vbs.Log(optimizer, every=number, to=[sink]))

    return attach


def schedule(per: str, every: float | None = None, *, kind: str = "ExponentialLR", of_inner: bool = False) -> Attach:
    """Attaches a scheduler of torch."""
    kinds = torch.optim.lr_scheduler
    make: dict[str, Callable[[Any], Any]] = {
        "ExponentialLR": lambda of: kinds.ExponentialLR(of, 0.9),
        "MultiStepLR": lambda of: kinds.MultiStepLR(of, [2, 5], 0.7),
        "OneCycleLR": lambda of: kinds.OneCycleLR(of, max_lr=0.2, total_steps=6),
        "ChainedScheduler": lambda of: kinds.ChainedScheduler(
            [kinds.LinearLR(of, 0.5, 1.0, total_iters=4), kinds.CosineAnnealingLR(of, T_max=5)]
        ),
        "SequentialLR": lambda of: kinds.SequentialLR(
            of, [kinds.LinearLR(of, 0.5, 1.0, total_iters=2), kinds.CosineAnnealingLR(of, T_max=3)], [2]
        ),
    }

    def attach(optimizer: Any, model: nn.Module, recorder: Recorder) -> None:
        optimizer.attach(make[kind](optimizer.inner if of_inner else optimizer), per=per, every=every)

    return attach


def save(**options: Any) -> Attach:
    """Attaches a checkpoint."""

    def attach(optimizer: Any, model: nn.Module, recorder: Recorder) -> None:
        folder = folder_of(recorder)
        optimizer.attach(vbs.Checkpoint(folder, model=model, optimizer=optimizer, **options))

    return attach


def scaled(
    *, unscales: bool = False, leaves_out: bool = True, bad: bool = True, has_weights: bool = False, **options: Any
) -> Callable[[Turn], None]:
    """A backward pass and a step through a GradScaler, whose scale changes within steps.

    Args:
        unscales: whether gradients are unscaled and clipped by the user.
        leaves_out: whether some minibatches have no backward pass.
        bad: whether the loss of one sample in the second epoch is infinite.
        has_weights: whether the loss is a sum with a weight.
        options: of the scaler.
    """
    scalers: dict[int, Any] = {}  # of each run

    def turn(turn: Turn) -> None:
        kind = turn.recorder.device.type
        if id(turn.recorder) not in scalers:
            scalers.clear()
            of_scaler = {"init_scale": 2.0**10, "growth_interval": 3, **options}
            scalers[id(turn.recorder)] = torch.amp.GradScaler(kind, **of_scaler)
        scaler = scalers[id(turn.recorder)]
        if leaves_out and sum(turn.numbers) % 5 == 2:
            turn.step(torch.zeros(()))
            return
        loss = turn.loss(turn.model, turn.x, turn.y)
        scaler.scale(
            loss * (float("inf") if bad and turn.epoch == 1 and BAD_SAMPLE in turn.numbers else 1.0)
        ).backward()
        if unscales:
            scaler.unscale_(turn.optimizer)
            nn.utils.clip_grad_norm_(turn.model.parameters(), 0.1)
        turn.step(loss, functools.partial(scaler.step, turn.optimizer))
        scaler.update()
        with turn.recorder.paused():
            turn.recorder.note("scale", scaler.get_scale())

    return turn


def changing_buffers(turn: Turn) -> None:
    """The model runs in training mode before each minibatch, and changes its statistics."""
    with torch.no_grad():
        turn.model(turn.x * 2)
    plainly(turn)


def evaluated(recorder: Recorder, *, way: Way = plain, net: Callable[[], nn.Module] = Normed) -> None:
    """Between epochs, and within a step, the model is evaluated over all cores."""
    x, y = vectors()
    tests = vbs.EvaluationLoader(TensorDataset(x, y), minibatch_size=5)

    def evaluate(optimizer: Any, model: nn.Module, recorder: Recorder) -> None:
        if optimizer.steps_done % 4 not in (1, 3):
            return
        metrics = vbs.Metrics("right", "seen", device=recorder.device)
        if optimizer.steps_done % 4 == 3:
            vbs.share_buffers(model)
        model.eval()
        with torch.no_grad():
            for own_x, own_y in tests:
                right = (model(own_x.to(recorder.device)).argmax(-1) == own_y.to(recorder.device)).sum()
                metrics.add(right=right, seen=len(own_y))
        model.train()
        recorder.note("metrics", metrics.read())

    seeds = {"seed_minibatches": True, "skip_nonfinite": True}
    front_door(recorder, net=net, way=way, rule="adascale", after_step=evaluate, attach=[log_every(3)], **seeds)


def watched(
    recorder: Recorder,
    *,
    on_end: str = "stop",
    num_epochs: int | None = 3,
    every: int = 1,
    killed_after: Sequence[int] = (),
) -> None:
    """A trace whose file changes: valid rows, rows that are fixed, an invalid content, a shorter and a longer one."""
    rank, cores = rank_and_cores() if recorder.device.type != "xla" else xla_rank_and_cores()
    path = recorder.directory / f"trace-{cores}-{dist.is_initialized()}.csv"
    edits = {
        2: [MINIBATCH * n for n in (1, 1, 1, 5, 2, 6, 2, 2, 2, 2, 3, 3)],
        4: None,
        6: [MINIBATCH * n for n in (1, 1, 1, 5, 2, 6, 2, 4, 1, 3, 1, 1, 7, 2)],
        8: [MINIBATCH * n for n in (1, 1, 1, 5, 2, 6, 2, 4, 1, 3, 5, 4, 7)],
    }

    def write(sizes: list[int] | None) -> None:
        rows = ["step,batchsize", *(f"{step},{size}" for step, size in enumerate(sizes or [MINIBATCH + 1]))]
        new = path.with_suffix(".new")
        new.write_text("\n".join(rows) + "\n")
        os.replace(new, path)

    def edit(optimizer: Any, model: nn.Module, recorder: Recorder) -> None:
        if rank == 0 and optimizer.steps_done in edits:
            write(edits[optimizer.steps_done])

    if rank == 0:
        write(TRACE)
    await_all(recorder)
    while not path.exists():  # XLA cores have no barrier that compiles no graph
        time.sleep(0.01)
    trace = vbs.traces.WatchedTrace(path, every=every, lead=2)
    attach = [log_every(2), *([save(every_steps=3)] if killed_after else [])]
    how: Any = {"runs": [{"num_epochs": num_epochs}], "attach": attach, "rule": "adascale"}
    how |= {"killed_after": killed_after}
    front_door(recorder, loader={"trace": trace, "on_end": on_end}, after_step=edit, **how)


def xla_rank_and_cores() -> tuple[int, int]:
    import torch_xla.runtime as runtime

    return runtime.global_ordinal(), runtime.world_size()


def shared_freely(recorder: Recorder, **loader: Any) -> None:
    """Cores take minibatches as they are free: recorded are the samples of each step, and what cores have in common."""
    taken: list[tuple[int, list[int]]] = []

    def turn(turn: Turn) -> None:
        step = turn.optimizer.steps_done
        plainly(turn)
        taken.append((step, [] if turn.optimizer.is_idle else turn.numbers))

    how: Any = {"exact": True, "seed_minibatches": True, "is_common": True, "net": functools.partial(Normed, 0.2)}
    front_door(recorder, loader={"assign": "as free", **loader}, turn=turn, rule="adascale", **how)
    all_taken: list[Any] = [None] * rank_and_cores()[1]
    if dist.is_initialized():
        dist.all_gather_object(all_taken, taken)
    else:
        all_taken = [taken]
    found: dict[int, list[int]] = {}
    for step, numbers in itertools.chain(*all_taken):
        found.setdefault(step, []).extend(numbers)
    recorder.note("samples of each step", [sorted(found[step]) for step in sorted(found)])


def compiled(
    recorder: Recorder, *, is_whole: bool = False, net: Callable[[], nn.Module] = Normed, **options: Any
) -> None:
    """With a compiled model, or a compiled function that contains a whole step."""
    x, y = vectors()
    model = seeded(net())
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=TRACE, minibatch_size=MINIBATCH)
    inner = sgd(model)
    how: Any = {"rule": "adascale", "ref_batchsize": REF_BATCHSIZE, "model": model, **options}
    optimizer = vbs.Optimizer(inner, sampler, **how)
    track = recorder.begin(model, optimizer, inner, has_hook=True)
    called = model if is_whole else torch.compile(model, backend="eager")

    def one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = mean_loss(called, x, y)
        loss.backward()
        if is_whole:
            optimizer.step()
        return loss.detach()

    run = torch.compile(one, backend="eager") if is_whole else one
    for _ in optimizer.epochs(2):
        for numbers in sampler:
            loss = run(x[numbers], y[numbers])
            if is_whole:
                recorder.note("loss", loss)
            else:
                track.step(numbers, loss)


# ----------------------------------------------------------------------------------------------- runs that are resumed


def resumed(recorder: Recorder, **options: Any) -> None:
    """Part of a run that moves from one number of cores to the next through ``state_dict`` in the middle of a step."""
    model, optimizer, sampler, x, y = usual(recorder, "adascale", on_end="cycle", **options)
    path = recorder.directory / "state.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    note_position(recorder, "resumed at", optimizer)
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
                await_all(recorder)  # until the others have read the state
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                if sampler.rank == 0:
                    torch.save(state, path)
                return


def checkpointed(
    recorder: Recorder,
    *,
    rule: str = "adascale",
    policy: Callable[[], Any] | None = None,
    num_steps: int = 6,
    saves: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Part of a run that moves from one number of cores to the next through a checkpoint, within an epoch."""
    trace = policy() if policy else TRACE
    kept = {} if policy else {"on_end": "cycle"}
    model, optimizer, sampler, x, y = usual(recorder, rule, trace, **kept, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    metrics = vbs.Metrics("seen", device=recorder.device)
    saves = {"every_steps": 2, "every_seconds": 0.5, **(saves or {})}
    folder = recorder.directory / "run"
    parts = {"model": model, "optimizer": optimizer, "schedulers": [scheduler], "metrics": [metrics]}
    checkpoint = vbs.Checkpoint(folder, **parts, **saves)
    note_position(recorder, "resumed at", optimizer)
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
    recorder.note("seen", metrics.read())  # which waits for all ranks, including the writer
    if sampler.rank == 0:
        note_files(recorder, folder)


def note_files(recorder: Recorder, folder: Path) -> None:
    """The executed trace, the decisions, and every leaf of the newest checkpoint."""
    for name in ("executed.csv", "assigned.csv", "decisions.jsonl", "log.jsonl"):
        recorder.note(name, recorder.text(folder / name))
    names = sorted(path.name for path in folder.glob("step-*"))
    recorder.note("checkpoints", names)
    files = [path for path in sorted(folder.glob("step-*")) if path.is_file()]
    if files:
        with recorder.paused():
            recorder.note(files[-1].name, flattened(torch.load(files[-1], weights_only=True)))


@dataclasses.dataclass(frozen=True)
class Session:
    """A part of a run in :func:`sessions`, which new objects resume.

    Args:
        until: the number of steps at which it is killed, None to reach the end.
        stops: whether it is asked to stop instead, so that it saves.
        changes: other arguments than before.
        allowed: what the checkpoint allows to be changed.
    """

    until: int | None = None
    stops: bool = False
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    allowed: tuple[str, ...] = ()


def sessions(
    recorder: Recorder,
    of_run: Sequence[Session],
    *,
    num_epochs: int | None = 3,
    attaches_late: bool = False,
    **options: Any,
) -> None:
    """A run that is killed and stopped several times, each time within an epoch, and resumed by new objects.

    Args:
        of_run: its parts.
        num_epochs: of the complete run.
        attaches_late: whether schedulers are attached after their state was loaded.
        options: of sampler and optimizer.
    """
    folder = folder_of(recorder)
    for session in of_run:
        given = {"rule": "adascale", "on_end": "cycle", **options, **session.changes}
        limits = given.pop("limits", {})
        model, optimizer, sampler, x, y = usual(recorder, given.pop("rule"), given.pop("trace", TRACE), **given)
        parts = [schedule("samples", 24), schedule("update", 2, kind="MultiStepLR")]
        for attach in parts[:0] if attaches_late else parts:
            attach(optimizer, model, recorder)
        saves = {"every_steps": 2, "allow_changes": session.allowed}
        checkpoint = vbs.Checkpoint(folder, model=model, optimizer=optimizer, **saves)
        for attach in parts if attaches_late else parts[:0]:
            attach(optimizer, model, recorder)
        optimizer.attach(checkpoint)
        note_position(recorder, "resumed at", optimizer)
        try:
            _run_session(recorder, session, optimizer.epochs(num_epochs, **limits), x, y)
        except SystemExit as ended:
            recorder.note("exit code", ended.code)
        note_position(recorder, "ended at", optimizer)
        await_all(recorder)
        if sampler.rank == 0:
            note_files(recorder, folder)
        await_all(recorder)


def _run_session(recorder: Recorder, session: Session, epochs: Iterator[int], x: torch.Tensor, y: torch.Tensor) -> None:
    model, optimizer = recorder.tracks[-1].model, recorder.tracks[-1].optimizer
    with contextlib.closing(epochs):
        for _ in epochs:
            for numbers in optimizer.sampler:
                if session.stops and optimizer.steps_done == session.until and optimizer.sampler.rank == 0:
                    vbs.request_stop()
                loss = mean_loss(model, x[numbers], y[numbers])
                loss.backward()
                recorder.step(numbers, loss)
                # in the middle of a step, cores with fewer minibatches would already wait for the others
                if optimizer.steps_done == session.until and not session.stops and not optimizer.is_accumulating:
                    return


# ------------------------------------------------------------------------------------------------------------- policies


def decided(recorder: Recorder, policy: Callable[[], Any], *, num_workers: int = 0, rule: str = "adascale") -> None:
    """Batch sizes decided by a policy, with the recorder's clock."""
    x, y = vectors()
    model = seeded(Normed())
    chosen = policy()
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=chosen, minibatch_size=2, seed=5)
    inner = sgd(model)
    optimizer = vbs.CustomOptimizer(inner, sampler, rule=rule, ref_batchsize=4, model=model)
    recorder.begin(model, optimizer, inner)
    optimizer.on_decision(lambda record: recorder.note("decision", record))
    numbered = TensorDataset(x, y, torch.arange(NUM_SAMPLES))
    loader = DataLoader(numbered, batch_sampler=sampler, num_workers=num_workers)
    records: list[Any] = []
    log = vbs.Log(optimizer, every=2, to=[records.append])
    for epoch in optimizer.epochs(2):
        for inputs, targets, numbers in loader:
            loss = mean_loss(model, inputs, targets)
            loss.backward()
            recorder.step(numbers, loss)
            log.step(loss)
        if isinstance(sampler.policy, vbs.policies.OnPlateau):
            sampler.policy.tell(1.0 + 0.1 * epoch)
    recorder.run["log"] = records
    recorder.note("hints", optimizer.hints())


def sawtooth(situation: Any) -> float:
    return 2 * (1 + situation.steps_done % 7)


ASKED = {"every": 4, "lead": 3}
POLICIES: dict[str, Callable[[], Any]] = {
    "autoscale": lambda: vbs.Autoscale(max_batch_size=40, **ASKED),
    "per core": lambda: vbs.policies.PerCore(6, **ASKED),
    "norm test": lambda: vbs.policies.NormTest(eta=0.4, max_batch_size=30, max_growth=1.6, **ASKED),
    "critical batch": lambda: vbs.policies.CriticalBatch(cost=0.4, max_batch_size=24, **ASKED),
    "on plateau": lambda: vbs.policies.OnPlateau(patience=1, factor=1.5, **ASKED),
    "function": lambda: vbs.policies.FunctionPolicy(sawtooth, **ASKED),
}


# -------------------------------------------------------------------------------------------------------------- streams


def numbered_samples() -> Iterator[dict[str, Any]]:
    x, y = vectors()
    for number in range(NUM_SAMPLES):
        yield {"x": x[number], "y": y[number], "number": number}


class Resumable:
    """The same samples without end, with a state."""

    def __init__(self) -> None:
        self._next = self._first = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        x, y = vectors()
        self._next = self._first
        while True:
            number = self._next % NUM_SAMPLES
            self._next += 1
            yield {"x": x[number], "y": y[number], "number": number}

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._first = state["next"]


class Turned:
    """Samples whose order depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        x, y = vectors()
        for number in range(NUM_SAMPLES):
            number = (number + 7 * self.epoch) % NUM_SAMPLES
            yield {"x": x[number], "y": y[number], "number": number}


class Shard(Resumable):
    """The samples of this rank."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, cores = rank_and_cores()
        return itertools.islice(super().__iter__(), rank, None, cores)


STREAMED = [MINIBATCH * n for n in (3, 1, 4, 2)]


def streamed(
    recorder: Recorder,
    *,
    samples: Callable[[], Any] = lambda: numbered_samples,
    num_workers: int = 0,
    trace: Any = STREAMED,
    runs: Sequence[Mapping[str, Any]] = ({"num_epochs": 1},),
    net: Callable[[], nn.Module] = Normed,
    way: Way = plain,
    exact: bool = False,
    **options: Any,
) -> None:
    model, more = way(seeded(net()))
    stream = vbs.Stream(samples(), trace=trace, minibatch_size=MINIBATCH, **more, **options)
    loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
    inner = sgd(model)
    how: Any = {"ref_batchsize": REF_BATCHSIZE, "model": model, "exact": exact}
    optimizer = vbs.CustomOptimizer(inner, loader, rule="adascale", **how)
    recorder.begin(model, optimizer, inner)
    log_every(2)(optimizer, model, recorder)
    for limits in runs:
        for epoch in optimizer.epochs(**limits):
            for minibatch in loader:
                loss = mean_loss(model, minibatch["x"], minibatch["y"])
                loss.backward()
                recorder.step(minibatch["number"], loss, loss=loss)
            note_position(recorder, f"epoch {epoch}", optimizer)


def resumed_stream(
    recorder: Recorder, *, saves_stream: bool = False, is_stateful: bool = False, num_workers: int = 0
) -> None:
    """A stream in three sessions: its state, or that of its loader, is in the checkpoint, or it is skipped."""
    folder = folder_of(recorder)
    for last in (3, 8, 12):
        stream = vbs.Stream(Resumable(), trace=TRACE, minibatch_size=MINIBATCH, on_end="cycle")
        kind = DataLoader
        if is_stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader as kind
        loader = kind(stream, batch_size=None, num_workers=num_workers, generator=torch.Generator())
        model = seeded(Normed())
        inner = sgd(model)
        how: Any = {"ref_batchsize": REF_BATCHSIZE, "model": model}
        optimizer = vbs.Optimizer(inner, loader, rule="linear", **how)
        recorder.begin(model, optimizer, inner)
        saved = [loader] if is_stateful else [stream] if saves_stream else []
        optimizer.attach(vbs.Checkpoint(folder, model=model, optimizer=optimizer, schedulers=saved, every_steps=2))
        with contextlib.closing(optimizer.epochs(1)) as epochs:
            for _ in epochs:
                for minibatch in loader:
                    loss = mean_loss(model, minibatch["x"], minibatch["y"])
                    loss.backward()
                    recorder.step(minibatch["number"], loss)
                    if optimizer.steps_done == last:
                        break
                break
        await_all(recorder)


def orders(recorder: Recorder) -> None:
    """The samples assigned to each of several ranks, without training."""
    path, draw = recorder.directory / "trace.csv", random.Random(4)
    sizes = [8 * draw.choice(range(1, 30)) for _ in range(60)]
    path.write_text("step,batchsize\n" + "".join(f"{step},{size}\n" for step, size in enumerate(sizes)))
    lengths = [1 + 7 * number % 13 for number in range(1003)]
    found = recorder.run["orders"] = {}
    for cores, rank in ((most, rank) for most in range(1, 8) for rank in range(most)):
        where: Any = {"trace": path, "num_replicas": cores, "rank": rank}
        sampled: Any = {"dataset_size": 1003, "minibatch_size": 8, **where}
        sources = {
            "shuffled": vbs.CustomSampler(**sampled),
            "in order": vbs.CustomSampler(**sampled, shuffle=False, seed=1),
            "lockstep": vbs.CustomSampler(**sampled, lockstep=True, on_end="hold"),
            "cycle": vbs.CustomSampler(**sampled, seed=2**40, on_end="cycle"),
            "larger minibatches": vbs.CustomSampler(**sampled, max_minibatch_size=64),
            "tokens": vbs.TokenBudget(lengths, tokens=8, too_long="truncate", on_end="cycle", **where),
            "stream": vbs.Stream(range(1003), **sampled, collate_fn=list),
            "stream in lockstep": vbs.Stream(range(1003), **sampled, lockstep=True, collate_fn=list),
        }
        for name, source in sources.items():
            for epoch, first_step in ((0, 0), (1, 3)):
                source.set_epoch(epoch, first_step)
                drawn = json.dumps(list(source))
                of_epoch = [len(source), drawn.count("]") - 1, hashlib.sha256(drawn.encode()).hexdigest()[:16]]
                found[f"{name}, {rank} of {cores}, epoch {epoch} from step {first_step}"] = of_epoch


# -------------------------------------------------------------------------------------------------------- token budgets


def budgeted(
    recorder: Recorder,
    *,
    packed: bool = False,
    num_workers: int = 0,
    trace: Any = (32, 96, 64, 160, 32),
    rule: Any = "linear",
    runs: Sequence[Mapping[str, Any]] = ({"num_epochs": 2},),
    attach: Sequence[Attach] = (),
    **options: Any,
) -> None:
    """Texts of 1 to 13 tokens in minibatches of at most 32."""
    generator = torch.Generator().manual_seed(3)
    data = [torch.randint(0, NUM_CLASSES, (1 + 7 * number % 13,), generator=generator) for number in range(48)]
    how: Any = {"tokens": 32, "packed": packed, "max_shapes": 3, "on_end": None if callable(trace) else "cycle"}
    budget = vbs.TokenBudget([len(text) for text in data], trace if callable(trace) else list(trace), **how)

    def collate(numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        found = [data[number] for number in numbers]
        if packed:
            row = torch.cat(found)
            rows = pad(row, (0, 32 - len(row)), value=-1)[None]
        else:
            length = budget.padded_length([len(text) for text in found])
            rows = torch.stack([pad(text, (0, length - len(text)), value=-1) for text in found])
        return rows.clamp(min=0), torch.where(rows < 0, -100, (rows * 3 + 1) % NUM_CLASSES), numbers

    loader = DataLoader(range(48), batch_sampler=budget, collate_fn=collate, num_workers=num_workers)
    model = seeded(Tokens(dropout=0.1)).to(recorder.device)
    inner = sgd(model)
    options = {"ref_batchsize": 64, "model": model, "seed_minibatches": True, **options}
    optimizer = vbs.Optimizer(inner, budget, rule=rule, **options)
    recorder.begin(model, optimizer, inner)
    for one in attach:
        one(optimizer, model, recorder)
    for limits in runs:
        for epoch in optimizer.epochs(**limits):
            for x, y, numbers in loader:
                x, y = x.to(recorder.device), y.to(recorder.device)
                loss = sum_loss(model, x, y)
                loss.backward()
                recorder.step(numbers, loss, weight=num_tokens(y), loss=loss)
            note_position(recorder, f"epoch {epoch}", optimizer)


# ----------------------------------------------------------------------------------------------------------- open steps


def opened(
    recorder: Recorder,
    how: str,
    *,
    net: Callable[[], nn.Module] = Normed,
    way: Way = plain,
    rule: str = "adascale",
    is_weighted: bool = False,
    scales: bool = False,
    bad_step: int | None = None,
    **options: Any,
) -> None:
    """Steps with other numbers of minibatches on each core, without a loader.

    Args:
        how: how a core ends its part: "last", "end_step" or "minibatches".
        scales: whether with a GradScaler.
        bad_step: the number of a step in which a loss is not finite.
    """
    (rank, cores), (x, y), draw = rank_and_cores(), vectors(), random.Random(6)
    model, more = way(seeded(net()))
    given = {"trace": vbs.OpenSteps(timeout=200), "minibatch_size": MINIBATCH, **more}
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, **given)
    inner = sgd(model)
    options = {"ref_batchsize": REF_BATCHSIZE, "model": model, "rule": rule, **options}
    optimizer = vbs.Optimizer(inner, sampler, **options)
    recorder.begin(model, optimizer, inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3, enabled=scales)

    def run(numbers: list[int], is_bad: bool, **last: bool) -> None:
        loss = mean_loss(model, x[numbers], y[numbers]) * (len(numbers) if is_weighted else 1)
        scaler.scale(loss * (float("inf") if is_bad else 1.0)).backward()
        weight = {"weight": len(numbers)} if is_weighted else {}
        recorder.step(numbers, loss, functools.partial(scaler.step, optimizer) if scales else None, **weight, **last)
        scaler.update()

    if how != "minibatches":
        recorder.step(None, None, optimizer.end_step)  # without a minibatch on any core, this is not a step
    for step in range(7):
        lengths = [4 + draw.randrange(3) for _ in range(1 + draw.randrange(2 * cores))]
        program = [draw.sample(range(NUM_SAMPLES), length) for length in lengths]
        own, bad = [numbers for numbers in program if draw.randrange(cores) == rank], [program[0]] * (step == bad_step)
        if how == "minibatches":
            for numbers in optimizer.minibatches(own, padding=[0, 1, 2, 3]):
                run(numbers, numbers in bad)
            if not own:  # the step that this call has ended is not seen by step()
                recorder.step(None, None, lambda: None)
            continue
        for number, numbers in enumerate(own, start=1):
            run(numbers, numbers in bad, **({"last": number == len(own)} if how == "last" else {}))
        if not own or how == "end_step":
            recorder.step(None, None, optimizer.end_step)
    note_position(recorder, "end", optimizer)


def read_openly(
    recorder: Recorder,
    *,
    runs: Sequence[Mapping[str, Any]] = ({"num_epochs": 2},),
    killed_after: int | None = None,
    **options: Any,
) -> None:
    """Open steps over a loader, of which the cores read in turns.

    Args:
        runs: the arguments of ``optimizer.epochs``, called several times.
        killed_after: the number of steps after which the run is left, and resumed by new objects.
        options: of the optimizer.
    """
    (x, y), is_saved = vectors(), killed_after is not None
    for until in (killed_after, None) if is_saved else (None,):
        model = seeded(Normed())
        data = TensorDataset(x, y, torch.arange(NUM_SAMPLES))
        loader = vbs.DataLoader(data, vbs.OpenSteps(timeout=200), minibatch_size=MINIBATCH)
        inner = sgd(model)
        how = {"ref_batchsize": REF_BATCHSIZE, "model": model, "rule": "linear", "measure_noise": True, **options}
        optimizer = vbs.Optimizer(inner, loader, **how)
        recorder.begin(model, optimizer, inner, has_hook=True)
        for one in (log_every(1), *([save(every_steps=1)] if is_saved else [])):
            one(optimizer, model, recorder)
        for limits in runs:
            with contextlib.closing(optimizer.epochs(**limits)) as epochs:
                for epoch in epochs:
                    if _run_openly(recorder, loader, optimizer, until):
                        break
                    note_position(recorder, f"epoch {epoch}", optimizer)
        await_all(recorder)


def _run_openly(recorder: Recorder, loader: Any, optimizer: Any, until: int | None) -> bool:
    """An epoch; returns whether the run ends here."""
    (rank, cores), model, iterator = rank_and_cores(), recorder.tracks[-1].model, iter(loader)
    for number in itertools.count(optimizer.steps_done):
        own: list[Any] = []
        for turn in range(cores):
            if turn == rank:
                own = list(itertools.islice(iterator, (number + rank) % 3 + (rank == 0)))
            await_all(recorder)
        num_read = torch.tensor(len(own))
        if dist.is_initialized():
            with recorder.paused():
                dist.all_reduce(num_read)
        if not num_read:
            return False
        for x, y, numbers in optimizer.minibatches(own):
            loss = mean_loss(model, x, y)
            loss.backward()
            recorder.step(numbers, loss, loss=loss)
        if optimizer.steps_done == until:
            return True
    return False


def limited_openly(recorder: Recorder) -> None:
    """A loop that goes on with steps after the run has reached its limit."""
    (rank, _), (x, y) = rank_and_cores(), vectors()
    model = seeded(Normed())
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=vbs.OpenSteps(timeout=200), minibatch_size=MINIBATCH)
    inner = sgd(model)
    optimizer = vbs.Optimizer(inner, sampler, rule="linear", ref_batchsize=REF_BATCHSIZE, model=model)
    recorder.begin(model, optimizer, inner, has_hook=True)
    for limits in ({"samples": 10}, {"samples": 30}):
        for _ in optimizer.epochs(**limits):
            for number in range(5):
                own = [[number, rank, 7, 8], [rank, 9, number, 3]][: 1 + (rank + number) % 2]
                if number % 2:
                    for numbers in optimizer.minibatches(own):
                        mean_loss(model, x[numbers], y[numbers]).backward()
                        recorder.step(numbers)
                elif rank == 0:
                    mean_loss(model, x[own[0]], y[own[0]]).backward()
                    recorder.step(own[0], last=True)
                else:
                    recorder.step(None, None, optimizer.end_step)
        note_position(recorder, "end", optimizer)


def ended_openly(recorder: Recorder) -> None:
    """Cores with different numbers of steps in an epoch, the last one not ended: the end of the epoch ends them."""
    (rank, _), (x, y) = rank_and_cores(), vectors()
    model = seeded(Normed())
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=vbs.OpenSteps(timeout=200), minibatch_size=MINIBATCH)
    inner = sgd(model)
    optimizer = vbs.Optimizer(inner, sampler, rule="root", ref_batchsize=REF_BATCHSIZE, model=model)
    recorder.begin(model, optimizer, inner, has_hook=True)
    for epoch in optimizer.epochs(2):
        for number in range(3 + 2 * rank):
            numbers = [(7 * number + 11 * rank + epoch + place) % NUM_SAMPLES for place in range(MINIBATCH)]
            loss = mean_loss(model, x[numbers], y[numbers])
            loss.backward()
            recorder.step(numbers, loss, last=number % 2 == 1)
        note_position(recorder, f"epoch {epoch}", optimizer)
    note_position(recorder, "end", optimizer)


# --------------------------------------------------------------------------------------------------- several optimizers


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 7))


def adversaries(
    recorder: Recorder,
    *,
    rules: tuple[str, str] = ("linear", "adascale"),
    style: str = "inputs",
    saves: bool = False,
    leaves: bool = False,
    **options: Any,
) -> None:
    """Two models with an optimizer each and one sampler; one of them has a scheduler, the other a log.

    Args:
        style: how the critic gets no gradients of the generator's loss: "inputs" or "zero_grad"; "in turn" for a step
            of the critic before the backward pass of the generator.
        saves: whether a checkpoint resumes the run once, with the second optimizer as one of its `schedulers`.
        leaves: whether epochs are left early, and the position set on one of the optimizers only.
    """
    x, _ = vectors()
    x = x.to(recorder.device)
    folder = folder_of(recorder)
    for until in (4, None) if saves else (None,):
        sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=TRACE, minibatch_size=MINIBATCH)
        models = [seeded(one()).to(recorder.device) for one in (Critic, generator)]
        inners = [sgd(models[0]), adamw(models[1])]
        made = [
            vbs.Optimizer(inner, sampler, rule=rule, ref_batchsize=REF_BATCHSIZE, model=model, **options)
            for inner, rule, model in zip(inners, rules, models, strict=True)
        ]
        tracks = [recorder.begin(*parts) for parts in zip(models, made, inners, strict=True)]
        schedule("samples", 16)(made[1], models[1], recorder)
        log_every(2)(made[0], models[0], recorder)
        checkpoint = None
        if saves:
            parts = {"model": nn.ModuleList(models), "optimizer": made[0], "schedulers": [made[1]]}
            checkpoint = vbs.Checkpoint(folder, every_steps=2, **parts)
        for epoch in (checkpoint or made[0]).epochs(3):
            if leaves:
                made[epoch % 2].set_epoch(epoch, epoch % 2)
            if _run_adversaries(tracks, sampler, x, style, until, 2 if leaves and epoch < 2 else None, checkpoint):
                break
            note_position(recorder, f"epoch {epoch}", made[1])
        await_all(recorder)


def _run_adversaries(
    tracks: list[Track],
    sampler: Any,
    x: torch.Tensor,
    style: str,
    until: int | None,
    most: int | None,
    checkpoint: Any,
) -> bool:
    """An epoch; returns whether the run ends here."""
    critic, generator = (track.model for track in tracks)
    first = tracks[0].optimizer
    begin = first.steps_done
    for numbers in sampler:
        real = x[numbers]
        fake = generator(torch.randn(len(numbers), 3).to(x.device))
        of_critic = softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
        of_generator = softplus(-critic(fake)).mean()
        if style == "inputs":
            of_critic.backward(inputs=list(critic.parameters()))
            of_generator.backward(inputs=list(generator.parameters()))
        elif style == "zero_grad":
            of_generator.backward()
            first.zero_grad()
            of_critic.backward()
        else:
            of_critic.backward()
        tracks[0].step(numbers, of_critic, loss=of_critic)
        if style == "in turn":
            softplus(-critic(fake)).mean().backward(inputs=list(generator.parameters()))
        tracks[1].step(numbers, of_generator)
        if checkpoint is not None:
            checkpoint.step()
        if first.steps_done == until:
            return True
        if most is not None and first.steps_done == begin + most:
            return False
    return False


def taking_turns(recorder: Recorder, **options: Any) -> None:
    """Two optimizers with a sampler each: two steps of one, then one of the other."""
    x, _ = vectors()
    models, tracks, minibatches = [seeded(one()) for one in (Critic, generator)], [], []
    for model, sizes, rule in zip(models, ([8, 12, 4, 16, 8], [12, 8, 20]), ("adascale", "root"), strict=True):
        how: Any = {"dataset_size": NUM_SAMPLES, "minibatch_size": MINIBATCH, "on_end": "cycle", "seed": len(sizes)}
        sampler, inner = vbs.CustomSampler(trace=sizes, **how), sgd(model)
        optimizer = vbs.Optimizer(inner, sampler, rule=rule, ref_batchsize=REF_BATCHSIZE, model=model, **options)
        tracks.append(recorder.begin(model, optimizer, inner))
        minibatches.append(iter(sampler))
    for which in (0, 0, 1, 0, 1):
        track = tracks[which]
        for numbers in minibatches[which]:
            fake = models[1](torch.randn(len(numbers), 3))
            loss = softplus(-models[0](x[numbers] if which == 0 else fake)).mean() + mse_loss(fake, x[numbers])
            loss.backward(inputs=list(track.model.parameters()))
            if track.step(numbers, loss):
                break


# -------------------------------------------------------------------------------------------------- elastic, frameworks


def lost_core(recorder: Recorder, *, num_workers: int = 0, joins: bool = False) -> None:
    """On elastic cores: the second one is killed within a step; another one may join.

    It waits until the others have begun the step, so that these find out in the reduction. When another core joins is
    not determined, so the run is then exact, and only what does not depend on the cores is recorded.
    """
    folder, killed_in = recorder.directory, 4  # the number of a step of 7 minibatches
    is_added = (folder / "killed").exists()
    if is_added and not joins:
        os._exit(0)  # a core that replaces the killed one is not needed
    x, y = vectors()
    model = seeded(Normed(0.2 if joins else 0.0))
    data = TensorDataset(x, y, torch.arange(NUM_SAMPLES))
    loader = vbs.DataLoader(data, TRACE, minibatch_size=MINIBATCH, on_end="cycle", num_workers=num_workers)
    inner = sgd(model)
    options: Any = {"rule": "adascale", "ref_batchsize": REF_BATCHSIZE, "model": model, "exact": joins}
    optimizer = vbs.Optimizer(inner, loader, **options)
    if is_added:
        optimizer.record_grad_norm(every=1)  # as the others do
        (folder / "joins").touch()
    epochs = optimizer.epochs(6)
    first_rank = loader.sampler.rank
    if not is_added:
        recorder.begin(model, optimizer, inner, is_common=joins)
    if not joins:
        log_every(2)(optimizer, model, recorder)
    for _ in epochs:
        for own_x, own_y, numbers in loader:
            loss = mean_loss(model, own_x, own_y)
            loss.backward()
            if is_added:
                optimizer.step()
                continue
            recorder.step(numbers, loss, loss=loss)
            if optimizer.steps_done == killed_in and optimizer.is_accumulating and not (folder / "killed").exists():
                if first_rank == 1:
                    while len([*folder.glob("begun-*")]) < loader.sampler.num_replicas - 1:
                        time.sleep(0.01)
                    (folder / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                (folder / f"begun-{first_rank}").touch()
            if joins and optimizer.steps_done == killed_in + 2:
                while not (folder / "joins").exists():
                    time.sleep(0.01)
                time.sleep(0.05)
    note_position(recorder, "end", optimizer)
    recorder.note("weights", [p.detach() for p in model.parameters()])
