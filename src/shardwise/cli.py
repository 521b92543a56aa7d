"""The command line. Each command imports the code behind it only when it runs, so `--help` does not load torch."""

import os
import sys
import warnings
from inspect import Signature
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from shardwise._version import __version__
from shardwise.cli_options import (
    COUNT,
    MOST_THREADS,
    OPTIONAL_PATH,
    PATH,
    Debug,
    PlotCommand,
    location,
    number_or_range,
    path,
    train_parameters,
    within,
)
from shardwise.errors import ShardwiseError
from shardwise.machine.output import make_printable
from shardwise.train.options import options_from, options_of

app = typer.Typer(
    name="shardwise",
    help="Train and run neural networks too large for one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def _shardwise(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train and run neural networks too large for one device."""


@app.command()
def config(
    file: Annotated[str, typer.Argument(help="A preset (zero3), or a native, DeepSpeed or Accelerate file.")],
    debug: Debug = False,
) -> None:
    """Explain a configuration: every value, where it came from, what it costs or saves."""
    from shardwise.config import Config

    typer.echo(Config.load(file).explain())


@app.command(cls=PlotCommand)
def compare(
    model: Annotated[str, typer.Option(help="A built-in model (see --list), or file.py:function.")] = "gpt-26m",
    nproc: Annotated[int, typer.Option(help="Ranks; several may share one GPU.")] = 2,
    presets: Annotated[str, typer.Option(help="Presets of shardwise.")] = "zero0,zero1,zero2,zero3",
    peers: Annotated[str, typer.Option(help="Other systems: ddp, fsdp2, deepspeed, deepspeed-zero3.")] = "",
    steps: Annotated[int, typer.Option(help="Timed steps per row.", callback=within(1, 10**6))] = 20,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step.", callback=within(1, 10**6))] = 1,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    clip: Annotated[
        float, typer.Option(help="Largest gradient norm; 0 disables clipping.", callback=within(0, 1e30))
    ] = 1.0,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Same bits for every unit size.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.", **PATH)] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot to this file (.png, .svg, .pdf; default: compare-MODEL.png).", **OPTIONAL_PATH),
    ] = None,
    list_models: Annotated[bool, typer.Option("--list", help="List the built-in models and exit.")] = False,
    debug: Debug = False,
) -> None:
    """Train the same model under each preset and with peers, and show memory, bytes and time side by side."""
    from shardwise.compare import Settings, command
    from shardwise.models.built_in import BUILT_IN

    if list_models:
        typer.echo("\n".join(f"{name:<12}{entry.summary}" for name, entry in BUILT_IN.items()))
        return
    settings = Settings(model, nproc, precision, device, accumulate, clip or None, deterministic, steps)
    command.run(settings, presets, peers, json, plot)


