"""MinibatchSeeder: random numbers that depend on the minibatch, not on the core that runs it."""

from __future__ import annotations

import random
import struct
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from variable_batch_size.cores import devices, xla
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.optim.step_plan import Position

_TWO_SEEDS = struct.Struct("<QQ")


class MinibatchSeeder:
    """Sets the generators of a core before each minibatch, from the seed, the epoch and the minibatch's number in it.

    So what is drawn is the same on any number of cores, after a stop, and in a replay, and a stand-in disturbs nothing.
    The generators are set when the minibatch before has been taken over, and again when the next one is read after an
    evaluation, for what the data set and the loop draw; those of torch once more when the model runs, so that a new
    loader in between does not count. Loader workers have generators of their own, which are left alone. Where cores are
    threads of one process, as on XLA, Python's, numpy's and torch's generators on the host are shared by all of them,
    and only the device's is set.

    Args:
        is_on: whether to do so at all.
        sampler: of this core; its seed is one of the three.
        position: of this core.
        like: a tensor on the device whose generator the model draws from.
        model: that draws; None if only the loop is to be seen to, and no evaluation can be told from it.
    """

    def __init__(
        self,
        is_on: bool,
        sampler: MinibatchSource,
        position: Position,
        like: torch.Tensor,
        model: torch.nn.Module | None,
    ) -> None:
        self._is_on = is_on
        self._seed = sampler.seed
        self._position = position
        self._device = like.device
        self._kind = like.device.type
        self._of_loop = self._of_model = 0  # the seeds of the next minibatch
        self._has_run = False  # the model, since the latest minibatch was taken over
        self._was_evaluated = False  # likewise
        if not is_on:
            return
        sampler.on_request(self._when_asked)
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

    def _when_asked(self, is_first: bool) -> None:
        if is_first or self._was_evaluated:
            self.set()

    def _before_forward(self, model: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # what it sees of this must be nothing
            return
        if not model.training:
            self._was_evaluated = True
        elif self._is_due():
            self._has_run = True
            self._set_torch(self._of_model)

    def _is_due(self) -> bool:
        """Whether the model runs for the first time in this minibatch, or once more what it did then.

        Activation checkpointing puts the generators back to before the first run: what they were seeded with tells.
        """
        if self._kind == "xla":
            return not self._has_run
        return torch.default_generator.initial_seed() != self._of_model

    def _set_torch(self, seed: int) -> None:
        if self._kind == "xla":
            xla.set_random_seed(seed, self._device)
            return
        # torch.manual_seed would note down a call for every kind of device that there is not, for later
        torch.default_generator.manual_seed(seed)
        devices.set_random_seed(seed, self._device)

    def _seeds(self) -> tuple[int, int]:
        """63 bits each in which all of the numbers are mixed well."""
        numbers = b"%d,%d,%d" % (self._seed, self._position.epoch, self._position.next_minibatch)
        of_loop, of_model = _TWO_SEEDS.unpack(blake2b(numbers, digest_size=16).digest())
        return of_loop >> 1, of_model >> 1
