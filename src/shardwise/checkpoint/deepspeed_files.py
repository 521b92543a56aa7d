"""The files of a DeepSpeed ZeRO checkpoint: where every element of every parameter lies in them.

The files are pickles. torch's restricted unpickler reads them: it builds tensors and plain values, replaces the few
classes of DeepSpeed in them by inert stand-ins, and refuses everything else, so no code from the folder runs. Files are
mapped, not loaded, so memory does not grow with the model.

    stages 1 and 2   each optimizer group is one flat vector, padded; rank r has the r-th part of it
    stage 3          each parameter is cut into one fragment per rank, padded; a rank's fragments follow one another
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.errors import CheckpointError
from shardwise.optim.states import MASTER
from shardwise.partition.layout import Span

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")
_NOT_DATA_PARALLEL = "is tensor-parallel or has no model states: only data-parallel checkpoints are read"


class InertObject:
    """Replaces an object of DeepSpeed: has its fields and no behaviour."""


class InertLossScaler(InertObject):
    """Replaces DeepSpeed's loss scalers."""

    cur_scale: float = 1.0
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = 1


_STAND_INS: list[tuple[Callable[..., Any], str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (InertLossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (type("DynamicLossScaler", (InertLossScaler,), {}), "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (type("fragment_address", (InertObject,), {}), "deepspeed.utils.tensor_fragment.fragment_address"),
]


class ParamFragment(NamedTuple):
    """Some elements of a parameter, from `start` in vector number `vector` of a rank."""

    elements: Span
    rank: int
    vector: int
    start: int


@dataclass
class DeepSpeedParam:
    """A parameter as DeepSpeed stored it. `sources` has the vectors of each key, by rank and number."""

    shape: tuple[int, ...]
    fragments: list[ParamFragment]
    sources: Mapping[str, Sequence[Sequence[torch.Tensor]]]
    group: int | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.sources[MASTER][0][0].dtype


@dataclass
class DeepSpeedCheckpoint:
    """A whole checkpoint: rank 0's model states and optimizer states as DeepSpeed wrote them, and every parameter."""

    model: dict[str, Any]
    optim: dict[str, Any]
    params: dict[str, DeepSpeedParam]

    @property
    def aliases(self) -> dict[str, str]:
        """The first name of each tied parameter, by its other names."""
        return _aliases(self.model)


def load_inert(path: Path) -> Any:
    """The content of a DeepSpeed file, with mapped tensors; a CheckpointError if it holds anything but plain data."""
    with torch.serialization.safe_globals(_STAND_INS):  # type: ignore[arg-type]  # pairs are allowed, not annotated
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            reason = str(error).split("\n")[0]
            raise CheckpointError(f"{path} holds something that is not plain data and is not read: {reason}") from None
        except (OSError, RuntimeError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None


def spread(lengths: Sequence[int], start: int, numel: int) -> Iterator[tuple[int, int, Span]]:
    """Where `numel` elements from `start` on lie in vectors laid end to end: vector number, position, elements.

    >>> list(spread([4, 4, 4], 3, 6))[:2]
    [(0, 3, Span(start=0, stop=1)), (1, 0, Span(start=1, stop=5))]
    """
    wanted = Span(start, start + numel)
    for index, stop in enumerate(accumulate(lengths)):
        part = wanted.intersect(Span(stop - lengths[index], stop))
        if part:
            yield index, part.start - (stop - lengths[index]), part.shift(-start)


def find(source: Path, tag: str | None) -> Path:
    """The folder of a checkpoint: the one in `source` that `tag` or the file `latest` names, or `source` itself."""
    if tag is None and (source / "latest").is_file():
        tag = (source / "latest").read_text().strip()
    folder = source / tag if tag is not None else source
    if tag is not None and (tag in ("", ".", "..") or Path(tag).name != tag or "\\" in tag):
        raise CheckpointError(f"{tag!r} is not the name of a folder in {source}: give the tag that DeepSpeed saved")
    if not list(folder.glob("*zero_pp_rank_*_optim_states.pt")):
        raise CheckpointError(
            f"{folder} holds no *zero_pp_rank_*_optim_states.pt: name the folder that DeepSpeed's save_checkpoint "
            "wrote, from a run with ZeRO stage 1, 2 or 3"
        )
    return folder


def read(folder: Path) -> DeepSpeedCheckpoint:
    """The checkpoint in a folder."""
    optim = [load_inert(path)["optimizer_state_dict"] for path in _by_rank(folder, "optim_states")]
    stage = int(optim[0].get("zero_stage", 0))
    if stage not in _FORMATS:
        raise CheckpointError(f"{folder} was written by ZeRO stage {stage}: stages 1, 2 and 3 are read")
    form = _FORMATS[stage]
    models = [load_inert(path) for path in form.model_files(folder)]
    if not models or models[0].get("mp_world_size", 1) != 1:
        raise CheckpointError(f"{folder} {_NOT_DATA_PARALLEL}")
    params = form.read(models[0]["param_shapes"], optim) | _read_frozen(models)
    order = {name: number for number, name in enumerate(models[0]["module"])}
    ranked = sorted(params, key=lambda name: order.get(name, len(order)))
    return DeepSpeedCheckpoint(models[0], optim[0], {name: params[name] for name in ranked})


def _one_model(folder: Path) -> list[Path]:
    """The file with the model's states; several such files are tensor-parallel parts."""
    paths = sorted(folder.glob("mp_rank_*_model_states.pt"))
    if len(paths) > 1:
        raise CheckpointError(f"{folder} {_NOT_DATA_PARALLEL}")
    return paths


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


def _read_groups(shapes: Sequence[Mapping[str, Any]], optim: Sequence[Mapping[str, Any]]) -> dict[str, DeepSpeedParam]:
    base = [states["base_optimizer_state"] for states in optim]
    if not isinstance(base[0], Mapping):
        raise CheckpointError('it was saved with "elastic_checkpoint", which is not supported: save it without')
    flats = [states["single_partition_of_fp32_groups"] for states in optim]
    paddings = optim[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    ids = [group["params"][0] for group in base[0]["param_groups"]]
    sources = _sources(flats, [[one["state"].get(number, {}) for number in ids] for one in base])
    params = {}
    for group, members in enumerate(shapes):
        start, lengths = 0, [flat[group].numel() for flat in flats]
        for (name, shape), padding in zip(members.items(), paddings[group], strict=True):
            numel = torch.Size(shape).numel()
            fragments = [
                ParamFragment(elements, rank, group, at) for rank, at, elements in spread(lengths, start, numel)
            ]
            params[name] = DeepSpeedParam(tuple(shape), fragments, sources[group], group, _extras(base[0], ids[group]))
            start += numel + padding
        if start > sum(lengths):
            raise CheckpointError(f"group {group} has {sum(lengths)} elements, and its parameters need {start}")
    return params


def _read_fragments(
    shapes: Sequence[Mapping[str, Any]], optim: Sequence[Mapping[str, Any]]
) -> dict[str, DeepSpeedParam]:
    base = [states["optimizer_state_dict"] for states in optim]
    flats = [states["fp32_flat_groups"] for states in optim]
    groups = {number: index for index, group in enumerate(base[0]["param_groups"]) for number in group["params"]}
    sources = _sources(flats, [[one["state"].get(number, {}) for number in range(len(flats[0]))] for one in base])
    lengths = [flat.numel() for flat in flats[0]]
    params, start = {}, 0
    for name, shape in ((name, shape) for members in shapes for name, shape in members.items()):
        numel = torch.Size(shape).numel()
        share = -(-numel // len(flats))
        fragments = []
        for rank in range(len(flats)):
            for index, at, elements in spread(lengths, start, share):
                inside = elements.shift(rank * share).intersect(Span(0, numel))
                fragments += [ParamFragment(inside, rank, index, at)] if inside else []
        index = fragments[0].vector if fragments else 0
        params[name] = DeepSpeedParam(tuple(shape), fragments, sources[index], groups[index], _extras(base[0], index))
        start += share
    if start != sum(lengths):
        raise CheckpointError(f"each rank holds {sum(lengths)} elements, and the parameters need {start}")
    return params


def _read_frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, DeepSpeedParam]:
    """The frozen parameters: stage 3 cuts them like the others; stages 1 and 2 have them whole in the model's state."""
    model, params = models[0], {}
    if len(models) > 1:
        for name, shape in (model["frozen_param_shapes"] or {}).items():
            flats = [[each["frozen_param_fragments"][name].reshape(-1)] for each in models]
            numel, share = torch.Size(shape).numel(), flats[0][0].numel()
            spans = [Span(rank * share, (rank + 1) * share).intersect(Span(0, numel)) for rank in range(len(models))]
            fragments = [ParamFragment(span, rank, 0, 0) for rank, span in enumerate(spans) if span]
            params[name] = DeepSpeedParam(tuple(shape), fragments, {MASTER: flats})
        return params
    trained = {name for group in model["param_shapes"] for name in group}
    others = trained | set(model["buffer_names"]) | set(_aliases(model))
    for name, value in model["module"].items():
        if name not in others:
            fragments = [ParamFragment(Span(0, value.numel()), 0, 0, 0)]
            params[name] = DeepSpeedParam(tuple(value.shape), fragments, {MASTER: [[value.reshape(-1)]]})
    return params


def _sources(
    flats: Sequence[Sequence[torch.Tensor]], states: Sequence[Sequence[Mapping[str, Any]]]
) -> list[dict[str, list[list[torch.Tensor]]]]:
    """For each group, the vectors of every key, by rank and number. Fragments refer to vectors of all groups."""
    by_group = []
    for group, flat in enumerate(flats[0]):
        keys = [
            key
            for key, value in states[0][group].items()
            if isinstance(value, torch.Tensor) and value.shape == flat.shape
        ]
        one: dict[str, list[list[torch.Tensor]]] = {MASTER: [list(rank) for rank in flats]}
        for key in keys:
            one[f"optim/{key}"] = [[state.get(key, torch.empty(0)) for state in rank] for rank in states]
        by_group.append(one)
    return by_group


def _extras(base: Mapping[str, Any], number: int) -> dict[str, Any]:
    state = base["state"].get(number, {})
    extras = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor) or value.ndim == 0}
    if isinstance(extras.get("step"), int):
        extras["step"] = torch.tensor(float(extras["step"]))  # as torch's optimizers store it
    return extras


def _aliases(model: Mapping[str, Any]) -> dict[str, str]:
    """The first name of each tied parameter, by its other names."""
    shared = model.get("shared_params") or {}
    return dict(shared.items() if isinstance(shared, Mapping) else shared)


class _StageFormat(NamedTuple):
    """How a stage of DeepSpeed writes: the files with the model's states, and the reader of trained parameters."""

    model_files: Callable[[Path], list[Path]]
    read: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], dict[str, DeepSpeedParam]]


_GROUPS = _StageFormat(_one_model, _read_groups)
_FORMATS = {1: _GROUPS, 2: _GROUPS, 3: _StageFormat(partial(_by_rank, kind="model_states"), _read_fragments)}
