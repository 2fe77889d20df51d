"""Random programs with two optimizers, copies of models, reused rules and policies, evaluations, hooks and resumes.

A program depends only on its seed. What happens in a minibatch depends on its index in the step, never on its core.
:func:`run` executes it with the library; ``two_optimizers_by_hand.py`` does without.
"""

from __future__ import annotations

import copy
import gc
import io
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import variable_batch_size as vbs
from variable_batch_size.optim.attachments import Follower

MINIBATCH = 4
NUM_SAMPLES = 58
REF_BATCHSIZE = 8
NUM_EPOCHS = 50  # more than any program reaches
SEEDS = (3, 4)  # of the samplers
GAMMA = 0.96  # of all schedules
PER = 8  # samples in a step of a schedule that follows the samples
EMA = 0.8
WARMUP = 48  # samples
CLAMP = 0.02
TOLD = [1.0, 0.9, 0.95, 0.9, 0.92, 0.85, 0.9, 0.91]  # values of the metric of a policy
SIZES_OF_POLICY = [8, 20, 4, 12]
EVENTS = ["evaluate both", "evaluate first", "evaluate second", "state", "copy", "zero", "freeze", "unfreeze"]
EVERY, LEAD, MAX_BATCH_SIZE = 2, 1, 32


@dataclass(frozen=True)
class Side:
    """One of the two optimizers.

    Attributes:
        inner: "sgd", "adam", "adamw", or "both" for SGD and AdamW in a list.
        rule: a key of `RULES`.
        options: further arguments of the optimizer.
        hooks: keys of `HOOKS`.
        schedule: who steps a scheduler of the learning rate: "inner hook", "wrapper", "samples", or None.
    """

    inner: str
    rule: str
    options: dict[str, Any]
    hooks: tuple[str, ...]
    schedule: str | None


@dataclass(frozen=True)
class Program:
    """The actions of a user. In each *turn* an optimizer makes a step, or both make one if they share a sampler.

    Attributes:
        seed: of the weights and data.
        losses: "pair" for two models with a loss each, "gan" for losses that run through both models, "halves" for an
            optimizer for each half of one model.
        shares_sampler: whether there is one sampler for both optimizers.
        order: of the calls of ``step()`` if they share it, otherwise of the turns.
        style: how gradients are computed: "inputs", "zero_grad", or "in turn" for a step() after each backward pass.
        sizes: a trace for each optimizer.
        policy: the class of the policy that decides instead, or None.
        sides: the optimizers.
        shares_rule: whether both are given the same object.
        is_weighted: whether minibatches have weights; some weigh nothing.
        is_exact: whether in exact mode.
        is_seeded: whether random numbers depend on the minibatch; the loop then draws some.
        dropout, batch_norm: whether models have these.
        teacher: "ema", "mean" or "copy" of the first model, which is then part of its loss, or None.
        teacher_from: after which turn the teacher is made; -1 for after the optimizers, -2 for before them.
        teacher_trains: whether it is in training mode.
        teacher_first: whether it runs before the model.
        events: after turns.
        within: the turns in which both models are evaluated after each accumulated minibatch.
        skipped: pairs of turn and minibatch without a backward pass.
        saved_after, lost_after: the turns after which a state is saved, and after which it is loaded; None for never.
        is_new: whether it is loaded into new objects.
        left_after: the turns after which the epoch is left.
        num_turns: of the first run.
        second: the models of a second run: "new", "same", "copy" for copies made in the first run; None for no run.
        keeps_first: whether the objects of the first run exist during the second one.
        uses_loader: whether minibatches come from a DataLoader.
    """

    seed: int
    losses: str
    shares_sampler: bool
    order: tuple[int, ...]
    style: str
    sizes: tuple[list[int], list[int]]
    policy: str | None
    sides: tuple[Side, Side]
    shares_rule: bool
    is_weighted: bool
    is_exact: bool
    is_seeded: bool
    dropout: bool
    batch_norm: bool
    teacher: str | None
    teacher_from: int
    teacher_trains: bool
    teacher_first: bool
    events: dict[int, str]
    within: frozenset[int]
    skipped: frozenset[tuple[int, int]]
    saved_after: int | None
    lost_after: int | None
    is_new: bool
    left_after: frozenset[int]
    num_turns: int
    second: str | None
    keeps_first: bool
    uses_loader: bool

    def source(self, turn: int) -> int:
        """Which sampler the minibatches of a turn come from."""
        return 0 if self.shares_sampler else self.order[turn % len(self.order)]

    def which(self, turn: int) -> tuple[int, ...]:
        """The optimizers that make a step in a turn, in this order."""
        return self.order if self.shares_sampler else (self.source(turn),)


