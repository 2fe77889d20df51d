"""nanogpt_plain.py with batches that grow, a log, checkpoints, and the same result on any number of cores.

python examples/nanogpt.py        # about a minute on a CPU
torchrun --nproc-per-node 2 examples/nanogpt.py
"""

import sys
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import variable_batch_size as vbs

CONTEXT, WIDTH, HEADS, LAYERS, EPOCHS = 64, 64, 4, 2, 2


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=tokens.device)
        x = self.tokens(tokens) + self.positions.weight
        return self.head(self.blocks(x, mask=mask, is_causal=True))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def main(share: float = 1.0) -> None:
    text = "\n\n".join(topics[name] for name in sorted(topics))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([numbers[character] for character in text[: int(share * len(text))]])
    windows = tokens.unfold(0, CONTEXT + 1, CONTEXT)
    train, test = TensorDataset(windows[: len(windows) * 9 // 10]), windows[len(windows) * 9 // 10 :]

    torch.manual_seed(0)
    device = vbs.device()
    model = GPT(len(numbers)).to(device)
    trace = vbs.traces.rampup(16, 16, len(train) // 2, final=64)
    loader = vbs.DataLoader(train, trace=trace, minibatch_size=16, on_end="hold")
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    optimizer = vbs.Optimizer(inner, loader, rule="root", ref_batchsize=16, clip_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, EPOCHS * (len(train) // 16), cycle_momentum=False)
    optimizer.attach(scheduler, per="samples")
    log = vbs.Log(optimizer, every=50, to=[vbs.Console()])
    checkpoint = vbs.Checkpoint("runs/nanogpt", model=model, optimizer=optimizer, every_seconds=60)
    optimizer.attach(log, checkpoint)

    for _ in optimizer.epochs(EPOCHS):
        for (batch,) in loader:
            loss = loss_of(model, batch.to(device))
            loss.backward()
            optimizer.step(loss=loss)
        with torch.no_grad():
            log.write(test_loss=loss_of(model, test.to(device)))


if __name__ == "__main__":
    vbs.launch(main, tuple(map(float, sys.argv[1:])), cores=1)
