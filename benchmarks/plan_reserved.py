"""What the plan says that torch's allocator reserves, beside what an H200 reserved in runs that were measured before.

    python benchmarks/plan_reserved.py > result.json

The dry runs need no GPU. Each row names the result file of the measured run.
"""

import json
import warnings
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_offload import LENGTH, SIZES, VOCABULARY

from shardwise.config import Config
from shardwise.dry_run.dry_run import Scenario, dry_run
from shardwise.dry_run.kernels import CUDA
from shardwise.models import loading
from shardwise.models.built_in import GPT, ModelAndData

RESULTS = Path(__file__).parent / "results"
GIB = 2**30


def gpt(size: str, batch: int) -> ModelAndData:
    data = torch.zeros(batch, LENGTH + 1, dtype=torch.long)
    return GPT(*SIZES[size], VOCABULARY, LENGTH + 1), lambda rank, step: {"tokens": data}


def measured(file: str, **wanted: Any) -> dict[str, Any]:
    """The row of a result file with these values."""
    rows = [row for run in json.loads((RESULTS / file).read_text())["runs"] for row in run["rows"]]
    return next(row for row in rows if wanted.items() <= row.items())


def cases() -> list[tuple[str, Scenario, dict[str, Any], str]]:
    bf16 = {"precision": {"compute": "bf16"}, "gradients": {"clip_norm": 1.0}}
    found = []
    for preset in ("zero0", "zero1", "zero2", "zero3"):
        file = "2026-11-15-gpu-stages.json"
        row = measured(file, row=preset, precision="bf16")
        build = partial(loading.load, "mlp-0.5b", "cpu")
        found.append((f"0.5 B, two ranks, {preset}", scenario(build, {"preset": preset, **bf16}, 2), row, file))
    for preset, file in (
        ("zero2_offload", "2026-11-16-gpu-offload-pair.json"),
        ("zero3_offload", "2026-11-16-gpu-offload-zero3.json"),
    ):
        config = {"preset": preset, "checkpointing": {"enabled": True}, **bf16}
        row = measured(file, row=preset)
        found.append((f"2.7 B, {preset}", scenario(partial(gpt, "2.7b", 8), config, 1), row, file))
    return found


def scenario(build: Any, config: dict[str, Any], ranks: int) -> Scenario:
    return Scenario(build, Config.load(config), ranks, CUDA)


def main() -> None:
    warnings.simplefilter("ignore")
    rows = []
    for name, each, seen, file in cases():
        foreseen = dry_run(each)
        unit = "gib" if "peak_gib" in seen else "mib"
        scale = GIB if unit == "gib" else 2**20
        peak, reserved = seen[f"peak_{unit}"] * scale, seen[f"reserved_{unit}"] * scale
        rows.append(
            {
                "case": name,
                "measured_in": file,
                "peak_gib": [round(foreseen.peak_bytes / GIB, 3), round(peak / GIB, 3)],
                "reserved_gib": [round(foreseen.reserved_bytes / GIB, 3), round(reserved / GIB, 3)],
                "reserved_error": round(foreseen.reserved_bytes / reserved - 1, 4),
            }
        )
    print(json.dumps({"date": datetime.now().date().isoformat(), "foreseen_and_measured": rows}, indent=1))


if __name__ == "__main__":
    main()
