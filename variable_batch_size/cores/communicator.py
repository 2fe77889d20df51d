"""Communicator: the collectives of a run's cores, and how work on their device is executed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

Group = Any  # a process group of torch.distributed, whose class some builds of torch lack; None for the default one
Ranks = tuple[int, ...]
Formula = Callable[..., Sequence[Sequence[Any]]]  # of the elements of vectors
Operation = Callable[..., Sequence[torch.Tensor]]

_LARGE = 2**22  # elements from which on a second call costs less than it gains; equal at 1 M


class Communicator(ABC):
    """The collectives of the ranks of a run, and how their device executes operations."""

    rank: int
    num_replicas: int
    # whether all ranks must run the same graph: differences such as being idle must then be data and not a branch
    is_one_program = False
    timeout: timedelta | None = None  # of a sum, where it differs from that of the backend
    keeps_flat_gradients = True  # in buckets, which one call reduces; otherwise in a tensor per parameter

    @abstractmethod
    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor, in place, by its sum over all ranks. Every rank must call it with the same shapes."""

    @abstractmethod
    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor, in place, by that of rank 0."""

    def flush(self, *, is_extra: bool = False) -> None:  # noqa: B027 (eager devices have nothing to do)
        """Compile and start the operations traced so far, on lazy devices.

        With `is_extra`, random numbers are not affected: a resumed run may flush at other points.
        """

    def traced_scalar(self, number: float) -> float:
        """A number that changes from step to step, in a form that does not cause a recompilation."""
        return number

    def traced_beta(self, number: float) -> float:
        """Like :meth:`traced_scalar`, for x in [0, 1) when 1 − x is also traced (Adam's betas)."""
        return number

    def as_operation(self, formula: Formula) -> Operation:
        """An operation on vectors that computes a formula of their elements and returns other vectors.

        A lazy device traces it as one operation. The formula must not depend on anything else that changes.
        """

        def operation(*vectors: torch.Tensor) -> Sequence[torch.Tensor]:
            return [torch.stack(list(elements)) for elements in formula(*(vector.unbind() for vector in vectors))]

        return operation

    def where(
        self, condition: torch.Tensor, ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Each of the first tensors if the condition holds, otherwise each of the others."""
        return [torch.where(condition, one, other) for one, other in zip(ones, others, strict=True)]

    def scaled(self, tensors: Sequence[torch.Tensor], factors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each tensor times its factor, an element of a vector; 0 where the factor is 0, even for NaN."""
        found = []
        for tensor, factor in zip(tensors, torch.split(factors, 1), strict=True):
            product = tensor * factor.to(tensor.dtype)
            found.append(torch.where(factor != 0, product, torch.zeros_like(product)).view_as(tensor))
        return found

    def squared_norms(self, lists: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The squared norm of each of several lists of real tensors, none of them empty, in float32."""
        squares = [[tensor.float().pow(2).sum() for tensor in tensors] for tensors in lists]
        return torch.stack([torch.stack(some).sum() if len(some) > 1 else some[0] for some in squares])

    def shard_like(self, tensors: Iterable[torch.Tensor]) -> None:  # noqa: B027 (most have one device for each tensor)
        """Before the first graph: shard tensors whose layout the compiler would otherwise choose."""

    def flush_before_collective(self) -> None:
        """Start what the user has traced: it may differ between ranks, which must run the same graph to communicate."""
        if self.num_replicas > 1:
            self.flush(is_extra=True)

    def total(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor, or of the elements of several, over all ranks, on the host. Every rank must call it.

        Waits for the device.
        """
        self.flush_before_collective()
        one, *more = [tensor.detach() for tensor in tensors]
        total = torch.cat([part.reshape(-1) for part in (one, *more)]) if more else one.clone()
        self.sum([total])
        self.flush()
        return total.cpu()


def check_same_core(communicator: Communicator, rank: int, num_replicas: int) -> None:
    """Raise if a copied or pickled communicator is not on the core that it was made on."""
    before = (communicator.rank, communicator.num_replicas)
    if before != (rank, num_replicas):
        problem = "what rank {} of {} has pickled was loaded by rank {} of {}".format(*before, rank, num_replicas)
        raise RuntimeError(f"{problem}: let each core load its own, or use a vbs.Checkpoint to resume on other cores")


def each_element_once(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor without the repetitions of ``expand()``, which cannot be written to."""
    repeated = [stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor[tuple(0 if is_repeated else slice(None) for is_repeated in repeated)] if any(repeated) else tensor


def parts_to_sum(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Large tensors on a CPU in two parts: gloo has two threads, and an all-reduce uses one of them."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(-1).chunk(2) if tensor.device.type == "cpu" and tensor.numel() >= _LARGE else [tensor]


@final
class SingleProcess(Communicator):
    """One process that is the only rank."""

    rank, num_replicas = 0, 1

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        pass


def is_running() -> bool:
    """Whether torch.distributed is initialized."""
    return dist.is_available() and dist.is_initialized()


@final
class SharedGroup:
    """A process group, the dimension of a mesh, or None for the default group, which copies of its owner share.

    So do pickles, unless they are for loader workers, which need none.
    """

    def __init__(self, given: Any, *, is_for_workers: bool = False) -> None:
        self.given, self._is_for_workers = given, is_for_workers

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedGroup":
        return self

    def __reduce__(self) -> Any:
        if self._is_for_workers:
            return SharedGroup, (None,)
        if is_running() and isinstance(self.given, dist.ProcessGroup):
            advice = "use copy.deepcopy, pass a DeviceMesh as `process_group`, or pickle the state_dict()s"
            raise RuntimeError(f"a loader or an optimizer with a process group of its own cannot be pickled: {advice}")
        return SharedGroup, (self.given,)


def group_of(process_group: Any) -> Group:
    """The process group itself, or that of a DeviceMesh with one dimension."""
    if process_group is None:
        return None
    if not is_running():
        raise ValueError("`process_group` must be None if torch.distributed is not initialized")
    if isinstance(process_group, dist.ProcessGroup) or process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return process_group
    if not hasattr(process_group, "mesh_dim_names"):
        raise ValueError(f"`process_group` must be a ProcessGroup or a DeviceMesh, got {type(process_group).__name__}")
    if process_group.ndim != 1:
        found = f"a mesh with dimensions {process_group.mesh_dim_names or process_group.ndim}"
        rule = "`process_group` must be the mesh dimension along which ranks have different samples"
        raise ValueError(f'{rule}, such as mesh["data"], got {found}')
    return process_group.get_group()


def ranks_of(group: Group) -> Ranks:
    """The global ranks of a process group."""
    return tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
