"""Membership: which cores take part in a run as they join and leave, and LiveCores, their collectives over gloo.

Cores agree through a store in a separate process. A *generation* is a set of cores with a process group of their own.
When a core dies, or others wait to join, every core reports to the next generation, the first one that has the reports
of all that are alive writes the decision, and all of these build a new group. A core that is not in it has to leave.

A collective is complete for all cores or for none: it ends with a second all-reduce of one number, the *commit*. A core
that has completed the commit shows that all others have the sums; if no core has, none uses them.
"""

import contextlib
import ctypes
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from variable_batch_size.cores.communicator import Communicator, each_element_once, parts_to_sum

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_BETWEEN_BEATS = 0.2
_SECONDS_OF_A_WAIT = 0.1  # for a collective, until the other cores are looked at again
_SECONDS_OF_STORE = 60.0
_SECONDS_OF_GROUP = 3600.0  # a collective is left because a core has died, not because a step takes long

_current: "Membership | None" = None  # of this process, as the default process group of torch.distributed is


class MembershipChanged(Exception):
    """A core has left before the gradients of a step were reduced, so the step lacks its minibatches."""


class LeftRunError(RuntimeError):
    """This core does not, or no longer, take part in the run: it must end."""


class _BrokenGroup(Exception):
    """A collective has failed, or must be left."""


class Change(NamedTuple):
    """What the cores of a generation have decided about the next one."""

    members: list[int]  # the cores from now on, in the order of their ranks
    admitted: list[int]  # those of them that need the state of the run, from the first one that has it
    completed: int  # collectives so far
    reducing: int | None  # the step that some of them have begun; None if all were between two steps
    pending: bool  # whether other cores wait to be admitted between two steps
    consumed: int  # of all requests to join, how many were answered


class _Report(NamedTuple):
    """What a core reports about itself when a generation ends."""

    completed: int  # collectives so far
    reducing: int | None
    pending: bool
    is_between_steps: bool
    has_state: bool


