"""A small GPT on documents of very different lengths, packed into rows of a fixed number of tokens.

python examples/packed_documents.py                     # half a minute on a CPU
python examples/packed_documents.py --cores 2           # the same result on two cores
python examples/packed_documents.py --padded            # the same documents, padded to few shapes instead

A row holds as many whole documents as fit. Positions restart with each, and a token sees earlier tokens of its own
document only, so the result is that of the documents one by one; only the end of a row is padding.
"""

from __future__ import annotations

import argparse
import functools
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

import variable_batch_size as vbs

LONGEST, WIDTH, HEADS, LAYERS = 256, 32, 2, 2
TOKENS = 512  # of a minibatch
IGNORED = -100

Minibatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, positions, and the document number of each token


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        is_same = documents[:, None, :, None] == documents[:, None, None, :]
        mask = is_same & torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        for block in self.blocks:
            x = block(x, mask)
        logits: torch.Tensor = self.head(x)
        return logits


def packed(samples: list[torch.Tensor], length: int = TOKENS) -> Minibatch:
    """Documents one after another in a row; the rest of it is a document of its own, without a loss."""
    rest = length - sum(map(len, samples))
    tokens = pad(torch.cat(samples), (0, rest))
    positions = pad(torch.cat([torch.arange(len(sample)) for sample in samples]), (0, rest))
    numbers = torch.repeat_interleave(torch.tensor([*map(len, samples), rest]))
    documents = numbers.where(numbers < len(samples), -1)
    return tokens[None], positions[None], documents[None]


def padded(samples: list[torch.Tensor], budget: vbs.TokenBudget) -> Minibatch:
    """A row for each document, all of them as long as one of the budget's shapes."""
    length = budget.padded_length(list(map(len, samples)))
    rows = zip(*(packed([sample], length) for sample in samples), strict=True)
    tokens, positions, documents = (torch.cat(parts) for parts in rows)
    return tokens, positions, documents


def loss_and_weight(model: nn.Module, minibatch: Minibatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of all tokens that follow another one of their document, and their number."""
    tokens, _, documents = minibatch
    is_target = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    targets = tokens[:, 1:].where(is_target, IGNORED)
    logits = model(*minibatch)[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, is_target.sum()


def read(most: int) -> tuple[list[torch.Tensor], int]:
    """The first paragraphs of Python's built-in help on the language as characters, and the number of distinct ones."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    parts = [part.strip()[:LONGEST] for part in text.split("\n\n")]
    parts = [part for part in parts if len(part) > 1][:most]
    return [torch.tensor([numbers[character] for character in part]) for part in parts], len(numbers)


def train(options: argparse.Namespace) -> list[tuple[str, str]]:
    documents, vocabulary = read(options.documents)
    lengths = list(map(len, documents))
    budget = vbs.TokenBudget(lengths, "0:2048 20:4096 40:8192", tokens=TOKENS, packed=not options.padded)
    collate = functools.partial(padded, budget=budget) if options.padded else packed
    loader = torch.utils.data.DataLoader(documents, batch_sampler=budget, collate_fn=collate)
    torch.manual_seed(0)
    model = GPT(vocabulary)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    optimizer = vbs.Optimizer(inner, budget, rule="root", ref_batchsize=2048, model=model)
    optimizer.attach(vbs.Log(optimizer, every=10, to=[vbs.Console()]))
    for _ in optimizer.epochs(1):
        for minibatch in loader:
            loss, weight = loss_and_weight(model, minibatch)
            loss.backward()  # the sum of the losses
            optimizer.step(weight=weight, loss=loss)
    plan = vbs.TokenBudget(lengths, TOKENS, tokens=TOKENS, packed=True, num_replicas=1, rank=0).plan
    rows = [[documents[sample] for sample in samples] for samples in plan.samples(range(10), key=(0, 0))]
    return [
        ("documents", f"{len(documents):,} of {min(lengths)} to {max(lengths)} tokens"),
        ("minibatches", f"{budget.plan.num_minibatches:,} of at most {TOKENS} tokens, shapes: {len(budget.shapes)}"),
        ("padding", f"{budget.plan.padding:.1%}"),
        ("updates", f"{optimizer.steps_done:,}"),
        ("tokens", f"{optimizer.weight_done:,.0f}"),
        ("packed", f"loss {mean_loss(model, [packed(one) for one in rows]):.4f} of {len(rows)} rows"),
        ("one by one", f"loss {mean_loss(model, [packed([text]) for one in rows for text in one]):.4f}"),
    ]


@torch.no_grad()
def mean_loss(model: nn.Module, minibatches: list[Minibatch]) -> float:
    sums, weights = zip(*(loss_and_weight(model, minibatch) for minibatch in minibatches), strict=True)
    return float(sum(sums) / sum(weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--padded", action="store_true", help="pad documents instead of packing them")
    parser.add_argument("--documents", type=int, default=2600, help="how many to train on")
    parser.add_argument("--cores", type=int, default=1, help="number of processes")
    options = parser.parse_args()
    rows = vbs.launch(train, (options,), cores=options.cores)[0] if options.cores > 1 else train(options)
    for name, value in rows:
        print(f"{name:14}{value}")


if __name__ == "__main__":
    main()
