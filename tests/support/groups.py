"""The process groups that a test leaves behind."""

from collections.abc import Collection

import torch.distributed as dist


def groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def destroy_extra_groups(kept: Collection[dist.ProcessGroup] = ()) -> None:
    """Free all groups but the default one and those to keep, once every rank has finished with them.

    Each holds threads and sockets, and Gloo's threads wake up a hundred times a second.
    """
    for group in groups():
        if group is not dist.group.WORLD and group not in kept:
            dist.destroy_process_group(group)
