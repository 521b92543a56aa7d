"""Adapters of PEFT on bases that bitsandbytes and torchao have quantised, on two ranks, in every stage."""

import pytest

from clients import quantized_runs
from support import run_ranks

pytest.importorskip("peft", reason="needs the extra hf")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

WEIGHTS = 2 * (4 * 64 * 64 + 3 * 64 * 128)  # elements of the quantised layers


@pytest.mark.parametrize(
    ("kind", "package", "bits"),
    [
        ("nf4", "bitsandbytes", 4),
        ("nf4 nested", "bitsandbytes", 4),
        ("int8", "bitsandbytes", 8),
        ("torchao int8", "torchao", 8),
        ("torchao float8", "torchao", 8),
    ],
)
def test_adapters_train_alike_in_every_stage_on_a_base_that_rests_sharded(kind, package, bits, tmp_path):
    pytest.importorskip(package, reason=f"{package} is not installed (requirements/clients.txt)")
    options = {"fresh": True, "timeout": 250}
    for found in run_ranks(quantized_runs.run, 2, kind, str(tmp_path), **options):
        assert all(losses == found["losses"]["zero0"] for losses in found["losses"].values()), found["losses"]
        assert set(found["same"].values()) == {(True, True)}, found["same"]
        assert found["resumed zero2"] == found["resumed zero3_offload"] == found["rest"]
        sizes = found["bytes"]
        assert sizes["held"] == sizes["whole"] // 2
        assert WEIGHTS * bits // 8 <= sizes["narrow"] < 1.1 * WEIGHTS * bits // 8
    assert run_ranks(quantized_runs.alone, 1, kind, str(tmp_path), **options) == [True]


def test_qlora_through_shardwise_trainer(tmp_path):
    """A base that transformers quantises when it loads it; under zero3 with activation checkpointing."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (requirements/clients.txt)")
    quantized_runs.save_base(str(tmp_path))
    options = {"fresh": True, "init": False, "torchrun": True, "timeout": 250}
    for found in run_ranks(quantized_runs.by_trainer, 2, str(tmp_path), **options):
        assert found["zero3"]["losses"] == found["zero2"]["losses"]
        assert len(found["zero3"]["losses"]) == 3
        assert WEIGHTS // 2 <= found["zero3"]["packed"] < 1.1 * WEIGHTS // 2
        assert found["zero3"]["mine"] == found["zero3"]["packed"] // 2
        assert found["zero2"]["mine"] == found["zero2"]["packed"]
    assert (tmp_path / "zero3" / "final" / "adapter_model.safetensors").is_file()
