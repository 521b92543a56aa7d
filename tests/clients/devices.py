"""Where clients run: on the CPU, and with `-m gpu` on CUDA, where two ranks share one GPU over NCCL."""

import os

import pytest
import torch

from support.nccl import nccl_environment

ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CUDA)]


def share_gpu(rank):
    """All ranks compute on GPU 0, with torch's deterministic algorithms. Before anything in the process uses CUDA."""
    os.environ |= {**nccl_environment(rank), "LOCAL_RANK": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    torch.use_deterministic_algorithms(True, warn_only=True)
