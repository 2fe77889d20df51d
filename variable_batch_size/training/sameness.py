"""Sees that all cores train the same: the same weights at the start, and the same settings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from variable_batch_size.cores.communicator import Communicator

_LONGEST = 120


def begin_alike(facts: Mapping[str, object], tensors: Sequence[torch.Tensor], communicator: Communicator) -> None:
    """Refuse cores that were set up differently, and let tensors be on all cores as they are on core 0."""
    if communicator.is_one_program:
        share_from_first(tensors, communicator)  # which is only noted down, and made one program with what follows
        refuse_different(facts, communicator, tensors[0].device)
    else:
        refuse_different(facts, communicator, tensors[0].device)
        share_from_first(tensors, communicator)


def share_from_first(tensors: Iterable[torch.Tensor], communicator: Communicator) -> None:
    """Let parameters and buffers be on all cores as they are on core 0."""
    if communicator.num_replicas > 1:
        communicator.broadcast(list({id(tensor): tensor for tensor in tensors}.values()))


def refuse_different(facts: Mapping[str, object], communicator: Communicator, device: torch.device) -> None:
    """Raise on every core if the cores differ in any of the facts, and say in which; every core must call it.

    Args:
        facts: what must be the same, by name; the same names on all cores.
        communicator: the way to the other cores.
        device: on which it sums.
    """
    if communicator.num_replicas == 1:
        return
    own = torch.tensor([_digest(value) for value in facts.values()], dtype=torch.int64)
    total = communicator.total(own.to(device))
    names = [
        name for name, mine, sum_ in zip(facts, own, total, strict=True) if mine * communicator.num_replicas != sum_
    ]
    if not names:
        return
    texts = _texts_of_all_cores(str(facts[names[0]]), communicator, device)
    said = ", ".join(f"{text} on core {rank}" for rank, text in enumerate(texts))
    more = f" (and in {', '.join(names[1:])})" if len(names) > 1 else ""
    raise ValueError(f"all cores must be set up alike, but they differ in {names[0]}{more}: {said}")


def _digest(value: object) -> int:
    """32 bits, so that their sum over all cores is exact in 64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:4], "little")


def _texts_of_all_cores(text: str, communicator: Communicator, device: torch.device) -> list[str]:
    table = torch.zeros(communicator.num_replicas, _LONGEST, dtype=torch.int32)
    content = text.encode()[:_LONGEST]
    table[communicator.rank, : len(content)] = torch.tensor(list(content), dtype=torch.int32)
    rows = communicator.total(table.to(device)).tolist()
    return [bytes(int(number) for number in row if number).decode(errors="replace") for row in rows]
