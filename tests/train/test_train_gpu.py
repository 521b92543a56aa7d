"""`shardwise train` on CUDA. Run on a machine with a GPU: `pytest -m gpu tests/train/test_train_gpu.py`."""

import sys

import pytest
import torch

from shardwise.train.folder import read
from support import run_command

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "arguments", [["--nproc", "1", "--precision", "bf16"], ["--nproc", "2", "--precision", "fp16"]]
)
def test_on_a_gpu(tmp_path, arguments):
    """One rank over NCCL, and two that share the GPU over Gloo; stopped by --steps, then continued."""
    (tmp_path / "text.py").write_text("def f(x):\n    return x + 1\n\n\n" * 200)
    command = [sys.executable, "-m", "shardwise", "train", "text.py", "--size", "nano", "--context", "16"]
    command += ["--device", "cuda", "--sample", "5", "--out", "run", *arguments]
    shown = run_command([*command, "--steps", "10"], cwd=tmp_path, timeout=180).stdout
    assert "(GPU)" in shown
    run_command([*command, "--steps", "14"], cwd=tmp_path, timeout=180)
    rows = read(tmp_path / "run/metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, 15))
    assert rows[-1].loss < rows[0].loss
    assert 0 < rows[-1].memory_bytes <= rows[-1].peak_bytes < 2**30
