"""ForwardState: finds what a forward pass in training changes in a model, which then depends on the core."""

import logging
import pickle
import random
import sys
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from variable_batch_size.cores.communicator import each_element_once
from variable_batch_size.cores.devices import module_of
from variable_batch_size.cores.dtensor import is_dtensor, to_local
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.module_hooks import add_hook, add_hook_to_all
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.optim.run import Run
from variable_batch_size.optim.wrappers import Wrappers

logger = logging.getLogger(__name__)

_NUM_MINIBATCHES = 2  # in the second one, what the first has created is changed
_MOST_NAMES = 3  # in a message
_NUMBERS = (bool, int, float)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_COMPARED = (torch.Tensor, *_NUMBERS, *_GENERATORS)
# what these change in training does not influence the loss
_WITHOUT_INFLUENCE = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    DistributedDataParallel,
)
_COMPILED = ("xla", "tpu")  # devices where a comparison of values would be a further program


class _Seen(NamedTuple):
    """A buffer, a parameter, or another attribute of a module, before a forward pass."""

    path: str  # from the model, with its name
    module: nn.Module
    name: str
    value: Any
    version: int  # of a tensor
    content: Any  # a copy of the bytes of a tensor, or the state of a generator; None where it is not copied


class ForwardState(Part):
    """Raises in exact mode, and logs a warning otherwise, if a forward pass in training changes state of the model.

    The vectors of ``spectral_norm``, a running scale, a codebook, a counter and a generator of the model's own depend
    on the minibatches that a core has run before, and so does a loss that is computed from them. In the first two
    minibatches of a pass, buffers, parameters and other tensors, numbers and generators that are attributes of modules
    are compared: at the start of the minibatch's first forward pass, and at its ``step()``. What is created, or has a
    graph, belongs to the minibatch. Statistics of BatchNorm are not read in training. In the first pass, the bytes of
    tensors are compared, too, because writing through ``tensor.data`` leaves the version of a tensor as it is.

    Args:
        wrappers: the model of the optimizer, or how to find it.
        is_on: whether there are several cores, or the result must be independent of their number.
        exact: whether to raise.
        ignored: patterns for the names of what has no influence on the loss.

    Attributes:
        num_left: of the minibatches that are compared.
    """

    def __init__(self, wrappers: Wrappers, *, is_on: bool, exact: bool, ignored: Collection[str]) -> None:
        self._wrappers, self._is_on, self._exact, self._ignored = wrappers, is_on, exact, ignored
        self._copies_bytes = True
        self._found: list[nn.Module] = []  # the outermost modules that have run, if the model was not passed
        self._hooks: list[RemovableHandle] = []
        self._before: list[_Seen] = []
        self._has_run = False  # whether the model has run since the latest minibatch
        self.num_left = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_found": [], "_hooks": [], "_before": []}  # modules that were found are not copied

    def begin_pass(self, run: Run) -> None:
        if self._is_on:
            self.num_left, self._has_run = _NUM_MINIBATCHES, False

    def watch(self, is_on: bool) -> None:
        """Start or stop watching for runs of the model: before the first one, the loop may set attributes."""
        for hook in self._hooks:
            hook.remove()
        is_on = is_on and self._is_on
        self._hooks = [add_hook(root, self._before_forward) for root in self._roots()] if is_on else []
        if is_on and self.num_left and self._misses_some():
            self._hooks.append(add_hook_to_all(self._before_any_forward))

    def on_request(self, *, is_first: bool, is_run_next: bool) -> None:
        """The loop may request a minibatch after the forward pass of the one before."""
        if self.num_left and not self._has_run:
            self._before = [self._see(*found) for found in self._attributes(self._roots())]

    def _before_any_forward(self, module: nn.Module) -> None:
        """Without `model=`, until the parameters of the optimizer are in modules that were found."""
        own = {*self._wrappers.parameters}
        if not module.training or own.isdisjoint(module.parameters()) or self._is_found(module):
            return
        self._found.append(module)
        self._before += [self._see(*found) for found in self._attributes([module])]
        self._has_run = True
        self.watch(True)  # before a compiler traces a module inside, which it would trace again without the hook

    def _before_forward(self, model: nn.Module) -> None:
        if not self.num_left or self._has_run or not model.training:
            return
        self._has_run = True
        before, self._before = {(seen.module, seen.name): seen for seen in self._before}, []
        for path, module, name, value in self._attributes(self._roots()):
            seen = before.get((module, name))  # not copied again: it may be that a graph is captured
            is_known = seen is not None and seen.value is value and seen.version == _version_of(value)
            self._before.append(seen if seen is not None and is_known else self._see(path, module, name, value))

    def after_backward(self, plan: StepPlan) -> None:
        """Raise or warn if the forward pass has changed something."""
        if not self.num_left:
            return
        self.num_left, self._has_run = self.num_left - 1, False
        now = {seen.module: _attributes_of(seen.module) for seen in self._before}
        with torch.no_grad():
            changed = [seen.path for seen in self._before if _has_changed(seen, now[seen.module].get(seen.name))]
        self._before = []
        if not self.num_left:
            self._copies_bytes = False
            if self._misses_some():
                self.watch(True)  # no longer for all modules
        if not changed:
            return
        more = f" and {len(changed) - _MOST_NAMES} more" if len(changed) > _MOST_NAMES else ""
        names = ", ".join(changed[:_MOST_NAMES]) + more
        if self._exact:
            raise ValueError(
                f"the forward pass changes {names}, which the next one may read, so that the weights depend on the "
                "number of cores: change it once a step instead, after step() has returned True, pass its name as "
                "`ignored_state` if it has no influence on the loss, or train with exact=False"
            )
        self._is_on, self.num_left = False, 0
        if self._wrappers.communicator.rank == 0:
            logger.warning(
                "The forward pass changes %s, on each core for its own minibatches. If this has influence on the loss, "
                "the weights depend on the number of cores: change it once a step instead, after step() has returned "
                "True. Otherwise pass its name as `ignored_state`.",
                names,
            )

    def _roots(self) -> list[nn.Module]:
        return self._found if self._wrappers.model is None else [self._wrappers.model]

    def _is_found(self, module: nn.Module) -> bool:
        return any(module is part for root in self._found for part in root.modules())

    def _misses_some(self) -> bool:
        found = {p for root in self._found for p in root.parameters()}
        return self._wrappers.model is None and not found.issuperset(self._wrappers.parameters)

    def _attributes(self, roots: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module, str, Any]]:
        """What is compared: path, module, name and value."""
        own, without_influence = {*self._wrappers.parameters}, _classes_without_influence()
        for place, module in [found for root in roots for found in root.named_modules()]:
            if isinstance(module, without_influence):
                continue
            for name, value in _attributes_of(module).items():
                if not isinstance(value, _COMPARED) or name == "training" or _is_seeded(value):
                    continue
                if isinstance(value, nn.Parameter) and value.requires_grad and value not in own:
                    continue  # another optimizer may update it before step()
                path = f"{place}.{name}" if place else name
                if not any(fnmatchcase(path, pattern) for pattern in self._ignored):
                    yield path, module, name, value

    def _see(self, path: str, module: nn.Module, name: str, value: Any) -> _Seen:
        content = _content(value) if self._copies_bytes or isinstance(value, _GENERATORS) else None
        return _Seen(path, module, name, value, _version_of(value), content)


