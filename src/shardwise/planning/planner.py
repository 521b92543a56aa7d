"""`shardwise.plan`: every preset foreseen, whether it fits, and the one to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from shardwise.config.presets import PRESETS
from shardwise.errors import ConfigError
from shardwise.planning.cost import sent_bytes, wire_share
from shardwise.planning.dry_run import can_be_run
from shardwise.planning.estimate import CATEGORIES, estimate
from shardwise.planning.fit import headroom, is_supported, judge
from shardwise.planning.hardware import Hardware
from shardwise.planning.inputs import find_model
from shardwise.planning.recommend import Advice, advise
from shardwise.planning.workload import Model, Workload


@dataclass(frozen=True)
class Row:
    """One preset. Bytes of one rank; on `host` and `disk`, of one node. `margin` is free memory over capacity,
    `wire_share` the time of sending over that of computing, where the machine's rates are known.

    It `fits` only under its `condition`, where there is one: what was not said of the machine. `note`: why it does not.
    """

    preset: str
    categories: dict[str, int]
    tiers: dict[str, int]
    wire_bytes: int
    margin: float
    fits: bool
    wire_share: float | None = None
    startup_bytes: int | None = None
    note: str = ""
    condition: str = ""
    is_supported: bool = True

    @property
    def is_dry_run(self) -> bool:
        """Else its figures are arithmetic."""
        return self.startup_bytes is not None

    @property
    def peak_bytes(self) -> int:
        return sum(self.categories.values())


@dataclass(frozen=True)
class Plan:
    """All presets on one hardware for one workload."""

    model: Model
    workload: Workload
    hardware: Hardware
    rows: list[Row]
    advice: Advice
    mode: str
    notes: list[str] = field(default_factory=list)

    def row(self, preset: str) -> Row:
        return next(row for row in self.rows if row.preset == preset)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        of = self.model.dimensions
        return {
            "schema": 1,
            "model": {
                "name": self.model.name,
                "parameters": self.model.parameters,
                "trainable": self.model.trainable,
                "dimensions": dataclasses.asdict(of) if of else None,
            },
            "hardware": dataclasses.asdict(self.hardware),
            "workload": dataclasses.asdict(self.workload),
            "mode": self.mode,
            "rows": [{**dataclasses.asdict(row), "peak_bytes": row.peak_bytes} for row in self.rows],
            "advice": dataclasses.asdict(self.advice),
            "notes": self.notes,
        }

    def __str__(self) -> str:
        from shardwise.planning.table import text

        return text(self)


def plan(
    model: str | None = None,
    *,
    params: int | None = None,
    hardware: Hardware | None = None,
    workload: Workload | None = None,
    presets: Sequence[str] = tuple(PRESETS),
    detailed: bool | None = None,
) -> Plan:
    """What every rank will hold at its peak under each preset, before anything is launched.

    `model` is a name that `shardwise.models.catalog` knows, a Hugging Face `config.json` or model folder, or
    `file.py:function`; or else `params` is the number of parameters. `detailed` runs the engine's own code on fake
    tensors, which takes seconds; the default does so for `file.py:function`, of which nothing else is known.

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


def _plan(model: Model, workload: Workload, hardware: Hardware, presets: Sequence[str], detailed: bool) -> Plan:
    notes = []
    seen: dict[str, Any] = {}
    if detailed:
        configs = {preset: workload.config(preset) for preset in presets}
        possible = [preset for preset in presets if is_supported(configs[preset]) and can_be_run(configs[preset])]
        seen, failure = _dry_runs(model, workload, hardware.gpus, possible)
        if failure:
            notes.append(f"no dry run: {failure}; what follows is arithmetic")
    rows = [_row(preset, model, workload, hardware, seen.get(preset)) for preset in presets]
    notes += _notes(model, workload, rows)
    return Plan(model, workload, hardware, rows, advise(rows, model, workload, hardware), _mode(seen), notes)


