"""Runs that train in several ways, on the device of any backend: for comparisons of XLA cores with one process."""

import functools
import time

import scenarios
import token_programs
import torch
from small_runs import classified, sgd
from torch import nn

import variable_batch_size as vbs

MINIBATCH, NUM_SAMPLES = 8, 400
SIZES = [MINIBATCH * n for n in (8, 2, 1, 12, 8, 9, 5, 1, 1, 8)]
EDITED = [16] * 14 + [32] * 10
TOKEN_SEEDS = (1, 2)


def models():
    """Made before a launch, as virtual cores have one generator."""
    made = {}
    for name in ("by speed", "larger minibatches", "norm layers", "watched"):
        torch.manual_seed(0)
        made[name] = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    return made | {f"tokens {seed}": token_programs.model_of(torch.float32) for seed in TOKEN_SEEDS}


def train(model, backend, trace, *, num_epochs, edits=None, seconds=0.0, assign="round robin", **options):
    """Each core but the first sleeps for some seconds in every minibatch. Returns what is compared."""
    device = scenarios.device_of(backend)
    model = model.to(device)
    of_loader = {name: options.pop(name) for name in ("max_minibatch_size", "on_end") if name in options}
    data = classified(NUM_SAMPLES, 6, num_classes=3, dtype=torch.float32)
    loader = vbs.DataLoader(data, trace, minibatch_size=MINIBATCH, assign=assign, **of_loader)
    inner = sgd(model, momentum=0.5)
    optimizer = vbs.Optimizer(inner, loader, ref_batchsize=2 * MINIBATCH, model=model, **options)
    records, graphs, sizes, shares = [], [], [], []
    optimizer.attach(vbs.Log(optimizer, every=1, to=[records.append]))
    rank = loader.sampler.rank
    for _ in optimizer.epochs(num_epochs):
        for x, y in loader:
            time.sleep(seconds * rank)
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            sizes.append(len(x))
            if optimizer.step(loss=loss):
                shares.append(optimizer.num_own)
                if rank == 0 and edits and optimizer.steps_done in edits:
                    edits[optimizer.steps_done]()
            graphs.append(scenarios.num_graphs(backend))
    measures = optimizer.rule.measures_noise or "measure_noise" in options
    return {
        "state": scenarios.state_of(model),
        "noise": (optimizer.noise.variance, optimizer.noise.square_norm) if measures else None,
        "records": records,
        "graphs": graphs,
        "sizes": sizes,
        "shares": shares,
    }


def write(path, sizes):
    path.write_text("\n".join(["step,batchsize", *(f"{step},{size}" for step, size in enumerate(sizes))]) + "\n")


def watched(model, backend, path):
    """A run whose trace becomes `EDITED` after its fourth step."""
    trace = vbs.traces.WatchedTrace(path, every=2, lead=4)
    return train(model, backend, trace, num_epochs=None, rule="adascale", edits={4: lambda: write(path, EDITED)})


def tokens(model, backend, seed):
    """A run over a token budget: weights, tokens, and after each epoch the shapes so far and the number of graphs."""
    device, program = scenarios.device_of(backend), token_programs.program_of(seed)
    model = model.to(device)
    budget = token_programs.budget_of(program)
    inner = token_programs.inner_of(program, model)
    how = {"rule": program["rule"], "ref_batchsize": program["ref_batchsize"], "model": model}
    optimizer = vbs.CustomOptimizer(inner, budget, **how)
    collate = functools.partial(token_programs.collate, budget)
    loader = torch.utils.data.DataLoader(program["texts"], batch_sampler=budget, collate_fn=collate)
    shapes, epochs = set(), []
    for _ in optimizer.epochs(2):
        for texts, positions in loader:
            loss, number = token_programs.summed_loss(model, texts.to(device), positions.to(device))
            loss.backward()
            optimizer.step(weight=number)
            shapes.add(texts.shape)
        epochs.append((set(shapes), scenarios.num_graphs(backend)))
    return {"state": scenarios.state_of(model), "tokens": optimizer.weight_done, "epochs": epochs}


def run_all(made, backend, path):
    """Each way, on these cores."""
    cycle = {"num_epochs": 2, "on_end": "cycle"}
    found = {
        "by speed": train(made["by speed"], backend, SIZES, assign="by speed", seconds=0.1, rule="adascale", **cycle),
        "larger minibatches": train(
            made["larger minibatches"], backend, SIZES, max_minibatch_size=32, rule="linear", **cycle
        ),
        "norm layers": train(made["norm layers"], backend, SIZES, measure_noise="norm layers", rule="linear", **cycle),
        "watched": watched(made["watched"], backend, path),
    }
    return found | {f"tokens {seed}": tokens(made[f"tokens {seed}"], backend, seed) for seed in TOKEN_SEEDS}