def _classes_without_influence() -> tuple[type, ...]:
    metric = getattr(sys.modules.get("torchmetrics.metric"), "Metric", None)
    return _WITHOUT_INFLUENCE if metric is None else (*_WITHOUT_INFLUENCE, metric)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return {**vars(module), **module._buffers, **dict(parameters)}


def _is_seeded(value: Any) -> bool:
    """Whether a value is one of the generators that exact mode seeds."""
    if not isinstance(value, torch.Generator):
        return False
    defaults = [torch.default_generator, *getattr(module_of(value.device), "default_generators", ())]
    return any(value is default for default in defaults)


def _version_of(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _content(value: Any) -> torch.Tensor | bytes | None:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, _GENERATORS):
        return pickle.dumps(value)
    is_copied = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and _has_bytes(value)
    return _bytes_of(value).clone() if is_copied else None


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one, whose bytes can be read without a further program of the device."""
    is_plain = type(tensor) is torch.Tensor or is_dtensor(tensor)
    is_other = tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_conj()
    return is_plain and not is_other and tensor.device.type not in (*_COMPILED, "meta")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return each_element_once(to_local(tensor.detach())).reshape(-1).view(torch.uint8)


def _has_changed(seen: _Seen, now: Any) -> bool:
    before = seen.value
    if isinstance(before, _NUMBERS):
        return now is not before and isinstance(now, _NUMBERS) and now != before
    if isinstance(before, _GENERATORS):
        return isinstance(now, _GENERATORS) and _content(now) != seen.content
    if now is before:
        is_written = _version_of(now) != seen.version
        return is_written or (seen.content is not None and not torch.equal(_bytes_of(now), seen.content))
    if not isinstance(now, torch.Tensor) or isinstance(now, nn.Parameter) or now.requires_grad:
        return False  # FSDP replaces parameters
    is_alike = (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
    if not is_alike or not _has_bytes(now):
        return True
    return not torch.equal(_bytes_of(now), _bytes_of(before) if seen.content is None else seen.content)
