"""A small GPT on the characters of Python's documentation: batches that grow with the tokens and are weighted by them.

python examples/language_model.py                       # windows of the text, all of one length
python examples/language_model.py --padded              # its padded paragraphs: minibatches with very different weights
python examples/language_model.py --cores 2             # the same result on two cores, or under torchrun
python examples/language_model.py --device cuda --text FILE --tokens 20000000
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import variable_batch_size as vbs

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
MINIBATCH = 8
REF_BATCHSIZE = 16
PADDING = -1


@dataclass(frozen=True)
class Text:
    """A text as samples, each a tensor of character indices.

    Attributes:
        name: its source.
        vocabulary: the number of distinct characters.
        train: the training samples.
        test: the last tenth, the test samples.
        tokens_per_sample: the mean number of predicted characters per sample.
    """

    name: str
    vocabulary: int
    train: list[torch.Tensor]
    test: list[torch.Tensor]
    tokens_per_sample: int


def read(path: str | None, *, is_padded: bool) -> Text:
    """Read a file, or by default Python's built-in help on the language, about half a million characters."""
    text = Path(path).read_text(encoding="utf-8") if path else "\n\n".join(topics[name] for name in sorted(topics))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    parts = [part for part in text.split("\n\n") if part.strip()] if is_padded else [text]
    pieces = [part[i : i + CONTEXT + 1] for part in parts for i in range(0, len(part), CONTEXT)]
    samples = [torch.tensor([numbers[character] for character in piece]) for piece in pieces if len(piece) > 1]
    samples = samples if is_padded else [sample for sample in samples if len(sample) == CONTEXT + 1]
    num_train = len(samples) * 9 // 10
    tokens = sum(len(sample) - 1 for sample in samples)
    name = path or "pydoc_data.topics, Python's built-in help on the language"
    return Text(name, len(numbers), samples[:num_train], samples[num_train:], round(tokens / len(samples)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens.clamp(min=0)) + self.positions.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.blocks(x))
        return logits


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=PADDING)


def loss_and_weight(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of all characters, and their number."""
    targets = tokens[:, 1:].flatten()
    loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets, ignore_index=PADDING, reduction="sum")
    return loss, (targets != PADDING).sum()


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train on one core."""
    text = read(options.text, is_padded=options.padded)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.manual_seed(0)
    model = GPT(text.vocabulary).to(device)

    # three stages, given in tokens: from 16 to 64 samples
    starts, sizes = (0, options.tokens // 8, options.tokens // 3), (16, 32, 64)
    stages = vbs.traces.Stages(starts, sizes, options.tokens, "tokens", text.tokens_per_sample)
    loader = vbs.DataLoader(text.train, trace=stages, minibatch_size=MINIBATCH, collate_fn=padded)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    optimizer = vbs.Optimizer(
        inner, loader, rule="root", ref_batchsize=REF_BATCHSIZE, clip_grad_norm=1.0, measure_noise=True
    )

    # warm-up over the first tenth of the tokens, then a cosine to 0 at the last token
    per = MINIBATCH * text.tokens_per_sample
    num_steps = max(10, options.tokens // per)
    scheduler = SequentialLR(
        inner,
        [LinearLR(inner, 0.05, total_iters=num_steps // 10), CosineAnnealingLR(inner, num_steps - num_steps // 10)],
        milestones=[num_steps // 10],
    )
    optimizer.attach(scheduler, per="tokens", every=per)
    optimizer.attach(vbs.Log(optimizer, every=options.log_steps, to=[show]))

    started = time.monotonic()
    for _ in optimizer.epochs():
        for tokens in loader:
            loss, weight = loss_and_weight(model, tokens.to(device))
            loss.backward()  # the sum of the losses
            optimizer.step(weight=weight, loss=loss)
    sampler = loader.sampler
    return {
        "rank": sampler.rank,
        "text": text.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": optimizer.weight_done,
        "updates": optimizer.steps_done,
        "constant updates": math.ceil(optimizer.samples_done / REF_BATCHSIZE),
        "noise scale": optimizer.noise_scale,
        "test loss": test_loss(model, text, device),
        "seconds": time.monotonic() - started,
    }


def show(record: dict[str, Any]) -> None:
    print(
        f"step {record['step']:5}  tokens {record['weight']:>12,.0f}  batch size {record['batch_size']:3}  "
        f"lr {record['lr']:.5f}  loss {record['loss']:.3f}  noise scale {record['noise_scale']:>9,.0f} tokens",
        flush=True,
    )


@torch.no_grad()
def test_loss(model: nn.Module, text: Text, device: torch.device) -> float:
    """The mean over all characters of the test samples, which are divided among the cores."""
    sums = vbs.Metrics("loss", "tokens", device=device)
    for samples in vbs.EvaluationLoader(text.test, minibatch_size=MINIBATCH, collate_fn=padded):
        loss, weight = loss_and_weight(model, samples.to(device))
        sums.add(loss=loss, tokens=weight)
    found = sums.read()
    return found["loss"] / found["tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="train a small GPT on characters, with batches that grow with the tokens"
    )
    parser.add_argument("--text", metavar="FILE", help="any text (default: Python's built-in help)")
    parser.add_argument("--tokens", type=int, default=600_000, help="characters to train on")
    parser.add_argument(
        "--padded", action="store_true", help="paragraphs of different lengths instead of windows of one length"
    )
    parser.add_argument("--cores", type=int, default=1, help="number of processes; not needed under torchrun")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--log-steps", type=int, default=25)
    options = parser.parse_args()
    if options.cores > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        backend = "nccl" if options.device == "cuda" else "gloo"
        result = vbs.launch(train, (options,), cores=options.cores, backend=backend)[0]
    else:
        result = train(options)
    if result["rank"]:
        return
    rows = [
        ("text", result["text"]),
        ("parameters", f"{result['parameters']:,}"),
        ("tokens", f"{result['tokens']:,.0f}"),
        ("updates", f"{result['updates']:,}, where a constant {REF_BATCHSIZE} makes {result['constant updates']:,}"),
        ("noise scale", f"{result['noise scale']:,.0f} tokens"),
        ("test loss", f"{result['test loss']:.3f}, {result['test loss'] / math.log(2):.2f} bits a character"),
        ("time", f"{result['seconds']:.0f} s"),
    ]
    print()
    for name, value in rows:
        print(f"{name:14}{value}")


if __name__ == "__main__":
    main()
