"""The programs of ``two_optimizer_programs.py`` without the library: one process, and every formula written out.

A step is one batch where nothing depends on the division into minibatches. Otherwise the gradient of each minibatch is
computed by itself.
"""

from __future__ import annotations

import copy
import math
import random
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn
from two_optimizer_programs import (
    ADAM,
    CLAMP,
    EMA,
    EVERY,
    GAMMA,
    LEAD,
    MAX_BATCH_SIZE,
    MINIBATCH,
    NUM_SAMPLES,
    PER,
    REF_BATCHSIZE,
    SEEDS,
    SGD,
    SIZES_OF_POLICY,
    TOLD,
    WARMUP,
    Data,
    Program,
    Side,
    frozen_parameter,
    make_models,
    num_turns_of_second,
    parameters_of,
    run_turns,
    sample_losses,
)

from variable_batch_size.schedules.permutation import Permutation

CAPACITY = NUM_SAMPLES // MINIBATCH * MINIBATCH
Gradients = dict[nn.Parameter, torch.Tensor]


# ------------------------------------------------------------------------------------------------------------ positions


class Rows:
    """The batch sizes of all steps: a trace that is repeated, or what a policy decides."""

    def __init__(self, program: Program, source: int) -> None:
        self.policy, self.sizes, self.num_done = program.policy, program.sizes[source], 0
        self.best, self.num_worse, self.num_decisions, self.num_made = math.inf, 0, 0, 0
        self.decided: list[int] = []
        if self.policy:
            self.size = self.decide(REF_BATCHSIZE)
            self.decided = [self.size] * (LEAD + EVERY)

    def row(self, number: int) -> int:
        return self.decided[number] if self.policy else self.sizes[number % len(self.sizes)]

    def decide(self, now: int) -> int:
        if self.policy == "own":
            self.num_decisions += 1
            return SIZES_OF_POLICY[self.num_decisions % len(SIZES_OF_POLICY)]
        if self.num_worse < 2:
            return now
        self.num_worse = 0
        return min(2 * now, MAX_BATCH_SIZE)

    def after_step(self, size: int) -> None:
        """A decision is repeated until five of its steps were made."""
        self.num_done += 1
        if not self.policy:
            return
        self.num_made += size == self.size
        missing = LEAD + EVERY - (len(self.decided) - self.num_done)
        if missing >= EVERY:
            new = self.decide(self.size) if self.num_made >= 5 else self.size
            if new != self.size:
                self.size, self.num_made = new, 0
            self.decided += [new] * missing

    def tell(self, value: float) -> None:
        if value < self.best - 1e-4 * abs(self.best) if math.isfinite(self.best) else True:
            self.best, self.num_worse = value, 0
        else:
            self.num_worse += 1


class Position:
    """Of a sampler: the epoch, and how many of its samples are done."""

    def __init__(self, program: Program, source: int) -> None:
        self.rows, self.seed = Rows(program, source), SEEDS[source]
        self.epoch = self.offset = self.skipped = 0

    def _next_row(self) -> int:
        return self.rows.row(self.rows.num_done + self.skipped)

    def leave(self) -> None:
        """A trace has the same rows in an epoch however that ends; decided rows move to the next epoch."""
        while not self.rows.policy and self.offset + self._next_row() <= CAPACITY:
            self.offset += self._next_row()
            self.skipped += 1
        self.epoch, self.offset = self.epoch + 1, 0

    def next_step(self) -> tuple[int, int, torch.Tensor]:
        """The epoch of the next step, the number of its first minibatch in the epoch, and its samples."""
        size = self._next_row()
        if self.offset + size > CAPACITY:
            self.epoch, self.offset = self.epoch + 1, 0
        order = Permutation(NUM_SAMPLES, key=(self.seed, self.epoch))
        indices = torch.as_tensor(order(np.arange(self.offset, self.offset + size)))
        first = self.offset // MINIBATCH
        self.offset += size
        return self.epoch, first, indices


# --------------------------------------------------------------------------------------------------------------- rules


