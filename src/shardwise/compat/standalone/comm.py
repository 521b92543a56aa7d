"""`deepspeed.comm`: torch.distributed, and a group that starts without one being asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the default process group, unless there is one: that of torchrun's variables, or of this process alone.

    With NCCL the group has Gloo as well, for tensors on the CPU. MPI is not asked for ranks.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "init_distributed(dist_init_required=False) was called without a process group: leave the argument out, or "
            "call torch.distributed.init_process_group first"
        )
    options: dict[str, Any] = {"backend": _backend(dist_backend)}
    if timeout is not None:
        options["timeout"] = timeout
    if init_method is not None:
        dist.init_process_group(init_method=init_method, rank=rank, world_size=world_size, **options)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        dist.init_process_group(**options)
    else:
        dist.init_process_group(store=HashStore(), rank=0, world_size=1, **options)


def _backend(asked: str | None) -> str:
    asked = asked or ("nccl" if torch.cuda.is_available() else "gloo")
    return "cpu:gloo,cuda:nccl" if asked == "nccl" else "gloo" if asked == "ccl" else asked


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def known_world_size(world_size: int) -> int | None:
    """The number of ranks, given or in the environment; None if it is only in an init_method."""
    found = os.environ.get("WORLD_SIZE")
    return world_size if world_size > 0 else int(found) if found else None


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False, **options: Any
) -> Any:
    """torch's, also of scalars, which Gloo does not take."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output_tensor, tensor.reshape(-1) if tensor.ndim == 0 else tensor, group=group, async_op=async_op)


def inference_all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any
) -> torch.Tensor:
    """torch's all_reduce; returns the tensor."""
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def get_world_group() -> Any:
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group)


def has_all_gather_into_tensor() -> bool:
    return True


has_reduce_scatter_tensor = has_coalescing_manager = has_all_reduce_coalesced = has_all_gather_into_tensor


def allgather_fn(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, **options: Any) -> Any:
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=options.get("async_op", False))


def reduce_scatter_fn(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any
) -> Any:
    return dist.reduce_scatter_tensor(
        output_tensor, tensor, op=op, group=group, async_op=options.get("async_op", False)
    )


def log_summary(show_straggler: bool = False) -> None:
    """Prints nothing: `engine.report()` counts the bytes on the wire."""


def configure(*args: Any, **kwargs: Any) -> None:
    """Does nothing: communication is not logged."""


# `deepspeed.utils.groups`: all ranks are data-parallel, and there is no other kind.


def _get_data_parallel_group() -> Any:
    return dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    return dist.get_world_size()


def _get_data_parallel_rank() -> int:
    return dist.get_rank()


def _get_sequence_parallel_group() -> Any:
    return None


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


get_data_parallel_group = _get_sequence_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_sequence_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_sequence_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_group = get_tensor_model_parallel_group = _get_sequence_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_sequence_parallel_world_size
_get_model_parallel_world_size = _get_sequence_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_sequence_parallel_rank


_LOGGED = (
    "all_gather all_gather_coalesced all_gather_object all_reduce all_reduce_coalesced all_to_all all_to_all_single "
    "barrier broadcast broadcast_object_list gather irecv isend monitored_barrier recv reduce reduce_scatter "
    "reduce_scatter_tensor scatter send"
)


@cache
def _logged(name: str) -> Callable[..., Any]:
    """torch's function, with the arguments of DeepSpeed's that say how to log the call; they have no effect."""
    function = getattr(dist, name)

    @wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str = "", debug: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def __getattr__(name: str) -> Any:
    return _logged(name) if name in _LOGGED.split() else getattr(dist, name)


_OWN = (
    "all_gather_into_tensor allgather_fn configure get_all_ranks_from_group get_local_rank get_world_group "
    "has_all_gather_into_tensor has_all_reduce_coalesced has_coalescing_manager has_reduce_scatter_tensor "
    "inference_all_reduce init_distributed is_initialized log_summary reduce_scatter_fn"
)
__all__ = [*_OWN.split(), *(name for name in dir(dist) if not name.startswith("_"))]
