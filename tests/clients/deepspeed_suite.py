"""Run DeepSpeed's own unit tests against shardwise's module `deepspeed`.

    python tests/clients/deepspeed_suite.py FOLDER [pytest arguments]

`deepspeed_suite.txt` names the tests that are left out, each with its reason.
"""

import os
import subprocess
import sys
from pathlib import Path

from shardwise.compat import activation
from shardwise.machine.launch import matmul_environment

LEFT_OUT = Path(__file__).with_suffix(".txt")


def left_out() -> list[str]:
    lines = [line for line in LEFT_OUT.read_text().splitlines() if line and not line.startswith("#")]
    return [line.split("    ")[0] for line in lines]


def main() -> int:
    folder, *further = sys.argv[1:]
    environment = {**os.environ, **matmul_environment(), **activation.environment(os.environ)}
    environment |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["DS_UNITTEST_TIMEOUT"] = "120"
    skipped = [word for name in left_out() for word in ("--deselect", name)]
    command = [sys.executable, "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", *skipped, *(further or ["unit"])]
    return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