@app.command(cls=PlotCommand)
def plan(
    model: Annotated[
        str | None, typer.Argument(help="A known model (llama3-8b), config.json, model folder or file.py:function.")
    ] = None,
    params: Annotated[str | None, typer.Option(help="Number of parameters instead of a model: 8e9, 8B.")] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Number of GPUs in all (8), or a range: 8..1024, doubling.",
            metavar="NUMBER",
            callback=number_or_range,
        ),
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of each GPU: 44GB (80GB).")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Host memory of each node.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk space of each node, for NVMe offload.")] = None,
    nodes: Annotated[int, typer.Option(help="Nodes that the GPUs are spread over.", callback=within(None, 10**6))] = 1,
    tp: Annotated[int, typer.Option(help="GPUs that hold one copy of the model (tensor parallel).", **COUNT)] = 1,
    pp: Annotated[int, typer.Option(help="GPUs that the layers are spread over (pipeline).", **COUNT)] = 1,
    schedule: Annotated[
        str, typer.Option(help="With --pp: torch's schedule, such as GPipe or ZBVZeroBubble.")
    ] = "1F1B",
    here: Annotated[bool, typer.Option("--here", help="Use the GPUs, memory, disk and links of this machine.")] = False,
    device: Annotated[
        str | None, typer.Option(help="GPU whose speed to assume: h100, a100, ..., or a calibration's JSON file.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Dollars an hour for a GPU.", callback=within(0, 10**6))] = None,
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s that a GPU reaches in training.", callback=within(None, 1e9))
    ] = None,
    gpu_link: Annotated[str | None, typer.Option(help="Rate from a GPU to the others: 450GB/s, 400Gb/s.")] = None,
    node_link: Annotated[str | None, typer.Option(help="Rate from a node to the others.")] = None,
    host_link: Annotated[str | None, typer.Option(help="Rate between a GPU and its host, each way.")] = None,
    disk_rate: Annotated[str | None, typer.Option(help="Rate of a node's disk.")] = None,
    seq: Annotated[int, typer.Option(help="Tokens per sample.", **COUNT)] = 2048,
    micro_batch: Annotated[int, typer.Option(help="Samples per rank and micro-batch.", **COUNT)] = 1,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step.", **COUNT)] = 1,
    global_batch: Annotated[int | None, typer.Option(help="Samples per step; sets --accumulate.", **COUNT)] = None,
    precision: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="A torch optimizer: AdamW, SGD, ...")] = "AdamW",
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations in the backward.")] = True,
    lora: Annotated[
        int | None, typer.Option(help="Train adapters of this rank on frozen weights.", callback=within(1, 10**6))
    ] = None,
    lora_targets: Annotated[str | None, typer.Option(help="Matrices with adapters (q_proj,v_proj).")] = None,
    presets: Annotated[str | None, typer.Option(help="Only these presets.")] = None,
    detailed: Annotated[
        bool | None, typer.Option(help="Run the engine on fake tensors, or use only arithmetic.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Vary micro-batch, recomputation and resident states too.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show the arithmetic.")] = False,
    inference: Annotated[
        bool, typer.Option("--inference", help="Plan generating with streamed weights instead of training.")
    ] = False,
    batch: Annotated[int, typer.Option(help="With --inference: sequences at a time.", **COUNT)] = 1,
    context: Annotated[int, typer.Option(help="With --inference: tokens of each, prompt included.", **COUNT)] = 2048,
    accounting: Annotated[str | None, typer.Option(help="Model states alone: full, no-master or fp32.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    emit: Annotated[
        Path | None, typer.Option(help="Write the chosen configuration (for DeepSpeed too).", **PATH)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot to this file (.png, .svg, .pdf; default: plan-MODEL.png).", **OPTIONAL_PATH),
    ] = None,
    debug: Debug = False,
) -> None:
    """Predict what every rank will hold, whether it fits, and which preset to use."""
    values = locals()  # every parameter by name
    from shardwise.planning import command

    command.run(values)


