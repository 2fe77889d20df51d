"""The evidence for rules of AdamW, Muon and Lion: lanes train like plain loops; the plan and the tables."""

import contextlib
import importlib
import io
import json
import math
import runpy
import sys

import forked
import numpy as np
import pytest
import torch
from documents import ROOT
from torch.nn.functional import cross_entropy, embedding, gelu, layer_norm

import variable_batch_size as vbs

NUM_SAMPLES, MINIBATCH_SIZE, REFERENCE = 64, 2, 4  # windows
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}
LION = {"betas": (0.9, 0.99), "weight_decay": 1.0}
MUON = {"momentum": 0.95, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


@pytest.fixture(scope="module", autouse=True)
def importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "reproduce"))
        yield


@pytest.fixture(scope="module")
def lanes():
    return importlib.import_module("lanes")


@pytest.fixture(scope="module")
def tables():
    return importlib.import_module("adam_and_muon_tables")


@pytest.fixture(scope="module")
def program():
    return importlib.import_module("adam_and_muon")


# ------------------------------------------------------------------------------------- plain loops of one training
class Plain(torch.nn.Module):
    """The same GPT with a parameter for each matrix, which queries, keys and values share or do not."""

    def __init__(self, size, weights, *, splits=False):
        super().__init__()
        self.size, d = size, size.width
        parts = dict(zip(size.shapes, weights.split([math.prod(shape) for shape in size.shapes.values()]), strict=True))
        self.parts = torch.nn.ParameterDict()
        for name, shape in size.shapes.items():
            part = parts[name].view(shape).clone()
            if name not in size.hidden:
                self.parts[name] = torch.nn.Parameter(part)
                continue
            for layer, matrix in enumerate(part):
                pieces = matrix.split(d, dim=1) if splits and name == "qkv" else [matrix]
                for number, piece in enumerate(pieces):
                    self.parts[f"{name}-{layer}-{number}"] = torch.nn.Parameter(piece.clone())

    def matrix(self, name, layer):
        pieces = [p for key, p in self.parts.items() if key.startswith(f"{name}-{layer}-")]
        return torch.cat(pieces, 1)

    def hidden(self):
        return [p for key, p in self.parts.items() if "-" in key]

    def others(self):
        return [p for key, p in self.parts.items() if "-" not in key]

    def flat(self):
        found = []
        for name in self.size.shapes:
            if name in self.size.hidden:
                found += [self.matrix(name, layer).flatten() for layer in range(self.size.layers)]
            else:
                found.append(self.parts[name].flatten())
        return torch.cat(found).detach()

    def forward(self, windows):
        inputs, targets = windows[:, :-1], windows[:, 1:]
        size, width = self.size, self.size.width // self.size.heads
        x = embedding(inputs, self.parts["tokens"]) + self.parts["positions"]
        future = torch.ones(size.context, size.context, dtype=torch.bool).triu(1)
        for layer in range(size.layers):
            qkv = layer_norm(x, (size.width,)) @ self.matrix("qkv", layer)
            q, k, v = (part.unflatten(2, (size.heads, width)).transpose(1, 2) for part in qkv.split(size.width, dim=2))
            scores = (q @ k.mT / math.sqrt(width)).masked_fill(future, -math.inf)
            x = x + (scores.softmax(3) @ v).transpose(1, 2).flatten(2) @ self.matrix("out", layer)
            x = x + gelu(layer_norm(x, (size.width,)) @ self.matrix("up", layer)) @ self.matrix("down", layer)
        logits = layer_norm(x, (size.width,)) @ self.parts["head"]
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, **settings):
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                update = (average * first + p.grad * (1 - first)).sign()
                p.mul_(1 - lr * group["weight_decay"]).sub_(lr * update)
                average.mul_(second).add_(p.grad, alpha=1 - second)


def windows_of(lanes, size, text, seed):
    starts = np.random.default_rng((seed, 1)).integers(len(text.train) - size.context, size=NUM_SAMPLES)
    return torch.stack([text.train[start : start + size.context + 1] for start in starts]).long()


def lr_at(number, batchsize, lr):
    progress = (number + 0.5) * batchsize / NUM_SAMPLES
    return lr * min(1.0, progress / 0.05) * (1 + math.cos(math.pi * progress)) / 2


