"""`shardwise plan`: options become hardware and workload, and a plan becomes a table and files."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from shardwise.checks import check_output_file
from shardwise.config import Config
from shardwise.config.presets import PRESETS, STAGE_PRESETS, STAGES, disk_folder, offloaded
from shardwise.errors import ConfigError
from shardwise.estimate import arithmetic
from shardwise.estimate import hardware as machines
from shardwise.estimate.hardware import Hardware
from shardwise.files import writing
from shardwise.models.workload import DEFAULT_TARGETS, Lora, ModelSpec, Workload, find_model
from shardwise.planning import report, scaling, search
from shardwise.planning.inference import plan_inference
from shardwise.planning.pipelines import about_pipelines
from shardwise.planning.planner import plan
from shardwise.planning.plot import draw_plan, draw_scaling
from shardwise.planning.report import Plan
from shardwise.plotting import plot_path
from shardwise.sizes import parse_bytes, parse_count
from shardwise.tables import console_of
from shardwise.timing.device import DeviceTimes, kept_calibration, load_calibration, published

_SIZES = {"gpu_memory": "gpu_bytes", "host_memory": "host_bytes", "disk": "disk_bytes"}
_RATES = {"gpu_link": "gpu_link", "node_link": "node_link", "host_link": "host_link", "disk_rate": "disk"}
_WORKLOAD = ("micro_batch", "precision", "optimizer", "checkpointing", "tp", "pp", "schedule")
_DEEPSPEED_TIERS = {"host": "cpu", "disk": "nvme"}


def _read(options: Mapping[str, Any], names: Mapping[str, str], read: Callable[[Any], Any]) -> dict[str, Any]:
    """The values of those options that are given, by the new name that `names` has for each.

    A ConfigError names the option that `read` refuses.
    """
    values = {}
    for option, name in names.items():
        if (given := options[option]) is not None:
            try:
                values[name] = read(given)
            except ValueError as error:
                raise ConfigError(f"--{option.replace('_', '-')} {given}: {error}") from None
    return values


def _gpus(text: str) -> int:
    """A number of GPUs; of a range, the first."""
    return int(text.partition("..")[0])


def _operations(tflops: float) -> float:
    if not 0 < tflops < float("inf"):
        raise ValueError("more than 0 is needed")
    return tflops * 1e12


def _rate(text: str) -> float:
    """Bytes per second: of 50GB/s, or of 400Gb/s, which are bits."""
    amount = re.sub(r"(/s|ps)$", "", text.strip())
    bits = re.fullmatch(r"(.*[kKMGT])b(it)?", amount)
    with contextlib.suppress(ValueError):
        if found := parse_bytes(bits[1] + "B" if bits else amount):
            return found / 8 if bits else float(found)
    raise ValueError("expected bytes or bits a second, such as 50GB/s or 400Gb/s")


def _hardware(options: Mapping[str, Any]) -> Hardware:
    """The machine that the options describe. With `here` it is this machine, except for what the options replace."""
    rates = _read(options, {"tflops": "operations"}, _operations) | _read(options, _RATES, _rate)
    sizes = _read(options, _SIZES, parse_bytes) | _read(options, {"gpus": "gpus"}, _gpus)
    base = machines.here() if options["here"] else Hardware()
    return replace(base, nodes=options["nodes"], rates=replace(base.rates, **rates), **sizes)


def _workload(options: Mapping[str, Any], on: Hardware) -> Workload:
    workload = Workload(
        sequence=options["seq"],
        accumulation=options["accumulate"],
        lora=_lora(options["lora"], options["lora_targets"]),
        **{name: options[name] for name in _WORKLOAD},
    )
    total = options["global_batch"]
    copies = on.zero_shape(workload.tp, workload.pp).world_size
    return workload if total is None else workload.for_global_batch(total, copies)


def _lora(rank: int | None, targets: str | None) -> Lora | None:
    if rank is None:
        if targets:
            raise ConfigError("--lora-targets needs --lora RANK")
        return None
    if rank < 1:
        raise ConfigError(f"--lora {rank}: the rank must be at least 1")
    names = tuple(name.strip() for name in targets.split(",") if name.strip()) if targets else DEFAULT_TARGETS
    return rank, names


def run(options: Mapping[str, Any]) -> None:
    """Plan, print, and write the requested files. `options` has the arguments of the command by name."""
    if options["emit"] is not None:
        check_output_file("--emit", options["emit"])
    if options["plot"] is not None:
        options = {**options, "plot": plot_path(options["plot"], f"plan-{_short_name(options)}")}
    on, is_range = _hardware(options), ".." in (options["gpus"] or "")
    workload = _workload({**options, "global_batch": None} if is_range else options, on)
    if workload.pp > 1 and options["search"]:
        raise ConfigError(f"--pp {workload.pp}: --search tries pipelines itself: leave out one of them")
    device = _device(options)
    params = _read(options, {"params": "params"}, parse_count).get("params")
    find = partial(find_model, options["model"], params, workload)
    if is_range:
        _show_scaling(find(), workload, on, options, device)
    elif options["inference"]:
        if workload.tp > 1:
            raise ConfigError(f"--tp {workload.tp}: a stream does not cut models; leave it out of --inference")
        of_training = ("search", "detailed", "emit", "plot", "price", "lora", "presets", "accounting")
        if ignored := [name for name in of_training if options[name]]:
            raise ConfigError(f"--{ignored[0]} is about training, and --inference is not: leave out one of them")
        _show_inference(find(), on, options)
    elif options["accounting"] is not None:
        _show_states(find().part(workload.tp), on.zero_shape(workload.tp, workload.pp).world_size, options)
    else:
        _show_plan(params, workload, on, options, device)


def _show_plan(
    params: int | None, workload: Workload, on: Hardware, options: Mapping[str, Any], device: DeviceTimes | None
) -> None:
    presets = [name.strip() for name in options["presets"].split(",")] if options["presets"] else None
    made = plan(
        options["model"],
        params=params,
        hardware=on,
        workload=workload,
        presets=presets,
        detailed=options["detailed"],
        device=device,
        price=options["price"],
    )
    ranked = search.search(made.model, workload, on, device) if options["search"] else None
    found = None if ranked is None else ranked[: search.COUNT]
    if options["json"]:
        searched = {} if found is None else {"search": [asdict(each) for each in found]}
        typer.echo(json.dumps({**made.to_dict(), **searched}, indent=1))
    else:
        _print(made, ranked, options["explain"])
        if found is not None:
            typer.echo(about_pipelines(made.model, workload, on, found[0].cost if found else None, device))
    if (path := options["emit"]) is not None:
        for line in emit(made, path, found):
            typer.echo(f"{path}: {line}", err=True)
    _plot(partial(draw_plan, made), options)


def _device(options: Mapping[str, Any]) -> DeviceTimes | None:
    """The device that is named; with `here`, this machine's, if it was calibrated."""
    name = options["device"]
    if name is None:
        return kept_calibration() if options["here"] else None
    return load_calibration(Path(name)) if name.endswith(".json") else published(name)


