"""The command line of `shardwise train`: options by name, made into `Options`."""

from pathlib import Path
from typing import Annotated

import typer

DATA, MODEL, UPDATES, PLACING, OUTPUTS = "Data", "Model", "Training", "Where and how it runs", "Progress and files"


def train(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text files, folders, or one .npy/.bin file of tokens (else: Python's standard library).",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    glob: Annotated[str, typer.Option(help="Which files of folders.", rich_help_panel=DATA)] = "*",
    vocab: Annotated[
        int | None, typer.Option(help="Different tokens in a file of tokens.", rich_help_panel=DATA)
    ] = None,
    held_out: Annotated[float, typer.Option(help="Part of the data that validates.", rich_help_panel=DATA)] = 0.02,
    size: Annotated[str, typer.Option(help="nano, small, 10m, 100m, 1b or 7b.", rich_help_panel=MODEL)] = "small",
    layers: Annotated[int | None, typer.Option(help="Instead of the size's.", rich_help_panel=MODEL)] = None,
    hidden: Annotated[int | None, typer.Option(help="Width.", rich_help_panel=MODEL)] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.", rich_help_panel=MODEL)] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a sequence.", rich_help_panel=MODEL)] = None,
    steps: Annotated[int, typer.Option(help="Updates in all.", rich_help_panel=UPDATES)] = 800,
    batch: Annotated[
        int | None, typer.Option(help="Sequences per step over all ranks (16).", rich_help_panel=UPDATES)
    ] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches per step (1).", rich_help_panel=UPDATES)] = None,
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate (by the model's width).", rich_help_panel=UPDATES)
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="cosine, linear or constant, after the warm-up.", rich_help_panel=UPDATES)
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Steps of rising rate (a twentieth of them).", rich_help_panel=UPDATES)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, order and sample.", rich_help_panel=UPDATES)] = 0,
    config: Annotated[
        str,
        typer.Option(help="A preset, or a native, DeepSpeed or Accelerate file.", rich_help_panel=PLACING),
    ] = "zero3",
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.", rich_help_panel=PLACING)] = None,
    clip: Annotated[
        float | None, typer.Option(help="Largest gradient norm; 0 does not clip (1).", rich_help_panel=PLACING)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=PLACING)] = "auto",
    nproc: Annotated[
        int | None, typer.Option("-n", "--nproc", help="Local ranks (the GPUs, else 2).", rich_help_panel=PLACING)
    ] = None,
    foresee: Annotated[bool, typer.Option(help="Tell the memory of a rank first.", rich_help_panel=PLACING)] = True,
    out: Annotated[Path, typer.Option(help="Folder of the run.", rich_help_panel=OUTPUTS)] = Path("runs/train"),
    resume: Annotated[
        Path | None, typer.Option(help="Start from these checkpoints instead.", rich_help_panel=OUTPUTS)
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the run in --out.", rich_help_panel=OUTPUTS)] = False,
    log_every: Annotated[int | None, typer.Option(help="Steps between lines.", rich_help_panel=OUTPUTS)] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between validations; 0 only at the end.", rich_help_panel=OUTPUTS)
    ] = None,
    eval_samples: Annotated[int, typer.Option(help="Sequences validated on.", rich_help_panel=OUTPUTS)] = 256,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; 0 only at the end.", rich_help_panel=OUTPUTS)
    ] = None,
    keep: Annotated[int, typer.Option(help="Checkpoints kept.", rich_help_panel=OUTPUTS)] = 2,
    plot: Annotated[bool, typer.Option(help="Draw loss and memory.", rich_help_panel=OUTPUTS)] = True,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write for TensorBoard too.", rich_help_panel=OUTPUTS)
    ] = False,
    prompt: Annotated[
        str, typer.Option(help="What the sample begins with.", rich_help_panel=OUTPUTS, show_default=False)
    ] = "import os\n\n\ndef ",
    sample: Annotated[int, typer.Option(help="Tokens of the sample.", rich_help_panel=OUTPUTS)] = 400,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train a language model. Without arguments: a small one on Python's own sources, in a few minutes.

    Ctrl-C saves and leaves; the same command goes on. Under torchrun it is one of torchrun's ranks.
    """
    from shardwise.train import command
    from shardwise.train.options import options_of

    command.run(
        options_of(
            data={"paths": tuple(paths or ()), "glob": glob, "vocab": vocab, "held_out": held_out},
            model={"size": size, "layers": layers, "hidden": hidden, "heads": heads, "context": context},
            updates={
                "steps": steps, "batch": batch, "accumulate": accumulate, "lr": lr, "schedule": schedule,
                "warmup": warmup, "seed": seed,
            },
            placing={"config": config, "precision": precision, "clip": clip, "device": device, "nproc": nproc,
                     "foresee": foresee},
            intervals={"log": log_every, "eval": eval_every, "save": save_every, "eval_samples": eval_samples},
            outputs={
                "out": out, "resume": resume, "fresh": fresh, "keep": keep, "plot": plot, "tensorboard": tensorboard,
                "prompt": prompt, "sample": sample,
            },
            debug=debug,
        )
    )  # fmt: skip
