"""Sees that all cores train the same: the same weights at the start, and the same settings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from variable_batch_size.cores.communicator import Communicator

_LONGEST = 120


def begin_alike(
    facts: Mapping[str, object], tensors: Sequence[torch.Tensor], communicator: Communicator
) -> Callable[[], None]:
    """Let tensors be on all cores as they are on core 0, and refuse cores that were set up differently.

    Returns:
        what must be called after the next flush. Where work is only noted down first, it does the refusing: so both are
        one program with whatever else is noted down until then.
    """
    if communicator.num_replicas == 1:
        share_from_first(tensors, communicator)
        return _nothing_more
    comparison = Comparison(facts, communicator, tensors[0].device)
    if communicator.is_one_program:
        share_from_first(tensors, communicator)
        return comparison.refuse_different
    comparison.refuse_different()
    share_from_first(tensors, communicator)
    return _nothing_more


def _nothing_more() -> None:
    pass


def share_from_first(tensors: Iterable[torch.Tensor], communicator: Communicator) -> None:
    """Let parameters and buffers be on all cores as they are on core 0."""
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    communicator.lay_out(tensors)
    if communicator.num_replicas > 1:
        communicator.broadcast(tensors)


class Comparison:
    """Compares facts between the cores, in one sum over all of them; every core must make one and ask it.

    Args:
        facts: what must be the same, by name; the same names on all cores.
        communicator: the way to the other cores.
        device: on which it sums.
    """

    def __init__(self, facts: Mapping[str, object], communicator: Communicator, device: torch.device) -> None:
        self._facts = facts
        self._communicator = communicator
        self._device = device
        self._own = torch.tensor([_digest(value) for value in facts.values()], dtype=torch.int64)
        self._total = self._own.to(device, copy=True)
        communicator.sum([self._total])

    def refuse_different(self) -> None:
        """After a flush: raise on every core if the cores differ in any of the facts, and say in which."""
        names = self._different()
        if not names:
            return
        texts = _texts_of_all_cores(str(self._facts[names[0]]), self._communicator, self._device)
        said = ", ".join(f"{text} on core {rank}" for rank, text in enumerate(texts))
        more = f" (and in {', '.join(names[1:])})" if len(names) > 1 else ""
        raise ValueError(f"all cores must be set up alike, but they differ in {names[0]}{more}: {said}")

    def _different(self) -> list[str]:
        num_replicas, total = self._communicator.num_replicas, self._total.cpu()
        return [
            name for name, mine, sum_ in zip(self._facts, self._own, total, strict=True) if mine * num_replicas != sum_
        ]


def _digest(value: object) -> int:
    """32 bits, so that their sum over all cores is exact in 64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:4], "little")


def _texts_of_all_cores(text: str, communicator: Communicator, device: torch.device) -> list[str]:
    table = torch.zeros(communicator.num_replicas, _LONGEST, dtype=torch.int32)
    content = text.encode()[:_LONGEST]
    table[communicator.rank, : len(content)] = torch.tensor(list(content), dtype=torch.int32)
    rows = communicator.total(table.to(device)).tolist()
    return [bytes(int(number) for number in row if number).decode(errors="replace") for row in rows]