def _show_scaling(
    model: ModelSpec, workload: Workload, on: Hardware, options: Mapping[str, Any], device: DeviceTimes | None
) -> None:
    """All numbers of GPUs of a range."""
    counts = scaling.gpu_counts(options["gpus"])
    refused = [name for name in ("search", "detailed", "emit", "inference", "accounting", "presets") if options[name]]
    if refused or options["nodes"] != 1:
        name = refused[0] if refused else "nodes"
        raise ConfigError(f"--gpus {options['gpus']}: a range cannot be combined with --{name}: leave out one of them")
    if model.dimensions is None:
        raise ConfigError(f"--gpus {options['gpus']}: a range needs a model whose dimensions are known: name one")
    found = scaling.scale(model, workload, counts, on, device, options["global_batch"])
    if options["json"]:
        typer.echo(json.dumps([asdict(point) for point in found.points], indent=1))
    else:
        console_of(scaling.WIDTH).print(scaling.render(found))
    _plot(partial(draw_scaling, found), options)


def _plot(draw: Callable[[Path], None], options: Mapping[str, Any]) -> None:
    if (path := options["plot"]) is not None:
        with writing(path, ConfigError):
            draw(path)
        typer.echo(f"wrote {path}", err=True)


def _short_name(options: Mapping[str, Any]) -> str:
    """What names the model in the name of a file: that of its folder, if it is a folder or a file in one."""
    given = Path(options["model"] or options["params"] or "model").resolve()
    return given.parent.name if given.name == "config.json" else given.name


