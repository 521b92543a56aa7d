"""Ray Train: a worker dies, and Ray's next attempt continues from the last checkpoint (`make test-ray`)."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support import run_command

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not find_spec("ray"), reason="needs Ray, which `make test-ray` installs"),
]
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "ray_train.py"
ENV = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
}


def run(folder: Path, *words: object) -> str:
    command = [sys.executable, EXAMPLE, "--storage", folder / "storage", "--every", "2", *map(str, words)]
    done = run_command(command, cwd=folder, timeout=600, env=ENV)
    return done.stdout + done.stderr


def starts(shown: str) -> set[tuple[int, int]]:
    return {(int(step), int(workers)) for step, workers in re.findall(r"from step (\d+) on (\d) workers", shown)}


def test_a_run_continues_after_a_worker_has_died_and_then_on_more_workers(tmp_path, capsys):
    shown = run(tmp_path, "--workers", 2, "--steps", 8, "--crash", 5)
    assert starts(shown) == {(0, 2), (4, 2)}  # the crash in step 5 lost that step alone
    assert re.search(r"ended with \{'step': 8, .*checkpoint \S+/step-8\n", shown)
    kept = sorted(path.name for path in (tmp_path / "storage" / "shardwise").glob("step-*"))
    assert kept == ["step-6", "step-8"]  # CheckpointConfig(num_to_keep=2)
    later = run(tmp_path, "--workers", 3, "--steps", 10)
    assert starts(later) == {(8, 3)}
    with capsys.disabled():
        for line in (*shown.splitlines(), *later.splitlines()):
            if re.search(r"from step|ended", line):
                print("\n" + line.strip(), end="")
