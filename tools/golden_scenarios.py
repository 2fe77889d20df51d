"""The small training runs of ``golden.py``: all features of the library, alone and in combinations."""

from __future__ import annotations

import dataclasses
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from golden_frameworks import compared, in_accelerate, in_keras, in_lightning, in_transformers
from golden_loops import (
    ASKED,
    POLICIES,
    Resumable,
    Session,
    Shard,
    Turned,
    adversaries,
    budgeted,
    changing_buffers,
    checkpointed,
    closures,
    compiled,
    copied,
    decided,
    ended_openly,
    evaluated,
    front_door,
    left_early,
    limited_openly,
    log_every,
    log_to_file,
    logged,
    lost_core,
    named_optimizers,
    opened,
    orders,
    positions,
    read_openly,
    resumed,
    resumed_stream,
    save,
    sawtooth,
    scaled,
    schedule,
    sessions,
    shared_freely,
    streamed,
    taking_turns,
    torch_loader,
    unread,
    watched,
)
from golden_recorder import Recorder
from golden_training import (
    ALL_CORES,
    MINIBATCH,
    MOST_CORES,
    PAIRS,
    TRACE,
    Branched,
    Mixed,
    Normed,
    NormedTower,
    Norms,
    Tied,
    Tokens,
    Tower,
    Wide,
    adamw,
    add_group,
    add_group_within,
    by,
    ddp,
    ddp_if_any,
    decaying,
    edited,
    evaluate,
    freeze_in_turns,
    freeze_within,
    hybrid,
    in_hook,
    leave_out,
    lockstep,
    muon_and_adamw,
    num_tokens,
    num_tokens_on_device,
    one_cycle,
    sgd,
    sharded,
    sharded_and_parallel,
    sharded_narrow,
    share_buffers,
    step_lr,
    sum_loss,
    tensor_parallel,
    texts,
    train,
    two_groups,
    two_sgd,
    two_sgd_without_bias,
    vectors,
    with_burst,
    with_nan,
    without_bias,
    zero,
    zero_adamw,
    zeroed_before,
)

