"""Conversion of a DeepSpeed ZeRO checkpoint to shardwise's format: values, optimizer state, counters, loss scale.

The files are pickles. torch's restricted unpickler reads them: it builds tensors and plain values, replaces the few
classes of DeepSpeed in them by inert stand-ins, and refuses everything else, so no code from the folder runs. Files are
mapped, not loaded, so memory does not grow with the model.

    stages 1 and 2   each optimizer group is one flat vector, padded; rank r has the r-th part of it
    stage 3          each parameter is cut into one fragment per rank, padded; a rank's fragments follow one another
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardwise.checkpoint.contents import RankContents, group_options
from shardwise.checkpoint.files import TensorSlice, joined, spread
from shardwise.checkpoint.folder import CheckpointDraft, writing
from shardwise.checkpoint.plain import to_plain
from shardwise.checkpoint.saving import CheckpointWrite, save
from shardwise.checkpoint.storage import Location
from shardwise.checkpoint.training_state import TrainingState
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.optim.states import PARAM
from shardwise.partition.layout import Span
from shardwise.tensors import dtype_name

# The keys that DeepSpeed itself stores, in addition to those of the user's `client_state`.
_OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version"),
}
_COMPUTE = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}
StoredParts = tuple[str, Sequence[int], int, list[tuple[int, int, Span]]]
"""A parameter's name, its shape, the number of its first vector, and its parts in order: rank, vector, elements."""
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")


class InertLossScaler:
    """Replaces DeepSpeed's loss scalers: has their fields and no behaviour."""

    cur_scale: float = 1.0
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = 1


