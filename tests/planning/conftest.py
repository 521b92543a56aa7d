"""Dry runs of models on several ranks make a process group of their own, so no other test may have left one."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_process_group():
    if dist.is_initialized():
        dist.destroy_process_group()
