"""The GPU measurements that `compare` does not make, each a script of its own, kept as dated results.

    python benchmarks/gpu.py single overlap host

writes benchmarks/results/DATE-gpu-PART.json: the JSON lines of the scripts, with commit, versions and hardware.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from shardwise.machine import env

HERE = Path(__file__).parent
PARTS = {
    "single": [
        "gpu_single.py --size 0.1b --batch 4 --steps 10 --rounds 15",
        "gpu_single.py --size 0.1b --batch 16 --steps 5 --rounds 7",
        "gpu_single.py --size 1.3b --batch 4 --steps 8",
    ],
    "7b": ["gpu_single.py --size 7b --batch 2 --steps 5"],
    "compile": [
        "gpu_single.py --size 0.1b --batch 16 --steps 10 --compile --rows plain_bf16,zero0,zero1,zero2,zero3",
        "gpu_single.py --size 1.3b --batch 4 --steps 8 --compile --rows plain_bf16,zero0,zero1,zero2,zero3",
    ],
    "overlap": [f"gpu_overlap.py --preset {preset}" for preset in ("zero1", "zero2", "zero3")],
    "offload": [
        "gpu_offload.py --row deepspeed_zero2_offload",
        "gpu_offload.py --row zero2_offload",
        "gpu_offload.py --row zero3_offload",
        'gpu_offload.py --row zero3_offload --name zero3_offload-split --offload {"update":"split"}',
        'gpu_offload.py --row zero2_offload --name zero2_offload-split --offload {"update":"split"}',
        'gpu_offload.py --row zero2_offload --name zero2_offload-24GiB --warm 5 --offload {"device_memory":"24GiB"}',
        "gpu_offload.py --row zero2_offload --name zero2_offload-24GiB-split --warm 5"
        ' --offload {"device_memory":"24GiB","update":"split"}',
        "gpu_offload.py --row fsdp2_offload",
    ],
    "offload-zero3": ["gpu_offload.py --row deepspeed_zero3_offload", "gpu_offload.py --row zero3_offload"],
    "offload-disk": [
        "gpu_offload.py --row zero2 --name zero2-optim-on-disk --warm 1 --steps 2 --probe-gib 8"
        ' --placement {"optim":{"tier":"disk"},"grads":{"tier":"host"}}',
    ],
    "offload-largest": [
        'gpu_offload.py --row zero3_offload --size 17b --batch 4 --warm 2 --steps 2 --offload {"host_memory":"108GiB"}',
    ],
    "offload-largest-disk": [
        "gpu_offload.py --row zero3_nvme --size 20b --batch 4 --warm 1 --steps 1 --probe-gib 4"
        ' --offload {"host_memory":"108GiB","ratio":0.61}',
    ],
    "inference": ["gpu_inference.py"],
    "reserved": [
        "gpu_reserved.py --nproc 2 --limit 1.1",
        "gpu_reserved.py --size 2.7b --batch 8 --length 1024 --presets plain,zero3_offload --limit 1.1",
    ],
    "trainer": ["gpu_trainer.py"],
    "host": ["host_cost.py --device cuda --precision bf16 --steps 20"],
    "stages": [
        "gpu_stages.py --precision fp16 --peers fsdp2,deepspeed --steps 5",
        "gpu_stages.py --precision bf16 --peers fsdp2,deepspeed --steps 5",
    ],
}


def main() -> None:
    if not sys.argv[1:] or not set(sys.argv[1:]) <= set(PARTS):
        sys.exit(f"usage: python benchmarks/gpu.py PART..., where PART is one of {', '.join(PARTS)}")
    results = Path(os.environ.get("OUT", HERE / "results"))
    for part in sys.argv[1:]:
        kept = {**env.made(), "versions": env.versions(), "runs": []}
        for line in PARTS[part]:
            kept["runs"].append({"command": f"python benchmarks/{line}", "rows": []})
            for row in run(line):
                kept["runs"][-1]["rows"].append(row)
                (results / f"{kept['date']}-gpu-{part}.json").write_text(json.dumps(kept, indent=1) + "\n")


def run(line: str) -> Iterator[dict]:
    """The rows of a script, as they come."""
    print(f"== {line}", flush=True)
    script, *arguments = line.split()
    found = False
    with subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        for text in process.stdout:
            print(text, end="", flush=True)
            if text.startswith("{"):
                found = True
                yield json.loads(text)
    if process.returncode or not found:
        yield {"error": f"exit code {process.returncode}" if process.returncode else "printed no row"}


if __name__ == "__main__":
    main()
