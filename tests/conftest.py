"""pytest's side of the test support: one setting before torch is imported, and workers that end with the session."""

import os

# Some virtual machines announce AMX and then kill whoever uses it (bf16 matrix products end in SIGILL).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch

from support import close_pools

torch.set_num_threads(1)  # as on the ranks: two cores are shared with them


def pytest_unconfigure(config: pytest.Config) -> None:
    close_pools()
