"""How the folder with the module `deepspeed` gets on Python's path, and what is in the way. Needs no torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from shardwise._version import __version__
from shardwise.errors import CompatibilityError

FOLDER = Path(__file__).parent / "path"
DEEPSPEED_VERSION = "0.16.3"
"""Below 0.16.4 and 0.18.2, from which clients offer tensor and sequence parallelism through DeepSpeed."""
VARIABLE = "SHARDWISE_AS_DEEPSPEED"
FORCE = "force"
"""The value of `VARIABLE` that goes before an installed DeepSpeed."""
_CLIENTS = ("transformers", "accelerate", "trl", "peft", "lightning", "pytorch_lightning", "swift", "llamafactory")
_STARTUP = "shardwise-as-deepspeed.pth"
_STARTUP_CODE = (
    f"import os; os.environ.get({VARIABLE!r}) and "
    "__import__('shardwise.compat.activation', fromlist=['start_up']).start_up()\n"
)

# DeepSpeed's `git_version_info`
version = f"{DEEPSPEED_VERSION}+shardwise.{__version__}"
git_hash = git_branch = None
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}


def activate() -> None:
    """Have `import deepspeed` find shardwise's module from now on, here and in child processes.

    Clients look for DeepSpeed when they are imported, so it is too late after them.
    """
    if is_active():
        return
    if (other := sys.modules.get("deepspeed")) is not None:
        raise CompatibilityError(
            f"deepspeed was imported already, from {other.__file__}: make `import shardwise.as_deepspeed` the first "
            "import of the script"
        )
    for client in _CLIENTS:
        if client in sys.modules:
            raise CompatibilityError(
                f"{client} was imported before shardwise.as_deepspeed and has looked for DeepSpeed already: make "
                "`import shardwise.as_deepspeed` the first import of the script"
            )
    sys.path.insert(0, str(FOLDER))
    os.environ.update(environment(os.environ))
    importlib.invalidate_caches()


def is_active() -> bool:
    return str(FOLDER) in sys.path


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables under which a command, and all that it starts, finds shardwise's `deepspeed`."""
    source = str(Path(__file__).parents[2])
    first = [str(FOLDER)]
    # Where shardwise itself is imported from a folder on the path, the command has to find that as well.
    own = [source] if source not in (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]) else []
    before = [part for part in given.get("PYTHONPATH", "").split(os.pathsep) if part and part not in first + own]
    path = [str(FOLDER / "bin"), str(Path(sys.executable).parent), given.get("PATH", "")]
    return {"PYTHONPATH": os.pathsep.join(first + own + before), "PATH": os.pathsep.join(filter(None, path))}


def installed_deepspeed() -> str | None:
    """The version of a DeepSpeed that is installed beside shardwise's; None if there is none."""
    others = [entry for entry in sys.path if entry != str(FOLDER)]
    found = next(iter(importlib.metadata.distributions(name="deepspeed", path=others)), None)
    return found.version if found is not None else None


def check_may_go_first(forced: bool, how: str) -> None:
    """Raise if a DeepSpeed is installed and `forced` is not set; `how` says how to set it."""
    version = installed_deepspeed()
    if version is not None and not forced:
        raise CompatibilityError(f"DeepSpeed {version} is installed and would be hidden: {how}, or uninstall it")


def start_up() -> None:
    """What the start-up file runs in processes that have the variable set."""
    found = None if os.environ.get(VARIABLE) == FORCE else installed_deepspeed()
    if found is None:
        activate()
    elif os.environ.get("RANK", "0") == "0":
        print(
            f"shardwise: DeepSpeed {found} is installed and is used; {VARIABLE}={FORCE} puts shardwise in its place",
            file=sys.stderr,
        )


def install() -> str:
    """Write a start-up file, by which the variable works in every Python process of this environment."""
    path = _startup_file()
    path.write_text(_STARTUP_CODE)
    return f"wrote {path}: with {VARIABLE}=1 in the environment, `import deepspeed` is shardwise"


def remove() -> str:
    """Remove the start-up file."""
    path = _startup_file()
    if not path.exists():
        return f"there is no {path}"
    path.unlink()
    return f"removed {path}"


def status() -> str:
    """Whether the start-up file is there, the variable is set, and another DeepSpeed is installed."""
    path, version, value = _startup_file(), installed_deepspeed(), os.environ.get(VARIABLE)
    lines = [
        f"start-up file: {path if path.exists() else 'not installed (shardwise as-deepspeed --install)'}",
        f"{VARIABLE}: {value if value else 'not set'}",
        f"installed DeepSpeed: {version or 'none'}",
    ]
    spec = importlib.util.find_spec("deepspeed")
    lines.append(f"`import deepspeed` here: {spec.origin if spec is not None else 'not found'}")
    return "\n".join(lines)


def _startup_file() -> Path:
    return Path(sysconfig.get_paths()["purelib"]) / _STARTUP
