"""LiveSteps: the steps of an optimizer whose cores may join and leave, even within a step.

Which samples make up a step does not depend on the cores, so others can run the minibatches of a core that has died.
Every core knows the *shares* of a step, the minibatches of each core. They follow from the cores that took part when
the step began and from the decisions since, which are the same for all: a minibatch whose core is gone is assigned to
the core with the fewest.
"""

import io
from typing import Any, final

import torch

from variable_batch_size.cores.live import LiveCores, Membership, MembershipChanged
from variable_batch_size.data.cursor import Cursor, StepPlan
from variable_batch_size.data.stream import Stream
from variable_batch_size.optim.buffers import Buffers
from variable_batch_size.optim.consistency import differences
from variable_batch_size.optim.gradients.accumulator import Counts, StepGradient
from variable_batch_size.optim.gradients.buckets import BucketAccumulator
from variable_batch_size.optim.loss_scale import LossScale
from variable_batch_size.optim.steps import Steps
from variable_batch_size.schedules.schedule import require_equal_minibatches

Shares = dict[int, list[int]]  # of each core, the places of its minibatches in a step


def first_shares(members: list[int], num_minibatches: int) -> Shares:
    """The shares of a step that begins with these cores.

    >>> first_shares([2, 5], num_minibatches=5)
    {2: [0, 2, 4], 5: [1, 3]}
    """
    return {core: list(range(rank, num_minibatches, len(members))) for rank, core in enumerate(members)}


def shares_after(shares: Shares, members: list[int]) -> Shares:
    """The shares after some cores have left and others were admitted, which take part from the next step on.

    >>> shares_after({2: [0, 3], 5: [1, 4], 7: [2, 5]}, members=[2, 7, 8])
    {2: [0, 3, 1], 7: [2, 5, 4], 8: []}
    """
    kept = {core: list(shares.get(core, ())) for core in members}
    able = [core for core in members if core in shares] or members
    for place in sorted(place for core, places in shares.items() if core not in kept for place in places):
        kept[min(able, key=lambda core: len(kept[core]))].append(place)
    return kept


