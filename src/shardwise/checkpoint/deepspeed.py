"""From a DeepSpeed ZeRO checkpoint to one of ours: values, optimizer state, counters and loss scale."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.contents import Contents, Item, group_options
from shardwise.checkpoint.deepspeed_files import Found, LossScaler, Param, Part, find, read
from shardwise.checkpoint.folder import Draft, writing
from shardwise.checkpoint.plain import dtype_name, to_plain
from shardwise.checkpoint.saving import Job
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.partition.layout import Span

# What DeepSpeed itself puts beside the user's `client_state`.
_OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version"),
}
_COMPUTE = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}


def convert(source: Path, out: Path, tag: str | None = None) -> Path:
    """Write the DeepSpeed checkpoint in `source` as one of ours into the folder `out`; where it is.

    `source` is what `save_checkpoint` was given; `tag` names one of the checkpoints in it, or the one that its file
    `latest` names.
    """
    folder = find(source, tag)
    with _expecting(folder):
        contents = _contents(read(folder))
    with writing(out):
        draft = Draft.begin(out, folder.name)
        job = Job(draft, rank=0, world_size=1, keep=None)
        job.contents = contents
        try:
            with _expecting(folder):
                job.write()
            job.commit()
        except BaseException:
            job.discard()
            raise
    return draft.target


@contextlib.contextmanager
def _expecting(folder: Path) -> Iterator[None]:
    """Within it, files that hold other things than DeepSpeed writes are a CheckpointError."""
    try:
        yield
    except ShardwiseError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}".split("\n")[0]
        raise CheckpointError(f"{folder} does not hold what DeepSpeed's ZeRO stages 1 to 3 write: {told}") from error


def _contents(found: Found) -> Contents:
    module = found.model["module"]
    tensors = {f"buffer/{name}": module[name] for name in found.model["buffer_names"] if name in module}
    head = _head(found, tensors)
    items = [item for name, param in found.params.items() for item in _items(name, param)]
    items += [_whole(key, tensor) for key, tensor in tensors.items()]
    return Contents(items, _extras(found), None, head)


def _extras(found: Found) -> dict[str, dict[str, Any]]:
    return {
        name: {key: to_plain(value, {}, key) for key, value in param.extras.items()}
        for name, param in found.params.items()
    }


def _items(name: str, param: Param) -> Iterator[Item]:
    for key, tensors in param.sources.items():
        if param.parts:
            yield _item(f"{key}/{name}", param.shape, param.parts, tensors)


def _item(key: str, shape: Sequence[int], parts: Sequence[Part], tensors: Sequence[Sequence[torch.Tensor]]) -> Item:
    def read(wanted: Span) -> torch.Tensor:
        found = []
        for part in parts:
            common = part.elements.intersect(wanted)
            if common:
                flat = tensors[part.rank][part.vector].reshape(-1)
                found.append(flat[common.shift(part.start - part.elements.start).slice])
        return torch.cat(found) if found else torch.empty(0)

    dtype = tensors[0][0].dtype
    return Item(key, dtype, tuple(shape), Span(0, torch.Size(shape).numel()), read)


def _whole(key: str, tensor: torch.Tensor) -> Item:
    return _item(key, tensor.shape, [Part(Span(0, tensor.numel()), 0, 0, 0)], [[tensor]])


def _head(found: Found, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = found.model
    state = {key: value for key, value in model.items() if key not in _OWN_KEYS}
    return {
        "steps": model["global_steps"],
        "world_size": 1,
        "written_by": f"DeepSpeed {model.get('ds_version')}, converted",
        "optimizer": None,
        "training": to_plain(_training(found), tensors, "training"),
        "state": to_plain(state or None, tensors, "state"),
        "config": None,
        "params": _params(found),
    }


def _training(found: Found) -> dict[str, Any]:
    scaler = found.optim.get("loss_scaler")
    base = found.optim.get("base_optimizer_state") or found.optim["optimizer_state_dict"]
    return {
        "steps": found.model["global_steps"],
        "skipped_steps": found.model["skipped_steps"],
        "was_skipped": False,
        "is_exhausted": False,
        "scaler": _scaler(scaler) if _compute(found) == "float16" and scaler is not None else None,
        "groups": [group_options(group) for group in base["param_groups"]],
        "lr_scheduler": None,
    }


def _params(found: Found) -> dict[str, dict[str, Any]]:
    names: dict[str, list[str]] = {}
    for alias, first in found.aliases.items():
        names.setdefault(first, []).append(alias)
    return {
        name: {
            "shape": param.shape,
            "dtype": param.dtype,
            "compute": _compute(found) if param.dtype.is_floating_point else dtype_name(param.dtype),
            "group": param.group,
            "aliases": names.get(name, []),
        }
        for name, param in found.params.items()
    }


def _compute(found: Found) -> str:
    config = found.model.get("ds_config") or {}
    return next((name for key, name in _COMPUTE.items() if _is_on(config, key)), "float32")


def _is_on(config: Mapping[str, Any], key: str) -> bool:
    section = config.get(key)
    return isinstance(section, Mapping) and bool(section.get("enabled"))


def _scaler(scaler: LossScaler) -> dict[str, torch.Tensor]:
    good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
    return {
        "scale": torch.tensor(float(scaler.cur_scale)),
        "good_steps": torch.tensor(good_steps, dtype=torch.int32),
        "patience": torch.tensor(scaler.cur_hysteresis, dtype=torch.int32),
    }
