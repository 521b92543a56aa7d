"""`shardwise plan`: options become hardware and workload, and a plan becomes a table and files."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from shardwise.config import Config
from shardwise.config.presets import NVME_FOLDER, PRESETS, STAGES
from shardwise.errors import ConfigError
from shardwise.planning import arithmetic, report, search
from shardwise.planning import hardware as machines
from shardwise.planning.hardware import Hardware, Rates
from shardwise.planning.planner import plan
from shardwise.planning.report import Plan
from shardwise.planning.workload import DEFAULT_TARGETS, Workload, find_model
from shardwise.sizes import parse_bytes, parse_count

_DEEPSPEED_TIERS = {"host": "cpu", "disk": "nvme"}


@dataclass(frozen=True)
class Output:
    """What to print or write besides the table."""

    as_json: bool = False
    explains: bool = False
    searches: bool = False
    accounting: str | None = None
    emit: Path | None = None
    plot: Path | None = None


def size(text: str | None, option: str) -> int | None:
    """Bytes; a ConfigError names the option."""
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def count(text: str | None, option: str) -> int | None:
    """A number of parameters; a ConfigError names the option."""
    if text is None:
        return None
    try:
        return parse_count(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def rate(text: str | None, option: str) -> float | None:
    """Bytes per second: of 50GB/s, or of 400Gb/s, which are bits."""
    if text is None:
        return None
    amount = re.sub(r"(/s|ps)$", "", text.strip())
    bits = re.fullmatch(r"(.*[kKMGT])b(it)?", amount)
    try:
        found = parse_bytes(bits[1] + "B" if bits else amount)
    except ValueError:
        found = 0
    if not found:
        raise ConfigError(f"{option} {text}: expected bytes or bits a second, such as 50GB/s or 400Gb/s")
    return found / 8 if bits else float(found)


def rates(
    tflops: float | None, gpu_link: str | None, node_link: str | None, host_link: str | None, disk_rate: str | None
) -> Rates:
    """The machine's rates, as far as they are given."""
    if tflops is not None and not 0 < tflops < float("inf"):
        raise ConfigError(f"--tflops {tflops}: more than 0 is needed")
    return Rates(
        operations=None if tflops is None else tflops * 1e12,
        gpu_link=rate(gpu_link, "--gpu-link"),
        node_link=rate(node_link, "--node-link"),
        host_link=rate(host_link, "--host-link"),
        disk=rate(disk_rate, "--disk-rate"),
    )


def hardware(
    gpus: int | None,
    gpu_memory: str | None,
    host_memory: str | None,
    disk: str | None,
    nodes: int,
    here: bool,
    given_rates: Rates,
) -> Hardware:
    """The machine that the options describe. With `here` it is this machine, except for what the options replace."""
    base = machines.here() if here else Hardware()
    known = {name: value for name, value in asdict(given_rates).items() if value is not None}
    base = replace(base, rates=replace(base.rates, **known))
    given: dict[str, Any] = {
        "gpus": gpus,
        "gpu_bytes": size(gpu_memory, "--gpu-memory"),
        "host_bytes": size(host_memory, "--host-memory"),
        "disk_bytes": size(disk, "--disk"),
    }
    return replace(base, nodes=nodes, **{name: value for name, value in given.items() if value is not None})


def lora(rank: int | None, targets: str | None) -> tuple[int, tuple[str, ...]] | None:
    """Rank and targets of adapters, if there are any."""
    if rank is None:
        if targets:
            raise ConfigError("--lora-targets needs --lora RANK")
        return None
    if rank < 1:
        raise ConfigError(f"--lora {rank}: the rank must be at least 1")
    names = tuple(name.strip() for name in targets.split(",") if name.strip()) if targets else DEFAULT_TARGETS
    return rank, names


