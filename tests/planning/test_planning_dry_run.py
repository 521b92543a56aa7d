"""The dry run predicts what real runs measure: the same peak, the same bytes sent."""

import gc
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.compare import Settings
from shardwise.compare.job import CompareJob, CompareRow
from shardwise.compare.session import foresee_settings
from shardwise.compare.worker import Worker
from shardwise.config import Config
from shardwise.dry_run.comm import DryComm
from shardwise.dry_run.dry_run import Scenario, Untraceable, dry_run, foresee, foresee_workload
from shardwise.engine.engine import Engine
from shardwise.models.built_in import BUILT_IN, GPT
from shardwise.models.dimensions import Dimensions
from shardwise.models.workload import Workload, from_dimensions
from support import ranks

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STAGES, OFFLOAD = RESULTS / "2026-11-15-gpu-stages.json", RESULTS / "2026-11-16-gpu-offload-zero3.json"
CASES = [
    (Settings("mlp-100k", 2, "fp32"), "zero0"),
    (Settings("mlp-100k", 2, "bf16"), "zero3"),
    (Settings("gpt-1m", 2, "fp16", accumulate=2), "zero2"),
    (Settings("gpt-1m", 2, "fp32"), "zero3"),
    (Settings("gpt-1m", 3, "fp32"), "zero1"),
    (Settings("gpt-1m", 3, "fp32"), "zero2"),
    (Settings("mlp-100k", 3, "bf16", accumulate=2), "zero3"),
    (Settings("gpt-1m", 2, "bf16"), "zero2_offload"),
    (Settings("mlp-100k", 2, "fp32", accumulate=2), "zero3_offload"),
    (Settings("mlp-100k", 3, "fp16"), "zero1_offload"),
]


def scenario(model, preset="zero3", world_size=2):
    return Scenario(lambda: (model, lambda rank, step: {"x": torch.ones(2, 8)}), Config.load(preset), world_size)


@ranks(2, 3)
def test_the_peak_is_the_measured_one(rank, world_size):
    for settings, preset in [case for case in CASES if case[0].world_size == world_size]:
        check_peak(settings, preset, rank)


def check_peak(settings, preset, rank):
    gc.collect()  # garbage of an earlier test would be freed in the middle of this one
    seen = Worker(CompareJob(settings, CompareRow(preset), rank)).observe()
    shared = [foresee_settings(settings, preset) if rank == 0 else None]
    dist.broadcast_object_list(shared)
    (foreseen,) = shared
    peak = torch.tensor([seen["peak_bytes"]])
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    assert foreseen.peak_bytes == pytest.approx(peak.item(), rel=0.01), (settings, preset)
    sent = sum(foreseen.sent_bytes.get(kind, 0) for kind in ("gather", "reduce"))
    assert sent == seen["wire_bytes_per_step"]["gather"] + seen["wire_bytes_per_step"]["reduce"]


@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero3"])
def test_the_peak_on_a_gpu_is_the_measured_one(preset):
    """Compared with figures of an H200: the dry run needs no GPU to predict them."""
    rows = [row for run in json.loads(STAGES.read_text())["runs"] for row in run["rows"]]
    measured = next(row["peak_mib"] for row in rows if row["row"] == preset and row["precision"] == "fp16")
    foreseen = foresee_settings(Settings("mlp-0.5b", 2, "fp16", "cuda"), preset)
    assert foreseen.peak_bytes / 2**20 == pytest.approx(measured, rel=0.003)
    assert sum(foreseen.categories.values()) == foreseen.peak_bytes
    assert foreseen.categories["overhead"] == 64 << 20


def test_states_on_the_host_of_a_gpu_are_the_measured_ones():
    """The same for offload: device, host and moved bytes of 2.68 B parameters on one H200."""
    rows = [row for run in json.loads(OFFLOAD.read_text())["runs"] for row in run["rows"]]
    measured = next(row for row in rows if row["row"] == "zero3_offload")
    settings = {"precision": {"compute": "bf16"}, "gradients": {"clip_norm": 1.0}, "checkpointing": {"enabled": True}}
    foreseen = foresee(offloaded_gpt, {"preset": "zero3_offload", **settings}, world_size=1, device="cuda")
    # When this was measured, two buffers of the pool (64 MiB each) were freed after the loss, not before it.
    assert foreseen.peak_bytes / 2**30 == pytest.approx(measured["peak_gib"] - 2 / 16, abs=0.01)
    assert foreseen.tiers["host"] / 2**30 == pytest.approx(measured["tier_gib"]["host"], abs=0.01)
    moved = {way: round(size / 1e9, 3) for way, size in foreseen.moved_bytes.items()}
    assert moved == measured["moved_gb_per_step"]


def offloaded_gpt():
    """The model of benchmarks/gpu_offload.py."""
    model = GPT(2560, 32, 20, vocabulary=32000, length=1025)
    return model, lambda rank, step: {"tokens": torch.zeros(8, 1025, dtype=torch.long)}


def test_a_higher_stage_never_holds_more_offloaded_either():
    """With few tokens the peak is in the update. A pool as large as the states would turn the order upside down."""
    small = Dimensions("small", 576, 8, 9, 49152, 1536, kv_heads=3, tied=True)
    workload, presets = Workload(sequence=128), ["zero1_offload", "zero2_offload", "zero3_offload"]
    found = [foresee_workload(from_dimensions(small, None), workload, preset, 2) for preset in presets]
    peaks = [one.peak_bytes for one in found]
    assert peaks == sorted(peaks, reverse=True)


def test_any_number_of_ranks():
    peaks = [foresee_settings(Settings("mlp-100k", ranks, "bf16"), "zero3").peak_bytes for ranks in (2, 5, 64)]
    assert peaks == sorted(peaks, reverse=True)


def test_a_report_shows_what_was_expected():
    with FakeTensorMode():
        model = nn.Linear(8, 8)
        engine = Engine(model, torch.optim.SGD(model.parameters()), Config(), DryComm(0, 2, "cpu"))
    assert engine.report().predicted_peak_bytes is None
    assert "everything, predicted" in str(engine.report())
    assert "engine.expect(" in str(engine.report())
    engine.expect(3 << 20)
    assert re.search(r"everything, predicted +3\.00 MiB", str(engine.report()))


def test_nothing_fake_is_left_behind():
    foresee_settings(Settings("mlp-100k", 2), "zero3")
    model, make_batch = BUILT_IN["mlp-100k"].build(), BUILT_IN["mlp-100k"].make_batch
    assert model(**make_batch(0, 0)).item() > 0


def test_what_needs_values_is_untraceable():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() if x.sum() > 0 else x.sum()

    with pytest.raises(Untraceable, match="DataDependent"):
        dry_run(Scenario(lambda: (Branching(8, 8), lambda rank, step: {"x": torch.ones(2, 8)}), Config(), 1))


def test_a_model_with_values_of_its_own_is_untraceable():
    with pytest.raises(Untraceable, match="'weight' has values of its own"):
        dry_run(scenario(nn.Linear(8, 8)))


def test_no_disk_is_touched(tmp_path):
    config = {"preset": "zero3_nvme", "offload": {"nvme_path": str(tmp_path)}}
    with pytest.raises(Untraceable, match="rest on the disk"):
        foresee(offloaded_gpt, config, world_size=1, device="cuda")
    assert not list(tmp_path.iterdir())
