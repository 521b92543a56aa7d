"""The disk tier on CUDA. Run on a machine with a GPU: `pytest -m gpu tests/test_disk_gpu.py`."""

import tempfile

import torch

from support import matrix, run_ranks
from support.training import PRECISIONS
from test_offload_gpu import PLACEMENTS, pytestmark, train

__all__ = ["pytestmark"]

ON_DISK = {
    "zero1, on disk": ("zero1", {"optim": {"tier": "disk"}}),
    "zero2, on disk": ("zero2", {"optim": {"tier": "disk"}, "grads": {"tier": "host"}}),
    "zero3_nvme": ("zero3", {}),
    "zero3, weights on disk": ("zero3", {"weights": {"tier": "disk"}, "optim": {"tier": "host"}}),
}


def same_bits(rank, world_size, precision, accumulation):
    """Units of 12 M elements in buckets of 4 M and chunks of 2 M, with few and with many buffers on the device."""
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    PLACEMENTS.update(ON_DISK)
    expected = {}
    with tempfile.TemporaryDirectory() as folder:
        for placement, (stage, _) in ON_DISK.items():
            for looks in (False, True):
                if (stage, looks) not in expected:
                    expected[stage, looks] = train(stage, precision, accumulation, rank, looks)
                offload = {
                    "buffer_bytes": 4 * 1024 * 1024 * 16,
                    "buffer_count": 3 if looks else 8,
                    "nvme_path": folder,
                    "host_memory": "0.5GB" if looks else None,
                }
                seen = train(placement, precision, accumulation, rank, looks, offload=offload)
                assert seen == expected[stage, looks], (placement, looks)
    assert len(set(expected["zero3", True])) == 4, "training did not change the weights"


@matrix({"world_size": [1, 2], "accumulation": [1, 2], "precision": list(PRECISIONS)})
def test_the_same_bits_as_on_the_device(world_size, precision, accumulation):
    run_ranks(same_bits, world_size, precision, accumulation, timeout=280)
