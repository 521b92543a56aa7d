"""Time of a detailed plan: `shardwise plan llama3-8b --detailed` with all presets, each run in a fresh process.

Run on a quiet machine: `python benchmarks/plan_time.py` writes results/DATE-plan-time.json.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from shardwise.machine import env

COMMAND = ["plan", "llama3-8b", "--gpus", "8", "--host-memory", "2TB", "--detailed"]
RUNS = 3


def timed() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "shardwise", *COMMAND], check=True)
    return time.perf_counter() - started


def main() -> None:
    load = os.getloadavg()[0]
    walls_s = [timed() for _ in range(RUNS)]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = {
        **env.made(),
        "versions": env.versions(),
        "command": f"shardwise {' '.join(COMMAND)}",
        "wall_s": round(median(walls_s), 1),
        "walls_s": [round(wall_s, 1) for wall_s in walls_s],
        "cpu_s": round((used.ru_utime + used.ru_stime) / RUNS, 1),
        "largest_process_bytes": used.ru_maxrss * 1024,
        "load_before": round(load, 2),
    }
    folder = Path(os.environ.get("OUT", Path(__file__).parent / "results"))
    (folder / f"{result['date']}-plan-time.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['wall_s']} s, {result['cpu_s']} s of CPU time, at a load of {load:.1f} before")


if __name__ == "__main__":
    main()