@final
class LiveSteps(Steps):
    """Reduces the gradients of an optimizer as cores join and leave, and lets the remaining ones redo what is lost."""

    def __init__(
        self,
        optimizer: Any,
        communicator: LiveCores,
        cursor: Cursor,
        accumulator: BucketAccumulator,
        buffers: Buffers,
        loss_scale: LossScale,
    ) -> None:
        if accumulator.is_view:
            raise ValueError("`gradient_as_bucket_view` must be False with `elastic`, which keeps sums of its own")
        if accumulator.own_norms is not None:
            raise ValueError("`measure_noise` must not be 'own norm' with `elastic`: its sums are lost with a core")
        self._optimizer, self._communicator = optimizer, communicator
        self._cursor, self._accumulator, self._buffers = cursor, accumulator, buffers
        self._loss_scale = loss_scale
        self._membership: Membership = communicator.membership
        self._members = [self._membership.core]  # as of the latest change that was applied
        self._has_joined = False
        self._num_applied = 0  # of the changes of the membership
        self._shares: Shares | None = None  # of a step within which cores have left, until it is complete
        self._is_stale = False  # whether the sampler still belongs to the previous cores

    # --------------------------------------------------------------------------------------------- joining the run

    def join(self) -> None:
        """Before the first epoch: begin the run together with other cores, or get its state from one of them."""
        if self._has_joined:
            return
        refuse_unsupported(self._optimizer)
        if self._membership.is_joined:
            raise ValueError("`elastic` needs one optimizer for all parameters, but another one has joined the run")
        self._membership.join(self._state, self._load)
        self._has_joined = True
        self._accumulator.compare_again()
        self._take_ranks()

    def _state(self) -> torch.Tensor:
        optimizer = self._optimizer
        tensors = [tensor.detach() for tensor in _tensors_of(optimizer)]
        state = {"run": optimizer.description, "tensors": tensors, "optimizer": optimizer.state_dict()}
        content = io.BytesIO()
        torch.save(state, content)
        return torch.frombuffer(content.getbuffer(), dtype=torch.uint8)

    def _load(self, content: torch.Tensor) -> None:
        optimizer = self._optimizer
        state = torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)
        different = differences(state["run"], optimizer.description)
        if different:
            raise ValueError(f"cores must have the same settings as the first one, but {'; '.join(different)}")
        with torch.no_grad():
            for tensor, value in zip(_tensors_of(optimizer), state["tensors"], strict=True):
                tensor.copy_(value)
        self._take_ranks()
        optimizer.load_state_dict(state["optimizer"])

    def _take_ranks(self) -> None:
        """Number the cores as they have joined."""
        sampler, self._members = self._optimizer.sampler, self._membership.members
        sampler.rank, sampler.schedule.num_replicas = self._membership.rank, len(self._members)
        self._cursor.reassign(sampler.rank, self._cursor.plan.step, [])

    # -------------------------------------------------------------------------------------------------- in a step

    def advance(self) -> StepPlan:
        """Advance to a minibatch, whose gradient is lost if this core dies before the step is complete."""
        sampler, number = self._optimizer.sampler, self._optimizer._runs.number
        num_read = sampler.num_yielded if sampler.num_prefetched else sampler.num_read
        if num_read != number:
            rule = "with `elastic`, a minibatch must not be read before step() of the previous one, as cores may leave"
            raise RuntimeError(f"{rule}: the loop has read {num_read} minibatches and calls step() for number {number}")
        plan = self._cursor.advance()
        self._communicator.step = plan.step
        return plan

    def reduce(self, plan: StepPlan) -> StepGradient | None:
        """The gradient of a step; None if this core has to run further minibatches first."""
        scaled = int(self._loss_scale.is_used)
        self._accumulator.counts = Counts(self._cursor.num_own, plan.num_minibatches, scaled=scaled)
        if not self._has_joined:
            raise RuntimeError("with `elastic`, train in a loop `for epoch in optimizer.epochs(…)`")
        if plan.is_idle:
            self._accumulator.drop_sums()
        while not (places := self._lost_places(plan.step)):
            if (gradient := self._try_to_reduce(plan)) is not None:
                self._shares = self._communicator.step = None
                return gradient
        if plan.is_idle:
            self._buffers.restore(True)  # its padding minibatch does not count
        self._reassign(plan.step, places)
        return None

    def _try_to_reduce(self, plan: StepPlan) -> StepGradient | None:
        """The gradient; None if cores have joined or left."""
        accumulator = self._accumulator
        kept = accumulator.kept_sums() if len(self._membership.members) > 1 else None
        try:
            with self._communicator.raising():
                gradient = accumulator.reduce(plan)
        except MembershipChanged:
            accumulator.restore_sums(kept)
            return None
        if accumulator.counts is not None and accumulator.counts.scaled:
            self._loss_scale.use()
        return gradient

    def _lost_places(self, step: int) -> list[int]:
        """What this core has to run in addition, after cores have left within a step."""
        core, before = self._membership.core, self._shares or self._shares_of(step)
        self._apply_changes(step)
        return (self._shares or before)[core][len(before[core]) :]

    def _shares_of(self, step: int) -> Shares:
        return first_shares(self._members, self._optimizer.sampler.schedule.num_minibatches(step))

    def _apply_changes(self, step: int | None = None) -> None:
        """Follow the decisions since the latest look, in a step or between two."""
        for change in self._membership.changes[self._num_applied :]:
            begun = step if change.reducing is None else change.reducing
            if self._shares is None and begun is not None:
                self._shares = self._shares_of(begun)
            if self._shares is not None:  # also if all cores that have begun the step are gone
                self._shares = shares_after(self._shares, change.members)
            self._accumulator.compare_again()
            self._members, self._is_stale = change.members, True
            self._num_applied += 1

    # --------------------------------------------------------------------------------------------- between two steps

    def settle(self) -> None:
        """When the loop requests a minibatch: between two steps, admit waiting cores, and give all cores new ranks."""
        cursor = self._cursor
        if not self._has_joined or cursor.is_accumulating or cursor.next is None:
            return
        self._apply_changes()
        while self._membership.pending and self._shares is None:  # otherwise other cores have begun a step
            self._membership.admit(self._state)
            self._apply_changes()
        if not self._is_stale:
            return
        step = cursor.next.step
        if self._shares is None:
            self._reassign(step, [])
        elif own := self._shares[self._membership.core]:
            self._reassign(step, own)
        else:
            padding = self._membership.rank % self._optimizer.sampler.schedule.num_minibatches(step)
            self._reassign(step, [padding], is_idle=True)

    def _reassign(self, step: int, places: list[int], *, is_idle: bool = False) -> None:
        """Run some minibatches of a step, and from the next one on those of this core's new rank."""
        optimizer, rank, self._is_stale = self._optimizer, self._membership.rank, False
        sampler, places = optimizer.sampler, sorted(places)
        first_step = step - sampler.schedule.steps(sampler.epoch).start + bool(places)
        sampler._reassign(rank, len(self._members), first_step, places)
        self._cursor.reassign(rank, step, places, is_idle=is_idle)
        optimizer._follow_reassigned()


def _tensors_of(optimizer: Any) -> list[torch.Tensor]:
    model = optimizer._wrappers.model
    of_model = [] if model is None else [*model.parameters(), *model.buffers()]
    return list({id(tensor): tensor for tensor in (*optimizer.parameters(), *of_model)}.values())


def refuse_unsupported(optimizer: Any) -> None:
    """Raise for what cannot be trained by cores that come and go."""
    sampler, wrappers = optimizer.sampler, optimizer._wrappers
    if wrappers.fsdp or any(hasattr(p, "device_mesh") for p in optimizer.parameters()):
        sharded = "`elastic` needs the full model on every core, but parameters are sharded, and shards die with their "
        raise ValueError(f"{sharded}core: use vbs.Checkpoint under torchrun, which restarts from the latest checkpoint")
    if wrappers.has_sync_batch_norm:
        raise ValueError("SyncBatchNorm waits for all cores in every minibatch: use BatchNorm with `elastic`")
    if sampler.is_shared:
        raise ValueError("`elastic` needs a sampler for each optimizer, but several are attached to this one")
    if sampler.schedule.is_live:
        raise ValueError("`elastic` needs a trace that is known in advance, not a policy or a watched trace")
    if sampler.schedule.is_open or sampler.shares is not None:
        raise ValueError('`elastic` needs a trace and assign="round robin", not OpenSteps or other shares')
    if isinstance(sampler, Stream) and not sampler.can_be_reread:
        raise ValueError(
            "`elastic` needs a stream that can be read again, the same on every core: pass an iterable or a function "
            "that returns one, and not `is_sharded`"
        )
    if sampler.schedule.lockstep:
        raise ValueError("`lockstep` of the sampler must be False with `elastic`")
    require_equal_minibatches(sampler.schedule, "`elastic`")
