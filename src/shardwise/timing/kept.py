"""Calibrations as JSON files: in the user's cache folder, one for each kind of device."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.machine.launch import cpu_field
from shardwise.timing.device import DeviceTimes, Link, Product

_SCHEMA = 1


def device_name() -> str:
    """The first GPU of this machine, or its processor."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return cpu_field("model name") or "cpu"


def calibration_path(name: str | None = None) -> Path:
    """Where the calibration of a device is kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"
    return folder / f"calibration-{re.sub(r'[^a-z0-9]+', '-', (name or device_name()).lower()).strip('-')}.json"


def kept_calibration() -> DeviceTimes | None:
    """That of this machine's device, if there is one."""
    path = calibration_path()
    return load_calibration(path) if path.exists() else None


def keep_calibration(device: DeviceTimes, made: dict[str, Any], path: Path | None = None) -> Path:
    """Write a calibration, with what it was `made` with: date, versions, hardware."""
    path = path or calibration_path(device.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = asdict(device)
    data["attention"] = [[*key, rate] for key, rate in device.attention.items()]
    path.write_text(json.dumps({"schema": _SCHEMA, **made, "device": data}, indent=1) + "\n")
    return path


def load_calibration(path: Path) -> DeviceTimes:
    """A calibration from its file."""
    try:
        kept = json.loads(path.read_text())
        if kept["schema"] != _SCHEMA:
            raise ValueError(f"its schema is {kept['schema']}")
        data = kept["device"]
        data["products"] = tuple(Product(*each) for each in data["products"])
        data["attention"] = {(dtype, side): rate for dtype, side, rate in data["attention"]}
        data["memory"] = tuple((size, seconds) for size, seconds in data["memory"])
        data["inner"], data["outer"] = Link(*data["inner"]), Link(*data["outer"])
        return DeviceTimes(**data)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} is no calibration of this version ({error}): make one with `shardwise env --calibrate`"
        ) from None
