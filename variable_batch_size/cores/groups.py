"""Process groups of torch.distributed, by whatever names them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

Group = Any
"""A process group of torch.distributed; None for the default one. (Its class is not there where torch lacks it.)"""

Ranks = tuple[int, ...]


def is_running() -> bool:
    """Whether a process group has been initialised."""
    return dist.is_available() and dist.is_initialized()


def group_of(process_group: Any) -> Group:
    """A process group, also from a mesh of devices with one dimension; anything else is refused."""
    if process_group is None:
        return None
    if not is_running():
        raise ValueError("`process_group` must be None where torch.distributed is not initialised")
    if isinstance(process_group, dist.ProcessGroup) or process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return process_group
    if not hasattr(process_group, "mesh_dim_names"):
        kind = type(process_group).__name__
        raise ValueError(f"`process_group` must be a group of torch.distributed or a DeviceMesh, got {kind}")
    if process_group.ndim != 1:
        raise ValueError(
            "`process_group` must be the dimension of the mesh along which cores have different samples, as "
            f'mesh["data"], got a mesh with the dimensions {process_group.mesh_dim_names or process_group.ndim}'
        )
    return process_group.get_group()


def ranks_of(group: Group) -> Ranks:
    """The processes of a group, by their rank among all."""
    return tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
