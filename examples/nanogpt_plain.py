"""A small GPT on the characters of Python's built-in help, in plain PyTorch; nanogpt.py has batches that grow.

python examples/nanogpt_plain.py        # about a minute on a CPU
python examples/nanogpt_plain.py 0.1    # on a tenth of the text
"""

import sys
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(len(numbers)).to(device)
    loader = torch.utils.data.DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, EPOCHS * (len(train) // 16), cycle_momentum=False)

    updates = 0
    for epoch in range(EPOCHS):
        for (batch,) in loader:
            loss = loss_of(model, batch.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            updates += 1
        with torch.no_grad():
            print(f"epoch {epoch}, {updates} updates, test loss {loss_of(model, test.to(device)).item():.3f}")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
