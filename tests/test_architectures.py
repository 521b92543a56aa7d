"""Real architectures of transformers and diffusers: the same bits in every stage, and DDP's losses."""

import pytest

from support import ranks
from support.architectures import ARCHITECTURES, measure

pytest.importorskip("transformers", reason="transformers is the extra hf")
ORDINARY = ["Llama", "Qwen3-MoE", "T5"]
PARAMETERS = [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.full) for name in ARCHITECTURES]


@ranks(2, timeout=110)
@pytest.mark.parametrize("name", PARAMETERS)
def test_trains_with_the_same_bits_in_every_stage_and_the_losses_of_ddp(rank, world_size, name):
    if "diffusion" in name:
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    seen = measure(rank, world_size, name)
    assert seen["equal_bits"], seen
    assert seen["difference"] < 1e-4, seen
