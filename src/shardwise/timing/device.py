"""What kernels, copies and collectives take on one kind of device: measured, or from published figures.

A kernel that was measured in just this form takes what it took. Others are interpolated: matrix products and attention
from the rates of the nearest that were measured, everything else from the time that as many bytes take.

Measurements are kept as JSON files in the user's cache folder, one for each kind of device.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import torch

from shardwise.errors import ConfigError
from shardwise.machine.launch import cpu_field
from shardwise.timing.forms import FRESH, Form
from shardwise.timing.tape import Issued
from shardwise.timing.timeline import COMPUTE, Operation

_NEAREST = 3
FREE = math.inf
_SCHEMA = 1


class Link(NamedTuple):
    """How a rank sends to others.

    rate       bytes a second that it sends, while all others do
    latency_s  of an operation between two ranks
    hop_s      more for each further rank
    cores      bytes a second that occupy all cores, which then do not compute; infinite where a device sends by itself
    """

    rate: float
    latency_s: float = 0.0
    hop_s: float = 0.0
    cores: float = FREE

    def seconds(self, size_bytes: float, ranks: int) -> float:
        """A gather or a reduction of `size_bytes` in all, over `ranks` ranks."""
        if ranks < 2:
            return 0.0
        return self.latency_s + self.hop_s * (ranks - 2) + size_bytes * (ranks - 1) / ranks / self.rate

    def stolen_s(self, size_bytes: float, ranks: int) -> float:
        return size_bytes * (ranks - 1) / ranks / self.cores


class Product(NamedTuple):
    """A measured matrix product [rows, depth] x [depth, columns], and the operations a second that it reached."""

    dtype: str
    rows: int
    columns: int
    depth: int
    rate: float


@dataclass(frozen=True)
class DeviceTimes:
    """The kernels and links of a device.

    source     where the figures come from, as plans print it
    peak       operations a second by dtype, by the data sheet: what MFU is a fraction of
    attention  operations a second by dtype and pass (forward, backward)
    memory     seconds of an element-wise kernel by the bytes that it reads and writes, in ascending order
    kernels    seconds of forms that were measured, by key
    issue_s    what the host takes for an operator
    is_ahead   whether the host issues operators ahead of the device; otherwise it computes them itself
    slowdown   of all kernels against these figures
    fresh      bytes of memory a second that are touched for the first time: page faults on the CPU
    spread     the standard deviation of the speed of such devices among each other
    ranks      how many work together: the slowest of them sets the pace
    """

    name: str
    source: str
    products: tuple[Product, ...]
    attention: Mapping[tuple[str, str], float]
    memory: tuple[tuple[float, float], ...]
    inner: Link
    outer: Link
    up: float = FREE
    down: float = FREE
    disk: float = FREE
    peak: Mapping[str, float] = field(default_factory=dict)
    kernels: Mapping[str, float] = field(default_factory=dict)
    issue_s: float = 0.0
    is_ahead: bool = True
    slowdown: float = 1.0
    fresh: float = FREE
    spread: float = 0.0
    ranks: int = 1

    @cached_property
    def pace(self) -> float:
        """What the slowest of the ranks takes for what these figures say takes 1: the expected largest of so many
        normally distributed values (Blom's approximation)."""
        return 1.0 + self.spread * NormalDist().inv_cdf((self.ranks - 0.375) / (self.ranks + 0.25))

    @cached_property
    def _known(self) -> dict[Form, float]:
        return {}

    def kernel_s(self, form: Form) -> float:
        """One kernel. Most of a step's repeat in every layer, so each form is priced once."""
        if (seconds := self._known.get(form)) is None:
            seconds = self._known[form] = self._kernel_s(form)
        return seconds

    def _kernel_s(self, form: Form) -> float:
        if (measured := self.kernels.get(form.key)) is not None:
            return measured
        if form.key == FRESH:
            return form.size_bytes / self.fresh
        by_bytes = self.memory_s(form.size_bytes)
        if not form.flops:
            return by_bytes
        return max(by_bytes, form.flops / self._rate(form))

    def memory_s(self, size_bytes: float) -> float:
        """An element-wise kernel: between two measured sizes along the line that joins them."""
        points = self.memory
        if size_bytes <= points[0][0]:
            return points[0][1] * (1.0 if len(points) > 1 else size_bytes / points[0][0])
        at = min(bisect.bisect(points, (size_bytes, 0.0)), len(points) - 1)
        if size_bytes >= points[-1][0]:
            return points[-1][1] * size_bytes / points[-1][0]
        (low, low_s), (high, high_s) = points[at - 1], points[at]
        return low_s + (high_s - low_s) * (size_bytes - low) / (high - low)

    def _rate(self, form: Form) -> float:
        if form.product is None:
            side = "backward" if "backward" in form.key else "forward"
            return self.attention.get((form.dtype, side)) or self._product_rate(form.dtype, (4096, 4096, 4096))
        return self._product_rate(form.dtype, form.product[:3])

    def _product_rate(self, dtype: str, shape: Sequence[int]) -> float:
        """The rates of the nearest products by the ratios of their sides, the nearer ones counting more."""
        known = [each for each in self.products if each.dtype == dtype] or list(self.products)
        near = sorted((_distance(each[1:4], shape), each.rate) for each in known)[:_NEAREST]
        weights = [(1 / (1e-6 + distance), rate) for distance, rate in near]
        return math.exp(sum(w * math.log(rate) for w, rate in weights) / sum(w for w, _ in weights))

    def kernels_s(self, kernels: Mapping[Form, float]) -> float:
        return self.slowdown * self.pace * sum(count * self.kernel_s(form) for form, count in kernels.items())

    def priced(self, entries: Sequence[Issued], start: int) -> list[Operation]:
        """The operations of a tape's step that begins at entry `start`, with their seconds."""
        return [
            self._operation(entry, tuple(number - other for other in entry.after))
            for number, entry in enumerate(entries)
            if number >= start
        ]

    def _operation(self, entry: Issued, after: tuple[int, ...]) -> Operation:
        what, stream, issue_s = entry.what, entry.stream, entry.issues * self.issue_s
        if what in ("up", "down", "disk"):
            seconds = entry.size_bytes / getattr(self, what)
            return Operation(stream, what, seconds, what, after, issue_s if self.is_ahead else 0.0)
        if entry.ranks > 1:
            link, resource = (self.inner, "link") if entry.axis == "inner" else (self.outer, "network")
            seconds, stolen = (each(entry.size_bytes, entry.ranks) for each in (link.seconds, link.stolen_s))
            return Operation(stream, resource, max(seconds, stolen), what, after, stolen_s=stolen)
        seconds = self.kernels_s(entry.kernels)
        if not self.is_ahead:
            return Operation(stream, COMPUTE, seconds + issue_s, what, after)
        if stream == COMPUTE:
            return Operation(stream, COMPUTE, seconds, what, after, issue_s)
        # Not on the compute stream: the device does both at once, and each slows the other down.
        return Operation(stream, stream, seconds, what, after, issue_s, stolen_s=seconds)


def _distance(sides: Sequence[int], shape: Sequence[int]) -> float:
    return math.sqrt(sum(math.log(a / b) ** 2 for a, b in zip(sides, shape, strict=True)))


@dataclass(frozen=True)
class _Sheet:
    """Published figures of a GPU: operations in 16 bits and in fp32, bytes of memory, to its node, of its network card,
    and to its host, all a second and each way."""

    half: float
    single: float
    memory: float
    link: float
    network: float
    host: float


_SHEETS = {
    "a100": _Sheet(312e12, 19.5e12, 2.04e12, 300e9, 25e9, 32e9),
    "h100": _Sheet(989e12, 67e12, 3.35e12, 450e9, 50e9, 64e9),
    "h200": _Sheet(989e12, 67e12, 4.8e12, 450e9, 50e9, 64e9),
    "b200": _Sheet(2250e12, 80e12, 8.0e12, 900e9, 50e9, 64e9),
    "l40s": _Sheet(362e12, 91e12, 0.864e12, 32e9, 25e9, 32e9),
    "rtx4090": _Sheet(165e12, 82e12, 1.01e12, 32e9, 12.5e9, 32e9),
}
"""From the vendor's data sheets, without sparsity; network: a card of 400 (A100, L40S: 200, RTX: 100) Gb/s per GPU."""
_PRODUCTS, _ATTENTION, _MEMORY, _LINKS, _NETWORK, _HOST = 0.7, 0.8, 0.8, 0.8, 0.9, 0.8
"""What is usually reached of these figures; an assumption, which a calibration replaces. Attention counts as if it were
not causal, as torch counts it: half of these operations are never made."""
_LATENCY_S, _HOP_S, _NETWORK_LATENCY_S, _NETWORK_HOP_S = 15e-6, 2e-6, 30e-6, 6e-6
_ISSUE_S = 10e-6
"""What an operator of eager torch takes the host, the engine's part included; about that of an H200's (gpu-host)."""
_KERNEL_S = 3e-6
"""The shortest kernel."""
_SPREAD = 0.01
"""GPUs of one kind differ by a few percent under the same power limit; an assumption."""
_UNCALIBRATED = "two published steps took 1.4 and 1.6 times as long"
"""The factors that calibrations on single steps gave (benchmarks/time_model.py: torchtitan's rows, and an H200's)."""
PUBLISHED = tuple(_SHEETS)


def published(name: str) -> DeviceTimes:
    """A GPU by the figures of its data sheet, and what is usually reached of them.

    >>> published("h100").source
    'published figures of h100, not calibrated: two published steps took 1.4 and 1.6 times as long'
    """
    sheet = _SHEETS.get(name.lower())
    if sheet is None:
        raise ConfigError(f"no figures of a device {name!r}: choose from {', '.join(PUBLISHED)}, or give a calibration")
    peak = {"bf16": sheet.half, "fp16": sheet.half, "fp32": sheet.single}
    large = 1e9
    return DeviceTimes(
        name=name.lower(),
        source=f"published figures of {name.lower()}, not calibrated: {_UNCALIBRATED}",
        products=tuple(Product(dtype, 4096, 4096, 4096, _PRODUCTS * rate) for dtype, rate in peak.items()),
        attention={
            (dtype, side): _ATTENTION * sheet.half for dtype in ("bf16", "fp16") for side in ("forward", "backward")
        },
        memory=((1.0, _KERNEL_S), (large, _KERNEL_S + large / (_MEMORY * sheet.memory))),
        inner=Link(_LINKS * sheet.link, _LATENCY_S, _HOP_S),
        outer=Link(_NETWORK * sheet.network, _NETWORK_LATENCY_S, _NETWORK_HOP_S),
        up=_HOST * sheet.host,
        down=_HOST * sheet.host,
        disk=3e9,
        peak=peak,
        issue_s=_ISSUE_S,
        spread=_SPREAD,
    )


def reaching(device: DeviceTimes, operations: float) -> DeviceTimes:
    """A device that reaches `operations` a second in training, everything but copies and links included."""
    flat = tuple(each._replace(rate=operations) for each in device.products)
    attention = dict.fromkeys(device.attention, operations)
    nothing = ((1.0, 0.0), (1e9, 0.0))
    source = f"{operations / 1e12:g} TFLOP/s as given"
    return replace(device, source=source, products=flat, attention=attention, memory=nothing, kernels={}, issue_s=0.0)


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
