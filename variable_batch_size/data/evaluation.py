"""EvaluationLoader: every sample of a data set once, over all cores."""

import threading
from collections.abc import Iterator
from typing import Any

import torch.utils.data

from variable_batch_size.checks import check_flag, check_positive, check_within
from variable_batch_size.cores.communicator import SharedGroup
from variable_batch_size.cores.detect import is_elastic, running_cores
from variable_batch_size.data.sampler import check_dataset


class _Reading(threading.local):
    """The minibatch of the loop in this thread; cores may be threads."""

    def __init__(self) -> None:
        self.number = -1  # in its pass
        self.is_padding = False
        self.added = set[int]()  # the minibatches of the pass for which something was added to Metrics


_reading = _Reading()


def counts() -> bool:
    """Whether the minibatch of the loop in this thread counts. Called by :meth:`Metrics.add`."""
    _reading.added.add(_reading.number)
    return not _reading.is_padding


class _Minibatches(torch.utils.data.Sampler[list[int]]):
    def __init__(self) -> None:
        self.of_core: list[range] = []

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self.of_core)

    def __len__(self) -> int:
        return len(self.of_core)


class EvaluationLoader(torch.utils.data.DataLoader[Any]):
    """A DataLoader that reads every sample once, over all cores, in order, with equally many minibatches on each core.

        metrics = vbs.Metrics("correct", "seen", device=device)
        for data, target in vbs.EvaluationLoader(test_set, minibatch_size=256):
            metrics.add(correct=(model(data).argmax(1) == target).sum(), seen=len(target))

    Core r of R reads minibatches r, r + R, r + 2R, … of the data set, of which the last may be smaller. Cores that have
    fewer of these end with padding, a copy of the first minibatch of the data set, which :class:`Metrics` does not
    count: a model in ``fully_shard`` waits for all cores in each forward pass.

    Args:
        dataset: a data set with a length and indices.
        minibatch_size: samples that one core runs at once.
        num_replicas: cores that share the work; those of the running backend if None.
        rank: which of them this is; that of the running backend if None.
        process_group: the cores that share the work, as in :class:`DataLoader`.
        lockstep: whether there is padding. Without it, a loop need not add to :class:`Metrics`.
        options: of torch's DataLoader, such as `num_workers`, `collate_fn` and `pin_memory`.

    >>> [list(EvaluationLoader(range(5), minibatch_size=2, num_replicas=2, rank=r, lockstep=False)) for r in (0, 1)]
    [[tensor([0, 1]), tensor([4])], [tensor([2, 3])]]
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[Any],
        *,
        minibatch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
        lockstep: bool = True,
        **options: Any,
    ) -> None:
        check_positive(minibatch_size=minibatch_size)
        for name in ("batch_size", "batch_sampler", "drop_last", "sampler", "shuffle"):
            if name in options:
                raise ValueError(
                    f"`{name}` must not be given: `minibatch_size` and the cores determine the minibatches"
                )
        if not options.get("in_order", True):
            raise ValueError("`in_order` must be True: the last minibatch may be padding")
        check_dataset(dataset)
        check_flag(lockstep=lockstep)
        self._size, self._minibatch_size, self._lockstep = len(dataset), minibatch_size, lockstep  # type: ignore[arg-type]
        self._cores = (rank, num_replicas, SharedGroup(process_group))
        super().__init__(dataset, batch_sampler=_Minibatches(), **options)
        self._assign()

    def _assign(self) -> None:
        """Assign minibatches to this core, given the cores that there are now."""
        given_rank, given_replicas, group = self._cores
        rank, num_replicas = running_cores(group.given)
        num_replicas = num_replicas if given_replicas is None else given_replicas
        rank = rank if given_rank is None else given_rank
        check_positive(num_replicas=num_replicas)
        check_within(num_replicas - 1, rank=rank)
        size, step = self._size, self._minibatch_size
        minibatches = [range(first, min(first + step, size)) for first in range(0, size, step)]
        own = minibatches[rank::num_replicas]
        self._num_own, self._has_padding = len(own), self._lockstep and len(minibatches) % num_replicas > 0  # of any
        num_rounds = -(-len(minibatches) // num_replicas)
        padding = minibatches[:1] if self._lockstep and len(own) < num_rounds else []
        self.batch_sampler.of_core = own + padding  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        if is_elastic():
            self._assign()
        minibatches = super().__iter__()
        return self._marked(minibatches) if self._has_padding else minibatches

    def _marked(self, minibatches: Iterator[Any]) -> Iterator[Any]:
        """Mark padding, and raise at the end, on all cores alike, if it may have been counted."""
        try:
            for number, minibatch in enumerate(minibatches):
                _reading.number, _reading.is_padding = number, number == self._num_own
                yield minibatch
            if not _reading.added.issuperset(range(len(self))):
                raise RuntimeError(
                    "the last minibatch of some cores was padding, which only vbs.Metrics leaves out: call "
                    "metrics.add() once for each minibatch, in a loop that reads this loader directly, or make it "
                    "with `lockstep=False`"
                )
        finally:
            _reading.number, _reading.is_padding, _reading.added = -1, False, set()
