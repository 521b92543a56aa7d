"""Measure one of the cases below and keep it as a dated result: benchmarks/results/DATE-CASE.json and .png.

    python benchmarks/bench.py cpu-gpt-26m

A result carries its commit, versions and hardware. Ratios within a file count; times of two files do not compare.
"""

import sys
from pathlib import Path

from rich.console import Console

from shardwise.compare import Settings, compare, report
from shardwise.compare.job import parse_rows

RESULTS = Path(__file__).parent / "results"
STAGES = "zero0,zero1,zero2,zero3"
CASES = {
    "cpu-gpt-26m": (Settings("gpt-26m", 2, steps=48), STAGES, "ddp,fsdp2,deepspeed"),
    "cpu-small-2000": (Settings("small-2000", 2, steps=40), "zero0,zero3", "ddp,deepspeed-zero3"),
    "cpu-mlp-33m": (Settings("mlp-33m", 2, steps=20), STAGES, "ddp,fsdp2,deepspeed"),
    "gpu-mlp-0.5b": (Settings("mlp-0.5b", 2, "bf16", "cuda", steps=8), STAGES, "fsdp2,deepspeed"),
    "gpu-mlp-0.5b-fp16": (Settings("mlp-0.5b", 2, "fp16", "cuda", steps=8), STAGES, "fsdp2,deepspeed"),
    "gpu-gpt-1.3b": (Settings("gpt-1.3b", 1, "bf16", "cuda", steps=12), STAGES, "ddp,fsdp2,deepspeed"),
}


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in CASES:
        sys.exit(f"usage: python benchmarks/bench.py CASE, where CASE is one of {', '.join(CASES)}")
    settings, presets, peers = CASES[sys.argv[1]]
    comparison = compare(settings, parse_rows(presets, peers), lambda text, done, of: print(f"{done}/{of} {text}"))
    report.show(comparison, Console(width=100))
    stem = RESULTS / f"{comparison.made['date']}-{sys.argv[1]}"
    comparison.save(stem.with_name(stem.name + ".json"))
    report.draw(comparison, stem.with_name(stem.name + ".png"))


if __name__ == "__main__":
    main()