class NoiseAverages:
    """V and G² of each parameter group, averaged with θ = max(1 − S/1000, 0.95)."""

    def __init__(self) -> None:
        self.sums = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]  # V, G² and the sum of the weights
        self.weight = self.samples = 0.0

    def observe(self, size: int, weights: list[float] | None, squares: list[list[float]], means: list[float]) -> None:
        """Add a step.

        Args:
            size: samples.
            weights: of the minibatches.
            squares: of each group, the squared norm of each minibatch's gradient, which is a sum if it has a weight.
            means: of each group, that of the mean gradient.
        """
        if weights is None:
            total, counted = float(size), len(squares[0])
            units = [size / counted] * counted
        else:
            total, units, counted = sum(weights), weights, sum(weight > 0 for weight in weights)
            self.weight += total
            self.samples += size
        if counted < 2:
            return
        for sums, of_minibatches, mean in zip(self.sums, squares, means, strict=True):
            if weights is None:
                mean_of_squares = sum(of_minibatches) / counted
            else:
                mean_of_squares = sum(s / w for s, w in zip(of_minibatches, units, strict=True) if w) / total
            if not mean_of_squares:
                continue
            variance = (mean_of_squares - mean) * total / (counted - 1)
            decay = max(0.95, 1 - size / REF_BATCHSIZE / 1000)
            all_samples = NUM_SAMPLES * (self.weight / self.samples if self.weight else 1.0)
            for place, value in enumerate((variance, mean - variance / total + variance / all_samples, 1.0)):
                sums[place] = decay * sums[place] + (1 - decay) * value

    def gain(self, group: int, size: int) -> float:
        variance, square, weight = self.sums[group]
        if not weight:
            return min(1.0, size / REF_BATCHSIZE)
        variance, square = max(variance / weight, 1e-30), max(square / weight, 0.0)
        per_sample = self.weight / self.samples if self.weight else 1.0
        return (variance / (REF_BATCHSIZE * per_sample) + square) / (variance / (size * per_sample) + square)


