"""`shardwise.plan`: the peak of every preset, whether it fits, and the preset to take."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from shardwise.config.presets import PRESETS
from shardwise.errors import ConfigError
from shardwise.machine.launch import cores
from shardwise.planning.cost import sent_bytes, wire_share
from shardwise.planning.dry_run import Foreseen, can_dry_run, foresee_workload
from shardwise.planning.estimate import CATEGORIES, estimate
from shardwise.planning.hardware import Hardware
from shardwise.planning.recommend import PlanRow, advise, headroom, is_supported, judge
from shardwise.planning.report import Plan
from shardwise.planning.workload import ModelSpec, Workload, find_model


def plan(
    model: str | None = None,
    *,
    params: int | None = None,
    hardware: Hardware | None = None,
    workload: Workload | None = None,
    presets: Sequence[str] = tuple(PRESETS),
    detailed: bool | None = None,
) -> Plan:
    """What every rank holds at its peak under each preset, before anything is launched.

    `model` is a name that `shardwise.models.catalog` knows, a Hugging Face `config.json` or model folder, or
    `file.py:function`; alternatively `params` is the number of parameters. `detailed` runs the engine's own code on
    fake tensors, which takes seconds. It is the default for `file.py:function`, of which nothing else is known.

    >>> import shardwise
    >>> foreseen = shardwise.plan("llama3-8b")
    >>> foreseen.advice.preset
    'zero1'
    """
    hardware, workload = hardware or Hardware(), workload or Workload()
    unknown = [name for name in presets if name not in PRESETS]
    if unknown:
        raise ConfigError(f"unknown preset {unknown[0]!r}: choose from {', '.join(PRESETS)}")
    known = find_model(model, params, workload)
    if detailed and known.dimensions is None and known.build is None:
        raise ConfigError("a detailed plan needs a model: name one instead of --params")
    return _plan(known, workload, hardware, presets, known.build is not None if detailed is None else detailed)


def _plan(model: ModelSpec, workload: Workload, hardware: Hardware, presets: Sequence[str], detailed: bool) -> Plan:
    notes = []
    foreseen: dict[str, Foreseen] = {}
    if detailed:
        configs = {preset: workload.config(preset) for preset in presets}
        possible = [preset for preset in presets if is_supported(configs[preset]) and can_dry_run(configs[preset])]
        foreseen, failure = _dry_runs(model, workload, hardware.gpus, possible)
        if failure:
            notes.append(f"no dry run: {failure}; the figures come from arithmetic")
    rows = [_row(preset, model, workload, hardware, foreseen.get(preset)) for preset in presets]
    notes += _notes(model, workload, rows)
    mode = "detailed" if foreseen else "analytic"
    return Plan(model, workload, hardware, rows, advise(rows, model, workload, hardware), mode, notes)


def _row(preset: str, model: ModelSpec, workload: Workload, hardware: Hardware, foreseen: Foreseen | None) -> PlanRow:
    config = workload.config(preset)
    found = foreseen or estimate(model, workload, config, hardware.gpus)
    split = dict(found.categories)
    split["overhead"] += hardware.reserved_bytes
    peak = sum(split.values())
    fit = judge(config, peak, found.tiers, hardware, is_dry_run=foreseen is not None)
    return PlanRow(
        preset=preset,
        categories={name: split.get(name, 0) for name in CATEGORIES},
        tiers={tier: size * (hardware.gpus // hardware.nodes) for tier, size in found.tiers.items()},
        wire_bytes=sent_bytes(preset, model, workload, hardware.gpus),
        margin=1 - peak / hardware.gpu_bytes,
        fits=fit.fits,
        wire_share=wire_share(preset, model, workload, hardware),
        startup_bytes=foreseen.startup_bytes + hardware.reserved_bytes if foreseen else None,
        note=fit.note,
        condition=fit.condition,
        is_supported=fit.is_supported,
    )


def _is_undecided(row: PlanRow) -> bool:
    """Whether arithmetic says no, and a dry run could say yes within the error that arithmetic may have."""
    least = (1 - row.margin) / (1 + headroom(False))
    return not row.fits and not row.is_dry_run and row.is_supported and not row.note and least <= 1 - headroom(True)


def _notes(model: ModelSpec, workload: Workload, rows: Sequence[PlanRow]) -> list[str]:
    notes = [f"{row.preset}: {row.note}" for row in rows if row.note]
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
    model: ModelSpec, workload: Workload, world_size: int, presets: Sequence[str]
) -> tuple[dict[str, Foreseen], str | None]:
    """The dry run of each preset, in parallel if there are cores for it; and why one failed, if one did."""
    if cores() < 2 or len(presets) < 2:
        found = [foresee_workload(model, workload, preset, world_size) for preset in presets]
    else:
        # Forked: a fresh interpreter would import torch again, which takes as long as a dry run.
        with ProcessPoolExecutor(min(cores(), len(presets)), get_context("fork")) as pool:
            # Offloading presets take longest, so they start first.
            order = sorted(presets, key=lambda preset: PRESETS[preset].optim.tier != "device", reverse=True)
            begun = {preset: pool.submit(foresee_workload, model, workload, preset, world_size) for preset in order}
            found = [begun[preset].result() for preset in presets]
    failure = next((each for each in found if isinstance(each, str)), None)
    foreseen = {preset: each for preset, each in zip(presets, found, strict=True) if not isinstance(each, str)}
    return foreseen, failure