def train_plainly(model, optimizers, windows, batchsize, lr):
    """Returns V and G² of all steps."""
    noises = []
    for number in range(NUM_SAMPLES // batchsize):
        norms = []
        model.zero_grad()
        for part in windows[number * batchsize : (number + 1) * batchsize].split(MINIBATCH_SIZE):
            grads = torch.autograd.grad(model(part), list(model.parameters()))
            norms.append(sum(grad.square().sum().item() for grad in grads))
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad * (MINIBATCH_SIZE / batchsize) + (0.0 if p.grad is None else p.grad)
        n = batchsize // MINIBATCH_SIZE
        square = sum(p.grad.square().sum().item() for p in model.parameters())
        variance = (sum(norms) / n - square) * batchsize / (n - 1)
        noises.append([variance, square - variance / batchsize])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(number, batchsize, lr)
            optimizer.step()
    return np.array(noises)


@pytest.fixture(scope="module")
def size(lanes):
    return lanes.Size(width=8, heads=2, layers=2, context=8)


@pytest.fixture(scope="module")
def text(lanes):
    return lanes.Text(lanes.text_of_library(40_000), torch.device("cpu"), block_size=256)


@pytest.fixture(scope="module")
def trainer(lanes, size, text):
    def made(*, is_muon=False):
        options = {"num_lanes": 5, "minibatch_size": MINIBATCH_SIZE, "is_compiled": False, "test_windows": 16}
        return lanes.Lanes(size, text, is_muon=is_muon, **options)

    return made


def lane(lanes, optimizer, settings, rule, batchsize, seed):
    return lanes.Lane(optimizer, settings, rule, batchsize, REFERENCE, seed)


def muon_of(model, lr, scale):
    """Muon for hidden matrices and AdamW for the others, with weight decay · √S."""
    muon = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    decay = {"lr": lr, "weight_decay": 0.1 * math.sqrt(scale)}
    adamw = torch.optim.AdamW(model.others(), betas=(0.9, 0.95), **decay)
    return [torch.optim.Muon(model.hidden(), **decay, **muon), adamw]


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw",
        "lion",
        pytest.param("muon", marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="since torch 2.9")),
    ],
)
def test_lanes_of_all_batch_sizes_train_like_plain_loops(optimizer, lanes, size, text, trainer):
    batchsizes, lr = (4, 16, 8), 2.0**-6
    settings = {"adamw": ADAMW, "lion": LION, "muon": MUON}[optimizer]
    rule = vbs.rules.MuonRule if optimizer == "muon" else vbs.rules.ConstantRule
    batch = trainer(is_muon=optimizer == "muon")
    jobs = [lane(lanes, optimizer, {**settings, "lr": lr}, rule(), b, seed) for seed, b in enumerate(batchsizes)]
    batch.train(jobs[:1], num_samples=NUM_SAMPLES)  # nothing of it is left in the next training
    rows = batch.train(jobs, num_samples=NUM_SAMPLES)
    for number, (row, batchsize) in enumerate(zip(rows, batchsizes, strict=True)):
        model = Plain(size, lanes.initial_weights(size, number), splits=optimizer == "muon")
        at = lr
        if optimizer == "muon":
            scale = batchsize / REFERENCE
            optimizers, at = muon_of(model, lr, scale), lr * math.sqrt(scale)
        elif optimizer == "adamw":
            optimizers = [torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)]
        else:
            optimizers = [Lion(model.parameters(), lr=lr, **LION)]
        before = model.flat()
        noises = train_plainly(model, optimizers, windows_of(lanes, size, text, number), batchsize, at)
        moved = (model.flat() - before).norm()
        # Newton and Schulz run in bfloat16, and their products of many matrices round in other places
        allowed = 0.02 if optimizer == "muon" else 1e-3
        assert (batch.tensors.weights[number] - model.flat()).norm() < allowed * moved
        with torch.no_grad():
            test = text.test_windows(16, size.context)
            assert row["loss"] == pytest.approx(model(test).item(), rel=1e-3)
        assert row["updates"] == NUM_SAMPLES // batchsize
        parts = np.array_split(noises, min(8, len(noises)))
        expected = [part.mean(0) for part in parts]
        np.testing.assert_allclose(row["noise"], expected, rtol=0.02 if optimizer == "muon" else 1e-3)


