"""The GPU measurements that `compare` does not make, each a script of its own, kept as dated results.

    python benchmarks/gpu.py single overlap host
    python benchmarks/gpu.py --minutes 9 inference offload-zero3     # where a machine is lent for that long

writes benchmarks/results/DATE-gpu-PART.json: the JSON lines of the scripts, with commit, versions and hardware. The
file is written after every row. A script that is running when the minutes are over is stopped, and the result says so.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.machine import env

HERE = Path(__file__).parent
DAY_S = 24 * 3600.0
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=DAY_S / 60, help="end after so many minutes")
    args = parser.parse_args()
    end = time.monotonic() + args.minutes * 60
    for part in args.parts:
        kept = {**env.made(), "versions": env.versions(), "runs": []}
        for line in PARTS[part]:
            kept["runs"].append({"command": f"python benchmarks/{line}", "rows": []})
            for row in run(line, end - time.monotonic()):
                kept["runs"][-1]["rows"].append(row)
                (results() / f"{kept['date']}-gpu-{part}.json").write_text(json.dumps(kept, indent=1) + "\n")


def results() -> Path:
    """Where dated results go."""
    return Path(os.environ.get("OUT", HERE / "results"))


def run(line: str, limit_s: float = DAY_S) -> Iterator[dict]:
    """The rows of a script, as they come; it is stopped after `limit_s`, with all processes that it started."""
    print(f"== {line}", flush=True)
    if limit_s <= 0:
        yield {"error": "not started: the minutes were over"}
        return
    script, *arguments = line.split()
    command = [sys.executable, str(HERE / script), *arguments]
    found = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        limit = threading.Timer(limit_s, _stop, (process,))
        limit.start()
        try:
            for text in process.stdout:
                print(text, end="", flush=True)
                if text.startswith("{"):
                    found = True
                    yield json.loads(text)
            process.wait()
        finally:
            is_over = not limit.is_alive()
            limit.cancel()
            _stop(process)
    if process.returncode or not found:
        yield {"error": _reason(process.returncode, is_over)}


def _stop(process: subprocess.Popen) -> None:
    """End a script that still runs, and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _reason(exit_code: int, is_over: bool) -> str:
    if is_over:
        return "stopped: the minutes were over"
    return f"exit code {exit_code}" if exit_code else "printed no row"


if __name__ == "__main__":
    main()
