"""`shardwise env --calibrate`: measure this machine's device once, and keep what `plan` needs of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import typer
from torch.nn import functional as F

from shardwise.config import Config
from shardwise.dry_run.dry_run import Scenario, dry_run
from shardwise.dry_run.kernels import kernels_for
from shardwise.machine import env
from shardwise.models import loading
from shardwise.models.built_in import GPT
from shardwise.partition.policy import DTYPE_NAMES
from shardwise.timing.calibrate import SIDES, SIZES, call_s, grid, measure_forms, measure_fresh, measure_issue_s
from shardwise.timing.device import (
    FREE,
    PUBLISHED,
    DeviceTimes,
    Link,
    Product,
    device_name,
    keep_calibration,
    published,
)
from shardwise.timing.forms import Form
from shardwise.timing.tape import Tape

_CPU_SIDES, _CPU_SIZES = SIDES[:3], SIZES[:-1]
_ATTENTION = {"cuda": (1, 16, 4096, 128), "cpu": (1, 8, 512, 64)}
_PRESETS = ("zero1", "zero3")


def run(models: Sequence[str], disk: Path | None = None) -> None:
    """Calibrate, keep, and say where."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = calibrate(device, models, disk)
    path = keep_calibration(found, {**env.made(), "versions": env.versions()})
    best = {each.dtype: each.rate for each in sorted(found.products, key=lambda each: each.rate)}
    for dtype, rate in best.items():
        typer.echo(f"  {dtype + ' products':<24}{rate / 1e12:.3g} TFLOP/s")
    size, seconds = found.memory[-1]
    typer.echo(f"  {'element-wise':<24}{size / seconds / 1e9:.3g} GB/s")
    typer.echo(f"  {'host, an operator':<24}{found.issue_s * 1e6:.3g} us")
    typer.echo(f"{found.name}: {len(found.kernels)} kernels in {path}")


def calibrate(device: torch.device, models: Sequence[str] = (), disk: Path | None = None) -> DeviceTimes:
    """The kernels, copies and links of a device. `models` are built-in ones, whose kernels are measured as they are."""
    is_cuda = device.type == "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if is_cuda else (torch.float32,)
    forms = grid(dtypes, *((SIDES, SIZES) if is_cuda else (_CPU_SIDES, _CPU_SIZES)))
    kernels = measure_forms([*forms, *(form for name in models for form in _forms_of(name, device))], device)
    copies = env.host_device_gbs()
    links = env.device_links_gbs().values()
    name, disks = device_name(), env.disk_gbs(disk).values() if disk is not None else ()
    sheet = next((published(each) for each in PUBLISHED if each in name.lower().replace(" ", "")), None)
    host_link = copies["both at once"] / 2 * 1e9 if copies else FREE
    return DeviceTimes(
        name=name,
        source=f"{name}, calibrated on {env.made()['date']} with torch {torch.__version__}",
        products=_products(forms, kernels),
        attention={
            (DTYPE_NAMES[dtype], side): rate for dtype in dtypes for side, rate in _attention(dtype, device).items()
        },
        memory=tuple((float(form.size_bytes), kernels[form.key]) for form in forms if not form.flops),
        inner=Link(min(links) * 1e9 if links else FREE, 15e-6, 2e-6),
        outer=sheet.outer if sheet else Link(FREE),
        up=host_link,
        down=host_link,
        disk=min(disks) * 1e9 if disks else FREE,
        peak=sheet.peak if sheet else {},
        kernels=kernels,
        issue_s=measure_issue_s(_tiny_step(device), device),
        is_ahead=is_cuda,
        fresh=FREE if is_cuda else measure_fresh(device),
    )


def _products(forms: Sequence[Form], kernels: dict[str, float]) -> tuple[Product, ...]:
    return tuple(
        Product(form.dtype, *form.product[:3], form.flops / kernels[form.key]) for form in forms if form.product
    )


def _attention(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Operations a second of causal attention, counted as if it were not causal."""
    shape = _ATTENTION[device.type]
    batch, heads, length, size = shape
    query, key, value = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    grad = torch.ones_like(out)
    forward = call_s(partial(F.scaled_dot_product_attention, query, key, value, is_causal=True), device)
    backward = call_s(lambda: torch.autograd.grad(out, (query, key, value), grad, retain_graph=True), device)
    operations = 4 * batch * heads * length * length * size
    return {"forward": operations / forward, "backward": 2.5 * operations / backward}


def _forms_of(model: str, device: torch.device) -> list[Form]:
    """The kernels of a built-in model on one rank."""
    found: dict[str, Form] = {}
    for preset in _PRESETS:
        tape = Tape(keeps_calls=True)
        config = Config.load({"preset": preset, "precision": {"compute": "bf16" if device.type == "cuda" else "fp32"}})
        dry_run(Scenario(partial(loading.load, model, "cpu"), config, 1, kernels_for(device.type)), tape)
        found |= {form.key: form for entry in tape.entries for form in entry.kernels}
    return list(found.values())


def _tiny_step(device: torch.device) -> Callable[[], object]:
    model = GPT(32, 4, 2, 64, 8).to(device)
    tokens = torch.zeros(1, 9, dtype=torch.long, device=device)
    return lambda: model(tokens).backward()