_STAND_INS: list[tuple[Callable[..., Any], str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (InertLossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (InertLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (SimpleNamespace, "deepspeed.utils.tensor_fragment.fragment_address"),
]


@dataclass
class DeepSpeedParam:
    """A parameter as DeepSpeed stored it. `states` has the flat parts, in order, of its values and each state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    states: dict[str, list[torch.Tensor]]
    group: int | None = None
    extras: dict[str, Any] = field(default_factory=dict)


def convert(source: Path, out: Path, tag: str | None = None) -> Location:
    """Convert the DeepSpeed checkpoint in `source` and write it into the folder `out`; returns its path.

    `source` is the folder that `save_checkpoint` was given. `tag` names one of the checkpoints in it; the default is
    the one that its file `latest` names.
    """
    folder = _find(source, tag)
    with _expecting(folder):
        contents = _read(folder)
        with writing(out):
            draft = CheckpointDraft.begin(out, folder.name)
            # The tensors are mapped: their values are read only now.
            save(CheckpointWrite(draft, contents, rank=0, world_size=1), None)
    return draft.target


def _find(source: Path, tag: str | None) -> Path:
    """The folder of a checkpoint: the one in `source` that `tag` or the file `latest` names, or `source` itself."""
    if tag is None and (source / "latest").is_file():
        tag = (source / "latest").read_text(errors="replace").strip()
    folder = source / tag if tag is not None else source
    if tag is not None and (tag in ("", ".", "..") or Path(tag).name != tag or "\\" in tag):
        raise CheckpointError(f"{tag!r} is not the name of a folder in {source}: give the tag that DeepSpeed saved")
    if not list(folder.glob("*zero_pp_rank_*_optim_states.pt")):
        raise CheckpointError(
            f"{folder} holds no *zero_pp_rank_*_optim_states.pt: name the folder that DeepSpeed's save_checkpoint "
            "wrote, from a run with ZeRO stage 1, 2 or 3"
        )
    return folder


@contextlib.contextmanager
def _expecting(folder: Path) -> Iterator[None]:
    """Within it, an error caused by content that DeepSpeed does not write becomes a CheckpointError."""
    try:
        yield
    except ShardwiseError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise CheckpointError(f"{folder} does not hold what DeepSpeed's ZeRO stages 1 to 3 write: {reason}") from error


def load_inert(path: Path) -> Any:
    """The content of a DeepSpeed file, with mapped tensors; a CheckpointError if it holds anything but plain data."""
    with torch.serialization.safe_globals(_STAND_INS):  # type: ignore[arg-type]  # pairs are allowed, not annotated
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            reason = str(error).split("\n")[0]
            raise CheckpointError(f"{path} holds something that is not plain data and is not read: {reason}") from None
        except Exception as error:  # whatever a damaged pickle leads to
            reason = str(error).split("\n")[0]
            raise CheckpointError(f"{path} cannot be read ({reason}): copy it again from where it was saved") from None


def _read(folder: Path) -> RankContents:
    """The checkpoint in a folder, as one rank writes it."""
    optim = [load_inert(path)["optimizer_state_dict"] for path in _by_rank(folder, "optim_states")]
    stage = int(optim[0].get("zero_stage", 0))
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{folder} was written by ZeRO stage {stage}: stages 1, 2 and 3 are read")
    is_cut = stage == 3  # otherwise one file has the model's states; several are tensor-parallel parts
    paths = _by_rank(folder, "model_states") if is_cut else sorted(folder.glob("mp_rank_*_model_states.pt"))
    models = [load_inert(path) for path in paths]
    if not models or models[0].get("mp_world_size", 1) != 1 or (len(models) > 1 and not is_cut):
        raise CheckpointError(
            f"{folder} is tensor-parallel or has no model states: only data-parallel checkpoints are read"
        )
    params = _read_trained(models[0]["param_shapes"], optim, is_cut) | _read_frozen(models)
    order = {name: number for number, name in enumerate(models[0]["module"])}
    ranked = sorted(params, key=lambda name: order.get(name, len(order)))
    return _contents(models[0], optim[0], {name: params[name] for name in ranked})


def _by_rank(folder: Path, kind: str) -> list[Path]:
    """The files of all ranks, in rank order; a CheckpointError if one is missing."""
    matches = {path: _RANK.search(path.name) for path in folder.glob(f"*zero_pp_rank_*_{kind}.pt")}
    numbers = {(int(match[2]), int(match[1])): path for path, match in matches.items() if match}
    expected = [(0, rank) for rank in range(len(numbers))]
    if sorted(numbers) != expected:
        raise CheckpointError(
            f"{folder} is tensor-parallel or lacks a file: found {sorted(path.name for path in matches)}"
        )
    return [numbers[key] for key in expected]


def _read_trained(
    shapes: Sequence[Mapping[str, Any]], optim: Sequence[Mapping[str, Any]], is_cut: bool
) -> dict[str, DeepSpeedParam]:
    """The parameters that are trained. Their parts are views of mapped vectors: no value is read here."""
    base = [states["optimizer_state_dict" if is_cut else "base_optimizer_state"] for states in optim]
    if not isinstance(base[0], Mapping):
        raise CheckpointError('it was saved with "elastic_checkpoint", which is not supported: save it without')
    flats = [states["fp32_flat_groups" if is_cut else "single_partition_of_fp32_groups"] for states in optim]
    groups = {number: index for index, group in enumerate(base[0]["param_groups"]) for number in group["params"]}
    numbers = range(len(flats[0])) if is_cut else [group["params"][0] for group in base[0]["param_groups"]]
    paddings = optim[0].get("param_alignment_paddings")
    params = {}
    for name, shape, index, parts in _fragments(shapes, flats) if is_cut else _runs(shapes, flats, paddings):
        values = {PARAM: [flats[rank][vector][part.slice] for rank, vector, part in parts]}
        state = base[0]["state"].get(numbers[index], {})
        # The last rank's states may be padded where its values are not: rank 0 shows which have a value per element.
        for key in (key for key, value in state.items() if getattr(value, "shape", None) == flats[0][index].shape):
            vectors = ((base[rank]["state"][numbers[vector]], part) for rank, vector, part in parts)
            values[f"optim/{key}"] = [vector[key][part.slice] for vector, part in vectors]
        extras = _extras(state)
        params[name] = DeepSpeedParam(tuple(shape), flats[0][0].dtype, values, groups[numbers[index]], extras)
    return params


def _runs(
    shapes: Sequence[Mapping[str, Any]], flats: Sequence[Sequence[torch.Tensor]], paddings: Any
) -> Iterator[StoredParts]:
    """Stages 1 and 2: a parameter follows the one before it in its group's vector, which all ranks share."""
    for group, members in enumerate(shapes):
        start, lengths = 0, [flat[group].numel() for flat in flats]
        gaps = paddings[group] if paddings else [0] * len(members)
        for (name, shape), padding in zip(members.items(), gaps, strict=True):
            numel = torch.Size(shape).numel()
            yield name, shape, group, [(rank, group, part) for rank, part in spread(lengths, start, numel)]
            start += numel + padding
        if start > sum(lengths):
            raise CheckpointError(f"group {group} has {sum(lengths)} elements, and its parameters need {start}")


def _fragments(shapes: Sequence[Mapping[str, Any]], flats: Sequence[Sequence[torch.Tensor]]) -> Iterator[StoredParts]:
    """Stage 3: each rank has a fragment of every parameter, at the same place in its vectors."""
    start, lengths = 0, [flat.numel() for flat in flats[0]]
    for name, shape in (item for members in shapes for item in members.items()):
        numel = torch.Size(shape).numel()
        share = -(-numel // len(flats))
        parts = [
            (rank, index, part)
            for rank in range(len(flats))
            for index, part in spread(lengths, start, max(0, min(share, numel - rank * share)))
        ]
        yield name, shape, parts[0][1] if parts else 0, parts
        start += share
    if start != sum(lengths):
        raise CheckpointError(f"each rank holds {sum(lengths)} elements, and the parameters need {start}")


def _read_frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, DeepSpeedParam]:
    """The frozen parameters: stage 3 cuts them like the others; stages 1 and 2 have them whole in the model's state."""
    model, params = models[0], {}
    if len(models) > 1:
        for name, shape in (model["frozen_param_shapes"] or {}).items():
            flats = [each["frozen_param_fragments"][name].reshape(-1) for each in models]
            places = spread([len(flat) for flat in flats], 0, torch.Size(shape).numel())
            parts = [flats[rank][part.slice] for rank, part in places]
            params[name] = DeepSpeedParam(tuple(shape), flats[0].dtype, {PARAM: parts})
        return params
    trained = {name for group in model["param_shapes"] for name in group}
    others = trained | set(model["buffer_names"]) | set(_aliases(model))
    for name, value in model["module"].items():
        if name not in others:
            params[name] = DeepSpeedParam(tuple(value.shape), value.dtype, {PARAM: [value.reshape(-1)]})
    return params


def _extras(state: Mapping[str, Any]) -> dict[str, Any]:
    extras = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor) or value.ndim == 0}
    if isinstance(extras.get("step"), int):
        extras["step"] = torch.tensor(float(extras["step"]))  # as torch's optimizers store it
    return {key: to_plain(value, {}, key) for key, value in extras.items()}


def _aliases(model: Mapping[str, Any]) -> dict[str, str]:
    """The first name of each tied parameter, by its other names."""
    return dict(model.get("shared_params") or {})


def _contents(model: dict[str, Any], optim: dict[str, Any], params: dict[str, DeepSpeedParam]) -> RankContents:
    tensors = {f"buffer/{name}": model["module"][name] for name in model["buffer_names"] if name in model["module"]}
    sections = model.get("ds_config") or {}
    enabled = {key for key, value in sections.items() if isinstance(value, Mapping) and value.get("enabled")}
    compute = next((name for key, name in _COMPUTE.items() if key in enabled), "float32")
    state = {key: value for key, value in model.items() if key not in _OWN_KEYS}
    training = _training(model, optim, compute)
    TrainingState.model_validate(training)
    head = {
        "steps": model["global_steps"],
        "world_size": 1,
        "written_by": f"DeepSpeed {model.get('ds_version')}, converted",
        "optimizer": None,
        "training": to_plain(training, tensors, "training"),
        "state": to_plain(state or None, tensors, "state"),
        "config": None,
    }
    slices = [
        each
        for name, param in params.items()
        for key, parts in param.states.items()
        for each in _laid_out(f"{key}/{name}", param.shape, parts)
    ]
    slices += [TensorSlice.whole(key, tensor) for key, tensor in tensors.items()]
    extras, facts = {name: param.extras for name, param in params.items()}, _params(params, _aliases(model), compute)
    return RankContents(joined(slices), extras, None, facts, head)


def _laid_out(key: str, shape: tuple[int, ...], parts: Sequence[torch.Tensor]) -> Iterator[TensorSlice]:
    """The tensor whose flat elements are `parts` laid end to end."""
    start = 0
    for part in parts:
        whole = TensorSlice.whole(key, part)
        yield replace(whole, shape=shape, elements=whole.elements.shift(start))
        start += len(part)


def _training(model: Mapping[str, Any], optim: Mapping[str, Any], compute: str) -> dict[str, Any]:
    scaler: InertLossScaler | None = optim.get("loss_scaler") if compute == "float16" else None
    scale: dict[str, torch.Tensor] | None = None
    if scaler is not None:
        good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
        scale = {
            "scale": torch.tensor(float(scaler.cur_scale)),
            "good_steps": torch.tensor(good_steps, dtype=torch.int32),
            "patience": torch.tensor(scaler.cur_hysteresis, dtype=torch.int32),
        }
    base = optim.get("base_optimizer_state") or optim["optimizer_state_dict"]
    return {
        "steps": model["global_steps"],
        "skipped_steps": model["skipped_steps"],
        "was_skipped": False,
        "is_exhausted": False,
        "scaler": scale,
        "groups": [group_options(group) for group in base["param_groups"]],
        "lr_scheduler": None,
    }


def _params(params: Mapping[str, DeepSpeedParam], aliases: Mapping[str, str], compute: str) -> dict[str, Any]:
    return {
        name: {
            "shape": param.shape,
            "dtype": dtype_name(param.dtype),
            "compute": compute if param.dtype.is_floating_point else dtype_name(param.dtype),
            "group": param.group,
            "aliases": [alias for alias, first in aliases.items() if first == name],
        }
        for name, param in params.items()
    }
