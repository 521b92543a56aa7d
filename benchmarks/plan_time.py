"""How long a detailed plan takes: `shardwise plan llama3-8b --detailed`, all presets, in a process of its own.

Run on a quiet machine: `python benchmarks/plan_time.py` writes results/DATE-plan-time.json.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from shardwise import env

COMMAND = ["plan", "llama3-8b", "--gpus", "8", "--host-memory", "2TB", "--detailed"]


def main() -> None:
    load = os.getloadavg()[0]
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "shardwise", *COMMAND], check=True)
    took_s = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = {
        **env.made(),
        "versions": env.versions(),
        "command": f"shardwise {' '.join(COMMAND)}",
        "wall_s": round(took_s, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "load_before": round(load, 2),
    }
    folder = Path(os.environ.get("OUT", Path(__file__).parent / "results"))
    (folder / f"{result['date']}-plan-time.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{took_s:.1f} s, {result['cpu_s']} s of CPU time, at a load of {load:.1f} before")


if __name__ == "__main__":
    main()
