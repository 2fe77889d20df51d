"""MinibatchSeeds: random numbers that depend on the minibatch, and not on the core that runs it."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import Any

import numpy as np
import torch

from variable_batch_size.cores import xla
from variable_batch_size.training.dealer import Dealer
from variable_batch_size.training.position import Position

_LOOP, _MODEL = 0, 1


class MinibatchSeeds:
    """Sets the generators of a core before each minibatch, from the seed, the epoch and the minibatch's number in it.

    So what is drawn is the same on any number of cores, after a stop, and in a replay, and a stand-in disturbs nothing.
    The generators are set when the minibatch before has been taken over, for what the loop draws, and those of torch
    once more when the model runs, so that an evaluation or a new loader in between does not count. Loader workers
    have generators of their own, which are left alone. Where cores are threads of one process, as on XLA, Python's,
    numpy's and torch's generators on the host are shared by all of them, and only the device's is set.

    Args:
        is_on: whether to do so at all.
        sampler: of this core; its seed is one of the three.
        position: of this core.
        like: a tensor on the device whose generator the model draws from.
        model: that draws; None if only the loop is to be seen to.
    """

    def __init__(
        self,
        is_on: bool,
        sampler: Dealer,
        position: Position,
        like: torch.Tensor,
        model: torch.nn.Module | None,
    ) -> None:
        self._is_on = is_on
        self._seed = sampler.seed
        self._position = position
        self._device = like.device
        self._is_due = False  # whether the model has not run since the latest minibatch was taken over
        if not is_on:
            return
        sampler.call_when_each_is_read(self.set)
        if model is not None:
            model.register_forward_pre_hook(self._before_forward)

    def set(self) -> None:
        """Set the generators for the next minibatch."""
        if not self._is_on:
            return
        seed = self._seed_of(_LOOP)
        if self._device.type != "xla":
            random.seed(seed)
            np.random.seed(seed % 2**32)
        self._set_torch(seed)
        self._is_due = True

    def _before_forward(self, model: torch.nn.Module, args: Any) -> None:
        # what torch.compile sees of this must be nothing
        if self._is_due and not torch.compiler.is_compiling() and model.training:
            self._is_due = False
            self._set_torch(self._seed_of(_MODEL))

    def _set_torch(self, seed: int) -> None:
        if self._device.type == "xla":
            xla.set_random_seed(seed, self._device)
            return
        # torch.manual_seed would note down a call for every kind of device that there is not, for later
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)

    def _seed_of(self, purpose: int) -> int:
        """63 bits in which all of the numbers are mixed well."""
        numbers = (self._seed, self._position.epoch, self._position.next_minibatch, purpose)
        digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
        (seed,) = struct.unpack("<Q", digest)
        return int(seed >> 1)
