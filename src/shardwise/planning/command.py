"""What `shardwise plan` does around a plan: options into hardware and workload, then table and files."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from shardwise.errors import ConfigError
from shardwise.planning import arithmetic, explain, search, table
from shardwise.planning import hardware as machines
from shardwise.planning.emit import emit, writing
from shardwise.planning.hardware import Hardware, Rates
from shardwise.planning.planner import Plan, plan
from shardwise.planning.workload import DEFAULT_TARGETS, Workload
from shardwise.sizes import parse_bytes, parse_count


@dataclass(frozen=True)
class Output:
    """What is wanted beside the table."""

    as_json: bool = False
    explains: bool = False
    searches: bool = False
    accounting: str | None = None
    emit: Path | None = None
    plot: Path | None = None


def size(text: str | None, option: str) -> int | None:
    """A size of the command line; a ConfigError names the option."""
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def count(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        return parse_count(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def rate(text: str | None, option: str) -> float | None:
    """Bytes per second: 50GB/s, or 400Gb/s, which are bits."""
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
    """What the machine does in a second, as far as it was said."""
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
    """The machine that is described; with `here`, this one, in which what is described replaces what is found."""
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
    """Adapters, if any."""
    if rank is None:
        if targets:
            raise ConfigError("--lora-targets needs --lora RANK")
        return None
    if rank < 1:
        raise ConfigError(f"--lora {rank}: the rank is at least 1")
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
    """Plan, print, and write the files that were asked for."""
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

        with writing("--plot", output.plot):
            draw(made, output.plot)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=table.WIDTH)


def _show(made: Plan, found: list[search.Candidate] | None, output: Output) -> None:
    console = _console()
    console.print(table.render(made))
    if found is not None:
        console.print(search.render(found))
    if output.explains:
        typer.echo("\n" + explain.explain(made))


def _show_states(model: str | None, parameters: int | None, on: Hardware, workload: Workload, output: Output) -> None:
    from shardwise.planning.inputs import find_model

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
    _console().print(table.states(known.parameters, on.gpus, each, output.accounting))
