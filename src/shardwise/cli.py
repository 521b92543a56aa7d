"""The command line. Only this file imports typer and rich; every command is a thin shell over the library."""

import sys
import warnings
from pathlib import Path
from typing import Annotated, TextIO

import typer

from shardwise._version import __version__
from shardwise.errors import ConfigError

app = typer.Typer(
    name="shardwise",
    help="Train and run neural networks too large for one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def _shardwise(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
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


def main() -> None:
    """The entry point of the `shardwise` command: a ConfigError is one message and exit code 2."""
    warnings.showwarning = _show_warning
    try:
        app()
    except ConfigError as error:
        if "--debug" in sys.argv:
            raise
        typer.secho(f"error: {error}", fg="red", err=True)
        raise SystemExit(2) from None


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    where = "" if Path(filename).is_relative_to(Path(__file__).parent) else f" ({filename}:{lineno})"
    typer.secho(f"warning: {message}{where}", fg="yellow", err=True)