def draw(seed: int) -> Program:
    rng = random.Random(seed)

    def chance(share: float) -> bool:
        return rng.random() < share

    losses = rng.choice(["pair", "gan", "halves"])
    shares_sampler = chance(0.6)
    policy = rng.choice(["plateau", "own"]) if not shares_sampler and chance(0.4) else None
    num_turns = rng.randint(12, 15) if policy else rng.randint(5, 9)
    is_exact, is_weighted, batch_norm = chance(0.3), chance(0.3), chance(0.3)
    is_seeded = is_exact or chance(0.3)
    dropout = is_seeded and chance(0.6)
    in_place = not is_exact and chance(0.12)
    shares_rule = chance(0.4)
    sides = [_draw_side(rng, in_place) for _ in range(2)]
    if shares_rule:
        sides[1] = Side(sides[0].inner, sides[0].rule, sides[1].options, sides[1].hooks, sides[1].schedule)
    styles = ["inputs"] + ["zero_grad"] * (not in_place) + ["in turn"] * (losses == "pair" and shares_sampler)
    order = rng.choice([(0, 1), (1, 0)] if shares_sampler else [(0, 1), (0, 0, 1), (1, 0, 1)])
    saved_after = rng.randrange(num_turns - 2) if chance(0.6) else None
    lost_after = None if saved_after is None else rng.randrange(saved_after, num_turns - 1)
    events = [event for event in EVENTS if not in_place or event not in ("zero", "freeze", "unfreeze")]
    teacher = rng.choice(["ema", "mean", "copy", None])
    num_skipped = 0 if in_place else rng.choice([0, 0, 3])
    return Program(
        seed=seed,
        losses=losses,
        shares_sampler=shares_sampler,
        order=order,
        style=rng.choice(styles),
        sizes=tuple([MINIBATCH * rng.choice([1, 1, 2, 3, 4, 5, 7]) for _ in range(11)] for _ in range(2)),
        policy=policy,
        sides=tuple(sides),
        shares_rule=shares_rule,
        is_weighted=is_weighted,
        is_exact=is_exact,
        is_seeded=is_seeded,
        dropout=dropout,
        batch_norm=batch_norm,
        teacher=teacher,
        teacher_from=rng.randint(-2, num_turns // 2),
        teacher_trains=batch_norm or chance(0.5),  # in evaluation, each core has its own statistics
        teacher_first=chance(0.5),
        events={turn: rng.choice(events) for turn in rng.sample(range(num_turns), rng.randint(2, 5))},
        within=frozenset(turn for turn in range(num_turns) if chance(0.2)),
        skipped=frozenset((rng.randrange(num_turns), rng.randrange(4)) for _ in range(num_skipped)),
        saved_after=saved_after,
        lost_after=lost_after,
        is_new=chance(0.6),
        left_after=frozenset(turn for turn in range(num_turns) if chance(0.1)),
        num_turns=num_turns,
        second=rng.choice([None, "new", "same", "copy"]),
        keeps_first=chance(0.85),
        uses_loader=chance(0.5),
    )


def _draw_side(rng: random.Random, in_place: bool) -> Side:
    inner = rng.choice(["sgd", "sgd", "adam", "adamw", "both"])
    names = ["linear", "root", "constant", "legw", "adascale", "surge", "own"]
    names += {"sgd": ["momentum", "adascale"], "both": ["one for each"]}.get(inner, ["sde", "half-life", "adamscale"])
    hooks = ["inner pre", "state", "scale"] + ["clamp", "wrapper pre"] * (not in_place)
    return Side(
        inner,
        rng.choice(names),
        {
            "clip_grad_norm": rng.choice([None, None, 0.1]),
            "smooth_steps": rng.choice([0, 0, 3]),
            "max_factor": rng.choice([None, None, 1.5]),
            "gradient_as_bucket_view": in_place,
        },
        tuple(sorted(rng.sample(hooks, rng.choice([0, 1, 2])))),
        rng.choice([None, "inner hook", "wrapper", "samples"]),
    )


# ----------------------------------------------------------------------------------------------- models, data and rules


class Net(nn.Module):
    """Two layers, with BatchNorm and dropout in between if there are any."""

    def __init__(self, program: Program, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(5)] if program.batch_norm else []
        dropout = [nn.Dropout(0.3)] if program.dropout else []
        self.trunk = nn.Sequential(nn.Linear(num_inputs, 5), *norm, nn.Tanh(), *dropout)
        self.head = nn.Linear(5, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


def make_models(program: Program, seed: int) -> list[nn.Module]:
    shapes = {"pair": [(6, 3), (4, 3)], "gan": [(6, 1), (4, 6)], "halves": [(6, 3)]}[program.losses]
    models = [Net(program, *shape).double() for shape in shapes]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in (p for model in models for p in model.parameters()):
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.5)
    return models


def parameters_of(program: Program, models: list[nn.Module], side: int) -> list[nn.Parameter]:
    """The parameters that an optimizer trains."""
    if program.losses == "halves":
        return list((models[0].head if side else models[0].trunk).parameters())
    return list(models[side].parameters())


def frozen_parameter(models: list[nn.Module]) -> nn.Parameter:
    """The parameter that is frozen by events."""
    return models[0].trunk[0].weight


class Data:
    """Inputs, targets and noise of all samples, and the number of their tokens."""

    def __init__(self, program: Program) -> None:
        generator = torch.Generator().manual_seed(program.seed + 1)
        self.x, self.y, self.z = (
            torch.randn(NUM_SAMPLES, size, generator=generator, dtype=torch.float64) for size in (6, 3, 4)
        )
        self.tokens = torch.randint(0, 6, (NUM_SAMPLES,), generator=generator)
        self.tokens[torch.rand(NUM_SAMPLES, generator=generator) < 0.4] = 0

    def minibatch(self, program: Program, indices: Any) -> tuple[torch.Tensor, ...]:
        """Inputs, targets and noise of some samples, with the random numbers that the loop draws."""
        x, y, z = (values[indices] for values in (self.x, self.y, self.z))
        if program.is_seeded:
            x = x * (1 + 0.1 * random.random()) + 0.1 * torch.randn_like(x)
            z = z + 0.1 * float(np.random.rand())
        return x, y, z


def sample_losses(program: Program, call: Any, teacher: Any, which: Any, batch: Any) -> dict[int, torch.Tensor]:
    """The loss of each sample for some of the optimizers; `call` runs one of the models."""
    x, y, z = batch
    found: dict[int, torch.Tensor] = {}
    taught = None
    is_taught = teacher is not None and (0 in which or program.losses == "halves")

    def teach() -> torch.Tensor:
        with torch.no_grad():
            return teacher(x)

    if is_taught and program.teacher_first:
        taught = teach()
    if program.losses == "halves":
        outputs = call(0, x)
        loss = (outputs - y).square().mean(1)
        found = dict.fromkeys(which, loss)
    elif program.losses == "pair":
        if 0 in which:
            outputs = call(0, x)
            found[0] = (outputs - y).square().mean(1)
        if 1 in which:
            found[1] = (call(1, z) - y).square().mean(1)
    else:
        fake = call(1, z)
        if 0 in which:
            outputs = call(0, x)
            found[0] = softplus(-outputs[:, 0]) + softplus(call(0, fake.detach())[:, 0])
        if 1 in which:
            found[1] = softplus(-call(0, fake)[:, 0])
    if is_taught:
        taught = teach() if taught is None else taught
        extra = 0.3 * (outputs - taught).square().mean(1)
        found = {
            side: loss + extra if side == 0 or program.losses == "halves" else loss for side, loss in found.items()
        }
    return found


class OwnRule(vbs.rules.Rule):
    """A rule of a user, which returns only the weight decay, and counts the steps that it has measured."""

    measures_noise = True

    def __init__(self) -> None:
        self.number = 0

    def factor(self, step: vbs.rules.Step) -> float:
        return (step.scale + 0.1 * self.number) ** 0.7

    def observe(self, step: vbs.rules.Step, norms: Any) -> None:
        self.number += 1

    def settings(self, group: Any, step: vbs.rules.Step, factor: float) -> dict[str, Any]:
        return {"weight_decay": group["weight_decay"] * step.scale}

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Any) -> None:
        self.number = state["number"]


