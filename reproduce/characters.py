"""A small GPT on characters: windows of the source of Python's library on the device, and the test loss on its end."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

CONTEXT, VOCABULARY = 128, 128  # characters


def text_of_python() -> str:
    """The modules of Python's standard library, one after the other: about 5 million characters."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


class Text:
    """Character indices on a device; the last tenth is the test part.

    Args:
        text: the text; all characters outside ASCII become the same character.
        device: the device of the tensors.
        context: the number of predicted characters per window.
    """

    def __init__(self, text: str, device: torch.device, *, context: int = CONTEXT) -> None:
        numbers = torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8)
        num_train = len(numbers) * 9 // 10
        self._train = numbers[:num_train].to(device).unfold(0, context + 1, 1)
        self._test = numbers[num_train:].to(device).unfold(0, context + 1, context)

    def __len__(self) -> int:
        """The number of training windows, one per start character."""
        return len(self._train)

    def __call__(self, indices: list[int]) -> torch.Tensor:
        """The windows of these indices, without synchronizing with the device."""
        numbers = torch.tensor(indices)
        if self._train.is_cuda:
            numbers = numbers.pin_memory().to(self._train.device, non_blocking=True)
        return self._train[numbers].long()

    @torch.no_grad()
    def test_loss(self, model: nn.Module, *, num_windows: int, at_once: int = 128) -> float:
        """Nats per character, over windows distributed over the test part."""
        every = max(1, len(self._test) // num_windows)
        windows = self._test[::every][:num_windows]
        total = torch.zeros((), device=windows.device)
        for part in windows.split(at_once):
            total += loss_of(model, part.long()).float() * len(part)
        return total.item() / len(windows)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A GPT with 3.2 million parameters at width 256 and 4 layers."""

    def __init__(self, *, width: int, heads: int, layers: int, context: int = CONTEXT) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]))
        return logits


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Nats per character of predicting each character from the previous ones."""
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
