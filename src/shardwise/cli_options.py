"""The options of the command line: how values are parsed and checked, and the options that `train` derives."""

from collections.abc import Callable, Iterator
from inspect import Parameter
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from shardwise.checks import MOST_SAMPLES, check_range
from shardwise.train.options import SECTIONS

MOST_THREADS = 4096


def path(text: str | Path) -> Path:
    """A path. An empty one would be the working directory, which an empty variable of a script does not mean."""
    if not str(text).strip():  # a default is a path already
        raise typer.BadParameter("the path is empty")
    return Path(text)


def location(text: Any) -> Any:
    """A path, or the address of an object store."""
    from shardwise.checkpoint.object_store import locate

    return locate(text) if "://" in str(text) else path(text)


class PlotCommand(TyperCommand):
    """A command whose --plot needs no value: without one, it is the current folder (see `plotting.plot_path`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        pairs = zip(args, [*args, "--"][1:], strict=True)
        words = ["--plot=." if word == "--plot" and after.startswith("-") else word for word, after in pairs]
        return super().parse_args(ctx, words)


PATH: dict[str, Any] = {"parser": path, "metavar": "PATH"}
OPTIONAL_PATH = {**PATH, "metavar": "[PATH]"}


def within(least: float | None, most: float) -> Callable[[typer.CallbackParam, Any], Any]:
    """A callback of an option that checks its range. `least` is None where the command itself checks it."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is not None:
            check_range(param.opts[-1], value, least, most)
        return value

    return check


def number_or_range(param: typer.CallbackParam, value: str | None) -> str | None:
    """A callback of an option that takes 8, or 8..1024."""
    try:
        counts = [int(part) for part in (value or "0").split("..")]
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither a number nor a range such as 8..1024") from None
    for count in counts:
        check_range(param.opts[-1], count, None, 10**6)
    return value


COUNT = {"callback": within(1, MOST_SAMPLES)}

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def train_parameters() -> Iterator[Parameter]:
    """A parameter for every field of the options of `train`."""
    special = {
        "paths": typer.Argument(metavar="PATH", show_default=False),
        "nproc": typer.Option("-n", "--nproc"),
        "prompt": typer.Option(show_default=False),
    }
    by_name = Parameter.KEYWORD_ONLY
    for section in SECTIONS.values():
        for name, field in section.model_fields.items():
            is_switch = field.default is False  # without --no-...
            info = special.get(name) or (typer.Option(f"--{name}") if is_switch else typer.Option())
            info.help = field.description
            if Path in (field.annotation, *get_args(field.annotation)):
                info.parser, info.metavar = PATH["parser"], PATH["metavar"]
            info.rich_help_panel = None if name == "paths" else section.model_config["title"]
            parsed: Any = _parsed_type(field.annotation)
            yield Parameter(name, by_name, default=field.default, annotation=Annotated[parsed, info])
    yield Parameter("debug", by_name, default=False, annotation=Debug)


def _parsed_type(kind: Any) -> Any:
    """The type that typer parses. A choice is a string here: the options check it, as they check numbers."""
    if get_origin(kind) is Literal:
        return str
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(map(_parsed_type, get_args(kind)))]  # noqa: UP007  # of a tuple
    return kind