def connect(address: str) -> Any:
    """A client of the store at ``"host:port"``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f'`store` must be an address such as "10.0.0.1:29400", got {address!r}')
    seconds = timedelta(seconds=_SECONDS_OF_STORE)
    return dist.TCPStore(host, int(port), is_master=False, timeout=seconds, wait_for_workers=False)  # type: ignore[attr-defined]


def new_core(store: Any) -> int:
    """The number of a new core, which no other core of the run ever has; older cores have smaller ones."""
    return int(store.add("cores", 1))


def report_death(store: Any, core: int) -> None:
    """Report to all cores that one has died: its process has ended, or its heartbeat has stopped."""
    store.set(f"dead/{core}", "")
    store.append("deaths", f"{core},")


class _Monitor(threading.Thread):
    """Sends the heartbeat of this core and looks at the others, in a thread with its own connection to the store.

    A core is dead if the process that has started it reports so, or if its heartbeat has not changed in many looks by
    some core: looks are counted, as a process that was suspended has not looked.
    """

    def __init__(self, address: str, core: int, timeout: float) -> None:
        super().__init__(daemon=True)
        self._store, self._core = connect(address), core
        self._most_missed = max(2, round(timeout / _SECONDS_BETWEEN_BEATS))
        self._watched: tuple[int, list[int]] = (-1, [])
        self._beats: dict[int, tuple[bytes, int]] = {}  # the latest of each core, and how often it has not changed
        self.dead: set[int] = set()
        self.begun = -1  # the latest generation whose decision some core has asked for
        self.num_requests = 0  # to join
        self.failure: Exception | None = None
        self._has_ended = threading.Event()

    def watch(self, generation: int, members: Sequence[int]) -> None:
        self._watched = generation, [core for core in members if core != self._core]

    def is_over(self, generation: int) -> bool:
        """Whether a generation must be left: a member is dead, or another one has left it."""
        return self.begun > generation or any(core in self.dead for core in self._watched[1])

    def run(self) -> None:
        number = 0
        next_beat = 0.0
        while not self._has_ended.wait(_SECONDS_BETWEEN_LOOKS):
            try:
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + _SECONDS_BETWEEN_BEATS
                    self._store.set(f"beat/{self._core}", str(number := number + 1))
                    self._compare_beats()
                self._look()
            except Exception as error:  # the store has ended
                self.failure = error
                return

    def _look(self) -> None:
        generation, _ = self._watched
        if self._store.check([f"{generation + 1}/begun"]):
            self.begun = max(self.begun, generation + 1)
        if self._store.check(["deaths"]):
            self.dead.update(map(int, self._store.get("deaths").decode().split(",")[:-1]))
        if self._store.check(["requests"]):
            self.num_requests = self._store.get("requests").count(b",")

    def _compare_beats(self) -> None:
        for core in self._watched[1]:
            beat = self._store.get(f"beat/{core}") if self._store.check([f"beat/{core}"]) else b""
            before, missed = self._beats.get(core, (b"", 0))
            missed = missed + 1 if beat == before else 0
            self._beats[core] = beat, missed
            if missed == self._most_missed:
                report_death(self._store, core)

    def end(self) -> None:
        self._has_ended.set()
        self.join()


class Membership:
    """The cores of a run, seen from one of them, in whose process it exists once.

    Args:
        address: of the store.
        core: the number of this core (:func:`new_core`).
        least: with fewer cores, the run ends with an error.
        most: cores that take part at the same time.
        first: cores that the run begins with.
        timeout: seconds without a heartbeat after which a core is dead, for one that hangs or whose machine has failed.
    """

    def __init__(self, address: str, core: int, *, least: int, most: int, first: int, timeout: float) -> None:
        self.core, self.members, self.is_joined = core, [core], False
        self.changes: list[Change] = []  # since this core has joined
        self.pending = False  # whether cores wait to be admitted, the same on all cores after each collective
        self._generation, self._count, self._consumed = -1, 0, 0
        self._least, self._most, self._first, self._timeout = least, most, first, timeout
        self._address, self._store = address, connect(address)
        self._group: Any = None
        self._is_stuck = False  # whether a collective of the group waits for a core that hangs
        self._has_stuck_group = False  # likewise, of a group that was left
        self._connecting: list[threading.Thread] = []
        self._monitor = _Monitor(address, core, timeout)
        self._monitor.start()

    @property
    def rank(self) -> int:
        return self.members.index(self.core)

    @property
    def may_admit(self) -> bool:
        """Whether a core waits to be admitted, as far as this one has seen."""
        return self._monitor.num_requests > self._consumed and len(self.members) < self._most

    # ------------------------------------------------------------------------------------------------- collectives

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over the cores, to be used after :meth:`commit`."""
        if self._group is not None:
            self._run(lambda group: [group.allreduce([tensor]) for tensor in tensors])

    def commit(self, step: int = 0) -> None:
        """Complete one or several sums, which no core may use before; for a step, all cores must be at the same one."""
        sent = torch.tensor([self.may_admit, step])
        if self._group is not None:
            self._run(lambda group: [group.allreduce([sent])])
        pending, steps = sent.tolist()
        self._count, self.pending = self._count + 1, pending > 0
        if steps != step * len(self.members):
            advice = "let optimizer.epochs(…) set the epoch, and leave it at the same step on all"
            raise RuntimeError(
                f"cores must be at the same step, but this one is at step {step} and others are not: {advice}"
            )

    def _run(self, start: Callable[[Any], list[Any]]) -> None:
        """Start collectives, and wait for them as long as all of their cores are there."""
        try:
            works = start(self._group)
        except RuntimeError as error:
            self._is_stuck = True  # others of them may have been started
            raise _BrokenGroup from error
        for work in works:
            is_complete = False
            while not is_complete:
                has_ended = work.is_completed()  # before the wait, which may give up just before that
                try:
                    is_complete = bool(work.wait(timedelta(seconds=_SECONDS_OF_A_WAIT)))
                except RuntimeError as error:
                    if has_ended or self._monitor.is_over(self._generation):
                        # one that waits for a core that hangs would let the destructor of the group wait, too
                        self._is_stuck = not all(other.is_completed() for other in works)
                        raise _BrokenGroup from error

    # --------------------------------------------------------------------------------------------------- agreement

    def reform(self, *, reducing: int | None = None, is_between_steps: bool = False) -> bool:
        """Agree on the cores from now on and form their group; returns whether the failed collective is complete.

        Args:
            reducing: the step that this core has begun.
            is_between_steps: whether this core asks for others to be admitted.
        """
        count = self._count
        while True:
            self._leave_group()
            report = _Report(self._count, reducing, self.pending, is_between_steps, self.is_joined)
            change = self._agree(report)
            reducing = reducing if change.completed == self._count else None  # another core has completed it
            self._adopt(change)
            if self._build():
                return self._count > count

    def _agree(self, report: _Report) -> Change:
        store, place = self._store, self._generation + 1
        store.set(f"{place}/report/{self.core}", json.dumps(report))
        store.set(f"{place}/begun", "")
        reports: dict[int, _Report] = {}
        while not store.check([f"{place}/decision"]):
            if self._monitor.failure is not None:
                raise RuntimeError(f"the store at {self._address} has ended") from self._monitor.failure
            for core in self.members:
                for key in (f"{place}/report/{core}", f"finished/{core}"):
                    if core not in reports and store.check([key]):
                        reports[core] = _Report(*json.loads(store.get(key)))
            if reports.keys() | self._monitor.dead >= set(self.members):
                store.compare_set(f"{place}/decision", "", json.dumps(self._decide(reports)))
            else:
                time.sleep(_SECONDS_BETWEEN_LOOKS / 4)
        change = Change(*json.loads(store.get(f"{place}/decision")))
        self._generation = place
        if self.core not in change.members and self.is_joined:
            self.is_joined = False
            raise self._removed()
        if len(change.members) < self._least:
            left = f"{len(change.members)} cores with the state of the run are left, but {self._least} are needed"
            raise RuntimeError(f"{left}: resume from a checkpoint, if there is one")
        return change

    def _removed(self) -> LeftRunError:
        seconds = f"it did not respond for {self._timeout:g} seconds"
        return LeftRunError(f"core {self.core} was removed from the run: {seconds}")

    def _decide(self, reports: dict[int, _Report]) -> Change:
        """The next generation, from the reports of all cores that are alive."""
        alive = [core for core in self.members if core in reports and core not in self._monitor.dead]
        alive = [core for core in alive if not self._store.check([f"finished/{core}"])]
        members = [core for core in alive if reports[core].has_state]
        count = max(report.completed for report in reports.values())
        ahead = [report for report in reports.values() if report.completed == count]
        reducing = next((report.reducing for report in ahead if report.reducing is not None), None)
        admitted: list[int] = []
        if not members and not count:  # the run has not begun, so that any core may be the first
            members, admitted = alive, alive[1:]
        pending, consumed = any(report.pending for report in ahead), self._consumed
        if members and all(reports[core].is_between_steps for core in members):
            added, consumed = self._requests(self._most - len(members))
            members, admitted, pending = [*members, *added], [*admitted, *added], False
        return Change(members, admitted, count, reducing, pending, consumed)

    def _requests(self, room: int) -> tuple[list[int], int]:
        """The next cores to admit, and how many requests to join are answered then."""
        store, found, consumed = self._store, list[int](), self._consumed
        requests = store.get("requests").decode().split(",")[:-1] if store.check(["requests"]) else []
        for core in map(int, requests[consumed:]):
            is_dead = store.check([f"dead/{core}"])
            if not is_dead and len(found) == room:
                break
            consumed += 1
            if not is_dead:
                found.append(core)
        return found, consumed

    def _adopt(self, change: Change) -> None:
        self.members, self._count = change.members, change.completed
        self.pending, self._consumed = change.pending, change.consumed
        self.changes.append(change)
        self._monitor.watch(self._generation, self.members)

    def _build(self) -> bool:
        """Connect to the other cores of the generation; returns whether all are there."""
        if len(self.members) == 1:
            return True
        made: list[Any] = []
        where = (f"{self._generation}/group", self.rank, len(self.members))
        thread = threading.Thread(target=self._connect_group, args=(made, *where), daemon=True)
        self._connecting = [*(one for one in self._connecting if one.is_alive()), thread]
        thread.start()  # in a thread, which waits long if a core dies meanwhile
        while thread.is_alive() and not self._monitor.is_over(self._generation):
            thread.join(_SECONDS_BETWEEN_LOOKS / 4)
        if not made:
            return False
        self._group = made[0]
        return True

    def _connect_group(self, made: list[Any], prefix: str, rank: int, size: int) -> None:
        with contextlib.suppress(RuntimeError):
            store = dist.PrefixStore(prefix, connect(self._address))  # type: ignore[attr-defined]
            made.append(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=_SECONDS_OF_GROUP)))

    def _leave_group(self) -> None:
        """Close the connections of the generation, which releases cores that wait for this one."""
        if self._is_stuck:
            self._has_stuck_group = True
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # forever: its destructor would wait, too
        self._group, self._is_stuck = None, False

    # ------------------------------------------------------------------------------------------- joining, finishing

    def join(self, get_state: Callable[[], torch.Tensor], set_state: Callable[[torch.Tensor], None]) -> None:
        """Wait to be admitted to the run, and get its state from the first core; or begin it with other cores."""
        while not self.is_joined:
            self._store.append("requests", f"{self.core},")
            self._adopt(self._await_admission())
            is_built = self._build()
            while not is_built or not self._share_state(get_state, set_state):
                self._leave_group()
                change = self._agree(_Report(self._count, None, False, False, False))
                self._adopt(change)
                if self.core not in change.members:  # ask again
                    self.members = [self.core]
                    break
                is_built = self._build()

    def admit(self, get_state: Callable[[], torch.Tensor]) -> None:
        """Between two steps: admit the cores that wait, and send them the state of the run. Every core must call it."""
        self.reform(is_between_steps=True)
        self._share_state(get_state, lambda state: None)

    def _await_admission(self) -> Change:
        """The decision that admits this core; that of the first generation is made here."""
        store, latest = self._store, self.changes[-1] if self.changes else None
        while True:
            if store.check([f"{self._generation + 1}/decision"]):
                self._generation += 1
                latest = Change(*json.loads(store.get(f"{self._generation}/decision")))
                if self.core in latest.members:
                    return latest
                continue
            if latest is None and self._generation < 0:
                found, consumed = self._requests(self._most)
                if len(found) >= self._first:
                    found.sort()
                    first = Change(found, found[1:], 0, None, False, consumed)
                    store.compare_set("0/decision", "", json.dumps(first))
                    continue
            elif latest is not None and all(map(self._has_ended, latest.members)):
                if not store.check(["finished"]):
                    raise RuntimeError("all cores of the run have died: resume from a checkpoint, if there is one")
                raise LeftRunError("the run has ended")
            if store.check([f"dead/{self.core}"]):
                raise self._removed()
            if self._monitor.failure is not None:
                raise LeftRunError("the run has ended") from self._monitor.failure
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _has_ended(self, core: int) -> bool:
        return bool(self._store.check([f"finished/{core}"]) or self._store.check([f"dead/{core}"]))

    def _share_state(self, get_state: Callable[[], torch.Tensor], set_state: Callable[[torch.Tensor], None]) -> bool:
        """Send the state to the admitted cores, or receive it; False if it did not arrive."""
        admitted = self.changes[-1].admitted
        source = next(core for core in self.members if core not in admitted)
        try:
            if self.core == source and admitted:
                state = get_state()
                parts, ranks = [torch.tensor([len(state)]), state], [self.members.index(core) for core in admitted]
                self._run(lambda group: [group.send([part], rank, 0) for rank in ranks for part in parts])
            elif self.core in admitted:
                size, rank = torch.zeros(1, dtype=torch.int64), self.members.index(source)
                self._run(lambda group: [group.recv([size], rank, 0)])
                state = torch.empty(int(size), dtype=torch.uint8)
                self._run(lambda group: [group.recv([state], rank, 0)])
                set_state(state)
        except _BrokenGroup:  # the next collective fails, too
            return self.is_joined
        if not self.is_joined:
            self.is_joined, self.changes = True, []
            self._store.set(f"joined/{self.core}", "")
        return True

    def finish(self) -> None:
        """At the end of the run: wait for the others, which may need this core's report of the last collective."""
        if self.is_joined:
            report = _Report(self._count, None, False, False, True)
            self._store.set(f"finished/{self.core}", json.dumps(report))
            self._store.set("finished", "")
            others = [core for core in self.members if core != self.core]
            while not all(core in self._monitor.dead or self._has_ended(core) for core in others):
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def close(self) -> None:
        """Close all connections."""
        self._leave_group()
        self._monitor.end()

    @property
    def is_stuck(self) -> bool:
        """Whether the process must end without a cleanup, which would wait for a core that hangs."""
        return self._has_stuck_group or any(thread.is_alive() for thread in self._connecting)


