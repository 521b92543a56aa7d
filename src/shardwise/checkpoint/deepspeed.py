"""Conversion of a DeepSpeed ZeRO checkpoint to shardwise's format: values, optimizer state, counters, loss scale."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.checkpointable import group_options
from shardwise.checkpoint.contents import RankContents
from shardwise.checkpoint.deepspeed_files import DeepSpeedCheckpoint, DeepSpeedParam, InertLossScaler, find, read
from shardwise.checkpoint.files import TensorSlice
from shardwise.checkpoint.folder import CheckpointDraft, writing
from shardwise.checkpoint.plain import dtype_name, to_plain
from shardwise.checkpoint.saving import CheckpointWrite
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.partition.layout import Span

# The keys that DeepSpeed itself stores beside those of the user's `client_state`.
_OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version"),
}
_COMPUTE = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}


def convert(source: Path, out: Path, tag: str | None = None) -> Path:
    """Convert the DeepSpeed checkpoint in `source` and write it into the folder `out`; returns its path.

    `source` is the folder that `save_checkpoint` was given. `tag` names one of the checkpoints in it; the default is
    the one that its file `latest` names.
    """
    folder = find(source, tag)
    with _expecting(folder):
        contents = _contents(read(folder))
    with writing(out):
        draft = CheckpointDraft.begin(out, folder.name)
        write = CheckpointWrite(draft, contents, rank=0, world_size=1)
        try:
            with _expecting(folder):  # the tensors are mapped: their values are read only now
                write.write()
            write.commit()
        except BaseException:
            write.discard()
            raise
    return draft.target


@contextlib.contextmanager
def _expecting(folder: Path) -> Iterator[None]:
    """Within it, an error caused by content that DeepSpeed does not write becomes a CheckpointError."""
    try:
        yield
    except ShardwiseError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise CheckpointError(f"{folder} does not hold what DeepSpeed's ZeRO stages 1 to 3 write: {reason}") from error


def _contents(source: DeepSpeedCheckpoint) -> RankContents:
    module = source.model["module"]
    tensors = {f"buffer/{name}": module[name] for name in source.model["buffer_names"] if name in module}
    head = _head(source, tensors)
    slices = [each for name, param in source.params.items() for each in _slices(name, param)]
    slices += [TensorSlice.whole(key, tensor) for key, tensor in tensors.items()]
    return RankContents(slices, _extras(source), None, head)


def _extras(source: DeepSpeedCheckpoint) -> dict[str, dict[str, Any]]:
    return {
        name: {key: to_plain(value, {}, key) for key, value in param.extras.items()}
        for name, param in source.params.items()
    }


def _slices(name: str, param: DeepSpeedParam) -> Iterator[TensorSlice]:
    """The values and states of a parameter, each as one whole tensor."""
    elements = Span(0, torch.Size(param.shape).numel())
    for key, vectors in param.sources.items() if param.fragments else ():
        yield TensorSlice(f"{key}/{name}", vectors[0][0].dtype, param.shape, elements, _joined(param, vectors))


def _joined(param: DeepSpeedParam, vectors: Sequence[Sequence[torch.Tensor]]) -> Callable[[Span], torch.Tensor]:
    """A function that returns any elements of a parameter, joined from its fragments."""

    def read(wanted: Span) -> torch.Tensor:
        found = []
        for fragment in param.fragments:
            common = fragment.elements.intersect(wanted)
            if common:
                flat = vectors[fragment.rank][fragment.vector].reshape(-1)
                found.append(flat[common.shift(fragment.start - fragment.elements.start).slice])
        return torch.cat(found) if found else torch.empty(0)

    return read


def _head(source: DeepSpeedCheckpoint, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = source.model
    state = {key: value for key, value in model.items() if key not in _OWN_KEYS}
    return {
        "steps": model["global_steps"],
        "world_size": 1,
        "written_by": f"DeepSpeed {model.get('ds_version')}, converted",
        "optimizer": None,
        "training": to_plain(_training(source), tensors, "training"),
        "state": to_plain(state or None, tensors, "state"),
        "config": None,
        "params": _params(source),
    }


def _training(source: DeepSpeedCheckpoint) -> dict[str, Any]:
    scaler = source.optim.get("loss_scaler")
    base = source.optim.get("base_optimizer_state") or source.optim["optimizer_state_dict"]
    return {
        "steps": source.model["global_steps"],
        "skipped_steps": source.model["skipped_steps"],
        "was_skipped": False,
        "is_exhausted": False,
        "scaler": _scaler(scaler) if _compute(source) == "float16" and scaler is not None else None,
        "groups": [group_options(group) for group in base["param_groups"]],
        "lr_scheduler": None,
    }


def _params(source: DeepSpeedCheckpoint) -> dict[str, dict[str, Any]]:
    names: dict[str, list[str]] = {}
    for alias, first in source.aliases.items():
        names.setdefault(first, []).append(alias)
    return {
        name: {
            "shape": param.shape,
            "dtype": param.dtype,
            "compute": _compute(source) if param.dtype.is_floating_point else dtype_name(param.dtype),
            "group": param.group,
            "aliases": names.get(name, []),
        }
        for name, param in source.params.items()
    }


def _compute(source: DeepSpeedCheckpoint) -> str:
    config = source.model.get("ds_config") or {}
    return next((name for key, name in _COMPUTE.items() if _is_on(config, key)), "float32")


def _is_on(config: Mapping[str, Any], key: str) -> bool:
    section = config.get(key)
    return isinstance(section, Mapping) and bool(section.get("enabled"))


def _scaler(scaler: InertLossScaler) -> dict[str, torch.Tensor]:
    good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
    return {
        "scale": torch.tensor(float(scaler.cur_scale)),
        "good_steps": torch.tensor(good_steps, dtype=torch.int32),
        "patience": torch.tensor(scaler.cur_hysteresis, dtype=torch.int32),
    }
