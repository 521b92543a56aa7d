"""The dry runs of a pipeline's ranks, against four real ones; bubbles by hand."""

import gc
import re
import statistics

import pytest
import torch

import shardwise
from shardwise.dry_run.pipeline import SCHEDULES, bubble
from shardwise.errors import ConfigError
from shardwise.estimate.hardware import Hardware, Rates
from shardwise.models.built_in import GPT, tokens
from shardwise.models.workload import Workload, find_model
from shardwise.observe import StorageObserver
from shardwise.planning.pipelines import about_pipelines, run_micro_batches, with_micro_batches
from support import run_ranks

RUNS = (("GPipe", "zero2", False), ("1F1B", "zero1", False), ("1F1B", "zero3", False))
"""Schedule, preset, and whether sharded weights stay gathered."""
BATCH, LENGTH, HIDDEN, LAYERS, VOCABULARY, MICRO_BATCHES = 2, 64, 128, 8, 128, 4


def build():
    model = GPT(hidden=HIDDEN, layers=LAYERS, heads=4, vocabulary=VOCABULARY, length=LENGTH)
    return model, tokens(BATCH, LENGTH, VOCABULARY)


def foreseen(rank, world_size):
    shape = {"pp": 2, "micro_batches": MICRO_BATCHES, "device": "cpu"}
    found = [
        shardwise.foresee_pipeline(build, preset, 4, schedule=schedule, keep_gathered=keeps, **shape)
        for schedule, preset, keeps in RUNS
    ]
    with pytest.raises(ConfigError, match="give a multiple of 3"):
        shardwise.foresee_pipeline(build, "zero2", 4, pp=3)
    check_plan()
    check_further_micro_batches(shape)
    return [[(each.peak_bytes, each.sent_bytes) for each in pipeline.ranks] for pipeline in found]


def check_further_micro_batches(shape):
    """A plan runs only some of many micro-batches where it knows what the others add."""
    shape = {**shape, "schedule": "Interleaved1F1B"}
    few = run_micro_batches(shape["schedule"], 2, 8)
    assert few == 4
    short, whole = (
        shardwise.foresee_pipeline(build, "zero2", 4, **shape | {"micro_batches": count}).ranks for count in (few, 8)
    )
    for one, all_of_them in zip(short, whole, strict=True):
        further = with_micro_batches(one, shape["schedule"], few, 8)
        assert further.peak_bytes == pytest.approx(all_of_them.peak_bytes, rel=0.01)
        assert further.sent_bytes["pp"] == all_of_them.sent_bytes["pp"]
    assert run_micro_batches("ZBVZeroBubble", 2, 8) == 8


def check_plan():
    """`shardwise plan --pp`: the fullest place, the peaks of all, and what they wait."""
    workload = Workload(pp=2, sequence=128, accumulation=4)
    made = shardwise.plan("llama3.2-1b", hardware=Hardware(gpus=4), workload=workload, presets=["zero1"])
    (row,), (places, sent, waits) = made.rows, made.notes[:3]
    assert row.is_dry_run
    peaks = [float(size) for size in re.findall(r"[\d.]+", places.partition("in GB:")[2].partition("(")[0])]
    assert max(peaks) == pytest.approx((row.peak_bytes - made.hardware.reserved_bytes) / 1e9, abs=0.06)
    assert "to its neighbours in the pipeline" in sent
    assert "1F1B 20%" in waits
    with pytest.raises(ConfigError, match="--pp 3 does not divide 4 GPUs"):
        shardwise.plan("llama3.2-1b", hardware=Hardware(gpus=4), workload=Workload(pp=3, accumulation=4))
    with pytest.raises(ConfigError, match="--pp 2 needs at least as many micro-batches"):
        shardwise.plan("llama3.2-1b", hardware=Hardware(gpus=4), workload=Workload(pp=2))


def measured(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return [observed(mesh, *run) for run in RUNS]


def observed(mesh, schedule, preset, keeps):
    """Peak and bytes sent of a step after the second: the middle one of three."""
    torch.manual_seed(0)
    model, make_batch = build()
    adamw = lambda params: torch.optim.AdamW(params, lr=1e-3)  # noqa: E731
    options = {"schedule": schedule, "micro_batches": MICRO_BATCHES, "keep_gathered": keeps}
    pipe = shardwise.pipeline(model, mesh, adamw, preset, **options)
    del model
    (name,) = make_batch(0, 0)

    def step(number):
        pipe.train_step({name: torch.cat([make_batch(0, number)[name] for _ in range(MICRO_BATCHES)])})

    step(0)
    step(1)
    peaks = []
    for number in range(2, 5):
        gc.collect()
        for engine in pipe.engines.values():
            engine.comm.sent_bytes.clear()
        with StorageObserver() as memory:
            step(number)
        peaks.append(memory.peak_bytes)
    kinds = ("gather", "reduce")
    sent = {kind: sum(each.comm.sent_bytes[kind] for each in pipe.engines.values()) for kind in kinds}
    pipe.destroy()
    return statistics.median(peaks), sent


@pytest.mark.timeout(300)
def test_peaks_and_traffic_of_a_pipelines_ranks_are_the_measured_ones():
    (predicted,) = run_ranks(foreseen, 1, fresh=True, init=False, timeout=200)
    ranks = run_ranks(measured, 4)
    hidden_bytes = BATCH * LENGTH * HIDDEN * 4
    for number, run in enumerate(RUNS):
        for place in range(2):
            peak_bytes, sent = predicted[number][place]
            peaks = [ranks[2 * place + replica][number][0] for replica in range(2)]
            assert peak_bytes == pytest.approx(statistics.mean(peaks), rel=0.03), (run, place, peak_bytes, peaks)
            real = ranks[2 * place][number][1]
            assert {kind: sent[kind] for kind in real} == real, (run, place)
            # The first stage sends its outputs on, the last one gradients back.
            assert sent["pp"] == MICRO_BATCHES * hidden_bytes
    peak_of = {run: [place[0] for place in predicted[number]] for number, run in enumerate(RUNS)}
    first, last = peak_of["1F1B", "zero1", False]
    assert first > last  # the first stage of 1F1B holds the activations of the most micro-batches
    assert all(less < more for less, more in zip(peak_of["1F1B", "zero3", False], (first, last), strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_of_a_schedule(schedule):
    """Of p = 4 ranks and m = 8 micro-batches: (p - 1) / (v m + p - 1) with v stages a rank; less for zero-bubble."""
    share = bubble(schedule, 4, 8)
    if schedule in ("GPipe", "1F1B"):
        assert share == pytest.approx(3 / 11)
    elif schedule in ("Interleaved1F1B", "LoopedBFS"):
        assert share == pytest.approx(3 / 19)
    else:
        assert share < 3 / 19


def test_a_search_says_whether_a_pipeline_would_be_faster():
    workload = Workload(accumulation=8)
    on = Hardware(gpus=64, nodes=8, rates=Rates(node_link=1e9))
    model = find_model("llama3-70b", None, workload)
    assert "No pipeline: the fastest" in about_pipelines(model, workload, on, 0.1)
    assert "A pipeline may be faster" in about_pipelines(model, workload, on, 1e6)
    assert "Nothing fits without a pipeline" in about_pipelines(model, workload, on, None)
    assert "No pipeline was tried" in about_pipelines(find_model(None, 10**9, workload), workload, on, 1.0)
