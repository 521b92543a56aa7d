"""Whether all ranks were started the same way: the same model, optimizer, options and configuration.

Ranks that differ would train on, each shard by its own rule. `initialize` compares a digest of everything; if digests
differ, the ranks exchange the facts behind them and all raise an error that names what differs. Options of the
optimizer that change later (learning rates) are compared at intervals: they are part of the name of a small operation,
and the agreement of ranks stops operations with different names. The same operation carries checksums of the inputs.
"""

from __future__ import annotations

import hashlib
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise._version import __version__
from shardwise.agreement.judge import name_ranks
from shardwise.comm import Comm
from shardwise.comm.model_group import ModelGroup
from shardwise.config import Config
from shardwise.config.draft import leaves
from shardwise.engine.habits import InputWatch
from shardwise.errors import ConfigWarning, DisagreementError
from shardwise.optim.optimizers import members

_FIRST, _EVERY = 10, 100  # the updates before which options are compared: the first of them, and all multiples
_SHOWN = 6
_TEXT = 200

# What may differ from machine to machine, and changes no result.
_LOCAL = (
    *("offload.nvme_path", "offload.weights_nvme_path", "offload.pin_memory", "offload.aio"),
    *("offload.device_memory", "offload.host_memory", "runtime.steps_per_print", "runtime.timers"),
)


def check_alike(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, scheduler: Any, comm: Comm
) -> None:
    """Raise on all ranks if one of them was given something else. A collective."""
    everyone = comm.everyone
    if everyone.world_size == 1:
        return
    facts = _facts(model, optimizer, config, scheduler)
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    if len(set(everyone.share_object(digest, "how it was started"))) == 1:
        return
    found = _differences(everyone.share_object(facts, "what it was started with"))
    listed = "\n".join(f"  {line}" for line in found[:_SHOWN])
    more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    comm.close()
    raise DisagreementError(
        f"the ranks were started differently, so each would train by its own rule:\n{listed}{more}\n"
        "Pass the same model, optimizer, options and configuration to shardwise.initialize on all ranks"
    )


def check_stages(model: nn.Module, pp: ModelGroup) -> None:
    """Warn if all ranks of a pp axis have the same parameters, by name and shape: such a model is hardly a stage. A
    collective of the axis."""
    shapes = repr([(name, tuple(param.shape)) for name, param in model.named_parameters()])
    everyone = pp.share_object(hashlib.sha256(shapes.encode()).hexdigest())
    if len(everyone) > 1 and len(set(everyone)) == 1 and dist.get_rank() == 0:
        warnings.warn(
            f"the mesh has a pp axis of {len(everyone)} ranks, and all of them have parameters of the same names and "
            "shapes: unless these are stages that a schedule of torch drives, nothing is cut, and each of these ranks "
            "trains a model of its own. Cut it with shardwise.pipeline(model, mesh, ...), or leave pp out of the mesh",
            ConfigWarning,
            stacklevel=3,
        )


class OptionsCheck:
    """Compares the options of the optimizer's groups between ranks at intervals, and the inputs once."""

    def __init__(self, comm: Comm, inputs: InputWatch) -> None:
        self._comm = comm
        self._inputs = inputs
        self._updates = 0

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Before each update. A collective in some of them."""
        model_group = self._comm.model_group
        if not self._comm.is_checked and model_group.size == 1:
            return
        self._updates += 1
        self._inputs.is_open = self._updates >= _FIRST - InputWatch.STEPS
        if self._updates == _FIRST or self._updates % _EVERY == 0:
            name = f"the optimizer's options ({describe_options(optimizer)})"
            sums = self._inputs.checksums()
            self._inputs.compare(self._comm.share(sums, name), model_group.share(sums))


def describe_options(optimizer: torch.optim.Optimizer) -> str:
    """A short text that differs if an option does; the learning rates come first.

    Options are what the optimizer was built with. Others write counters and norms of their own tensors into groups,
    which differ from rank to rank.

    >>> describe_options(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)).split(";")[0]
    'lr 0.1'
    """
    groups = optimizer.param_groups
    rates = list(dict.fromkeys(_plain(group.get("lr")) for group in groups))
    known = {"lr", *(key for member in members(optimizer) for key in member.defaults)}
    options = repr([sorted((key, _plain(value)) for key, value in group.items() if key in known) for group in groups])
    return f"lr {', '.join(rates)}"[:_TEXT] + f"; all of them {zlib.crc32(options.encode()):08x}"


def _facts(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, scheduler: Any) -> dict[str, str]:
    facts = {"shardwise": __version__, "torch": torch.__version__, "lr_scheduler": type(scheduler).__name__}
    for path, value, _ in leaves(config):
        if not path.startswith(_LOCAL):
            facts[f"configuration {path}"] = _plain(value)
    groups = optimizer.param_groups if optimizer is not None else []
    if optimizer is not None:
        facts["optimizer"] = ", ".join(type(member).__name__ for member in members(optimizer))
    for number, group in enumerate(groups):
        facts |= {
            f"optimizer group {number}, {key}": _plain(value)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
    group_of = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
    for name, param in model.named_parameters():
        trained = f"in group {group_of[id(param)]}" if id(param) in group_of else "frozen"
        cut = f", {placements}" if (placements := getattr(param, "placements", None)) else ""
        facts[f"parameter {name}"] = f"{tuple(param.shape)}, {_plain(param.dtype)}, {trained}{cut}"
    for name, buffer in model.named_buffers():
        facts[f"buffer {name}"] = f"{tuple(buffer.shape)}, {_plain(buffer.dtype)}"
    return facts


def _differences(everyone: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each fact that ranks disagree on, in the order of the facts."""
    lines = []
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            ranks.setdefault(facts.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(f"{value[:_TEXT]} on {name_ranks(where)}" for value, where in ranks.items())
            lines.append(f"{name}: {values}")
    return lines or ["the order of the parameters, or of the options"]


def _plain(value: Any) -> str:
    """A value as a text that is the same in every process."""
    if isinstance(value, torch.Tensor):
        # The value of a tensor on a device would have to be waited for, and the device's number differs by rank.
        is_here = value.numel() == 1 and value.device.type == "cpu"
        return repr(value.item()) if is_here else f"tensor on {value.device.type}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_plain(inner)}' for key, inner in value.items())}}}"
    known = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if known else str(value) if isinstance(value, torch.dtype) else type(value).__name__