@pytest.mark.parametrize(
    ("rule", "is_measured"), [("adam", False), ("adam:half-life", False), ("surge", True), ("adamscale", True)]
)
def test_rules_in_lanes_do_what_this_library_does(rule, is_measured, lanes, size, text, trainer):
    batchsize, lr = 8 if rule == "adamscale" else 16, 2.0**-6
    settings = {"min_updates": 2} if rule == "adamscale" else {}
    job = lane(lanes, "adamw", {**ADAMW, "lr": lr}, vbs.rules.make_rule(rule, **settings), batchsize, 3)
    batch = trainer()
    batch.train([job], num_samples=NUM_SAMPLES)

    model = Plain(size, lanes.initial_weights(size, 3))
    loader = vbs.DataLoader(windows_of(lanes, size, text, 3), batchsize, minibatch_size=MINIBATCH_SIZE, shuffle=False)
    inner = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    options = {"ref_batchsize": REFERENCE, "clip_grad_norm": 1.0}
    optimizer = vbs.Optimizer(inner, loader, rule=vbs.rules.make_rule(rule, **settings), **options)
    before, factors = model.flat(), set()
    for _ in optimizer.epochs(1):
        for windows in loader:
            inner.param_groups[0]["lr"] = lr_at(optimizer.steps_done, batchsize, lr)
            model(windows).backward()
            if optimizer.step():
                factors.add(optimizer.rule.factor(vbs.rules.Step(batchsize, MINIBATCH_SIZE, REFERENCE)))
    assert optimizer.steps_done == NUM_SAMPLES // batchsize
    assert (len(factors) > 1) == is_measured
    assert (batch.tensors.weights[0] - model.flat()).norm() < 1e-3 * (model.flat() - before).norm()