def run(
    model: str | None,
    params: str | None,
    on: Hardware,
    workload: Workload,
    presets: str | None,
    detailed: bool | None,
    output: Output,
) -> None:
    """Plan, print, and write the requested files."""
    parameters = count(params, "--params")
    if output.accounting is not None:
        _show_states(model, parameters, on, workload, output)
        return
    named = {"presets": [name.strip() for name in presets.split(",")]} if presets else {}
    made = plan(model, params=parameters, hardware=on, workload=workload, detailed=detailed, **named)
    found = search.search(made.model, workload, on) if output.searches else None
    if output.as_json:
        more = {} if found is None else {"search": [asdict(each) for each in found]}
        typer.echo(json.dumps({**made.to_dict(), **more}, indent=1))
    else:
        _show(made, found, output)
    if output.emit is not None:
        for line in emit(made, output.emit, found):
            typer.echo(f"{output.emit}: {line}", err=True)
    if output.plot is not None:
        from shardwise.planning.plot import draw

        with _writing("--plot", output.plot):
            draw(made, output.plot)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=report.WIDTH)


def _show(made: Plan, found: list[search.Candidate] | None, output: Output) -> None:
    console = _console()
    console.print(report.render(made))
    if found is not None:
        console.print(search.render(found))
    if output.explains:
        typer.echo("\n" + report.explain(made))


def _show_states(model: str | None, parameters: int | None, on: Hardware, workload: Workload, output: Output) -> None:
    assert output.accounting is not None
    each = arithmetic.accounting(output.accounting)
    known = find_model(model, parameters, workload)
    if output.as_json:
        states = {
            preset: float(arithmetic.total_bytes(preset, known.parameters, on.gpus, each))
            for preset in arithmetic.STAGES
        }
        typer.echo(json.dumps({"accounting": output.accounting, "state_bytes": states}, indent=1))
        return
    _console().print(report.states(known.parameters, on.gpus, each, output.accounting))


def emit(plan: Plan, path: Path, found: Sequence[search.Candidate] | None = None) -> list[str]:
    """Write the recommended configuration, or the best that a search `found`, for shardwise and DeepSpeed.

    Returns what the plan assumes and the file alone does not bring about.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--emit {path}: there is no folder {path.absolute().parent}")
    if found:
        workload = found[0].workload(plan.workload)
        settings = deepspeed_settings(workload, found[0].preset, found[0].device_memory)
    elif plan.advice.preset is None or found is not None:
        raise ConfigError(f"--emit {path}: {plan.advice.reason}")
    else:
        workload = plan.workload
        settings = deepspeed_settings(workload, plan.advice.preset)
    Config.load(settings)
    with _writing("--emit", path):
        path.write_text(json.dumps(settings, indent=2) + "\n")
    return list(_left_to_do(workload))


@contextlib.contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    """Raise a ConfigError that names the option if the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror or error}") from None


def _left_to_do(workload: Workload) -> Iterator[str]:
    if workload.checkpointing:
        yield "activations are recomputed: this file tells shardwise so; for DeepSpeed, switch it on in the model"
    if workload.lora is not None:
        rank, targets = workload.lora
        yield f"the plan assumes LoRA of rank {rank} on {', '.join(targets)}: add the adapters to the model"


def deepspeed_settings(workload: Workload, preset: str, device_memory: int | None = None) -> dict[str, Any]:
    """The settings of `preset` under DeepSpeed's keys."""
    placement = PRESETS[preset]
    shardings = [(row.weights.sharding, row.grads.sharding, row.optim.sharding) for row in STAGES]
    own = (placement.weights.sharding, placement.grads.sharding, placement.optim.sharding)
    zero: dict[str, Any] = {"stage": shardings.index(own)}
    for key, kind in (("offload_optimizer", placement.optim), ("offload_param", placement.weights)):
        if kind.tier != "device":
            zero[key] = {"device": _DEEPSPEED_TIERS[kind.tier], "pin_memory": True}
            if kind.tier == "disk":
                zero[key]["nvme_path"] = NVME_FOLDER
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
