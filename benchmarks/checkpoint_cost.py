"""Measure time and memory of save, load and export, and of torch.distributed.checkpoint with the same bytes.

    python benchmarks/checkpoint_cost.py --layers 64 --json benchmarks/results/DATE-checkpoint-cost.json

One process, zero3, AdamW in fp32 on `--layers` matrices of 1024 x 1024. `extra_mb` is the peak of anonymous memory
during the operation minus the memory before it. `kept_mb` is the memory after it minus the memory before it (a load
allocates the optimizer's state). `beside_mb`, the temporary memory of the operation, is the peak minus the larger of
the memory before and after it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import shardwise
from shardwise.checkpoint.export import export_checkpoint
from shardwise.machine import env

WIDTH = 1024
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--no-peer", action="store_true", help="leave torch.distributed.checkpoint out")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="shardwise-cost-"))
    rows = []
    try:
        for work in (saving, loading, exporting, exporting_offline, *([] if options.no_peer else [saving_by_dcp])):
            # Each in a new process, so that free heap memory of one does not hide the cost of the next.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                for row in pool.apply(work, (root, options.layers, options.device)):
                    print(json.dumps(row), flush=True)
                    rows.append(row)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if options.json:
        result = {
            **env.made(),
            "versions": env.versions(),
            "device": options.device,
            "layers": options.layers,
            "weights_mb": options.layers * LAYER_BYTES / MB,
            "unit_mb": LAYER_BYTES / MB,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def start(layers: int, device: str, steps: int) -> shardwise.Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(device)
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), "zero3")
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, WIDTH, device=device)).sum())
        engine.step()
    return engine


def saving(root: Path, layers: int, device: str) -> list[dict[str, Any]]:
    engine = start(layers, device, 1)
    rows = [measured("save", lambda: engine.save(root / "ours"), root / "ours")]
    rows.append(
        measured("save, asynchronous: until training continues", lambda: engine.save(root / "async", blocking=False))
    )
    engine.finish_save()
    return rows


def loading(root: Path, layers: int, device: str) -> list[dict[str, Any]]:
    engine = start(layers, device, 0)
    return [measured("load", lambda: engine.load(root / "ours"), root / "ours")]


def exporting(root: Path, layers: int, device: str) -> list[dict[str, Any]]:
    engine = start(layers, device, 1)
    return [measured("export, bf16", lambda: engine.export(root / "live", "bf16"), root / "live")]


def exporting_offline(root: Path, layers: int, device: str) -> list[dict[str, Any]]:
    work = measured(
        "export from a checkpoint, bf16",
        lambda: export_checkpoint(root / "ours", root / "offline", torch.bfloat16),
        root / "offline",
    )
    return [work]


def saving_by_dcp(root: Path, layers: int, device: str) -> list[dict[str, Any]]:
    """The same values as whole tensors: the easy case for it, with one rank and no boxes."""
    engine = start(layers, device, 1)
    values: dict[str, torch.Tensor] = {}
    for name, _ in engine.module.named_parameters():
        values[name] = engine.full_param(name)
        values |= {f"{name}.{key}": value for key, value in engine.full_state(name).items()}
    target = {key: torch.empty_like(value) for key, value in values.items()}
    rows = [
        measured(
            "torch.distributed.checkpoint: save", lambda: dcp.save(values, checkpoint_id=root / "dcp"), root / "dcp"
        )
    ]
    rows.append(measured("torch.distributed.checkpoint: load", lambda: dcp.load(target, checkpoint_id=root / "dcp")))
    return rows


def measured(name: str, work: Callable[[], object], folder: Path | None = None) -> dict[str, Any]:
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    after = anonymous_bytes()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder else None
    return {
        "name": name,
        "seconds": round(seconds, 2),
        "extra_mb": round((max(peak, after) - before) / MB, 1),
        "kept_mb": round((after - before) / MB, 1),
        "beside_mb": round((max(peak, after) - max(before, after)) / MB, 1),
        "size_mb": round(size / MB, 1) if size is not None else None,
    }


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


if __name__ == "__main__":
    main()
