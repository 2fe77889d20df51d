"""MinibatchSeeder: random numbers that depend on the minibatch, not on the core that runs it."""

import random
import struct
import weakref
from hashlib import blake2b
from typing import ClassVar

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from variable_batch_size.cores import devices
from variable_batch_size.data.cursor import Cursor, StepPlan
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.optim.module_hooks import add_hook
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.schedules.schedule import require_equal_minibatches


class _Generators:
    """What the generators of this process are seeded for. On XLA, where ranks share a process, it is not used."""

    source: weakref.ref[MinibatchSource] | None = None
    requested: ClassVar = weakref.WeakSet[MinibatchSource]()


class MinibatchSeeder(Part):
    """Seeds the random generators of a rank before each minibatch, from the seed, the epoch and the minibatch's number.

    So the random numbers of a minibatch are the same on any number of ranks, after a resume, and in a replay.
    Generators are seeded after each minibatch, and again when the next one is requested after an evaluation or after
    one of another source. Those of torch are seeded once more when the model runs, so that a loader that starts in
    between has no effect. Loader workers have their own generators. On XLA, ranks are threads of one process and share
    the host's generators: there only the device's is seeded. Without a model, evaluations cannot be recognized.
    """

    def __init__(
        self, is_on: bool, sampler: MinibatchSource, cursor: Cursor, like: torch.Tensor, model: torch.nn.Module | None
    ) -> None:
        if is_on:
            require_equal_minibatches(sampler.schedule, "`seed_minibatches`")
        self._is_on, self._source, self._cursor = is_on, sampler, cursor
        self._device, self._is_xla = like.device, like.device.type == "xla"
        self._of_loop = self._of_model = 0  # the seeds of the next minibatch
        self.has_run = self._was_evaluated = False  # whether the model has run since the latest minibatch
        self._model = model
        self._hooks: list[RemovableHandle] = []

    def watch(self, is_on: bool) -> None:
        """Start or stop watching for runs of the model, in place of another optimizer's seeder."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if is_on and self._is_on and self._model is not None:
            # compiled or not, the model must draw from the seed of its minibatch
            self._hooks = [add_hook(self._model, self._before_forward, is_compiled=False, replaces=True)]

    def set(self) -> None:
        """After a minibatch, and before a pass: set the generators for the next minibatch."""
        if self._is_on:
            _Generators.requested.clear()
            self._set()

    def before_minibatch(self, upcoming: StepPlan | None) -> None:
        self.set()

    def _set(self) -> None:
        self._of_loop, self._of_model = self._seeds()
        if not self._is_xla:
            _Generators.source = weakref.ref(self._source)
            random.seed(self._of_loop)
            np.random.seed(self._of_loop % 2**32)
        devices.set_random_seed(self._of_loop, self._device)
        self.has_run = self._was_evaluated = False

    def on_request(self, *, is_first: bool, is_run_next: bool = True) -> None:
        if not self._is_on:
            return
        is_run_next = is_run_next and not self._is_xla
        is_seeded = _Generators.source is not None and _Generators.source() is self._source
        # add the hook again if a seeder of another source has replaced it, as the model may have optimizers for both
        if is_run_next and not is_seeded and any(hook.id not in (hook.hooks_dict_ref() or ()) for hook in self._hooks):
            self.watch(True)
        if is_first or self._was_evaluated or (is_run_next and not is_seeded):
            self._set()
        if is_run_next:
            _Generators.requested.add(self._source)

    def _before_forward(self, model: torch.nn.Module) -> None:
        if not model.training:
            self._was_evaluated, _Generators.source = True, None
            return
        if not self._is_xla and _Generators.requested and self._source not in _Generators.requested:
            return  # the minibatch is one of another source
        # the first run of the minibatch, or activation checkpointing recomputes it: that restores the generators to
        # before the first run, which their seed shows
        if not self.has_run if self._is_xla else torch.default_generator.initial_seed() != self._of_model:
            self.has_run = True
            devices.set_random_seed(self._of_model, self._device)

    def _seeds(self) -> tuple[int, int]:
        """Two seeds of 63 bits, hashed from all of the numbers."""
        numbers = b"%d,%d,%d" % (self._source.seed, self._cursor.epoch, self._cursor.next_minibatch)
        of_loop, of_model = struct.unpack("<QQ", blake2b(numbers, digest_size=16).digest())
        return of_loop >> 1, of_model >> 1
