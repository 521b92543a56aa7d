"""`WireObserver`: bytes sent per rank, counted by wrapping the functions of `torch.distributed` while it is active.

This module imports nothing else of shardwise, so that it can judge the engine. The bytes are those of the standard
algorithms, whatever a backend does (Gloo's reduce-scatter sends twice as much). With W the size of the group and n the
bytes of the whole buffer (of all ranks' parts together):

| operation | sent by each rank |
|---|---|
| all-gather, reduce-scatter | n(W-1)/W: one part to, or for, each other rank |
| all-to-all | n(W-1)/W; with uneven splits, all but the rank's own part |
| all-reduce | 2n(W-1)/W: a reduce-scatter and an all-gather |
| broadcast, reduce | n(W-1)/W: the n(W-1) bytes that move in total, divided by the ranks |
| gather | n, the rank's own tensor; nothing on the destination |
| scatter | the other ranks' parts on the source; nothing elsewhere |
| send | n; receiving costs nothing |
| barrier | nothing, but it is recorded |

It does not see: functions imported by name before it started (`from torch.distributed import all_reduce`),
collectives issued in C++ (DDP's reducer) or through `torch.ops._c10d_functional` (DTensor).
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


@dataclass(frozen=True)
class WireRecord:
    """One call: the bytes of its buffer, the bytes that this rank sends, the size of its group, the description
    (`group_desc`) that the group was made with, and the ranks of the world that the bytes go to: the target of a send,
    or all other ranks of the group."""

    op: str
    payload_bytes: int
    sent_bytes: int
    dtype: torch.dtype | None
    group_size: int
    group: str = ""
    targets: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Call:
    """The arguments of a wrapped function by name, on one rank of its group."""

    arguments: dict[str, Any]
    rank: int
    world_size: int

    def nbytes(self, name: str) -> int:
        return _nbytes(self.arguments[name])

    def others(self, parts: Sequence[Any]) -> int:
        """Bytes of all parts except this rank's own."""
        return sum(_nbytes(part) for peer, part in enumerate(parts) if peer != self.rank)

    def is_root(self, name: str) -> bool:
        """Whether `src`/`dst` (a global rank) or `group_src`/`group_dst` names this rank."""
        if self.arguments.get(f"group_{name}") is not None:
            return bool(self.arguments[f"group_{name}"] == self.rank)
        return bool((self.arguments.get(name) or 0) == dist.get_rank())


# Each formula gives (payload bytes, sent bytes).
Formula = Callable[[_Call], tuple[int, int]]


def _all_gather(name: str) -> Formula:
    return lambda call: (call.nbytes(name) * call.world_size, call.nbytes(name) * (call.world_size - 1))


