"""Random runs over texts of differing length with a TokenBudget, and the same by plain PyTorch, a step at once."""

import functools
import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

import variable_batch_size as vbs

VOCABULARY, PADDING = 9, -1
LR = 0.05


class Reader(nn.Module):
    """Predicts each token from the mean of the previous ones of its document, padded or packed."""

    def __init__(self, dropout_rate=0.0):
        super().__init__()
        self.tokens, self.hidden, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, 5), nn.Linear(5, VOCABULARY)
        self.dropout_rate = dropout_rate

    def forward(self, tokens, positions):
        sums = nn.functional.pad(self.tokens(tokens.clamp(min=0)).cumsum(1), (0, 0, 1, 0))
        starts = torch.arange(tokens.shape[1], device=positions.device) - positions
        before = sums.gather(1, starts[..., None].expand(-1, -1, sums.shape[-1]))
        hidden = self.hidden((sums[:, 1:] - before) / (positions[..., None] + 1))
        return self.head(dropout(torch.tanh(hidden), self.dropout_rate, self.training))


@functools.cache
def program_of(seed):
    """The settings of a run, and its texts."""
    draw = random.Random(seed)
    tokens = draw.choice([24, 40, 64])
    lengths = [min(tokens, int(draw.lognormvariate(2, 0.8)) + 1) for _ in range(draw.randint(25, 60))]
    generator = torch.Generator().manual_seed(seed)
    return {
        "texts": [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths],
        "lengths": lengths,
        "trace": [tokens * draw.randint(1, 5) for _ in range(7)],
        "rule": draw.choice(["linear", "root", "constant"]),
        "ref_batchsize": 2 * tokens,
        "adam": draw.random() < 0.3,
        "options": {
            "tokens": tokens,
            "packed": draw.random() < 0.4,
            "max_shapes": draw.randint(2, 8),
            "multiple_of": draw.choice([1, 4]),
            "seed": seed,
            "on_end": "cycle",
        },
    }


def inner_of(program, model):
    if program["adam"]:
        return torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-2)
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-2)


def model_of(dtype=torch.float64, dropout_rate=0.0):
    torch.manual_seed(0)
    return Reader(dropout_rate).to(dtype)


def padded(texts, length):
    tokens = torch.stack([nn.functional.pad(text, (0, length - len(text)), value=PADDING) for text in texts])
    return tokens, torch.arange(length).expand(len(texts), -1)


def packed(texts, length):
    tokens, positions = torch.cat(texts), torch.cat([torch.arange(len(text)) for text in texts])
    rest = length - len(tokens)
    assert rest >= 0
    return nn.functional.pad(tokens, (0, rest), value=PADDING)[None], nn.functional.pad(positions, (0, rest))[None]


def summed_loss(model, tokens, positions):
    """The sum over all tokens that follow another one of their document, and how many these are."""
    targets = tokens[:, 1:].where(positions[:, 1:] > 0, PADDING)
    logits = model(tokens, positions)[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, (targets != PADDING).sum()


# ------------------------------------------------------------------------------------------------- with a TokenBudget


def budget_of(program, **where):
    return vbs.TokenBudget(program["lengths"], program["trace"], **program["options"], **where)


def collate(budget, texts):
    if budget.plan.packed:
        return packed(texts, budget.plan.tokens)
    return padded(texts, budget.padded_length([len(text) for text in texts]))


def plain(model):
    return model


def wrapped(model):
    return nn.parallel.DistributedDataParallel(model)


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.hidden)
    return fully_shard(model)


def train(
    seed,
    *,
    way=plain,
    dtype=torch.float64,
    num_epochs=2,
    steps=None,
    state=None,
    dropout_rate=0.0,
    workers=0,
    **options,
):
    """A run, or its part up to a number of steps; returns weights, and the state to resume from."""
    program = program_of(seed)
    model = model_of(dtype, dropout_rate)
    budget = budget_of(program)
    model = way(model)
    optimizer = vbs.CustomOptimizer(
        inner_of(program, model),
        budget,
        rule=program["rule"],
        ref_batchsize=program["ref_batchsize"],
        model=model,
        **options,
    )
    loader = torch.utils.data.DataLoader(
        program["texts"], batch_sampler=budget, collate_fn=functools.partial(collate, budget), num_workers=workers
    )
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for _ in optimizer.epochs(num_epochs):
        for tokens, positions in loader:
            loss, number = summed_loss(model, tokens, positions)
            loss.backward()
            optimizer.step(weight=number)
            if optimizer.steps_done == steps and not optimizer.is_accumulating:
                break
        if optimizer.steps_done == steps:
            break
    weights = {name.removeprefix("module."): _full(value) for name, value in model.state_dict().items()}
    result = {"weights": weights, "tokens": optimizer.weight_done, "steps": optimizer.steps_done}
    if steps is not None:
        result |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return result


def _full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()


def train_all(runs):
    """On each core: several runs, given by their arguments."""
    return [train(*args, **options) for args, options in runs]


# ---------------------------------------------------------------------------------------------------- by plain PyTorch


def steps_of(seed, num_epochs=2):
    """The samples of every step, from a budget of one core."""
    budget = budget_of(program_of(seed), num_replicas=1, rank=0)
    found = []
    for epoch in range(num_epochs):
        budget.set_epoch(epoch)
        read = iter(budget)
        for size in budget.get_epochtrace(epoch):
            found.append((size, [sample for _ in range(size // budget.minibatch_size) for sample in next(read)]))
    return found


@functools.cache
def train_plainly(seed):
    """Every step as one padded batch."""
    program, model = program_of(seed), model_of()
    optimizer, num_tokens = inner_of(program, model), 0
    for size, samples in steps_of(seed):
        texts = [program["texts"][sample] for sample in samples]
        loss, number = summed_loss(model, *padded(texts, max(map(len, texts))))
        optimizer.zero_grad()
        (loss / number).backward()
        scale = size / program["ref_batchsize"]
        factor = {"linear": scale, "root": scale**0.5, "constant": 1.0}[program["rule"]]
        optimizer.param_groups[0]["lr"] = LR * factor
        optimizer.step()
        num_tokens += int(number)
    return {"weights": dict(model.state_dict()), "tokens": num_tokens}