@app.command()
def env(
    disk: Annotated[
        Path | None, typer.Option(help="Also measure the disk of this folder (writes 1 GiB).", **PATH)
    ] = None,
    measure: Annotated[bool, typer.Option(help="Measure bandwidths.")] = True,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure kernels, copies and collectives, for `plan`, and keep them.")
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(help="With --calibrate: also the kernels of this built-in model."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show versions, devices, links and bandwidths of this machine, and what is missing."""
    from shardwise.machine.env import inspect

    if calibrate:
        from shardwise.estimate.calibration import run as run_calibration

        run_calibration(model or [], disk)
        return
    found = inspect(disk, measure)
    typer.echo(found.to_json() if json else str(found))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] SCRIPT [ARGS]...",
)
def run(
    context: typer.Context,
    nproc: Annotated[
        int | None,
        typer.Option("-n", "--nproc", help="Processes on this machine (default: 1; under Slurm, as the job asks)."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads per process (default: its share of the cores).", callback=within(1, MOST_THREADS)),
    ] = None,
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="Make `import deepspeed` in the script or command load shardwise.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="With --as-deepspeed: hide an installed DeepSpeed.")] = False,
    debug: Debug = False,
) -> None:
    """Run a script on several processes: torchrun, with the cores divided among them.

    Under Slurm it reads the job's variables: `srun shardwise run train.py`, or without srun in the script of sbatch.

    shardwise run -n 4 train.py --lr 1e-4

    shardwise run --as-deepspeed -- accelerate launch --config_file zero3.yaml train.py
    """
    from shardwise.machine import launch

    if not as_deepspeed:
        launch.run(nproc, context.args, threads)
    from shardwise.compat import activation

    activation.check_may_go_first(force, "pass --force")
    variables = activation.environment(os.environ)
    if launch.is_script(context.args):
        launch.run(nproc, context.args, threads, variables)
    launch.run_program(context.args, variables)


@app.command("as-deepspeed")
def as_deepspeed(
    install: Annotated[bool, typer.Option("--install", help="Make the variable work in this environment.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Undo --install.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show what `import deepspeed` finds (default).")] = False,
    debug: Debug = False,
) -> None:
    """Make `import deepspeed` load shardwise where SHARDWISE_AS_DEEPSPEED=1 is set."""
    from shardwise.compat import activation

    if install:
        typer.echo(activation.install())
    if remove:
        typer.echo(activation.remove())
    if status or not (install or remove):
        typer.echo(activation.status())


def train(**values: Any) -> None:
    """Train a language model. Without arguments: a small one on Python's own sources, in a few minutes.

    Ctrl-C saves and exits; the same command continues. Under torchrun, each process is one rank.
    """
    from shardwise.train import command

    command.run(options_from(values))


train.__signature__ = Signature(list(train_parameters()))  # type: ignore[attr-defined]  # typer reads it
app.command()(train)


@app.command()
def generate(
    model: Annotated[
        str | None, typer.Argument(help="The folder of a Hugging Face model (default: what `shardwise train` wrote).")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt in each line.", **PATH)] = None,
    weights: Annotated[str, typer.Option(help="Where weights rest that the GPU has no room for: host, disk.")] = "auto",
    device_memory: Annotated[str | None, typer.Option(help="Memory of the GPU to use in all: 22GiB (all).")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Host memory for weights.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32; lossy: int8, int4 (default: as stored).")
    ] = None,
    kv: Annotated[str, typer.Option(help="Where keys and values of past tokens rest: device or host.")] = "device",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.", **COUNT)] = 64,
    batch: Annotated[int, typer.Option(help="Prompts at a time.", **COUNT)] = 8,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: the GPU, if there is one).")] = None,
    debug: Debug = False,
) -> None:
    """Continue prompts with a model that need not fit the GPU: weights are streamed from host, disk and other ranks.

    Under torchrun, each process is one rank, which reads its part of the weights and continues its part of the prompts.
    """
    from shardwise.inference import command

    trained = options_of().outputs.out / "export"
    folder = command.check_folder(path(model) if model is not None else None, trained)
    if model is None and prompt is None and prompts is None:
        prompt = options_of().outputs.prompt
    command.run(
        folder,
        command.read_prompts(prompt, prompts),
        weights=weights,
        device_memory=device_memory,
        host_memory=host_memory,
        precision=precision,
        kv=kv,
        max_new_tokens=max_new_tokens,
        batch=batch,
        device=device,
    )


@app.command()
def inspect(
    checkpoint: Annotated[Any, typer.Argument(help="A checkpoint, or a folder of checkpoints.", parser=location)],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare checksums.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON (of one checkpoint).")] = False,
    debug: Debug = False,
) -> None:
    """Show the contents of a checkpoint, and whether it is complete."""
    import json as text

    from shardwise.checkpoint.inspect import describe, summary

    described = describe(checkpoint, verify)
    typer.echo(text.dumps(summary(checkpoint), indent=2) if json else described)


@app.command()
def export(
    checkpoint: Annotated[Any, typer.Argument(help="A checkpoint, or a folder of checkpoints.", parser=location)],
    out: Annotated[Path, typer.Argument(help="A new folder.", parser=path)],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 (default: as trained).")] = None,
    tag: Annotated[str, typer.Option(help="Which checkpoint of the folder.")] = "latest",
    max_file: Annotated[str, typer.Option(help="Largest size of a file.")] = "5GB",
    files_from: Annotated[
        Path | None, typer.Option(help="A folder with tokenizer files and configurations.", **PATH)
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's weights in Hugging Face's format (safetensors, an index). Needs no GPU and little memory."""
    from shardwise.checkpoint.export import export_command

    typer.echo(export_command(checkpoint, out, dtype, tag, max_file, files_from))


@app.command("import-deepspeed")
def import_deepspeed(
    source: Annotated[Path, typer.Argument(help="The folder that DeepSpeed's save_checkpoint wrote.", parser=path)],
    out: Annotated[Path, typer.Argument(help="The folder of checkpoints to write to.", parser=path)],
    tag: Annotated[str | None, typer.Option(help="Which checkpoint (default: the one that `latest` names).")] = None,
    debug: Debug = False,
) -> None:
    """Convert a DeepSpeed ZeRO checkpoint (stages 1 to 3), moments included. Executes no code from it."""
    from shardwise.checkpoint.deepspeed import convert

    typer.echo(f"wrote {convert(source, out, tag)}")


def main() -> None:
    """The entry point of the `shardwise` command. A ShardwiseError becomes one message and exit code 2."""
    warnings.showwarning = _show_warning
    make_printable()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except (ShardwiseError, OSError) as error:
        is_ours = isinstance(error, ShardwiseError)  # a DiskError is an OSError too
        if "--debug" in sys.argv or not (is_ours or _is_output_refused()):
            raise
        reason = error if is_ours else f"nothing can be printed: {cast(OSError, error).strerror}"
        typer.secho(f"error: {reason}", fg="red", err=True)
        raise SystemExit(2) from None


def _is_output_refused() -> bool:
    """Whether standard output cannot be written, as on a full disk. The remaining output is then dropped."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        # Python would try again at exit and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    where = "" if Path(filename).is_relative_to(Path(__file__).parent) else f" ({filename}:{lineno})"
    typer.secho(f"warning: {message}{where}", fg="yellow", err=True)