def _share(name: str, passes: int = 1) -> Formula:
    """`passes` times n(W-1)/W, rounded up to whole bytes."""
    return lambda call: (call.nbytes(name), -(-passes * call.nbytes(name) * (call.world_size - 1) // call.world_size))


def _parts(name: str) -> Formula:
    return lambda call: (call.nbytes(name), call.others(call.arguments[name]))


def _all_to_all_single(call: _Call) -> tuple[int, int]:
    n, splits = call.nbytes("input"), call.arguments.get("input_split_sizes")
    if not splits:
        return n, n * (call.world_size - 1) // call.world_size
    row = n // sum(splits) if sum(splits) else 0
    return n, n - row * splits[call.rank]


def _gather(call: _Call) -> tuple[int, int]:
    n = call.nbytes("tensor")
    return n, 0 if call.is_root("dst") else n


def _scatter(call: _Call) -> tuple[int, int]:
    parts = call.arguments.get("scatter_list") or []
    return (_nbytes(parts), call.others(parts)) if call.is_root("src") else (0, 0)


def _batch(call: _Call) -> tuple[int, int]:
    sent = sum(_nbytes(op.tensor) for op in call.arguments["p2p_op_list"] if op.op is c10d.isend)
    return sent, sent


FORMULAS: dict[str, Formula] = {
    "all_gather": _all_gather("tensor"),
    "all_gather_single": _all_gather("input_tensor"),
    "all_gather_into_tensor": _all_gather("input_tensor"),
    "all_gather_coalesced": _all_gather("input_tensor_list"),
    "all_reduce": _share("tensor", passes=2),
    "all_reduce_coalesced": _share("tensors", passes=2),
    "all_to_all": _parts("input_tensor_list"),
    "all_to_all_single": _all_to_all_single,
    "barrier": lambda call: (0, 0),
    "batch_isend_irecv": _batch,
    "broadcast": _share("tensor"),
    "gather": _gather,
    "isend": lambda call: (call.nbytes("tensor"), call.nbytes("tensor")),
    "monitored_barrier": lambda call: (0, 0),
    "reduce": _share("tensor"),
    "reduce_scatter": _parts("input_list"),
    "reduce_scatter_single": _share("input"),
    "reduce_scatter_tensor": _share("input"),
    "scatter": _scatter,
    "send": lambda call: (call.nbytes("tensor"), call.nbytes("tensor")),
}
# Object collectives call these inside their own module. No others are replaced there: torch compares some functions by
# identity (`op is isend`, the coalescing manager), and old names that call new ones would count twice.
CALLED_BY_OBJECT_COLLECTIVES = ("all_gather", "broadcast", "gather", "scatter", "send")


class WireObserver:
    """Records every collective and send that this process issues while the context is active.

    `control`: which records are control messages and not data: those up to this number of payload bytes, or those for
    which a function returns True.

    >>> with WireObserver() as wire:
    ...     pass
    >>> wire.sent_bytes, wire.records
    (0, [])
    """

    def __init__(self, control: int | Callable[[WireRecord], bool] = 0) -> None:
        self.records: list[WireRecord] = []
        self._is_control = control if callable(control) else lambda record: record.payload_bytes <= control
        self._replaced: list[tuple[Any, str, Any]] = []

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent, without control messages."""
        return sum(record.sent_bytes for record in self.data)

    @property
    def control_sent_bytes(self) -> int:
        """Bytes that this rank sent in control messages."""
        return sum(record.sent_bytes for record in self.records if self._is_control(record))

    @property
    def data(self) -> list[WireRecord]:
        """The records that are not control messages."""
        return [record for record in self.records if not self._is_control(record)]

    def __enter__(self) -> "WireObserver":
        for name, formula in FORMULAS.items():
            if hasattr(dist, name):
                wrapper = self._wrap(name, getattr(dist, name), formula)
                self._replace(dist, name, wrapper)
                if name in CALLED_BY_OBJECT_COLLECTIVES:
                    self._replace(c10d, name, wrapper)
        self._unwrap_p2p_ops()
        return self

    def __exit__(self, *exception: Any) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, inspect.getattr_static(owner, name)))
        setattr(owner, name, value)

    def _wrap(self, name: str, function: Callable[..., Any], formula: Formula) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._record(name, formula, signature.bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        wrapper.__dict__["torch_function"] = _torch_function(function)
        return wrapper

    def _record(self, name: str, formula: Formula, arguments: dict[str, Any]) -> None:
        operations = arguments.get("p2p_op_list")
        group = operations[0].group if operations else arguments.get("group")
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank >= 0:  # a rank outside the group: the call does nothing
            sizes = formula(_Call(arguments, rank, world_size))
            described = getattr(group, "group_desc", "") or ""
            targets = _targets(arguments, group)
            self.records.append(WireRecord(name, *sizes, _dtype_of(arguments), world_size, described, targets))

    def _unwrap_p2p_ops(self) -> None:
        """`P2POp` accepts only torch's own isend and irecv, so pass it the function behind the wrapper."""
        make, start = dist.P2POp.__new__, dist.P2POp.__init__

        def __new__(cls: type, op: Any, *args: Any, **kwargs: Any) -> Any:
            return make(cls, _torch_function(op), *args, **kwargs)

        def __init__(self: Any, op: Any, *args: Any, **kwargs: Any) -> None:
            start(self, _torch_function(op), *args, **kwargs)

        self._replace(dist.P2POp, "__new__", staticmethod(__new__))
        self._replace(dist.P2POp, "__init__", __init__)


def _torch_function(function: Any) -> Any:
    """torch's own function behind any number of observers."""
    return getattr(function, "torch_function", function)


def _nbytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else sum(map(_nbytes, value))


def _targets(arguments: dict[str, Any], group: Any) -> tuple[int, ...]:
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if arguments.get("group_dst") is not None:
        return (members[arguments["group_dst"]],)
    if arguments.get("dst") is not None:
        return (arguments["dst"],)
    return tuple(rank for rank in members if rank != dist.get_rank())


def _dtype_of(arguments: dict[str, Any]) -> torch.dtype | None:
    """The dtype of the first tensor among the arguments; None for a barrier."""
    for value in arguments.values():
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        tensor = getattr(first, "tensor", first)
        if isinstance(tensor, torch.Tensor):
            return tensor.dtype
    return None
