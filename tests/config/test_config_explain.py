"""explain() and the bill it prints: the formulas of the placement table, computed from placements and dtypes."""

import pytest

from shardwise.config import PRESETS, Config, costs
from shardwise.config.draft import leaves
from shardwise.partition.policy import DTYPES


def formula(preset, tier=None, k=1, **sections):
    config = Config.load({"preset": preset, "precision": {"compute": "bf16"}, "batch": {"accumulation": k}, **sections})
    return costs.formula(costs.resting(config), tier)


@pytest.mark.parametrize(
    ("preset", "one", "several"),
    [
        ("zero0", "16Ψ", "18Ψ"),
        ("zero1", "4Ψ + 12Ψ/W", "6Ψ + 12Ψ/W"),
        ("zero2", "2Ψ + 14Ψ/W", "2Ψ + 16Ψ/W"),
        ("zero3", "14Ψ/W", "16Ψ/W"),
        ("zero3_hybrid", "4Ψ/n + 12Ψ/W", "6Ψ/n + 12Ψ/W"),  # with one micro-batch on nodes: 2Ψ/n + 14Ψ/W (test_mesh)
    ],
)
def test_resting_bytes_are_those_of_the_design(preset, one, several):
    assert formula(preset) == one
    assert formula(preset, k=4) == several


def test_resting_bytes_by_tier():
    assert formula("zero2_offload", "device") == "2Ψ"
    assert formula("zero2_offload", "host") == "14Ψ/W"
    assert formula("zero3_offload", "host") == "14Ψ/W"
    assert formula("zero3_offload", "device") == "0"
    assert formula("zero3_nvme", "disk") == "12Ψ/W"


def test_master_and_weights_on_different_tiers_are_both_kept():
    assert formula("zero3", placement={"optim": {"tier": "host"}}) == "16Ψ/W"


def test_fp32_weights_are_their_own_master():
    assert costs.formula(costs.resting(Config.load("zero0"))) == "16Ψ"
    assert costs.formula(costs.resting(Config.load("zero1"))) == "8Ψ + 8Ψ/W"


def test_moments_follow_the_optimizer():
    assert formula("zero0", optimizer={"name": "SGD"}) == "8Ψ"
    assert formula("zero0", optimizer={"name": "SGD", "params": {"momentum": 0.9}}) == "12Ψ"
    assert formula("zero0", optimizer={"name": "Lion"}) == "12Ψ"


@pytest.mark.parametrize(
    ("preset", "ranks", "gigabytes"),
    [("zero0", 5, 128), ("zero1", 5, 51.2), ("zero2", 5, 38.4), ("zero3", 64, 1.75)],
)
def test_bytes_of_eight_billion_parameters(preset, ranks, gigabytes):
    config = Config.load({"preset": preset, "precision": {"compute": "bf16"}})
    assert costs.resting_bytes(costs.resting(config), 8 * 10**9, ranks) == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize(
    ("preset", "order", "wire"),
    [
        ("zero0", None, "2Ψf"),
        ("zero1", None, "2Ψf"),
        ("zero1", "sharded", "(K + 1)Ψf"),
        ("zero2", None, "(K + 1)Ψf"),
        ("zero3", None, "3KΨf"),
        ("zero3", "local", "(2K + 1)Ψf"),
    ],
)
def test_wire(preset, order, wire):
    assert costs.wire_formula(Config.load({"preset": preset, "gradients": {"order": order}}).placement) == wire


def test_bytes_of_a_dtype_are_those_of_torch():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == costs.DTYPE_BYTES


@pytest.mark.parametrize("preset", PRESETS)
def test_every_effective_value_is_there_in_100_columns(preset):
    config = Config.load({"preset": preset, "precision": {"compute": "fp16"}, "optimizer": {"name": "AdamW"}})
    text = config.explain()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)
    idle = {"zero0", "zero1", "zero2", "zero3", "zero3_hybrid"}
    for path, _, _ in leaves(config):
        section, _, name = path.partition(".")
        unused = (
            section == "scheduler"
            or (section == "offload" and (preset in idle or "aio" in path))
            or section == "placement"
        )
        assert unused or f"  {name} " in text or f"  {name[:20]}" in text, path


def test_origins_and_effects_are_told():
    text = Config.load(
        {
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": False},
            "gradient_clipping": "auto",
        }
    ).explain()
    assert "the placements of zero2" in text
    assert "gradients.reduce_bucket_bytes: derived" in text
    assert "no effect: communication always overlaps" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    assert "file" in rows["reduce_bucket_bytes"]
    assert "2GB" in rows["reduce_bucket_bytes"]
    assert "auto" in rows["clip_norm"]
    assert "default" in rows["prefetch"]


def test_open_accumulation_is_said_to_be_derived():
    text = Config.load({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}).explain()
    assert "derived at W ranks: 24 / (3 W)" in text