class OwnPolicy(vbs.Policy):
    """A policy of a user, which counts its decisions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._number = 0

    def decide(self, situation: Any) -> float:
        self._number += 1
        return SIZES_OF_POLICY[self._number % len(SIZES_OF_POLICY)]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._number}

    def load_state_dict(self, state: Any) -> None:
        self._number = state["number"]


RULES = {
    "linear": vbs.rules.LinearRule,
    "root": vbs.rules.RootRule,
    "constant": vbs.rules.ConstantRule,
    "momentum": vbs.rules.LinearMomentumRule,
    "legw": lambda: vbs.rules.LEGWRule(warmup_samples=WARMUP),
    "sde": vbs.rules.AdamRule,
    "half-life": lambda: vbs.rules.AdamRule(form="half-life"),
    "adascale": vbs.rules.AdaScaleRule,
    "adamscale": lambda: vbs.rules.AdamScaleRule(min_updates=2),
    "surge": vbs.rules.SurgeRule,
    "own": OwnRule,
    "one for each": lambda: [vbs.rules.AdaScaleRule(), vbs.rules.AdamRule()],
}


def make_policy(program: Program) -> vbs.Policy | None:
    options = {"every": EVERY, "lead": LEAD, "max_batch_size": MAX_BATCH_SIZE}
    if program.policy == "plateau":
        return vbs.policies.OnPlateau(patience=2, **options)
    return OwnPolicy(**options) if program.policy else None


SGD = {"lr": 0.03, "momentum": 0.9, "weight_decay": 1e-2}
ADAM = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 2e-2}


def make_inner(kind: str, parameters: list[nn.Parameter]) -> Any:
    """One or two optimizers of torch; all but "both" have two groups with different learning rates."""
    if kind == "both":
        return [torch.optim.SGD(parameters[:1], **SGD), torch.optim.AdamW(parameters[1:], **ADAM)]
    settings = SGD if kind == "sgd" else ADAM
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": settings["lr"] / 2}]
    return {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](groups, **settings)


# --------------------------------------------------------------------------------------------------- with the library


class Run:
    """The objects of a run with the library.

    Args:
        program: what to do.
        recipes: a rule for each optimizer, and the policy; they may have been used before.
        models: to be trained.
    """

    def __init__(self, program: Program, recipes: Any, models: list[nn.Module]) -> None:
        self.program, self.recipes, self.models, self.data = program, recipes, models, Data(program)
        self.teacher: Any = None
        self.turn, self.frozen = 0, False
        self.updated: list[int] = []  # the optimizers that have changed weights in the latest turn
        self.num_state_hooks = [0, 0]
        self.copies: list[nn.Module] | None = None
        if program.teacher_from == -2:
            self._make_teacher()
        self._make_optimizers()
        if program.teacher_from == -1:
            self._make_teacher()

    def _make_teacher(self) -> None:
        kind, model = self.program.teacher, self.models[0]
        if kind == "copy":
            self.teacher = copy.deepcopy(model)
        elif kind is not None:
            self.teacher = AveragedModel(model, multi_avg_fn=self._average if kind == "ema" else None)
        if self.teacher is not None:
            self.teacher.train(self.program.teacher_trains)

    def _average(self, averages: Any, weights: Any, number: Any) -> None:
        decay = vbs.rules.ema_decay(EMA, self.optimizers[0].batch_size, REF_BATCHSIZE)
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight, 1 - decay)

    def _make_optimizers(self) -> None:
        program, (rules, policy) = self.program, self.recipes
        make = {"dataset_size": NUM_SAMPLES, "minibatch_size": MINIBATCH}
        make |= {} if policy else {"on_end": "cycle"}
        self.samplers = [
            vbs.CustomSampler(trace=policy or sizes, seed=seed, **make)
            for sizes, seed in list(zip(program.sizes, SEEDS, strict=True))[: 1 if program.shares_sampler else 2]
        ]
        self.optimizers, self.schedulers = [], []
        for number, (side, rule) in enumerate(zip(program.sides, rules, strict=True)):
            inner = make_inner(side.inner, parameters_of(program, self.models, number))
            optimizer = vbs.CustomOptimizer(
                inner,
                self.samplers[number % len(self.samplers)],
                rule=rule,
                ref_batchsize=REF_BATCHSIZE,
                model=self.models[number % len(self.models)],
                exact=program.is_exact,
                seed_minibatches=program.is_seeded,
                **side.options,
            )
            self.optimizers.append(optimizer)
            self._add_hooks(number, side, optimizer, inner[0] if isinstance(inner, list) else inner)
        self.rank, self.num_replicas = self.samplers[0].rank, self.samplers[0].num_replicas
        self._streams = [self._minibatches(number) for number in range(len(self.samplers))]

    def _add_hooks(self, number: int, side: Side, optimizer: Any, inner: Any) -> None:
        """Register the user's hooks; the scheduler is that of the first inner optimizer or that of all."""
        scheduler = None
        if side.schedule is not None:
            scheduler = ExponentialLR(inner if side.schedule == "inner hook" else optimizer, GAMMA)
        self.schedulers.append(scheduler)
        if side.schedule == "inner hook":
            inner.register_step_post_hook(lambda *_: scheduler.step())
        if "inner pre" in side.hooks:
            inner.register_step_pre_hook(_scale_gradients(0.9))
        if "wrapper pre" in side.hooks:
            optimizer.register_step_pre_hook(_scale_gradients(1.25))
        if "state" in side.hooks:

            def add(of: Any, state: dict[str, Any]) -> dict[str, Any]:
                self.num_state_hooks[number] += 1
                return {**state, "note": number}

            def remove(of: Any, state: dict[str, Any]) -> dict[str, Any]:
                assert state["note"] == number
                return {key: value for key, value in state.items() if key != "note"}

            optimizer.register_state_dict_post_hook(add)
            optimizer.register_load_state_dict_pre_hook(remove)
        first, *_, last = parameters_of(self.program, self.models, number)
        if "scale" in side.hooks and not hasattr(first, "has_hook"):
            first.register_hook(lambda gradient: 0.5 * gradient)
            first.has_hook = True
        if "clamp" in side.hooks and not hasattr(last, "has_hook"):
            last.register_post_accumulate_grad_hook(_clamp)
            last.has_hook = True

    def _minibatches(self, number: int) -> Any:
        sampler = self.samplers[number]
        leader = self.optimizers[self.program.order[0] if self.program.shares_sampler else number]
        for _ in leader.epochs(NUM_EPOCHS):
            yield from DataLoader(range(NUM_SAMPLES), batch_sampler=sampler) if self.program.uses_loader else sampler

    def run_turn(self) -> None:
        """Make a step."""
        program, turn = self.program, self.turn
        source, which = program.source(turn), program.which(turn)
        within = 0
        while True:
            indices = next(self._streams[source])
            num_minibatches = self.optimizers[which[0]].get_bs() // MINIBATCH
            place = (self.rank + within * self.num_replicas) % num_minibatches
            self._run_minibatch(indices, which, is_skipped=(turn, place) in program.skipped)
            within += 1
            if not self.optimizers[which[0]].is_accumulating:
                break
            if turn in program.within:
                self._evaluate(self.models)
        self.updated = [side for side in which if self.optimizers[side].updated]
        self._after_step(which)

    def _run_minibatch(self, indices: Any, which: tuple[int, ...], *, is_skipped: bool) -> None:
        program, optimizers = self.program, self.optimizers
        batch, tokens = self.data.minibatch(program, indices), self.data.tokens[indices]
        weight = {"weight": int(tokens.sum())} if program.is_weighted else {}
        for some in [[side] for side in which] if program.style == "in turn" else [which]:
            found = sample_losses(program, self._call, self.teacher, some, batch)
            if not is_skipped:
                losses = {k: (v * tokens).sum() if program.is_weighted else v.mean() for k, v in found.items()}
                self._run_backward(losses)
            elif program.style == "zero_grad":  # gradients of the other model's loss, which ran through this one
                for side in some:
                    optimizers[side].zero_grad()
            for side in some:
                optimizers[side].step(**weight)

    def _call(self, model: int, x: torch.Tensor) -> torch.Tensor:
        return self.models[model](x)

    def _run_backward(self, losses: dict[int, torch.Tensor]) -> None:
        if self.program.losses == "halves" and len(losses) == 2:
            losses[0].backward()
            return
        for side in sorted(losses, reverse=True):  # the generator's loss first
            if self.program.style == "inputs":
                inputs = [p for p in self.optimizers[side].parameters() if p.requires_grad]
                losses[side].backward(inputs=inputs)
            else:
                self.optimizers[side].zero_grad()
                losses[side].backward()

    def _after_step(self, which: tuple[int, ...]) -> None:
        for number in which:
            optimizer, scheduler = self.optimizers[number], self.schedulers[number]
            if self.program.sides[number].schedule == "wrapper" and optimizer.updated:
                scheduler.step()
            elif self.program.sides[number].schedule == "samples":
                Follower.checked(scheduler, "samples", PER).follow(optimizer.run)
            if optimizer.sampler.policy is not None and self.program.policy == "plateau":
                optimizer.sampler.policy.tell(TOLD[self.turn % len(TOLD)])
        if 0 in which and isinstance(self.teacher, AveragedModel) and self.optimizers[0].updated:
            self.teacher.update_parameters(self.models[0])

    def do_events(self) -> None:
        """After a turn."""
        program, turn = self.program, self.turn
        if turn == program.teacher_from:
            self._make_teacher()
        event = program.events.get(turn, "")
        if event.startswith("evaluate"):
            chosen = {"evaluate first": self.models[:1], "evaluate second": self.models[-1:]}
            self._evaluate(chosen.get(event, self.models))
        elif event == "state":
            for optimizer in self.optimizers:
                optimizer.state_dict()
        elif event == "zero":
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        elif event == "copy":
            self.copies = copy.deepcopy(self.models)
            self._evaluate(self.copies, torch.ones)
        elif event in ("freeze", "unfreeze"):
            self._freeze(event == "freeze")
        if turn in program.left_after:
            source = program.source(turn)
            self.samplers[source].set_epoch(self.samplers[source].epoch + 1)
            self._streams[source] = self._minibatches(source)

    def _evaluate(self, models: list[nn.Module], make: Any = torch.rand) -> None:
        """With random numbers, unless the models are copies, which the optimizers do not know."""
        for model in models:
            model.eval()
            with torch.no_grad():
                model(make(3, model.trunk[0].in_features, dtype=torch.float64))
            model.train()

    def _freeze(self, is_frozen: bool) -> None:
        self.frozen = is_frozen
        frozen_parameter(self.models).requires_grad_(not is_frozen)

    def save(self) -> bytes:
        state = {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() if scheduler else None for scheduler in self.schedulers],
            "teacher": self.teacher.state_dict() if self.teacher is not None else None,
            "frozen": self.frozen,
            "turn": self.turn,
        }
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        """Load a state, into new objects or into those that there are."""
        program, state = self.program, torch.load(io.BytesIO(saved), weights_only=True)
        if program.is_new:
            self.models = make_models(program, seed=program.seed + 7)
            self._make_optimizers()
        self.teacher = None
        if state["teacher"] is not None:
            self._make_teacher()
            self.teacher.load_state_dict(state["teacher"])
        for name in ("models", "optimizers", "schedulers"):
            for thing, own in zip(getattr(self, name), state[name], strict=True):
                if thing is not None:
                    thing.load_state_dict(own)
        self._freeze(state["frozen"])
        self.turn = state["turn"]
        self._streams = [self._minibatches(number) for number in range(len(self.samplers))]

    def result(self) -> dict[str, Any]:
        """What is compared after a turn."""
        tensors = [p.detach().flatten() for model in self.models for p in model.parameters()]
        averages = [] if self.teacher is None else [p.detach().flatten() for p in self.teacher.parameters()]
        buffers = [b.double().flatten() for model in self.models for b in model.buffers()]
        return {
            "weights": torch.cat([*tensors, *averages]).clone(),
            "buffers": torch.cat(buffers).clone() if buffers else torch.zeros(0),
            "lrs": [
                one.current_lr(group) for one in map(self.optimizers.__getitem__, self.updated) for group in (0, 1)
            ],
            "counts": [(one.steps_done, one.samples_done, one.steps_skipped) for one in self.optimizers],
        }