import variable_batch_size as vbs


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A run.

    Args:
        function: makes it, with a recorder.
        cores: on how many gloo processes it is made; 0 is one process without a process group.
        on_xla: whether it is also made on virtual XLA cores.
        on_gpu: whether it is also made on a GPU, as those on XLA cores are.
        elastic: on how many elastic cores it is made; 0 for none.
        is_counted: whether operations are counted; torch.compile does nothing while they are.
    """

    function: Callable[[Recorder], None]
    cores: tuple[int, ...]
    on_xla: bool = False
    on_gpu: bool = False
    elastic: int = 0
    is_counted: bool = True

    def is_made_at(self, place: str) -> bool:
        """Whether it is made at a place of ``golden.PLACES``."""
        if place == "elastic":
            return self.elastic > 0
        if place == "cuda":
            return self.on_gpu or self.on_xla
        return int(place) in self.cores if place.isdecimal() else self.on_xla


def _of(
    function: Callable[..., None],
    cores: tuple[int, ...] = MOST_CORES,
    on_xla: bool = False,
    on_gpu: bool = False,
    is_counted: bool = True,
    **how: Any,
) -> Scenario:
    return Scenario(functools.partial(function, **how), cores, on_xla, on_gpu, is_counted=is_counted)


ADASCALE = vbs.rules.AdaScaleRule
ADAMSCALE = functools.partial(vbs.rules.AdamScaleRule, min_updates=2)  # by default it waits for ten
WEIGHTED = {"net": Tokens, "data": texts, "loss": sum_loss}
DROPPED = functools.partial(Normed, 0.3)

RULES = {
    "linear": _of(train, ALL_CORES, on_xla=True),
    "linear, adamw": _of(train, ALL_CORES, inner=adamw, on_xla=True),
    "linear, foreach": _of(train, ALL_CORES, inner=functools.partial(sgd, foreach=True)),
    "root": _of(train, ALL_CORES, rule=vbs.rules.RootRule, inner=functools.partial(sgd, nesterov=True)),
    "constant": _of(train, ALL_CORES, rule=vbs.rules.ConstantRule),
    "linear momentum": _of(train, ALL_CORES, rule=vbs.rules.LinearMomentumRule, on_xla=True),
    "linear momentum, clipped": _of(train, ALL_CORES, rule=vbs.rules.LinearMomentumRule, clip_grad_norm=0.2),
    "adascale": _of(train, ALL_CORES, rule=ADASCALE, inner=two_groups, on_xla=True),
    "adascale, mean first": _of(
        train, ALL_CORES, rule=functools.partial(vbs.rules.AdaScaleRule, starts_with_mean=True)
    ),
    "adam": _of(
        train, ALL_CORES, rule=vbs.rules.AdamRule, inner=functools.partial(adamw, betas=(0.7, 0.99)), on_xla=True
    ),
    "adam, half-life": _of(train, ALL_CORES, rule=functools.partial(vbs.rules.AdamRule, form="half-life"), inner=adamw),
    "adam, decay as it is": _of(
        train, ALL_CORES, rule=functools.partial(vbs.rules.AdamRule, scales_weight_decay=False), inner=adamw
    ),
    "adamscale": _of(train, ALL_CORES, rule=ADAMSCALE, inner=adamw, on_xla=True),
    "legw": _of(train, ALL_CORES, rule=functools.partial(vbs.rules.LEGWRule, warmup_samples=120)),
    "surge": _of(train, ALL_CORES, rule=vbs.rules.SurgeRule, inner=adamw),
    "muon and adam": _of(
        train,
        ALL_CORES,
        rule=lambda: [vbs.rules.MuonRule(), vbs.rules.AdamRule()],
        inner=muon_and_adamw,
        net=Tower,
        clip_grad_norm=0.5,
    ),
    "adascale of each": _of(
        train, ALL_CORES, rule=lambda: [vbs.rules.AdaScaleRule(), vbs.rules.LinearRule()], inner=two_sgd
    ),
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
    "measured momentum": _of(train, rule=vbs.rules.LinearMomentumRule, measure_noise=True),
    "weighted": _of(train, ALL_CORES, **WEIGHTED, weight=num_tokens, on_xla=True),
    "weighted, skipping": _of(train, **WEIGHTED, weight=num_tokens, skip_nonfinite=True, clip_grad_norm=0.3),
    "weighted on device": _of(
        train, ALL_CORES, on_gpu=True, **WEIGHTED, weight=num_tokens_on_device, scheduler=by("tokens", every=20)
    ),
    "weighted momentum": _of(train, **WEIGHTED, weight=num_tokens, rule=vbs.rules.LinearMomentumRule),
    "weighted adascale": _of(train, ALL_CORES, **WEIGHTED, weight=num_tokens, rule=ADASCALE, on_xla=True),
    "weighted adamscale": _of(train, **WEIGHTED, weight=lambda y: float(num_tokens(y)), rule=ADAMSCALE, inner=adamw),
    "weights of zero on device": _of(
        train, on_gpu=True, **WEIGHTED, weight=lambda targets: num_tokens_on_device(targets) // 9, rule=ADASCALE
    ),
    "weights of zero": _of(train, **WEIGHTED, weight=lambda targets: num_tokens(targets) // 9, rule=ADASCALE),
    "seeded dropout": _of(train, ALL_CORES, on_gpu=True, net=DROPPED, seed_minibatches=True),
    "dropout": _of(train, net=DROPPED),
    "exact": _of(train, ALL_CORES, exact=True, net=DROPPED),
    "exact, clipped": _of(train, on_gpu=True, exact=True, clip_grad_norm=0.2, smooth_steps=2, inner=adamw),
    "exact adascale": _of(train, ALL_CORES, exact=True, rule=ADASCALE, inner=two_groups, on_xla=True),
    "exact adamscale": _of(train, exact=True, rule=ADAMSCALE, inner=adamw, max_factor=3.0),
    "exact momentum, measured": _of(train, exact=True, rule=vbs.rules.LinearMomentumRule, measure_noise=True),
    "exact weighted": _of(train, ALL_CORES, exact=True, **WEIGHTED, weight=num_tokens, rule=ADASCALE),
    "exact burst": _of(train, ALL_CORES, exact=True, backward=with_burst, clip_grad_norm=1.0),
    "exact burst adascale": _of(train, exact=True, backward=with_burst, rule=ADASCALE, clip_grad_norm=1.0),
    "exact nan": _of(train, exact=True, backward=with_nan, skip_nonfinite=True),
    "exact, unused at times": _of(train, exact=True, net=Branched, rule=ADASCALE),
    "exact, bfloat16": _of(train, exact=True, net=Tower, dtype=torch.bfloat16, data=lambda: vectors(torch.bfloat16)),
    "exact, float64": _of(train, exact=True, dtype=torch.float64, data=lambda: vectors(torch.float64)),
    "exact, edited": _of(train, exact=True, backward=edited),
    "kept": _of(train, gradient_as_bucket_view=True),
    "kept adascale": _of(train, ALL_CORES, on_gpu=True, gradient_as_bucket_view=True, rule=ADASCALE, inner=two_groups),
    "kept weighted": _of(train, gradient_as_bucket_view=True, **WEIGHTED, weight=num_tokens, rule=ADASCALE),
    "kept, clipped": _of(train, gradient_as_bucket_view=True, clip_grad_norm=0.2, inner=adamw),
    "kept, zero_grad between": _of(train, gradient_as_bucket_view=True, backward=zeroed_before, rule=ADASCALE),
    "kept, bfloat16": _of(
        train,
        (0, 2),
        gradient_as_bucket_view=True,
        net=Tower,
        dtype=torch.bfloat16,
        data=lambda: vectors(torch.bfloat16),
    ),
    "kept nan": _of(train, gradient_as_bucket_view=True, backward=with_nan, skip_nonfinite=True),
    "lockstep": _of(train, ALL_CORES, way=lockstep, rule=ADASCALE),
    "lockstep, skipping": _of(train, way=lockstep, backward=with_nan, skip_nonfinite=True),
    "lockstep, exact": _of(train, way=lockstep, exact=True, **WEIGHTED, weight=num_tokens, rule=ADASCALE),
}

PARAMETERS = {
    "frozen within a step": _of(train, on_gpu=True, backward=freeze_within, rule=ADASCALE),
    "frozen within a step, exact": _of(train, (0, 2), backward=freeze_within, exact=True),
    "group added within a step": _of(train, backward=add_group_within, inner=without_bias, rule=ADASCALE),
    "group added to several": _of(train, (0, 2), before_step=add_group, inner=two_sgd_without_bias),
    "left out": _of(train, ALL_CORES, backward=leave_out),
    "left out, adascale": _of(train, on_gpu=True, backward=leave_out, rule=ADASCALE, skip_nonfinite=True),
    "frozen in turns": _of(train, ALL_CORES, before_step=freeze_in_turns),
    "frozen in turns, adascale": _of(train, before_step=freeze_in_turns, rule=ADASCALE, inner=two_groups),
    "frozen in turns, exact": _of(train, before_step=freeze_in_turns, exact=True),
    "group added": _of(train, before_step=add_group, inner=without_bias),
    "group added, adascale": _of(train, ALL_CORES, before_step=add_group, inner=without_bias, rule=ADASCALE),
    "group added, exact": _of(train, before_step=add_group, inner=without_bias, exact=True),
    "group added, kept": _of(train, before_step=add_group, inner=without_bias, gradient_as_bucket_view=True),
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
    "lr stepped in a hook": _of(train, scheduler=in_hook, rule=ADASCALE),
    "lr changed by the optimizer": _of(train, inner=decaying),
    "step lr": _of(train, scheduler=step_lr),
    "one cycle": _of(train, scheduler=one_cycle, rule=ADASCALE),
    "by progress": _of(train, scheduler=by("progress"), rule=ADASCALE),
    "by samples": _of(train, scheduler=by("samples"), inner=adamw, rule=vbs.rules.AdamRule),
    "hold": _of(train, sampler={"on_end": "hold", "shuffle": False}, num_epochs=5),
    "cycle": _of(train, sampler={"on_end": "cycle", "seed": 9}, num_epochs=5),
    "constant trace": _of(train, sampler={"trace": 3 * MINIBATCH}, num_epochs=2),
    "closures": _of(closures, ALL_CORES),
    "left early": _of(left_early, ALL_CORES),
    "positions": _of(positions),
    "not read": _of(unread),
    "deep copy": _of(copied, (0, 2), on_gpu=True),
    "logged": _of(logged, ALL_CORES),
    "logged, exact": _of(logged, exact=True, dropout=0.2),
    "logged, late progress": _of(logged, rule="linear", measure_noise=True, smoothing="paper"),
    "compiled": _of(compiled, (0, 2), is_counted=False),
    "compiled, norm layers": _of(compiled, (0,), is_counted=False, net=Tower, measure_noise="norm layers"),
    "compiled step": _of(compiled, (0, 2), is_counted=False, is_whole=True),
}

SHARDED = {
    "ddp": _of(train, (1, 2, 3, 4), net=Tower, way=ddp, rule=ADASCALE),
    "ddp, BatchNorm": _of(train, (2, 3), net=NormedTower, way=ddp),
    "ddp, exact": _of(train, PAIRS, net=Tower, way=ddp, exact=True),
    "fully_shard": _of(train, (1, 2, 3, 4), net=Tower, way=sharded),
    "fully_shard, BatchNorm": _of(train, (2, 3), net=NormedTower, way=sharded, clip_grad_norm=0.3),
    "fully_shard adascale": _of(train, (2, 3, 4), net=Tower, way=sharded, rule=ADASCALE, inner=two_groups),
    "fully_shard momentum": _of(
        train, PAIRS, net=Tower, way=sharded, rule=vbs.rules.LinearMomentumRule, clip_grad_norm=0.3
    ),
    "fully_shard adam": _of(train, PAIRS, net=Tower, way=sharded, rule=vbs.rules.AdamRule, inner=adamw),
    "fully_shard nan": _of(train, PAIRS, net=Tower, way=sharded, backward=with_nan, skip_nonfinite=True),
    "fully_shard nan adascale": _of(train, PAIRS, net=NormedTower, way=sharded, backward=with_nan, rule=ADASCALE),
    "fully_shard left out": _of(train, PAIRS, net=Tower, way=sharded, backward=leave_out, rule=ADASCALE),
    "fully_shard zero_grad": _of(train, PAIRS, net=Tower, way=sharded, backward=zeroed_before),
    "fully_shard group added": _of(train, PAIRS, net=Tower, way=sharded, before_step=add_group, inner=without_bias),
    "fully_shard weighted": _of(
        train, PAIRS, net=Tower, way=sharded, rule=ADASCALE, loss=sum_loss, weight=lambda y: 1 + int(y.sum())
    ),
    "fully_shard measured": _of(train, PAIRS, net=Tower, way=sharded, measure_noise=True),
    "fully_shard frozen": _of(train, PAIRS, net=Tower, way=sharded, before_step=freeze_in_turns),
    "fully_shard bfloat16": _of(train, PAIRS, net=Tower, way=sharded_narrow, rule=ADASCALE),
    "fully_shard once": _of(train, PAIRS, net=Tower, way=sharded, reduce_scatter_once=True),
    "fully_shard once, adascale": _of(
        train, PAIRS, net=NormedTower, way=sharded, rule=ADASCALE, reduce_scatter_once=True
    ),
    "fully_shard once, weighted": _of(
        train,
        PAIRS,
        net=Tower,
        way=sharded,
        rule=ADASCALE,
        reduce_scatter_once=True,
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
    "hsdp once": _of(train, (4,), net=NormedTower, way=hybrid, rule=ADASCALE, reduce_scatter_once=True),
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
    "zero adam": _of(train, PAIRS, net=Tower, inner=zero_adamw, rule=vbs.rules.AdamRule),
    "zero, exact": _of(train, PAIRS, net=Tower, inner=zero, exact=True),
}


# in 18 steps, some things are measured a second time
LONG = {"loader": {"on_end": "cycle"}, "runs": [{"num_epochs": 6}]}
CYCLE = {"on_end": "cycle"}
OTHER_TRACE = [MINIBATCH * n for n in (3, 1, 4, 5, 1, 6, 2, 2, 7, 1, 1)]


def _sgd_of(**options: Any) -> Callable[[torch.nn.Module], Any]:
    return functools.partial(sgd, **options)


FRONT_DOOR = {
    "front door": _of(
        front_door,
        ALL_CORES,
        on_xla=True,
        rule="adascale",
        loader={"verbose": True},
        attach=[log_every(2), schedule("samples")],
    ),
    "front door, all of the trace": _of(front_door, runs=[{}], attach=[log_every(1)], inner=two_groups),
    "attached": _of(
        front_door,
        ALL_CORES,
        on_gpu=True,
        rule="adascale",
        runs=[{"num_epochs": 3}],
        attach=[
            schedule("update", 2),
            schedule("epoch"),
            schedule("samples", of_inner=True),
            schedule("progress", 3),
            log_every(2),
            save(every_steps=3),
        ],
    ),
    "attached, tokens": _of(
        front_door, ALL_CORES, **WEIGHTED, weight=num_tokens, attach=[schedule("tokens", 20), log_every(3)]
    ),
    "limit of samples": _of(
        front_door, ALL_CORES, on_xla=True, runs=[{"samples": 50}, {"num_epochs": 3, "samples": 90}, {}]
    ),
    "limit of progress": _of(front_door, rule="adascale", runs=[{"progress": 9.5}, {"progress": 13.25}]),
    "limit of tokens": _of(front_door, **WEIGHTED, weight=num_tokens, runs=[{"tokens": 100}, {"tokens": 250.5}]),
    "limit, workers": _of(
        front_door, (0, 2), loader={"num_workers": 2}, runs=[{"samples": 50}, {"samples": 90}], attach=[log_every(1)]
    ),
    "limit, workers of torch's loader": _of(
        front_door, (0, 2), loader={"num_workers": 2}, makes_loader=torch_loader, runs=[{"samples": 50}, {}]
    ),
    "limit, attached": _of(
        front_door,
        (0, 2),
        rule="adascale",
        runs=[{"progress": 7.0}, {"num_epochs": 3}],
        attach=[schedule("epoch"), log_every(1), save(every_steps=3)],
    ),
    "schedulers": _of(
        front_door,
        runs=[{"num_epochs": 3}],
        killed_after=(3,),
        attach=[
            schedule("update", kind="ChainedScheduler"),
            schedule("samples", 12, kind="SequentialLR"),
            schedule("progress", kind="MultiStepLR"),
            save(every_steps=2),
        ],
    ),
    "schedulers that end": _of(front_door, attach=[schedule("update", kind="OneCycleLR")], inner=_sgd_of()),
    "epochs left early": _of(  # in the middle of a step, where a core with fewer minibatches would wait for others
        front_door,
        (0,),
        loader=CYCLE,
        leaves_after=(2, 7),
        leaves_within=(4,),
        runs=[{"num_epochs": 4}],
        attach=[schedule("epoch"), save(every_steps=2)],
    ),
    "epochs left early, policy": _of(
        front_door,
        loader={"trace": lambda seen: MINIBATCH * (1 + seen.steps_done % 4)},
        leaves_after=(2, 7),
        runs=[{"num_epochs": 4}],
        attach=[save(every_steps=3)],
    ),
    "many losses between records": _of(
        front_door, (0, 2), **LONG, attach=[log_every(9), log_to_file(6)], rule="adascale"
    ),
    "lockstep, buffers changed between": _of(
        front_door, way=lockstep, turn=changing_buffers, rule="adascale", skip_nonfinite=True
    ),
    "buffers changed between": _of(front_door, turn=changing_buffers),
    "killed": _of(
        front_door,
        ALL_CORES,
        on_xla=True,
        rule="adascale",
        attach=[log_every(2), save(every_steps=2)],
        killed_after=(3, 5),
    ),
    "killed, adamscale": _of(
        front_door, rule=ADAMSCALE, inner=adamw, attach=[save(every_steps=2)], killed_after=(3,), measure_noise=True
    ),
    "killed, several optimizers": _of(
        front_door,
        rule=["muon", "adam"],
        inner=muon_and_adamw,
        net=Tower,
        attach=[save(every_steps=2, format="sharded")],
        killed_after=(3, 5),
    ),
    "killed, larger minibatches": _of(
        front_door, (0, 2), loader={"max_minibatch_size": 16}, attach=[save(every_steps=2)], killed_after=(3, 5)
    ),
    "killed, by speed": _of(
        front_door,
        (2, 3),
        **LONG | {"loader": {"assign": "by speed", **CYCLE}},
        attach=[save(every_steps=2)],
        killed_after=(11,),
    ),
    "killed, own norm": _of(
        front_door, (0, 2), **LONG, measure_noise="own norm", attach=[save(every_steps=3)], killed_after=(7,)
    ),
    "killed, weighted": _of(
        front_door, (0, 2), **WEIGHTED, weight=num_tokens, attach=[save(every_steps=2)], killed_after=(3,)
    ),
    "killed, ddp": _of(front_door, (2,), net=Tower, way=ddp, attach=[save(every_steps=2)], killed_after=(3,)),
    "killed, fully_shard": _of(
        front_door,
        PAIRS,
        net=Tower,
        way=sharded,
        inner=adamw,
        rule="adam",
        attach=[save(every_steps=2)],
        killed_after=(3,),
    ),
    "killed, fully_shard, sharded format": _of(
        front_door,
        PAIRS,
        net=Tower,
        way=sharded,
        rule="adascale",
        attach=[save(every_steps=2, format="sharded", asynchronous=True)],
        killed_after=(3, 5),
    ),
    "killed, tensor parallel": _of(
        front_door, PAIRS, net=Tower, way=tensor_parallel, attach=[save(every_steps=2)], killed_after=(3,)
    ),
    "killed, zero": _of(front_door, PAIRS, net=Tower, inner=zero, attach=[save(every_steps=2)], killed_after=(3,)),
    "orders": _of(orders, (0,)),
    "reads ahead": _of(front_door, reads_ahead=True, rule="adascale", skip_nonfinite=True),
    "loader workers": _of(
        front_door, (0, 2, 4), makes_loader=torch_loader, loader={"num_workers": 2, "persistent_workers": True}
    ),
    "workers, reads ahead": _of(front_door, (0, 2), reads_ahead=True, loader={"num_workers": 2}, seed_minibatches=True),
    "larger minibatches": _of(front_door, ALL_CORES, on_xla=True, loader={"max_minibatch_size": 16}),
    "larger minibatches, adascale": _of(
        front_door, rule="adascale", loader={"max_minibatch_size": 8}, attach=[log_every(2)], inner=two_groups
    ),
    "by speed": _of(front_door, (2, 3), **LONG | {"loader": {"assign": "by speed", **CYCLE}}, attach=[log_every(3)]),
    "by speed, workers": _of(
        front_door, (2,), **LONG | {"loader": {"assign": "by speed", "num_workers": 1, **CYCLE}}, rule="adascale"
    ),
    "by speed, checkpoint": _of(
        front_door, (0, 2), **LONG | {"loader": {"assign": "by speed", **CYCLE}}, attach=[save(every_steps=5)]
    ),
    "as free": _of(shared_freely, MOST_CORES),
    "as free, workers": _of(shared_freely, (2,), num_workers=1),
    "scaler": _of(front_door, ALL_CORES, turn=scaled()),
    "scaler, adascale": _of(front_door, on_gpu=True, turn=scaled(), rule="adascale"),
    "scaler, adam": _of(front_door, turn=scaled(), rule="adam", inner=adamw, net=Tower),
    "scaler, unscaled": _of(front_door, turn=scaled(unscales=True), clip_grad_norm=0.2),
    "scaler, weighted": _of(front_door, **WEIGHTED, weight=num_tokens, turn=scaled(), rule="adascale"),
    "scaler, exact": _of(front_door, turn=scaled(), exact=True, rule="adascale"),
    "scaler, kept": _of(front_door, turn=scaled(leaves_out=False, growth_interval=1000), gradient_as_bucket_view=True),
    "scaler, ddp": _of(front_door, (2,), turn=scaled(), net=Tower, way=ddp),
    "scaler, fully_shard": _of(
        front_door, PAIRS, turn=scaled(leaves_out=False, bad=False), net=Tower, way=sharded, rule="adascale"
    ),
    "norm layers": _of(
        front_door, on_xla=True, measure_noise="norm layers", rule="adascale", net=Tower, **LONG, attach=[log_every(4)]
    ),
    "norm layers, linear rule": _of(front_door, (0, 2), measure_noise="norm layers", net=Tower, way=ddp_if_any, **LONG),
    "norm layers, larger minibatches": _of(
        front_door,
        (0, 2),
        measure_noise="norm layers",
        net=Tower,
        **LONG | {"loader": {"max_minibatch_size": 16, **CYCLE}},
    ),
    "norm layers, scaler": _of(front_door, (0, 2), measure_noise="norm layers", net=Tower, turn=scaled()),
    "norm layers, fully_shard": _of(front_door, PAIRS, measure_noise="norm layers", net=Tower, way=sharded, **LONG),
    "own norm": _of(
        front_door, on_gpu=True, measure_noise="own norm", rule="adam", inner=adamw, **LONG, attach=[log_every(4)]
    ),
    "norm layers of several kinds": _of(front_door, (0, 2), measure_noise="norm layers", net=Norms, **LONG),
    "own norm, muon": _of(
        front_door, (0, 2), measure_noise="own norm", rule=["muon", "adam"], inner=muon_and_adamw, net=Tower, **LONG
    ),
    "own norm, weighted": _of(
        front_door, (0, 2), measure_noise="own norm", **WEIGHTED, weight=num_tokens, inner=adamw, **LONG
    ),
    "smoothing": _of(train, rule=vbs.rules.AdaScaleRule, smoothing=0.9),
    "smoothing by a function": _of(train, measure_noise=True, smoothing=lambda scale: 1 - 0.1 * min(1, scale)),
    "fused": _of(train, on_gpu=True, inner=_sgd_of(fused=True, foreach=None), rule=vbs.rules.AdaScaleRule),
    "fused, skipping": _of(
        train, (0,), on_gpu=True, inner=_sgd_of(fused=True, foreach=None), skip_nonfinite=True, backward=with_nan
    ),
    "fused, nan skipped by adascale": _of(
        train, (0,), on_gpu=True, inner=_sgd_of(fused=True, foreach=None), rule=ADASCALE, backward=with_nan
    ),
    "fused, adamscale": _of(train, (0,), on_gpu=True, inner=functools.partial(adamw, fused=True), rule=ADAMSCALE),
    "fused, weighted": _of(
        train,
        (0,),
        on_gpu=True,
        **WEIGHTED,
        weight=num_tokens_on_device,
        inner=_sgd_of(fused=True, foreach=None),
        rule=ADASCALE,
        clip_grad_norm=0.3,
        smooth_steps=2,
        max_factor=1.5,
    ),
    "one step late": _of(front_door, (0,), on_gpu=True, **LONG, rule="adascale", attach=[log_every(3)]),
    "one step late, killed": _of(
        front_door, (0,), on_gpu=True, **LONG, rule="adascale", attach=[save(every_steps=3)], killed_after=(7,)
    ),
    "mixed types": _of(train, net=Mixed, rule=vbs.rules.AdaScaleRule, clip_grad_norm=0.5),
    "tied": _of(train, net=Tied, data=texts, rule=vbs.rules.AdaScaleRule),
    "evaluated over all cores": _of(evaluated, ALL_CORES),
    "evaluated over all cores, fully_shard": _of(evaluated, (2,), net=NormedTower, way=sharded),
    "watched": _of(watched, ALL_CORES, on_xla=True),
    "watched, hold": _of(watched, on_end="hold", num_epochs=4, every=2),
    "watched, killed": _of(watched, killed_after=(7,)),
}

# those that are resumed from the previous number of cores
CHAINED = {
    "resumed": _of(resumed, ALL_CORES),
    "resumed, exact": _of(resumed, ALL_CORES, exact=True, dropout=0.3),
    "resumed, adam": _of(resumed, ALL_CORES, inner=adamw, measure_noise=True, smooth_steps=3),
    "checkpoint": _of(checkpointed, ALL_CORES),
    "checkpoint, exact": _of(
        checkpointed, ALL_CORES, exact=True, dropout=0.3, rule="linear", saves={"asynchronous": True}
    ),
    "checkpoint, sharded format": _of(checkpointed, ALL_CORES, inner=adamw, rule="adam", saves={"format": "sharded"}),
    "checkpoint, autoscale": _of(checkpointed, ALL_CORES, policy=lambda: vbs.Autoscale(max_batch_size=40, **ASKED)),
    "checkpoint, per core": _of(checkpointed, ALL_CORES, policy=lambda: vbs.policies.PerCore(8, **ASKED), num_steps=9),
}

RESUMED = {
    "sessions": _of(sessions, on_gpu=True, of_run=[Session(3), Session(5, stops=True), Session(6), Session()]),
    "sessions, exact": _of(sessions, of_run=[Session(3), Session(7, stops=True), Session()], exact=True, dropout=0.2),
    "sessions, changed": _of(
        sessions,
        on_end="stop",
        of_run=[
            Session(3),
            Session(6, changes={"trace": OTHER_TRACE}, allowed=("trace",)),
            Session(
                changes={"trace": OTHER_TRACE, "rule": "root", "ref_batchsize": 12, "seed": 5},
                allowed=("rule", "ref_batchsize", "seed"),
            ),
        ],
    ),
    "sessions, continued": _of(
        sessions,
        on_end="stop",
        num_epochs=None,
        of_run=[Session(changes={"trace": TRACE[:5]}), Session(changes={"trace": TRACE}, allowed=("trace",))],
    ),
    "sessions, other norm": _of(
        sessions,
        (0, 2),
        of_run=[Session(5, changes={"measure_noise": True}), Session(changes={"measure_noise": "own norm"})],
    ),
    "sessions, schedulers attached later": _of(sessions, of_run=[Session(3), Session()], attaches_late=True),
    "sessions, several optimizers": _of(sessions, (0, 2), of_run=[Session(3), Session()], inner=two_sgd, rule="linear"),
    "sessions, limits": _of(
        sessions,
        of_run=[Session(changes={"limits": {"samples": 50}}), Session(5), Session(changes={"limits": {"progress": 9}})],
    ),
    "sessions, policy": _of(
        sessions,
        of_run=[Session(5), Session(11, stops=True), Session()],
        trace=lambda seen: MINIBATCH * (1 + seen.steps_done % 4),
        on_end=None,
    ),
}

POLICY = {
    **{f"policy {name}": _of(decided, ALL_CORES, policy=policy) for name, policy in POLICIES.items()},
    "policy, linear rule": _of(decided, policy=POLICIES["function"], rule="linear"),
    "policy, workers": _of(
        decided, (0, 2), policy=lambda: vbs.policies.FunctionPolicy(sawtooth, every=4, lead=8), num_workers=2
    ),
    "policy, limit": _of(
        front_door,
        (0, 2),
        loader={"trace": lambda seen: MINIBATCH * (1 + seen.steps_done % 4)},
        rule="adascale",
        runs=[{"progress": 12.0}, {"samples": 150}],
        attach=[log_every(2), save(every_steps=4)],
    ),
}

STREAMS = {
    "stream": _of(streamed, ALL_CORES),
    "stream, workers": _of(streamed, (0, 2, 3), num_workers=2),
    "stream, epochs": _of(streamed, dataset_size=23, runs=[{"num_epochs": 2}]),
    "stream with epochs of its own": _of(
        streamed, samples=Turned, dataset_size=40, on_end="cycle", runs=[{"num_epochs": 3}]
    ),
    "stream, policy": _of(streamed, trace=lambda seen: MINIBATCH * (1 + seen.steps_done % 3)),
    "stream that ends": _of(streamed, trace=4 * MINIBATCH),
    "stream that ends, workers": _of(streamed, (0, 2), trace=3 * MINIBATCH, num_workers=2),
    "stream, exact": _of(streamed, exact=True, net=functools.partial(Normed, 0.2)),
    "stream, larger minibatches": _of(streamed, max_minibatch_size=16),
    "stream, lockstep": _of(streamed, lockstep=True),
    "stream, fully_shard": _of(streamed, PAIRS, net=Tower, way=sharded),
    "stream, sharded": _of(streamed, samples=Shard, is_sharded=True),
    "stream, sharded, workers": _of(streamed, (2,), samples=Shard, is_sharded=True, num_workers=2),
    "stream, sharded, idle first": _of(streamed, samples=Shard, is_sharded=True, trace=[4, 12, 4, 16], lockstep=True),
    "stream, limit": _of(streamed, samples=Resumable, runs=[{"samples": 14}, {"samples": 30}], dataset_size=20),
    "stream, limit, workers": _of(streamed, (0, 2), num_workers=2, runs=[{"samples": 14}]),
    "stream, resumed": _of(resumed_stream),
    "stream, resumed, workers": _of(resumed_stream, (0, 2), num_workers=2),
    "stream, resumed from its state": _of(resumed_stream, saves_stream=True),
    "stream, resumed from the state of its loader": _of(resumed_stream, (0, 2), is_stateful=True, num_workers=2),
}

BUDGETS = {
    "token budget": _of(budgeted, ALL_CORES, on_xla=True, attach=[log_every(2)]),
    "token budget, packed": _of(budgeted, packed=True, rule="adascale"),
    "token budget, workers": _of(budgeted, (0, 2), num_workers=2, exact=True),
    "token budget, limit": _of(budgeted, runs=[{"tokens": 150}, {"samples": 400}], attach=[schedule("tokens", 50)]),
    "token budget, policy": _of(budgeted, trace=lambda seen: 32 * (1 + seen.steps_done % 3), rule="adascale"),
}

OPEN_STEPS = {
    "open steps, last": _of(opened, ALL_CORES, how="last"),
    "open steps, end_step": _of(opened, how="end_step", is_weighted=True, exact=True, clip_grad_norm=0.2),
    "open steps, minibatches": _of(opened, ALL_CORES, how="minibatches", is_weighted=True),
    "open steps, nan": _of(opened, how="last", rule="linear", bad_step=2, skip_nonfinite=True),
    "open steps, scaler": _of(opened, how="minibatches", rule="linear", bad_step=2, scales=True),
    "open steps, lockstep": _of(opened, how="minibatches", way=lockstep, bad_step=2),
    "open steps, ddp": _of(opened, (2,), how="last", way=ddp, net=Tower),
    "open steps, fully_shard": _of(opened, PAIRS, how="minibatches", way=sharded, net=NormedTower),
    "open steps, loader": _of(read_openly, ALL_CORES),
    "open steps, loader, limit": _of(read_openly, runs=[{"samples": 20}, {"samples": 56}]),
    "open steps, beyond the limit": _of(limited_openly),
    "open steps, resumed": _of(read_openly, killed_after=3, exact=True),
    "open steps, ended by the epoch": _of(ended_openly),
}

SEVERAL = {
    "two optimizers": _of(adversaries, ALL_CORES, on_xla=True),
    "two optimizers, zero_grad": _of(adversaries, style="zero_grad", rules=("adascale", "root"), smooth_steps=2),
    "two optimizers, in turn": _of(adversaries, style="in turn"),
    "two optimizers, exact": _of(adversaries, exact=True),
    "two optimizers, checkpoint": _of(adversaries, saves=True),
    "two optimizers, positions": _of(adversaries, leaves=True),
    "two optimizers, two samplers": _of(taking_turns),
    "two optimizers, two samplers, seeded": _of(taking_turns, seed_minibatches=True, skip_nonfinite=True),
}

ELASTIC = {
    "elastic, a core dies": Scenario(lost_core, (), elastic=3),
    "elastic, a core dies, another joins": Scenario(
        functools.partial(lost_core, joins=True, num_workers=1), (), elastic=2
    ),
}

FRAMEWORKS = {
    "Lightning": _of(in_lightning, (0,)),
    "Accelerate": _of(in_accelerate, (0,)),
    "Transformers": _of(in_transformers, (0,)),
    "Keras": _of(in_keras, (0,)),
    "compare": _of(compared, (0,)),
}

TABLES = (
    RULES,
    OPTIONS,
    PARAMETERS,
    LOOPS,
    FRONT_DOOR,
    CHAINED,
    RESUMED,
    POLICY,
    STREAMS,
    BUDGETS,
    OPEN_STEPS,
    SEVERAL,
    SHARDED,
)
SCENARIOS: dict[str, Scenario] = {
    name: made for table in (*TABLES, ELASTIC, FRAMEWORKS) for name, made in table.items()
}

# one of each kind, in one process
FAST = (
    "linear",
    "adascale",
    "linear momentum",
    "adamscale",
    "one rule for two",
    "clipped adascale",
    "smooth and bounded adascale",
    "nan skipped",
    "nan skipped by adascale",
    "measured",
    "weighted adascale",
    "weights of zero",
    "seeded dropout",
    "exact adascale",
    "exact burst",
    "kept adascale",
    "kept nan",
    "lockstep, skipping",
    "frozen within a step",
    "group added, adascale",
    "unused at times, adascale",
    "sparse adascale",
    "bfloat16 adascale",
    "edited gradients, adascale",
    "zero_grad between",
    "left out, adascale",
    "evaluated between",
    "closures",
    "left early",
    "positions",
    "not read",
    "deep copy",
    "logged",
    "compiled step",
    "one cycle",
    "by progress",
    "lr stepped in a hook",
    "checkpoint",
    "front door",
    "attached",
    "attached, tokens",
    "limit of samples",
    "limit of progress",
    "limit, workers",
    "limit, attached",
    "epochs left early",
    "epochs left early, policy",
    "reads ahead",
    "larger minibatches, adascale",
    "scaler, adascale",
    "scaler, weighted",
    "scaler, kept",
    "norm layers",
    "own norm",
    "evaluated over all cores",
    "watched, killed",
    "schedulers",
    "killed",
    "killed, several optimizers",
    "sessions",
    "sessions, changed",
    "sessions, continued",
    "sessions, limits",
    "sessions, policy",
    "policy autoscale",
    "policy function",
    "policy, limit",
    "stream",
    "stream, workers",
    "stream, policy",
    "stream, limit",
    "stream, resumed from its state",
    "token budget",
    "token budget, packed",
    "open steps, last",
    "open steps, minibatches",
    "open steps, nan",
    "open steps, scaler",
    "open steps, loader",
    "open steps, beyond the limit",
    "open steps, ended by the epoch",
    "two optimizers",
    "two optimizers, checkpoint",
    "two optimizers, positions",
    "two optimizers, two samplers",
)


def run(name: str, recorder: Recorder) -> dict[str, Any]:
    """Make a run; returns its record."""
    scenario = SCENARIOS[name]
    torch.manual_seed(1000 + (dist.get_rank() if dist.is_initialized() else 0))
    random.seed(1000)
    np.random.seed(1000)
    with warnings.catch_warnings(), recorder.recording(counts=scenario.is_counted and not scenario.elastic):
        warnings.simplefilter("ignore")
        scenario.function(recorder)
        return recorder.end()