@final
class LiveCores(Communicator):
    """The collectives of cores that may come and go.

    If a core dies in a collective, the others repeat it without that core, or raise :class:`MembershipChanged` within
    :meth:`raising`.
    """

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.step: int | None = None  # the one that this core has begun and not completed
        self._is_raising = False

    def __reduce__(self) -> Any:
        problem = "an optimizer of a run whose cores may join and leave cannot be copied or pickled"
        raise RuntimeError(f"{problem}, as this core is in one run only: copy the model, or its state_dict()")

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.membership.rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return len(self.membership.members)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Within, the gradients of a step are reduced: what a dying core would have added cannot be left out."""
        self._is_raising = True
        try:
            yield
            self.membership.commit(self.step or 0)
        except _BrokenGroup:
            if not self.membership.reform(reducing=self.step):
                raise MembershipChanged from None
        finally:
            self._is_raising = False

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = [part for tensor in tensors for part in parts_to_sum(tensor)]
        if self._is_raising:
            self.membership.sum(parts)
            return
        totals = self._complete(lambda: [part.clone() for part in parts])
        for part, total in zip(parts, totals, strict=True):
            part.copy_(total)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """As a sum with zeros: a collective that no core completes before the others take part."""
        targets = [each_element_once(tensor.detach()) for tensor in tensors]
        sent = [target.contiguous().view(-1).view(torch.uint8) for target in targets]
        found = self._complete(lambda: [one.clone() if self.rank == 0 else torch.zeros_like(one) for one in sent])
        for target, total in zip(targets, found, strict=True):
            target.copy_(total.view(target.dtype).view_as(target))

    def _complete(self, make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Sum tensors that are made for every attempt."""
        while True:
            tensors = make()
            try:
                self.membership.sum(tensors)
                self.membership.commit()
                return tensors
            except _BrokenGroup:
                if self.membership.reform(reducing=self.step):
                    return tensors
                logger.warning("a core has died: a sum has the values of the other %d cores only", self.num_replicas)


def current() -> Membership | None:
    """The membership of this process in a run whose cores may come and go; None in other runs."""
    return _current


def members() -> set[int]:
    """The numbers of the cores that take part in a run whose cores may come and go; none in other runs."""
    return set() if _current is None else set(_current.members)


@contextlib.contextmanager
def taking_part(membership: Membership) -> Iterator[None]:
    """Within, this process is a core of a run, with a default process group of its own for what needs one, as DDP."""
    global _current
    _current = membership
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
        membership.finish()
    finally:
        _current = None
        membership.close()
        dist.destroy_process_group()