def test_diverged_lane_has_the_loss_of_an_untrained_model_and_leaves_the_others_alone(lanes, trainer):
    wild = lane(lanes, "adamw", {**ADAMW, "lr": 1e30}, vbs.rules.ConstantRule(), 4, 0)
    tame = lane(lanes, "adamw", {**ADAMW, "lr": 2.0**-6}, vbs.rules.ConstantRule(), 4, 1)
    alone = trainer().train([tame], num_samples=NUM_SAMPLES)[0]
    diverged, beside = trainer().train([wild, tame], num_samples=NUM_SAMPLES)
    assert diverged["loss"] == pytest.approx(math.log(256))
    assert beside["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_training_ends_without_rows_when_its_time_is_over(lanes, trainer):
    job = lane(lanes, "adamw", {**ADAMW, "lr": 2.0**-6}, vbs.rules.ConstantRule(), 4, 1)
    assert trainer().train([job], num_samples=NUM_SAMPLES, stop_at=0.0) is None


def test_text_holds_out_one_block_in_twenty(lanes):
    text = lanes.Text(bytes(number // 4 for number in range(160)), torch.device("cpu"), block_size=4)
    assert len(text.train) == 152
    assert sorted({*range(40)} - set(text.train.tolist())) == [19, 39]
    assert text.test_windows(2, 3).tolist() == [[19] * 4, [39] * 4]


# ----------------------------------------------------------------------------------------------------------- plan
def loss_of(program, job, *, middle):
    """A parabola over log2(lr) around a best one that is twice as large at four times the batch size."""
    step = vbs.rules.Step(job.batchsize, 1, program.FULL.reference)
    rule = program.rule_of(job.rule)
    factor = 1.0 if rule.measures_noise else rule.factor(step)
    off = math.log2(job.lr * factor) - middle[job.optimizer] - math.log2(step.scale) / 2
    return 1.0 + 0.01 * off**2 + 0.001 * job.seed


@pytest.mark.parametrize("middle", [-8.3, -14.0, -3.4])
def test_plan_extends_each_grid_until_the_best_learning_rate_is_inside(middle, program, tables):
    scale, seeds, rows = program.FULL, [0, 1, 2], []
    middles = {"adamw": middle, "muon": middle + 1, "lion": middle - 1}
    for _ in range(100):
        if not (jobs := program.wanted(rows, scale, seeds)):
            break
        made = [(job, loss_of(program, job, middle=middles)) for job in jobs]
        rows += [{**job._asdict(), "samples": scale.samples[job.length], "loss": loss} for job, loss in made]
    assert not jobs
    assert len({program.Job(*(row[field] for field in program.Job._fields)) for row in rows}) == len(rows)
    found = tables.Found(rows, scale.reference, seeds)
    for optimizer, best in middles.items():
        for length, sizes in scale.batchsizes.items():
            for size in sizes:
                cell = tables.Cell(optimizer, "constant", length, size)
                expected = best + math.log2(size / scale.reference) / 2
                assert abs(math.log2(found.tuned(cell)) - expected) <= 0.5
                assert found.optimum(cell) == (pytest.approx(expected), 3)
    for one in tables.exponents(found, "adamw"):
        assert one.exponent == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-9))
    regrets = tables.regrets(found, "adamw", "long")
    assert [size for rule, size in regrets if rule == "linear"] == [64, 256, 1024]
    at_best = loss_off(found, middle, 0)
    assert regrets["linear", 64].value == pytest.approx(loss_off(found, middle, 1) - at_best)
    too_low = tables.regrets(found, "adamw", "long", below=4)
    assert too_low["constant", 64].value == pytest.approx(loss_off(found, middle, -3) - at_best)
    assert too_low["linear", 64].value == pytest.approx(loss_off(found, middle, -1) - at_best)


def loss_off(found, middle, octaves):
    """The loss where the learning rate is that many octaves above root scaling of the tuned one."""
    lr = found.tuned(next(cell for cell in found.cells() if cell[:1] + cell[2:] == ("adamw", "long", 16)))
    return 1.0 + 0.01 * (math.log2(lr) + octaves - middle) ** 2


def test_root_and_linear_are_runs_of_the_grid(program):
    job = program.Job("adamw", "linear", "short", 4, 0.5, 1)
    assert job.plain(program.FULL) == program.Job("adamw", "constant", "short", 4, 0.125, 1)
    assert job._replace(rule="root", batchsize=256).plain(program.FULL)[1:5] == ("constant", "short", 256, 2.0)
    assert job._replace(rule="adam").plain(program.FULL).rule == "adam"


def test_arms_change_only_what_they_are_named_after(program):
    step = vbs.rules.Step(batch_size=64, minibatch_size=8, ref_batchsize=16)
    changed = {
        name: program.rule_of(name).merged_settings({**ADAMW, "lr": 0.5}, step, 1.0)
        for name in ("beta2 half-life", "half-lives", "timescale")
    }
    assert changed["beta2 half-life"] == {"lr": 0.5, "betas": (0.9, pytest.approx(0.95**4))}
    assert changed["half-lives"] == {"lr": 0.5, "betas": (pytest.approx(0.9**4), pytest.approx(0.95**4))}
    assert changed["timescale"] == {"lr": 0.5, "weight_decay": 0.4}


def test_trainer_takes_the_first_program_with_enough_runs_that_fits_in_the_time(program):
    trainer = object.__new__(program.Trainer)
    trainer._scale, trainer._seconds, trainer._made, trainer._is_compiled = program.FULL, {(False, 8): 0.01}, {}, False
    few = [program.Job("muon", "constant", "long", 16, 2.0**-power, 0) for power in range(3)]
    many = [program.Job("adamw", "constant", "long", 16, 2.0**-power, 0) for power in range(20)]
    short = [program.Job("adamw", "constant", "short", 16, 2.0**-power, 0) for power in range(9)]
    assert trainer.choose([*few, *many, *short], 1000.0) == (program.Program(False, "long", 8), many[:16])
    assert trainer.choose([*few, *many, *short], 100.0) == (program.Program(False, "short", 8), short)
    assert trainer.choose([*few, *many], 100.0) is None
    assert trainer.choose(few, 1000.0) == (program.Program(True, "long", 8), few)


# --------------------------------------------------------------------------------------------------------- tables
def test_minimum_of_a_parabola_and_where_a_curve_crosses(tables):
    assert tables.minimum_of_parabola(4.0, 1.0, 2.0) == 0.25
    assert tables.minimum_of_parabola(1.0, 1.25, 3.5) == pytest.approx(-0.625)  # x² + 1.25·x + 1.25
    assert tables.minimum_of_parabola(1.0, 2.0, 2.5) == -1.0
    assert tables.minimum_of_parabola(2.0, 2.0, 1.0) == 1.0
    assert tables.crossing([4, 16, 64], [1.0, 1.1, 1.5], 0.3) == 32.0
    assert tables.crossing([4, 16, 64], [1.0, 1.1, 1.2], 0.3) == 64.0


def row(optimizer, rule, length, batchsize, lr, seed, loss, samples, noise=()):
    fields = {"optimizer": optimizer, "rule": rule, "length": length, "batchsize": batchsize, "lr": lr, "seed": seed}
    return {**fields, "loss": loss, "samples": samples, "noise": list(noise)}


def grid(optimizer, length, batchsize, best, loss, samples, *, spread=0.01, rule="constant", noise=()):
    """Three seeds at the best learning rate and its neighbours, which lose 0.1; the loss differs between seeds."""
    return [
        row(optimizer, rule, length, batchsize, best * factor, seed, loss + off + spread * (seed - 1), samples, noise)
        for factor, off in ((0.5, 0.1), (1.0, 0.0), (2.0, 0.1))
        for seed in range(3)
    ]


def test_muon_keeps_its_efficiency_further_by_the_samples_that_a_batch_size_costs(tables):
    rows = []
    for optimizer, slope in (("adamw", 0.04), ("muon", 0.02)):  # nats for each octave of the batch size
        for length, samples, base in (("short", 1000, 1.2), ("long", 4000, 1.0)):
            for octave in range(0, 9, 2):
                loss = base + slope * octave
                rows += grid(optimizer, length, 16 * 2**octave, 2.0**-8, loss, samples, spread=0.0001)
    found = tables.Found(rows, 16, [0, 1, 2])
    # four times the samples are worth 0.2 nats, and 20 % more are worth 0.2 · log 1.2 / log 4
    worth = 0.2 * math.log(1.2) / math.log(4)
    for optimizer, slope in (("adamw", 0.04), ("muon", 0.02)):
        middle, low, high = tables.efficient_size(found, optimizer, "long")
        assert middle == pytest.approx(16 * 2 ** (worth / slope), rel=0.01)
        assert low < middle < high < 1.05 * low
    ratios = {claim.of: claim for claim in tables.claims(found) if "20 %" in claim.what}
    assert ratios["muon long"].ours == pytest.approx(2 ** (worth / 0.02 - worth / 0.04), rel=0.01)


def test_ratio_of_samples_is_that_of_the_lengths_where_muon_reaches_in_the_short_one_what_adamw_reaches_in_the_long_one(
    tables,
):
    rows = []
    for optimizer, length, samples, loss in (
        ("adamw", "short", 1000, 1.4),
        ("muon", "short", 1000, 1.1),
        ("adamw", "long", 4000, 1.0),
        ("muon", "long", 4000, 0.9),
    ):
        rows += grid(optimizer, length, 16, 2.0**-8, loss, samples, spread=0.0001)
    found = tables.Found(rows, 16, [0, 1, 2])
    # AdamW needs ¾ of the way from 1.4 to 1.0 for 1.1; Muon half of that from 1.1 to 0.9 for 1.0
    for is_short, expected in ((True, 4**0.75), (False, 4**0.5)):
        middle, low, high = tables.samples_ratio(found, 16, is_short=is_short)
        assert middle == pytest.approx(expected, rel=0.01)
        assert low < middle < high < 1.01 * low


def test_surge_is_fitted_to_the_best_learning_rates(tables):
    lrs = {4: 2.0**-9, 16: 2.0**-8, 64: 2.0**-8, 256: 2.0**-9}  # symmetric around 32
    rows = [
        one for size, lr in lrs.items() for one in grid("adamw", "short", size, lr, 1.0, 1000, noise=[[64.0, 2.0]] * 4)
    ]
    found = tables.Found(rows, 16, [0, 1, 2])
    assert found.noise_scale("adamw", "short") == 32.0
    assert tables.peak_of_surge(found, "adamw", "short")[0] == 32.0
    values = {(one.begin, one.end): one.exponent.value for one in tables.exponents(found, "adamw")}
    assert values == {(4, 16): 0.5, (16, 64): 0.0, (64, 256): -0.5}
    expected = math.log2(2 * (32 + 4) / (32 + 16)) / 2  # √S · (Bn + B0) / (Bn + B)
    assert tables.exponents(found, "adamw")[0].of_surge == pytest.approx(expected)


def test_regret_and_betas_compare_the_same_seeds(tables):
    rows = grid("adamw", "short", 16, 2.0**-8, 1.0, 1000) + grid("adamw", "short", 64, 2.0**-7, 1.1, 1000)
    rows += grid("adamw", "short", 64, 2.0**-7, 1.05, 1000, rule="half-lives")
    found_by_seed = (1.30, 1.32, 1.34)  # beside 1.04, 1.05, 1.06 of the best arm
    rows += [row("adamw", "adam", "short", 64, 2.0**-8, seed, loss, 1000) for seed, loss in enumerate(found_by_seed)]
    found = tables.Found(rows, 16, [0, 1, 2])
    regret = {rule: value for (rule, _), value in tables.regrets(found, "adamw", "short").items()}
    assert set(regret) == {"constant", "root", "linear", "adam"}
    assert regret["adam"].value == pytest.approx(0.27)
    assert regret["root"].value == pytest.approx(0.05)
    assert regret["constant"].value == pytest.approx(0.15)
    # the spread of the differences is 0.01 once and 0 three times, with 8 degrees of freedom in all
    assert regret["adam"].half == pytest.approx(2.306 * math.sqrt(2 * 0.01**2 / 8) / math.sqrt(3), rel=0.01)
    ((key, difference),) = tables.betas(found, "short").items()
    assert (key, difference.value) == (("half-lives", 64), pytest.approx(-0.05))


def test_best_learning_rate_moves_where_more_seeds_say_so(tables):
    losses = {-9: [1.0, 1.0, 1.0], -8: [0.8, 1.2, 1.2], -7: [0.9, 0.9, 0.9]}
    rows = [
        row("adamw", "constant", "short", 16, 2.0**power, seed, loss, 1000)
        for power, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]
    cell = tables.Cell("adamw", "constant", "short", 16)
    found = tables.Found(rows, 16, [0, 1, 2])
    assert (found.best(cell), found.tuned(cell)) == (2.0**-7, None)  # and its other neighbour is not there
    rows += [row("adamw", "constant", "short", 16, 2.0**-6, seed, 1.0, 1000) for seed in range(3)]
    found = tables.Found(rows, 16, [0, 1, 2])
    assert (found.best(cell), found.tuned(cell)) == (2.0**-7, 2.0**-7)


def test_tables_of_the_page_are_those_of_the_committed_runs(program, tables):
    results = importlib.import_module("results")
    rows = tables.with_noise(
        {
            "rows": results.read(results.csv_of("adam_and_muon")),
            "curve": results.read(results.curves_of("adam_and_muon")),
        }
    )
    printed = tables.markdown(tables.Found(rows, program.FULL.reference, [0, 1, 2])).splitlines()
    page = (ROOT / "docs" / "reproduced.md").read_text(encoding="utf-8")
    section = page.split("## AdamW, Muon and Lion\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(lines) > 30
    assert [line for line in lines if line not in printed] == []


# ----------------------------------------------------------------------------------------------------- the program
def start(folder, *options):
    sys.path.insert(0, "reproduce")
    sys.argv = ["reproduce/adam_and_muon.py", "--small", "--device", "cpu", "--directory", str(folder), *options]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            (folder / "ended.json").write_text(json.dumps([end.code, output.getvalue()]))


def ended(folder, *options):
    folder.mkdir(exist_ok=True)
    forked.run(start, folder, *options, folder=ROOT, environment={"PYTHONPATH": str(ROOT)})
    return json.loads((folder / "ended.json").read_text())


def test_stopped_program_resumes_with_the_missing_runs(tmp_path):
    code, output = ended(tmp_path, "--seconds", "0", "--seeds", "0")
    assert code == 75
    assert "the same command resumes" in output
    code, output = ended(tmp_path, "--seeds", "0")
    assert code == 0, output
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    (tmp_path / "results.jsonl").write_text("".join(line + "\n" for line in lines[:-40]))
    (tmp_path / "lanes" / "result.json").unlink()
    code, output = ended(tmp_path, "--seeds", "0")
    assert code == 0, output
    again = (tmp_path / "results.jsonl").read_text().splitlines()
    assert again[: len(lines) - 40] == lines[:-40]
    before, after = (
        {tuple(list(row.values())[:6]): row["loss"] for row in map(json.loads, part)} for part in (lines, again)
    )
    assert len(after) == len(again)
    # which ones extend a grid depends on the runs that were there at the time
    both = before.keys() & after.keys()
    assert len(both) > len(lines) - 10
    assert [after[job] for job in both] == pytest.approx([before[job] for job in both], rel=1e-4)
    assert "## Exponents of the best learning rate" in (tmp_path / "tables.md").read_text()


def test_runs_of_another_text_are_not_continued(tmp_path):
    (tmp_path / "results.jsonl").write_text(json.dumps({"text_crc32": "0123abcd"}) + "\n")
    failed = forked.run(start, tmp_path, folder=ROOT, environment={"PYTHONPATH": str(ROOT)})
    assert "results.jsonl: made with another text, of crc32 0123abcd: pass it as --text" in failed.stderr