def _scale_gradients(factor: float) -> Any:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(factor)

    return hook


def _clamp(p: torch.Tensor) -> None:
    p.grad = p.grad.clamp(-CLAMP, CLAMP)


def run_turns(run: Any, num_turns: int, *, may_be_lost: bool) -> list[dict[str, Any]]:
    """Execute turns of a run, here or by hand; returns the result after each, also of those that are then lost."""
    program, saved, results = run.program, None, []
    while run.turn < num_turns:
        run.run_turn()
        results.append(run.result())
        run.do_events()
        if may_be_lost and run.turn == program.saved_after and saved is None:
            saved = run.save()
        if may_be_lost and run.turn == program.lost_after:
            may_be_lost = False
            run.load(saved)
        run.turn += 1
    return results


def run(program: Program) -> list[dict[str, Any]]:
    """Execute a program with the library on this core."""
    torch.manual_seed(program.seed)
    rules = [RULES[side.rule]() for side in program.sides]
    if program.shares_rule:
        rules[1] = rules[0]
    recipes = rules, make_policy(program)
    first = Run(program, recipes, make_models(program, program.seed))
    results = run_turns(first, program.num_turns, may_be_lost=True)
    if program.second is not None:
        models = {"new": None, "same": first.models, "copy": first.copies}[program.second]
        if not program.keeps_first:
            first = None
            gc.collect()
        second = Run(program, recipes, models or make_models(program, program.seed + 2))
        results += run_turns(second, num_turns_of_second(program), may_be_lost=False)
    return results


def num_turns_of_second(program: Program) -> int:
    return min(3, program.num_turns)


def run_all(programs: list[Program]) -> list[list[dict[str, Any]]]:
    return [run(program) for program in programs]
