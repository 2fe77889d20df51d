"""Finds the objects that have some parameters: a parameter does not know who has it."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TypeVar

import torch

Kind = TypeVar("Kind")


def alive(*kinds: type[Kind]) -> list[Kind]:
    """All objects of a kind, or of one of several, in no order: an object refers to its class."""
    known: list[type] = [*kinds]
    for one in known:
        known += type.__subclasses__(one)
    return [thing for thing in gc.get_referrers(*known) if issubclass(type(thing), kinds)]


def owners(*kinds: type[Kind], parameters: Iterable[torch.Tensor]) -> list[Kind]:
    """The modules of a kind, or of one of several, that have some of the parameters, in no order."""
    own = set(parameters)
    return [thing for thing in alive(*kinds) if not own.isdisjoint(_parameters_of(thing))]


def _parameters_of(thing: object) -> Iterable[torch.Tensor]:
    module = getattr(thing, "submod", thing)  # as a stage of a pipeline has it
    return module.parameters() if isinstance(module, torch.nn.Module) else ()