class Smoothed:
    """A factor that is bounded, and whose jumps are distributed over steps."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.num_steps, self.most = max(1, options["smooth_steps"]), options["max_factor"] or math.inf
        self.factor: float | None = None
        self.size, self.left = 0, 1

    def move(self, goal: float, size: int) -> float:
        goal = min(goal, self.most)
        if self.factor is None:
            self.factor = goal
        else:
            self.left = self.left if size == self.size else self.num_steps
            self.factor = goal if self.left == 1 else self.factor + (goal - self.factor) / self.left
        self.size, self.left = size, max(1, self.left - 1)
        return self.factor


class HandOptimizer:
    """SGD or Adam for two groups of parameters, with the settings of a rule."""

    def __init__(self, side: Side, parameters: list[nn.Parameter]) -> None:
        self.side, self.groups = side, [parameters[:1], parameters[1:]]
        is_both = side.inner == "both"
        self.kinds = ["sgd", "adamw"] if is_both else [side.inner] * 2
        self.rules = ["adascale", "sde"] if side.rule == "one for each" else [side.rule] * 2
        self.base = [(SGD if kind == "sgd" else ADAM)["lr"] for kind in self.kinds]
        self.base[1] /= 1 if is_both else 2
        self.num_scheduled = [0, 0]  # steps of the schedule of each group
        self.state: dict[nn.Parameter, dict[str, Any]] = {p: {"step": 0} for p in parameters}
        self.noise = NoiseAverages()
        self.smoothed = [Smoothed(side.options) for _ in range(2)]
        self.steps_done = self.samples_done = self.steps_skipped = self.num_observed = 0
        self.lrs = list(self.base)

    @property
    def measures(self) -> bool:
        return bool({"adascale", "surge", "adamscale", "own"} & {*self.rules})

    def step(self, size: int, minibatches: list[Gradients], weights: list[float] | None) -> bool:
        """Update from the gradients of the minibatches; if there is one for the whole step, from that."""
        steps_done = self.steps_done
        self.steps_done += 1
        self.samples_done += size
        if weights is not None and not sum(weights):
            self.steps_skipped += 1
            self._schedule(is_updated=False)
            return False
        divisor = len(minibatches) if weights is None else sum(weights)
        mean: Gradients = {}
        for p in (p for group in self.groups for p in group):
            found = [gradients[p] for gradients in minibatches if p in gradients]
            if found:
                mean[p] = sum(found[1:], start=found[0]) / divisor
        if self.measures:
            self._observe(size, minibatches, weights, mean)
        norm = torch.sqrt(sum((gradient.square().sum() for gradient in mean.values()), torch.zeros(())).double())
        most = self.side.options["clip_grad_norm"]
        eps = 1e-6 / (size // MINIBATCH if "momentum" in self.rules else 1)  # is added to the norm of the sum there
        clip = 1.0 if most is None else min(1.0, most / (float(norm) + eps))
        for group, (parameters, rule) in enumerate(zip(self.groups, self.rules, strict=True)):
            factor = self.smoothed[group].move(self._factor(rule, group, size, steps_done), size)
            lr = self.base[group] * GAMMA ** self.num_scheduled[group]
            self._update(group, rule, factor, lr, size, {p: mean[p] * clip for p in parameters if p in mean})
        self._schedule(is_updated=True)
        return True

    def _observe(self, size: int, minibatches: Any, weights: Any, mean: Gradients) -> None:
        self.num_observed += 1
        squares, means = [], []
        for group, parameters in enumerate(self.groups):
            divided = self.rules[group] == "adamscale"
            squares.append([self._square(gradients, parameters, divided) for gradients in minibatches])
            means.append(self._square(mean, parameters, divided))
        self.noise.observe(size, weights, squares, means)

    def _square(self, gradients: Gradients, parameters: list[nn.Parameter], divided: bool) -> float:
        """The squared norm, for AdamScale after the division by the root of the second moment."""
        total = 0.0
        for p in parameters:
            if p not in gradients:
                continue
            gradient = gradients[p]
            if divided:
                step = self.state[p]["step"]
                if step < 2:
                    continue
                root = (self.state[p]["second"] / (1 - ADAM["betas"][1] ** step)).sqrt() + ADAM["eps"]
                is_tiny = root < 0.1 * root.square().mean().sqrt()
                gradient = torch.where(is_tiny, 0.0, gradient / root)
            total += float(gradient.square().sum())
        return total

    def _factor(self, rule: str, group: int, size: int, steps_done: int) -> float:
        scale = size / REF_BATCHSIZE
        if rule in ("linear", "momentum"):
            return scale
        if rule in ("root", "sde", "half-life"):
            return math.sqrt(scale)
        if rule == "legw":
            return math.sqrt(scale) * min(1.0, (steps_done + 1) * REF_BATCHSIZE / WARMUP)
        if rule == "own":
            return (scale + 0.1 * self.num_observed) ** 0.7
        if rule == "constant":
            return 1.0
        gain = self.noise.gain(group, size)
        return {"adascale": gain, "adamscale": math.sqrt(gain), "surge": gain / math.sqrt(scale)}[rule]

    @torch.no_grad()
    def _update(self, group: int, rule: str, factor: float, lr: float, size: int, gradients: Gradients) -> None:
        kind, n = self.kinds[group], size // MINIBATCH
        settings = dict(SGD if kind == "sgd" else ADAM)
        lr, decay = lr * factor, settings["weight_decay"]
        if rule == "own":
            decay *= size / REF_BATCHSIZE
        elif rule == "momentum":
            lr, decay = lr / n, decay * n
            gradients = {p: gradient * n for p, gradient in gradients.items()}
        elif rule in ("sde", "half-life"):
            kappa = factor**2
            settings["betas"] = [
                max(0.0, 1 - kappa * (1 - beta)) if rule == "sde" else beta**kappa for beta in settings["betas"]
            ]
            settings["eps"] /= factor
            decay *= factor if kind == "adamw" else 1.0
        self.lrs[group] = lr
        is_first_inner = self.side.inner != "both" or group == 0
        inner = 0.9 if "inner pre" in self.side.hooks and is_first_inner else 1.0
        for p, gradient in gradients.items():
            (self._sgd if kind == "sgd" else self._adam)(p, gradient * inner, lr, decay, settings, kind)

    def _sgd(self, p: Any, gradient: Any, lr: float, decay: float, settings: Any, kind: str) -> None:
        state, gradient = self.state[p], gradient + decay * p
        state["buffer"] = gradient if "buffer" not in state else settings["momentum"] * state["buffer"] + gradient
        p -= lr * state["buffer"]

    def _adam(self, p: Any, gradient: Any, lr: float, decay: float, settings: Any, kind: str) -> None:
        state = self.state[p]
        if kind == "adamw":
            p *= 1 - lr * decay
        else:
            gradient = gradient + decay * p
        state["step"] += 1
        powers = (gradient, gradient.square())
        for name, beta, power in zip(("first", "second"), settings["betas"], powers, strict=True):
            state[name] = beta * state.get(name, torch.zeros_like(p)) + (1 - beta) * power
            state[name + " product"] = beta * state.get(name + " product", 1.0)
        first, second = (state[name] / (1 - state[name + " product"]) for name in ("first", "second"))
        p -= lr * first / (second.sqrt() + settings["eps"])

    def _schedule(self, *, is_updated: bool) -> None:
        schedule = self.side.schedule
        if schedule == "samples":
            self.num_scheduled = [self.samples_done // PER] * 2
        elif is_updated and schedule is not None:
            self.num_scheduled[0] += 1
            if schedule == "wrapper" or self.side.inner != "both":
                self.num_scheduled[1] += 1


# ------------------------------------------------------------------------------------------------------------- the run


class HandRun:
    """The objects of a run by hand; buffers are those that each of some cores would have."""

    def __init__(self, program: Program, models: list[nn.Module], num_cores: int) -> None:
        self.program, self.models, self.data, self.num_cores = program, models, Data(program), num_cores
        self.turn, self.teacher, self.num_averaged = 0, None, 0
        self.updated: list[int] = []  # the optimizers that have changed weights in the latest turn
        self.copies: list[nn.Module] | None = None
        self.positions = [Position(program, source) for source in range(1 if program.shares_sampler else 2)]
        self.optimizers = [
            HandOptimizer(side, parameters_of(program, models, number)) for number, side in enumerate(program.sides)
        ]
        self.buffers = [[b.clone() for model in models for b in model.buffers()] for _ in range(num_cores)]
        if program.teacher_from < 0:
            self._make_teacher()

    def _make_teacher(self) -> None:
        if self.program.teacher is not None:
            self.teacher = copy.deepcopy(self.models[0]).train(self.program.teacher_trains)

    @property
    def is_one_batch(self) -> bool:
        """Whether a step is one batch: if nothing depends on its division into minibatches."""
        program = self.program
        is_divided = program.batch_norm or program.is_seeded or program.skipped
        hooks = {hook for side in program.sides for hook in side.hooks}
        return not is_divided and "clamp" not in hooks and not any(one.measures for one in self.optimizers)

    def run_turn(self) -> None:
        program, which = self.program, self.program.which(self.turn)
        position = self.positions[program.source(self.turn)]
        epoch, first, indices = position.next_step()
        parts = [indices] if self.is_one_batch else list(indices.split(MINIBATCH))
        n = len(indices) // MINIBATCH
        weights = [float(self.data.tokens[part].sum()) for part in parts] if program.is_weighted else None
        gradients: dict[int, list[Gradients]] = {side: [] for side in which}
        for number, part in enumerate(parts):
            self._use_buffers(number % self.num_cores)
            self.seeds = _seeds(position.seed, epoch, first + number)
            found = self._minibatch(part, which, is_skipped=(self.turn, number) in program.skipped)
            for side in which:
                gradients[side].append(found.get(side, {}))
            self._keep_buffers(number % self.num_cores)
        steps = [self.optimizers[side].step(n * MINIBATCH, gradients[side], weights) for side in which]
        self.updated = [side for side, is_updated in zip(which, steps, strict=True) if is_updated]
        position.rows.after_step(n * MINIBATCH)
        position.rows.tell(TOLD[self.turn % len(TOLD)])
        if 0 in self.updated and self.teacher is not None and program.teacher != "copy":
            self._average(n * MINIBATCH)

    def _use_buffers(self, core: int) -> None:
        for buffer, values in zip(
            (b for model in self.models for b in model.buffers()), self.buffers[core], strict=True
        ):
            buffer.copy_(values)

    def _keep_buffers(self, core: int) -> None:
        self.buffers[core] = [b.clone() for model in self.models for b in model.buffers()]

    def _minibatch(self, indices: torch.Tensor, which: tuple[int, ...], *, is_skipped: bool) -> dict[int, Gradients]:
        program = self.program
        if program.is_seeded:
            torch.manual_seed(self.seeds[0])
            random.seed(self.seeds[0])
            np.random.seed(self.seeds[0] % 2**32)
        batch, tokens = self.data.minibatch(program, indices), self.data.tokens[indices]
        gradients: dict[int, Gradients] = {}
        for some in [[side] for side in which] if program.style == "in turn" else [which]:
            found = sample_losses(program, self._call(which), self.teacher, some, batch)
            for side, losses in found.items() if not is_skipped else ():
                loss = (losses * tokens).sum() if program.is_weighted else losses.mean()
                gradients[side] = self._gradients(side, loss)
            torch.manual_seed(0)  # step() has seeded the generators for the next minibatch
        return gradients

    def _call(self, which: tuple[int, ...]) -> Any:
        """Runs a model, with new random numbers if it is the first one of the minibatch that is trained."""
        own = {0} if self.program.losses == "halves" else {*which}

        def call(model: int, x: torch.Tensor) -> torch.Tensor:
            if self.program.is_seeded and model in own and torch.initial_seed() != self.seeds[1]:
                torch.manual_seed(self.seeds[1])
            return self.models[model](x)

        return call

    def _gradients(self, side: int, loss: torch.Tensor) -> Gradients:
        parameters = parameters_of(self.program, self.models, side)
        trained = [p for p in parameters if p.requires_grad]
        found = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
        gradients = {p: gradient for p, gradient in zip(trained, found, strict=True) if gradient is not None}
        hooks = self.program.sides[side].hooks
        if "scale" in hooks and parameters[0] in gradients:
            gradients[parameters[0]] = gradients[parameters[0]] * 0.5
        if "clamp" in hooks and parameters[-1] in gradients:
            gradients[parameters[-1]] = gradients[parameters[-1]].clamp(-CLAMP, CLAMP)
        if "wrapper pre" in hooks:
            gradients = {p: gradient * 1.25 for p, gradient in gradients.items()}
        return gradients

    @torch.no_grad()
    def _average(self, size: int) -> None:
        """The first update copies the weights."""
        decay = self.num_averaged / (self.num_averaged + 1)
        if self.program.teacher == "ema" and self.num_averaged:
            decay = EMA ** (size / REF_BATCHSIZE)
        self.num_averaged += 1
        for average, p in zip(self.teacher.parameters(), self.models[0].parameters(), strict=True):
            average.copy_(decay * average + (1 - decay) * p)

    def do_events(self) -> None:
        """Evaluations, copies and saving change nothing."""
        event = self.program.events.get(self.turn, "")
        if self.turn == self.program.teacher_from:
            self._make_teacher()
            self.num_averaged = 0
        if event == "copy":
            self._use_buffers(0)  # those that an optimizer for the copies broadcasts
            self.copies = copy.deepcopy(self.models)
        if event in ("freeze", "unfreeze"):
            frozen_parameter(self.models).requires_grad_(event == "unfreeze")
        if self.turn in self.program.left_after:
            self.positions[self.program.source(self.turn)].leave()

    def save(self) -> Any:
        return copy.deepcopy({name: value for name, value in vars(self).items() if name not in ("program", "data")})

    def load(self, saved: Any) -> None:
        vars(self).update(saved)

    def result(self) -> dict[str, Any]:
        tensors = [p.detach().flatten() for model in self.models for p in model.parameters()]
        averages = [] if self.teacher is None else [p.detach().flatten() for p in self.teacher.parameters()]
        return {
            "weights": torch.cat([*tensors, *averages]),
            "buffers": [
                torch.cat([b.double().flatten() for b in [*buffers, torch.zeros(0)]]) for buffers in self.buffers
            ],
            "lrs": [lr for side in self.updated for lr in self.optimizers[side].lrs],
            "counts": [(one.steps_done, one.samples_done, one.steps_skipped) for one in self.optimizers],
        }


def _seeds(seed: int, epoch: int, minibatch: int) -> tuple[int, int]:
    """Of the loop and of the model in a minibatch."""
    digest = blake2b(f"{seed},{epoch},{minibatch}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little") >> 1, int.from_bytes(digest[8:], "little") >> 1


def run(program: Program, num_cores: int = 1) -> list[dict[str, Any]]:
    """Execute a program by hand; with the buffers that so many cores would have."""
    first = HandRun(program, make_models(program, program.seed), num_cores)
    results = run_turns(first, program.num_turns, may_be_lost=True)
    if program.second is not None:
        first._use_buffers(0)  # which are broadcast
        models = {"new": None, "same": first.models, "copy": first.copies}[program.second]
        second = HandRun(program, models or make_models(program, program.seed + 2), num_cores)
        results += run_turns(second, num_turns_of_second(program), may_be_lost=False)
    return results


def first_difference(program: Program, expected: Any, found: Any, rank: int) -> str | None:
    """What is different on a core, in the first turn in which anything is."""
    largest = 1e-6 if program.is_exact else 1e-9  # exact sums are rounded
    # in turns of its own, the other model's loss runs through a model whose optimizer has no minibatch then
    has_buffers = program.losses != "gan" or program.shares_sampler
    for turn, (right, own) in enumerate(zip(expected, found, strict=True)):
        for name in ("weights", "lrs", *["buffers"] * has_buffers):
            values = right[name][rank] if name == "buffers" else right[name]
            one, other = (torch.as_tensor(one, dtype=torch.float64) for one in (values, own[name]))
            if one.shape != other.shape or not torch.allclose(one, other, rtol=0, atol=largest):
                by = (one - other).abs().max().item() if one.shape == other.shape else f"{one.shape}, {other.shape}"
                return f"{name} after turn {turn}: {by}"
        if right["counts"] != own["counts"]:
            return f"counts after turn {turn}: {own['counts']} instead of {right['counts']}"
    return None