def _print(made: Plan, ranked: list[search.Candidate] | None, explains: bool) -> None:
    console = console_of(report.WIDTH)
    console.print(report.render(made))
    if ranked is not None:
        console.print(search.render(ranked, made.workload))
    if explains:
        typer.echo("\n" + report.explain(made))


def _show_states(part: ModelSpec, ranks: int, options: Mapping[str, Any]) -> None:
    name = options["accounting"]
    each = arithmetic.accounting(name)
    sizes = {preset: arithmetic.total_bytes(preset, part.parameters, ranks, each) for preset in STAGE_PRESETS}
    if options["json"]:
        states = {preset: float(size) for preset, size in sizes.items()}
        typer.echo(json.dumps({"accounting": name, "state_bytes": states}, indent=1))
    else:
        console_of(report.WIDTH).print(report.states(part.parameters, ranks, each, name, sizes))


def _show_inference(model: ModelSpec, on: Hardware, options: Mapping[str, Any]) -> None:
    if model.dimensions is None:
        raise ConfigError("--inference needs a model whose dimensions are known: name one, or give its config.json")
    made = plan_inference(model.dimensions, on, options["batch"], options["context"], options["precision"])
    typer.echo(json.dumps(made.to_dict(), indent=1) if options["json"] else str(made))


def emit(plan: Plan, path: Path, found: Sequence[search.Candidate] | None = None) -> list[str]:
    """Write the recommended configuration, or the best that a search `found`, for shardwise and DeepSpeed.

    Returns what the plan assumes and the file alone does not bring about.
    """
    check_output_file("--emit", path)
    workload, preset, device_memory = plan.workload, plan.advice.preset, None
    if found:
        workload, preset, device_memory = found[0].workload(workload), found[0].preset, found[0].device_memory
    elif preset is None or found is not None:
        raise ConfigError(f"--emit {path}: {plan.advice.reason}")
    shape = plan.hardware.zero_shape(workload.tp, workload.pp)
    settings = deepspeed_settings(workload, preset, device_memory, shape.per_node)
    Config.load(settings)
    with writing(path, ConfigError):
        path.write_text(json.dumps(settings, indent=2) + "\n")
    return list(_left_to_do(workload))


def _left_to_do(workload: Workload) -> Iterator[str]:
    if workload.checkpointing:
        yield "activations are recomputed: this file tells shardwise so; for DeepSpeed, switch it on in the model"
    if workload.tp > 1:
        yield f"the plan assumes {workload.tp} GPUs for each copy of the model: cut it (docs/tensor-parallel.md)"
    if workload.pp > 1:
        yield f"the plan assumes a pipeline of {workload.pp} GPUs by {workload.schedule}: see docs/pipeline.md"
    if workload.lora is not None:
        rank, targets = workload.lora
        yield f"the plan assumes LoRA of rank {rank} on {', '.join(targets)}: add the adapters to the model"


def deepspeed_settings(
    workload: Workload, preset: str, device_memory: int | None = None, per_node: int = 1
) -> dict[str, Any]:
    """The settings of `preset` under DeepSpeed's keys; `per_node` ranks of ZeRO are on a node."""
    placement = PRESETS[preset]
    if placement == PRESETS["zero3_hybrid"]:
        zero: dict[str, Any] = {"stage": 3, "zero_hpz_partition_size": per_node}
    else:
        zero = {"stage": STAGES.index(offloaded(placement))}  # the row with all kinds on the device
    for key, kind in (("offload_optimizer", placement.optim), ("offload_param", placement.weights)):
        if kind.tier != "device":
            zero[key] = {"device": _DEEPSPEED_TIERS[kind.tier], "pin_memory": True}
            if kind.tier == "disk":
                zero[key]["nvme_path"] = disk_folder()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": workload.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "shardwise": {"checkpointing": workload.checkpointing},
        "optimizer": {"type": workload.optimizer, "params": {"lr": 1e-4}},
    }
    if device_memory is not None:
        settings["shardwise"]["device_memory"] = device_memory
    if workload.precision != "fp32":
        settings[workload.precision] = {"enabled": True}
    return settings
