"""Buffers: restores a model's buffers, such as BatchNorm's statistics, after minibatches that do not count."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from variable_batch_size.cores.communicator import Communicator, each_element_once
from variable_batch_size.cores.detect import communicator_for
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.flow import Outcome
from variable_batch_size.optim.module_hooks import add_hook
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.optim.run import Run
from variable_batch_size.rules.rule import Step

# a buffer's module, name, tensor and version, and a copy of its values; None for one that is not created yet
_Saved = tuple[torch.nn.Module, str, torch.Tensor | None, int, torch.Tensor | None]


class Buffers(Part):
    """Takes a snapshot of a model's buffers before a step, and restores it if the rank's minibatches do not count.

    The snapshot is taken at the end of the previous step. If the buffers change after that, for example because the
    user loads weights or another optimizer runs minibatches, the next forward pass of the model, or of a part of it,
    takes it again. In lockstep a padding minibatch may follow others of its step: a second snapshot then holds the
    buffers before it. Where all ranks run one program, whether a rank is idle is data and not a branch.
    """

    def __init__(self, model: torch.nn.Module | None, communicator: Communicator, *, may_skip: bool = False) -> None:
        self.model, self._communicator = model, communicator
        self._is_one_program = communicator.is_one_program
        self._before_step: list[_Saved] = []
        self._before_padding: list[_Saved] = []
        self._is_fresh = False  # whether the model has not run since the latest snapshot
        self._hooks: list[RemovableHandle] = []
        self._is_watching = self.is_on = False
        self.expect_skips(may_skip)

    def begin_pass(self, run: Run) -> None:
        self._run = run
        if not self._is_one_program:
            self.expect_skips(True)  # until the first minibatch shows whether a GradScaler is in use
        self.snapshot(run.cursor.plan.is_idle)

    def on_request(self, *, is_first: bool, is_run_next: bool) -> None:
        if is_run_next and not self._run.cursor.is_accumulating and not self._is_one_program:
            self.expect_changes()

    def after_backward(self, plan: StepPlan) -> None:
        if plan.is_padding and not plan.is_idle:
            self.restore_before_padding()

    def after_step(self, plan: StepPlan, step: Step, outcome: Outcome) -> None:
        if self.is_on:
            self.restore(plan.is_idle or outcome.reason is not None, outcome.is_skipped)
            upcoming = self._run.cursor.next
            self.snapshot(upcoming is not None and upcoming.is_idle)

    def before_minibatch(self, upcoming: StepPlan | None) -> None:
        if self._run.is_over:
            self.expect_skips(True)  # of minibatches that a loader has read ahead
            self.snapshot(True)
        if upcoming is not None and upcoming.is_padding and not upcoming.is_idle:
            self.snapshot_before_padding()

    def expect_skips(self, may_skip: bool) -> None:
        """Set whether, from now on, the update of a rank that is not idle may be skipped."""
        self._is_always_saved, was_on = self._is_one_program or may_skip, self.is_on
        # whether there may be anything to restore
        self.is_on = self.model is not None and (self._communicator.num_replicas > 1 or may_skip)
        if self.is_on != was_on:
            self.watch(self._is_watching)

    def watch(self, is_on: bool) -> None:
        """Start or stop watching for runs of the model, or of a part of it with buffers."""
        self._is_watching = is_on
        for hook in self._hooks:
            hook.remove()
        modules = self.model.modules() if self.model is not None and self.is_on and is_on else ()
        watched = [module for module in modules if module is self.model or module._buffers]
        self._hooks = [add_hook(module, self._before_forward) for module in watched]

    def snapshot(self, is_idle: bool) -> None:
        """Before a step: save the buffers if the step may have to be undone."""
        if not self.is_on or not (is_idle or self._is_always_saved):
            self._before_step = []
        elif not (self._is_one_program and self._before_step and self._is_unchanged()):  # there, it saves a graph
            self._before_step = self._copies()
        self._before_padding = []
        self._is_fresh = bool(self._before_step)

    def expect_changes(self) -> None:
        """Before the first minibatch of a step: other optimizers may have run the model since the snapshot."""
        self._is_fresh = bool(self._before_step)

    def snapshot_before_padding(self) -> None:
        """In lockstep, before a padding minibatch that follows others of its step."""
        if self.is_on:
            self._before_padding = self._copies()
            self._is_fresh = bool(self._before_padding)

    def restore_before_padding(self) -> None:
        _write_back(self._before_padding)
        self._before_padding = []

    def restore(self, is_undone: bool, is_skipped: torch.Tensor | None = None) -> None:
        """After a step: restore the buffers if the rank's minibatches do not count, which the device might decide."""
        is_eager = not self._is_one_program
        if is_eager and is_skipped is not None and self._has_new_tensors():  # of any shape: the host must choose
            is_undone, is_skipped = is_undone or bool(is_skipped), None
        if is_eager and (is_undone or is_skipped is None):
            _write_back(self._before_step if is_undone else [])
        else:
            _write_back([saved for saved in self._before_step if is_undone and saved[-1] is None])
            self._restore_values(is_undone, is_skipped)

    def _restore_values(self, is_undone: bool, as_data: torch.Tensor | None) -> None:
        saved = [(owner, name, values) for owner, name, *_, values in self._before_step if values is not None]
        if saved and (as_data is None or self._is_one_program):
            is_idle = torch.tensor([is_undone]).to(saved[0][-1].device)
            as_data = is_idle if as_data is None else is_idle | as_data
        with torch.no_grad():
            for owner, name, values in saved:
                written = each_element_once(owner._buffers[name])  # type: ignore[arg-type]
                written.copy_(torch.where(as_data, values, written).view_as(written))  # type: ignore[arg-type]

    def _has_new_tensors(self) -> bool:
        return any(owner._buffers.get(name) is not buffer for owner, name, buffer, *_ in self._before_step)

    def _before_forward(self, module: torch.nn.Module) -> None:
        if not self._is_fresh or not module.training:
            return
        self._is_fresh = False
        if not self._is_unchanged():
            if self._before_padding:
                self._before_padding = self._copies()
            else:
                self._before_step = self._copies()
            self._communicator.flush()  # else it would be part of another graph on a rank with more minibatches

    def _named_buffers(self) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor | None]]:
        for module in self.model.modules() if self.model is not None else ():
            yield from ((module, name, buffer) for name, buffer in module._buffers.items())

    def _copies(self) -> list[_Saved]:
        return [(*found, *_version_and_values(found[-1])) for found in self._named_buffers()]

    def _is_unchanged(self) -> bool:
        """Whether the buffers are those of the latest snapshot."""
        now = [(id(buffer), 0 if buffer is None else buffer._version) for _, _, buffer in self._named_buffers()]
        saved = self._before_padding or self._before_step
        return now == [(id(buffer), version) for _, _, buffer, version, _ in saved]


def _version_and_values(buffer: torch.Tensor | None) -> tuple[int, torch.Tensor | None]:
    if buffer is None:
        return 0, None
    values = each_element_once(buffer.detach())
    return buffer._version, (values if values.dim() else values.view(1)).clone()


@torch.no_grad()
def _write_back(snapshot: list[_Saved]) -> None:
    for owner, name, buffer, _, values in snapshot:
        if buffer is not None and values is not None:
            written = each_element_once(buffer)
            written.copy_(values.view_as(written))
        owner._buffers[name] = buffer  # the minibatch may have replaced the tensor


def share_buffers(model: torch.nn.Module, process_group: Any = None) -> None:
    """Broadcast the buffers of core 0, which is never idle, to all cores; call it before evaluating.

    Every core must call it. During training, each core has its own BatchNorm statistics.

    Args:
        model: the model whose buffers are shared.
        process_group: the cores, as in :class:`CustomSampler`.
    """
    buffers = list(model.buffers())
    communicator = communicator_for(buffers, process_group)
    communicator.flush_before_collective()
    with torch.no_grad():
        communicator.broadcast(buffers)
    communicator.flush()
