"""Train the architectures of tests/support/architectures.py on two ranks; write a dated result and docs/models.md.

`make architectures` runs it.
"""

import datetime
import json
import os
import subprocess
from pathlib import Path

import diffusers
import torch
import transformers

from support import close_pools, page, run_ranks
from support.architectures import ARCHITECTURES, STEPS, measure

ROOT = Path(__file__).parent.parent


def main() -> None:
    os.environ["SHARDWISE_POISON"] = "1"  # as in the tests
    rows = [run_ranks(measure, 2, name, timeout=300)[0] for name in ARCHITECTURES]
    close_pools()
    result = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "versions": {one.__name__: one.__version__ for one in (torch, transformers, diffusers)},
        "ranks": 2,
        "steps": STEPS,
        "rows": rows,
    }
    (page.RESULTS / f"{result['date']}-architectures.json").write_text(json.dumps(result, indent=1) + "\n")
    page.write()


def commit() -> str:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "src") else "")


if __name__ == "__main__":
    main()
