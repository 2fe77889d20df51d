"""MinibatchSeeder: random numbers that depend on the minibatch, not on the core that runs it."""

from __future__ import annotations

import random
import struct
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from variable_batch_size.cores import devices, xla
from variable_batch_size.data.cursor import Cursor
from variable_batch_size.data.sampler import MinibatchSource

_TWO_SEEDS = struct.Struct("<QQ")


class MinibatchSeeder:
    """Seeds the random generators of a rank before each minibatch, from the seed, the epoch and the minibatch's number.

    So the random numbers of a minibatch are the same on any number of ranks, after a resume, and in a replay, and
    padding changes nothing. Generators are seeded after each minibatch, and again when the next one is requested after
    an evaluation, for the data set and the loop; those of torch once more when the model runs, so that a loader that is
    set up in between does not count. Loader workers have their own generators, which are not touched. On XLA ranks are
    threads of one process, which share the generators of Python, numpy and torch on the host: there only the device's
    generator is seeded.

    Args:
        is_on: whether to do so at all.
        sampler: of this rank, with the seed.
        cursor: of this rank.
        like: a tensor on the device whose generator the model uses.
        model: that draws random numbers; None to seed for the loop only, where evaluations cannot be recognised.
    """

    def __init__(
        self,
        is_on: bool,
        sampler: MinibatchSource,
        cursor: Cursor,
        like: torch.Tensor,
        model: torch.nn.Module | None,
    ) -> None:
        self._is_on = is_on
        self._seed = sampler.seed
        self._cursor = cursor
        self._device = like.device
        self._kind = like.device.type
        self._of_loop = self._of_model = 0  # the seeds of the next minibatch
        self._has_run = False  # whether the model has run since the latest minibatch
        self._was_evaluated = False  # likewise
        if not is_on:
            return
        sampler.on_request(self._on_request)
        if model is not None:
            model.register_forward_pre_hook(self._before_forward)

    def set(self) -> None:
        """Set the generators for the next minibatch."""
        if not self._is_on:
            return
        self._of_loop, self._of_model = self._seeds()
        if self._kind != "xla":
            random.seed(self._of_loop)
            np.random.seed(self._of_loop % 2**32)
        self._set_torch(self._of_loop)
        self._has_run = self._was_evaluated = False

    def _on_request(self, is_first: bool) -> None:
        if is_first or self._was_evaluated:
            self.set()

    def _before_forward(self, model: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # it must see nothing of this
            return
        if not model.training:
            self._was_evaluated = True
        elif self._is_due():
            self._has_run = True
            self._set_torch(self._of_model)

    def _is_due(self) -> bool:
        """Whether the model runs for the first time in this minibatch, or recomputes that run.

        Activation checkpointing restores the generators to before the first run, which their seed shows.
        """
        if self._kind == "xla":
            return not self._has_run
        return torch.default_generator.initial_seed() != self._of_model

    def _set_torch(self, seed: int) -> None:
        if self._kind == "xla":
            xla.set_random_seed(seed, self._device)
            return
        # torch.manual_seed would also queue a call for every type of device that is not initialised
        torch.default_generator.manual_seed(seed)
        devices.set_random_seed(seed, self._device)

    def _seeds(self) -> tuple[int, int]:
        """Two seeds of 63 bits, hashed from all of the numbers."""
        numbers = b"%d,%d,%d" % (self._seed, self._cursor.epoch, self._cursor.next_minibatch)
        of_loop, of_model = _TWO_SEEDS.unpack(blake2b(numbers, digest_size=16).digest())
        return of_loop >> 1, of_model >> 1
