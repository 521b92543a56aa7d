"""Arithmetic is close to the dry run, for models of which only the dimensions are known."""

import random

import pytest

from shardwise.config.shape import NodeShape
from shardwise.dry_run.dry_run import foresee_workload
from shardwise.estimate.arithmetic import sent_by_axis, tp_bytes
from shardwise.estimate.estimate import estimate
from shardwise.models.catalog import find
from shardwise.models.dimensions import Dimensions, Experts
from shardwise.models.workload import Workload, from_dimensions

DENSE = Dimensions("dense", 1024, 6, 16, 8000, 4096, kv_heads=4)
MIXTURE = Dimensions("mixture", 512, 4, 8, 8000, 2048, experts=Experts(8, 2, 1024))
CASES = [
    (DENSE, "zero1", Workload(sequence=1024, micro_batch=2, checkpointing=False)),
    (DENSE, "zero2", Workload(sequence=512, accumulation=2)),
    (DENSE, "zero3", Workload(sequence=2048)),
    (DENSE, "zero3", Workload(sequence=1024, lora=(8, ("q_proj", "v_proj")))),
    (MIXTURE, "zero3", Workload(sequence=1024)),
    (DENSE, "zero2_offload", Workload(sequence=512)),
    (DENSE, "zero3_offload", Workload(sequence=512)),
    (DENSE, "zero3_hybrid", Workload(sequence=512)),
    (DENSE, "zero3_hybrid", Workload(sequence=512, accumulation=2)),
    (DENSE, "zero1", Workload(sequence=1024, checkpointing=False, tp=4)),
    (DENSE, "zero3", Workload(sequence=512, accumulation=2, tp=2)),
]


@pytest.mark.parametrize(("of", "preset", "workload"), CASES)
def test_arithmetic_is_near_the_dry_run(of, preset, workload):
    model = from_dimensions(of, workload.lora)
    shape = NodeShape(2, 2) if preset == "zero3_hybrid" else NodeShape(1, 4)
    foreseen = foresee_workload(model, workload, preset, shape)
    assert foreseen.parameters == model.parameters
    assert foreseen.trainable == model.trainable
    model = model.part(workload.tp)
    estimated = estimate(model, workload, workload.config(preset), shape)
    assert tp_bytes(model, workload) == foreseen.sent_bytes.get("tp", 0)
    within = 0.15 if "offload" in preset else 0.03
    assert estimated.peak_bytes == pytest.approx(foreseen.peak_bytes, rel=within), (estimated, foreseen)
    if preset == "zero3_hybrid":  # what rests over a node is among them
        assert foreseen.categories["weights"] >= 2 * model.parameters // 2
    sent = sent_by_axis(preset, model, workload, shape)
    for axis, size in foreseen.axis_bytes.items():
        # At most; less the units that the backward finds gathered, of which this model has few.
        assert 0.7 * sent[axis] <= size <= 1.01 * sent[axis], axis


def test_frozen_weights_off_the_device_are_counted_as_in_the_dry_run():
    workload = Workload(sequence=512, lora=(8, ("q_proj", "v_proj")))
    model = from_dimensions(DENSE, workload.lora)
    foreseen = foresee_workload(model, workload, "zero3_offload", 4)
    estimated = estimate(model, workload, workload.config("zero3_offload").for_world_size(4), 4)
    assert estimated.tiers == foreseen.tiers


RESIDENT = ("zero0", "zero1", "zero2", "zero3")


def drawn(seed):
    """A small decoder of an unusual shape, a step of it, and ranks."""
    draw = random.Random(seed)
    heads = draw.choice([2, 4, 8])
    hidden = heads * draw.choice([32, 64])
    layers, vocabulary, width = draw.choice([1, 2, 3, 6]), draw.choice([1000, 4000, 8000]), 4 * hidden
    kind = draw.choice(["mostly vocabulary", "many layers", "wide", "square", "mixture"])
    if kind == "mostly vocabulary":
        layers, vocabulary = draw.choice([1, 2, 4]), draw.choice([32000, 50257])
    elif kind == "many layers":
        layers = draw.choice([12, 20])
    elif kind == "wide":
        hidden, heads, width = 1024, 16, draw.choice([2816, 8192])
    experts = Experts(4, 2, hidden) if kind == "mixture" else None
    form = {"tied": draw.random() < 0.5, "qk_norm": draw.random() < 0.3, "norms": draw.choice([2, 4])}
    of = Dimensions(
        kind, hidden, layers, heads, vocabulary, width, draw.choice([0, heads // 2]), experts=experts, **form
    )
    step = Workload(
        sequence=draw.choice([64, 256, 1024]),
        micro_batch=draw.choice([1, 2]),
        accumulation=draw.choice([1, 4]),
        precision=draw.choice(["bf16", "fp32"]),
        checkpointing=draw.random() < 0.5,
        lora=(draw.choice([4, 16]), ("q_proj", "v_proj")) if draw.random() < 0.3 else None,
    )
    return of, step, draw.choice([1, 2, 3, 8])


def estimated_peaks(of, step, ranks, presets=RESIDENT):
    model = from_dimensions(of, step.lora)
    return [estimate(model, step, step.config(preset), ranks).peak_bytes for preset in presets]


@pytest.mark.parametrize("seed", range(60))
def test_presets_are_in_order(seed):
    of, step, ranks = drawn(seed)
    peaks = estimated_peaks(of, step, ranks)
    assert peaks == sorted(peaks, reverse=True), (of, step, ranks)


@pytest.mark.parametrize(
    ("seed", "presets"),
    [
        (1, ("zero1_offload", "zero2_offload", "zero3_offload")),  # the pool is a large part of the device's memory
        (12, ("zero2_offload", "zero3_offload")),
        (43, ("zero1", "zero2", "zero3")),  # one rank, fp32, several micro-batches
    ],
)
def test_dry_runs_of_presets_are_in_order(seed, presets):
    of, step, ranks = drawn(seed)
    peaks = [foresee_workload(from_dimensions(of, step.lora), step, preset, ranks).peak_bytes for preset in presets]
    assert peaks == sorted(peaks, reverse=True), (of, step, ranks)


@pytest.mark.parametrize("seed", range(4))
def test_arithmetic_is_near_the_dry_run_for_unusual_shapes(seed):
    """48 such cases were off by 0.01 % at the median and 4.1 % at worst."""
    of, step, ranks = drawn(seed)
    model = from_dimensions(of, step.lora)
    for preset, peak in zip(("zero1", "zero3"), estimated_peaks(of, step, ranks, ("zero1", "zero3")), strict=True):
        foreseen = foresee_workload(model, step, preset, ranks)
        assert peak == pytest.approx(foreseen.peak_bytes, rel=0.05), (preset, of, step, ranks)


def test_frozen_weights_of_one_gpu_are_not_held_twice():
    step = Workload(lora=(16, ("q_proj", "v_proj")))
    peaks = estimated_peaks(find("llama3-8b"), step, 1)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == pytest.approx(peaks[0], rel=0.001)
