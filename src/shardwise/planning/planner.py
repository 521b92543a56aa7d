"""`shardwise.plan`: the peak of every preset, whether it fits, and the preset to take."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import torch

from shardwise.config.presets import PRESETS
from shardwise.config.shape import NodeShape
from shardwise.dry_run.dry_run import Foreseen, Untraceable, can_dry_run, foresee_workload
from shardwise.errors import ConfigError
from shardwise.estimate.arithmetic import sent_by_axis, tp_bytes, wire_share
from shardwise.estimate.estimate import estimate
from shardwise.estimate.hardware import Hardware
from shardwise.estimate.seconds import device_times, preset_time
from shardwise.machine.launch import cores
from shardwise.models.workload import ModelSpec, Workload, find_model
from shardwise.planning.pipelines import foresee_stages, pipeline_notes
from shardwise.planning.recommend import advise, headroom, judge, presets_for, refusal
from shardwise.planning.report import Plan, PlanRow
from shardwise.sizes import format_bytes
from shardwise.timing.device import DeviceTimes


def plan(
    model: str | None = None,
    *,
    params: int | None = None,
    hardware: Hardware | None = None,
    workload: Workload | None = None,
    presets: Sequence[str] | None = None,
    detailed: bool | None = None,
    device: DeviceTimes | None = None,
    price: float | None = None,
) -> Plan:
    """What every rank holds at its peak under each preset, before anything is launched.

    `model` is a name that `shardwise.models.catalog` knows, a Hugging Face `config.json` or model folder, or
    `file.py:function`; alternatively `params` is the number of parameters. `detailed` runs the engine's own code on
    fake tensors, which takes seconds. It is the default for `file.py:function`, of which nothing else is known.
    Seconds are those of `device` (an H100 by default); `price` is dollars an hour for a GPU.

    >>> import shardwise
    >>> foreseen = shardwise.plan("llama3-8b")
    >>> foreseen.advice.preset
    'zero1'
    """
    hardware, workload = hardware or Hardware(), workload or Workload()
    shape = hardware.zero_shape(workload.tp, workload.pp)
    presets = presets_for(shape) if presets is None else presets
    unknown = [name for name in presets if name not in PRESETS]
    if unknown:
        raise ConfigError(f"unknown preset {unknown[0]!r}: choose from {', '.join(PRESETS)}")
    known = find_model(model, params, workload)
    if detailed and known.dimensions is None and known.build is None:
        raise ConfigError("a detailed plan needs a model: name one instead of --params")
    known.part(workload.tp)  # raises if there is none
    if workload.pp > 1:
        _check_pipeline(known, workload, detailed)
    if detailed is None:
        detailed = workload.pp > 1 or known.build is not None
    return replace(_plan(known, workload, hardware, presets, detailed, device_times(hardware, device)), price=price)


def _check_pipeline(model: ModelSpec, workload: Workload, detailed: bool | None) -> None:
    if workload.accumulation < workload.pp:
        raise ConfigError(
            f"--pp {workload.pp} needs at least as many micro-batches: take --accumulate {2 * workload.pp}"
        )
    if model.dimensions is None or workload.lora or detailed is False:
        raise ConfigError(
            f"--pp {workload.pp} needs a dry run of a model whose dimensions are known, without adapters: name one "
            "of the catalog or a config.json, and leave out --params, --lora and --no-detailed"
        )


def _plan(
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    presets: Sequence[str],
    detailed: bool,
    device: DeviceTimes,
) -> Plan:
    notes = []
    foreseen: dict[str, Foreseen] = {}
    shape = hardware.zero_shape(workload.tp, workload.pp)
    if detailed:
        configs = {preset: workload.config(preset) for preset in presets}
        possible = [name for name, config in configs.items() if can_dry_run(config) and not refusal(config)]
        foreseen, failure = _dry_runs(model, workload, shape, possible)
        if failure and workload.pp > 1:
            raise ConfigError(f"--pp {workload.pp}: no dry run: {failure}")
        if failure:
            notes.append(f"no dry run: {failure}; the figures come from arithmetic")
    if workload.pp > 1:
        presets = list(foreseen)
        notes += pipeline_notes(workload, foreseen)
    if workload.tp > 1:
        notes.append(_tp_note(workload.tp, shape.world_size, _tp_sent_bytes(model, workload, foreseen)))
    rows = [_row(preset, model, workload, hardware, device, foreseen.get(preset)) for preset in presets]
    notes += _notes(model, workload, rows)
    mode = "detailed" if foreseen else "analytic"
    advice = advise(rows, model, workload, hardware)
    if advice.preset in foreseen:
        notes.append(_reserved_note(advice.preset, foreseen[advice.preset], hardware))
    return Plan(model, workload, hardware, rows, advice, mode, notes)


def _row(
    preset: str,
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    device: DeviceTimes,
    foreseen: Foreseen | None,
) -> PlanRow:
    config, part = workload.config(preset), model.part(workload.tp)
    shape, per_node = hardware.zero_shape(workload.tp, workload.pp), hardware.shape.per_node
    found = foreseen or estimate(part, workload, config, shape)
    if foreseen is not None and workload.pp > 1:  # of a stage
        held = foreseen.parameters // workload.tp
        part = replace(part, parameters=held, trainable=held)
    sent = sent_by_axis(preset, part, workload, shape)
    reserved = hardware.reserved_bytes
    peak = found.peak_bytes + reserved
    fit = judge(config, peak, found.tiers, hardware, is_dry_run=foreseen is not None)
    return PlanRow(
        preset=preset,
        categories={**found.categories, "overhead": found.categories["overhead"] + reserved},
        tiers={tier: size * per_node for tier, size in found.tiers.items()},
        wire_bytes=sum(sent.values()),
        outside_bytes=sent["outer"] * per_node,
        margin=1 - peak / hardware.gpu_bytes,
        wire_share=wire_share(preset, part, workload, hardware),
        startup_bytes=foreseen.startup_bytes + reserved if foreseen else None,
        time=preset_time(preset, model, workload, shape, device, foreseen),
        **vars(fit),
    )


def _reserved_note(preset: str, foreseen: Foreseen, on: Hardware) -> str:
    """What nvidia-smi will show: the allocator reserves more than the tensors take."""
    shown = foreseen.reserved_bytes + on.context_bytes
    note = (
        f"{preset}: torch's allocator will reserve about {format_bytes(foreseen.reserved_bytes)} for "
        f"{format_bytes(foreseen.peak_bytes)} of tensors; nvidia-smi shows it with the context, {format_bytes(shown)}"
    )
    if shown > on.gpu_bytes:
        note += ": more than a GPU has, so that it will return pages to the driver in every step, which takes time"
    return note


def _tp_sent_bytes(model: ModelSpec, workload: Workload, foreseen: Mapping[str, Foreseen]) -> int:
    if workload.pp > 1:  # of the stage that sends the most
        return max((each.sent_bytes.get("tp", 0) for each in foreseen.values()), default=0)
    return tp_bytes(model.part(workload.tp), workload)


def _tp_note(tp: int, copies: int, sent: int) -> str:
    held = "the copy" if copies == 1 else f"each of {copies} copies"
    return (
        f"{held} of the model is on {tp} GPUs: a GPU sends {format_bytes(sent)} to the others of its copy in a step, "
        "beside what the table says, so these should be in one node"
    )


def _is_undecided(row: PlanRow) -> bool:
    """Whether arithmetic says no, and a dry run could say yes within the error that arithmetic may have."""
    least = (1 - row.margin) / (1 + headroom(False))
    return not row.fits and not row.is_dry_run and row.is_supported and not row.note and least <= 1 - headroom(True)


def _notes(model: ModelSpec, workload: Workload, rows: Sequence[PlanRow]) -> list[str]:
    notes = [f"{row.preset}: {row.note}" for row in rows if row.note]
    peaks = {row.preset: row.peak_bytes for row in rows}
    if peaks.get("zero3_hybrid", 0) > peaks.get("zero2", math.inf):
        # 6Ψ/n + 12Ψ/W against 2Ψ + 16Ψ/W: with n = 2 never less (test_mesh).
        notes.append(
            "zero3_hybrid needs more than zero2 here: gradients that are added up in fp32 are sharded over the few "
            "GPUs of a node, not over all; it sends less out of the node"
        )
    if model.dimensions is None and model.build is None:
        notes.append("only the size is known: activations and logits are not counted, a unit is assumed to be Ψ/32")
    elif model.dimensions is None and all(row.startup_bytes is None for row in rows):
        notes.append("activations and logits are not counted")
    undecided = [row.preset for row in rows if _is_undecided(row)]
    if undecided:
        remedy = "use --detailed" if model.dimensions is not None else "name the model for a better estimate"
        notes.append(f"{', '.join(undecided)}: so close that arithmetic cannot tell whether it fits; {remedy}")
    large = [row.preset for row in rows if row.startup_bytes is not None and row.startup_bytes > row.peak_bytes]
    if large:
        notes.append(
            f"{', '.join(large)}: building the whole model on the device first would need more memory than training; "
            "build it on the CPU or with shardwise.deferred_init()"
        )
    if model.frozen and workload.lora:
        notes.append(f"{model.trainable / 1e6:.1f} M of {model.parameters / 1e9:.2f} B parameters are trained")
    return notes


def _dry_runs(
    model: ModelSpec, workload: Workload, shape: NodeShape, presets: Sequence[str]
) -> tuple[dict[str, Foreseen], str | None]:
    """The dry run of each preset, in parallel if there are cores for it; and why one failed, if one did."""
    foresee = partial(foresee_stages if workload.pp > 1 else foresee_workload, model, workload, ranks=shape)
    results: dict[str, Callable[[], Foreseen]]
    with contextlib.ExitStack() as stack:
        # A process that has started CUDA cannot fork: its children find CUDA uninitialized and fail.
        if cores() < 2 or len(presets) < 2 or torch.cuda.is_initialized():
            results = {preset: partial(foresee, preset) for preset in presets}
        else:
            # Forked: a fresh interpreter would import torch again, which takes as long as a dry run.
            pool = stack.enter_context(ProcessPoolExecutor(min(cores(), len(presets)), get_context("fork")))
            # Offloading presets take longest, so they start first.
            order = sorted(presets, key=lambda preset: PRESETS[preset].optim.tier != "device", reverse=True)
            results = {preset: pool.submit(foresee, preset).result for preset in order}
        foreseen: dict[str, Foreseen] = {}
        failure = None
        for preset in presets:
            try:
                foreseen[preset] = results[preset]()
            except Untraceable as error:
                failure = failure or str(error)
    return foreseen, failure
