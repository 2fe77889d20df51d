"""Fine-tune a small transformer: a new head, a lower rate for the rest, frozen embeddings, a growing batch size.

python examples/fine_tuning.py
python examples/fine_tuning.py --cores 2    # the same result
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs

WORDS, LENGTH, WIDTH = 64, 12, 32


def texts(number: int, seed: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (number, LENGTH), generator=torch.Generator().manual_seed(seed))


class Classifier(nn.Module):
    """A transformer encoder whose mean output a linear head classifies."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.encoder(self.embedding(words) + self.positions)
        return self.head(encoded.mean(1))  # type: ignore[no-any-return]


def pretrained() -> Classifier:
    """A model that predicts which quarter of the vocabulary most words are from; in practice, you load it."""
    torch.manual_seed(0)
    model, words = Classifier(4), texts(2048, seed=1)
    quarters = nn.functional.one_hot(words // (WORDS // 4), 4).sum(1).argmax(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for first in range(0, len(words), 64):
        cross_entropy(model(words[first : first + 64]), quarters[first : first + 64]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def fine_tune(num_epochs: int) -> tuple[float, int]:
    """The accuracy on the new task, whether more words are from the upper half, and the number of updates."""
    model, words = pretrained(), texts(3072, seed=2)
    upper = (2 * (words >= WORDS // 2).sum(1) > LENGTH).long()
    model.head = nn.Linear(WIDTH, 2)
    model.embedding.requires_grad_(False)

    dataset = torch.utils.data.TensorDataset(words[:2048], upper[:2048])
    loader = vbs.DataLoader(dataset, trace="0:32 64:64 96:128", minibatch_size=32)
    rest = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("head")]
    groups = [{"params": model.head.parameters(), "lr": 5e-3}, {"params": rest, "lr": 1e-3}]
    optimizer = vbs.Optimizer(torch.optim.AdamW(groups), loader, rule="adam", ref_batchsize=32, model=model)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
    optimizer.attach(warmup, per="samples")  # a step of the scheduler for each 32 samples, whatever the batch size

    for _ in optimizer.epochs(num_epochs):
        for data, target in loader:
            cross_entropy(model(data), target).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(words[2048:]).argmax(1) == upper[2048:]).float().mean().item()
    return accuracy, optimizer.steps_done


def main() -> None:
    parser = argparse.ArgumentParser(description="fine-tune a small transformer with a growing batch size")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--cores", type=int, default=1)
    options = parser.parse_args()
    results = vbs.launch(fine_tune, (options.epochs,), cores=options.cores, backend="gloo")
    print("{1} updates, accuracy {0:.1%}".format(*results[0]))


if __name__ == "__main__":
    main()