def _mode(seen: dict[str, Any]) -> str:
    return "detailed" if seen else "analytic"


def _row(preset: str, model: Model, workload: Workload, hardware: Hardware, foreseen: Any) -> Row:
    config = workload.config(preset)
    estimated = estimate(model, workload, config, hardware.gpus)
    split = dict(foreseen.categories if foreseen else estimated.categories)
    split["overhead"] += hardware.reserved_bytes
    per_node = hardware.gpus // hardware.nodes
    of_a_rank = foreseen.tiers if foreseen else estimated.tiers
    peak = sum(split.values())
    fit = judge(config, peak, of_a_rank, hardware, is_dry_run=foreseen is not None)
    return Row(
        preset=preset,
        categories={name: split.get(name, 0) for name in CATEGORIES},
        tiers={tier: size * per_node for tier, size in of_a_rank.items()},
        wire_bytes=sent_bytes(preset, model, workload, hardware.gpus),
        margin=1 - peak / hardware.gpu_bytes,
        fits=fit.fits,
        wire_share=wire_share(preset, model, workload, hardware),
        startup_bytes=foreseen.startup_bytes + hardware.reserved_bytes if foreseen else None,
        note=fit.note,
        condition=fit.condition,
        is_supported=fit.is_supported,
    )


def _is_undecided(row: Row) -> bool:
    """Too large for the headroom of arithmetic, and for that of a dry run only if arithmetic is right."""
    least = (1 - row.margin) / (1 + headroom(False))
    return not row.fits and not row.is_dry_run and row.is_supported and not row.note and least <= 1 - headroom(True)


def _notes(model: Model, workload: Workload, rows: Sequence[Row]) -> list[str]:
    notes = [f"{row.preset}: {row.note}" for row in rows if row.note]
    if model.dimensions is None and model.build is None:
        notes.append("only the size is known: activations and logits are not counted, units are taken as Ψ/32")
    elif model.dimensions is None and all(row.startup_bytes is None for row in rows):
        notes.append("activations and logits are not counted")
    undecided = [row.preset for row in rows if _is_undecided(row)]
    if undecided:
        remedy = "--detailed tells" if model.dimensions is not None else "name the model to know better"
        notes.append(f"{', '.join(undecided)}: so near that arithmetic cannot tell whether it fits; {remedy}")
    large = [row.preset for row in rows if row.startup_bytes is not None and row.startup_bytes > row.peak_bytes]
    if large:
        notes.append(
            f"{', '.join(large)}: building the whole model on the device first would take more than training it; "
            "build it on the CPU or with shardwise.deferred_init()"
        )
    if model.frozen and workload.lora:
        notes.append(f"{model.trainable / 1e6:.1f} M of {model.parameters / 1e9:.2f} B parameters are trained")
    return notes


def _dry_runs(
    model: Model, workload: Workload, world_size: int, presets: Sequence[str]
) -> tuple[dict[str, Any], str | None]:
    """The dry run of each preset, two at a time where there are cores for it; or why there is none."""
    from shardwise.machine.launch import cores
    from shardwise.planning.runs import foresee_workload

    if cores() < 2 or len(presets) < 2:
        found = [foresee_workload(model, workload, preset, world_size) for preset in presets]
    else:
        # Forked: a fresh interpreter would import torch again, which takes as long as a dry run.
        with ProcessPoolExecutor(min(cores(), len(presets)), get_context("fork")) as pool:
            # What takes longest begins first: the more rests elsewhere, the more there is to move.
            order = sorted(presets, key=lambda preset: PRESETS[preset].optim.tier != "device", reverse=True)
            begun = {preset: pool.submit(foresee_workload, model, workload, preset, world_size) for preset in order}
            found = [begun[preset].result() for preset in presets]
    failure = next((each for each in found if isinstance(each, str)), None)
    seen = {preset: each for preset, each in zip(presets, found, strict=True) if not isinstance(each, str)}
    return seen, failure
