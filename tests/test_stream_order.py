"""The streams of a GPU are ordered wherever they share memory, checked on the CPU (see `support.stream_order`)."""

import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.config import Config
from shardwise.config.shape import NodeShape
from shardwise.dry_run.comm import DryComm, PipelineRank
from shardwise.dry_run.dry_run import Scenario, build_of, dry_run
from shardwise.dry_run.kernels import CUDA
from shardwise.dry_run.observer import DryHostMemory
from shardwise.inference import streamed_model
from shardwise.inference.start import StreamRequest, _start
from shardwise.models.built_in import GPT
from shardwise.models.dimensions import Dimensions
from shardwise.models.workload import Workload, from_dimensions
from support import matrix, run_ranks
from support.stream_order import HOST, StreamOrder
from test_gather_order import WAYS, WIDTH, Branching

BF16 = {"precision": {"compute": "bf16"}, "gradients": {"clip_norm": 1.0}}
SETTINGS = {
    "fp32": {},
    "bf16": BF16,
    "fp16": {"precision": {"compute": "fp16"}},
    "accumulated": {"batch": {"accumulation": 2}},
    "activations on the host": {"checkpointing": {"enabled": True, "offload": True}, **BF16},
    "no prefetch": {"runtime": {"prefetch": 0}},
    "deep prefetch": {"runtime": {"prefetch": 3}},
}
PRESETS = ["zero0", "zero1", "zero2", "zero3", "zero3_hybrid", "zero1_offload", "zero2_offload", "zero3_offload"]


def gpt():
    tokens = torch.zeros(2, 17, dtype=torch.long)
    return GPT(32, 2, 2, vocabulary=64, length=17), lambda rank, step: {"tokens": tokens}


def branching():
    """Layers that some steps skip, one's output the next one's input."""
    way = WAYS["layers dropped at random"]
    return Branching(), lambda rank, step: {"x": torch.zeros(2, WIDTH), "way": way(rank, step), "hands_on": True}


def follow(config, world_size, nodes=1, build=gpt, order=None, tp=1, pipeline=None):
    shape, order = NodeShape(nodes, world_size // nodes), order or StreamOrder()
    small = {"min_unit_bytes": 1, **config.get("runtime", {})}
    loaded = Config.load({**config, "runtime": small})
    with order.watching():
        dry_run(Scenario(build, loaded, shape, CUDA, tp, pipeline), order)
    return order


@matrix({"preset": PRESETS, "nodes": [(1, 1), (2, 1), (3, 1), (4, 2)], "settings": list(SETTINGS)})
def test_uses_of_the_same_memory_are_ordered(preset, nodes, settings):
    order = follow({"preset": preset, **SETTINGS[settings]}, *nodes)
    assert order.faults == []
    expected = {"compute"}
    expected |= {"gather, inner", "reduce, inner"} if nodes[0] > 1 else set()
    expected |= {"h2d", "update", "d2h"} if preset.endswith("_offload") else set()
    assert expected <= order.streams


@pytest.mark.parametrize("preset", ["zero2", "zero3", "zero3_offload"])
def test_units_that_some_steps_skip(preset):
    order = follow({"preset": preset, "runtime": {"prefetch": 2}, "batch": {"accumulation": 3}}, 2, build=branching)
    assert order.faults == []
    assert "gather, inner" in order.streams


PIPELINES = [
    ("zero2", "GPipe", 1),
    ("zero3", "1F1B", 2),
    ("zero3", "ZBVZeroBubble", 1),
    ("zero3_offload", "Interleaved1F1B", 1),
]


def follow_pipelines(rank, world_size):
    small = from_dimensions(Dimensions("small", 64, 4, 4, 256, 128, kv_heads=4), None)
    build = build_of(small, Workload(sequence=16))
    return {
        (case, place): follow(
            {"preset": case[0], **BF16}, 2, build=build, tp=case[2], pipeline=PipelineRank(2, place, case[1], 4)
        ).faults
        for case in PIPELINES
        for place in range(2)
    }


def test_pipelines():
    (found,) = run_ranks(follow_pipelines, 1, fresh=True, init=False, timeout=200)  # it makes a group of its own
    assert {case: faults for case, faults in found.items() if faults} == {}
    assert len(found) == 2 * len(PIPELINES)


class Issued(TorchDispatchMode):
    """Tells a tape of operators on real tensors."""

    def __init__(self, order):
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._order.add(func, args, kwargs or {}, result)
        return result


def follow_inference(monkeypatch, world_size, order):
    """Three passes of a model whose weights are streamed, with room for about three of its nine units."""
    monkeypatch.setattr(streamed_model, "host_memory", lambda *_: DryHostMemory(order))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)))
    x = torch.randn(2, 64)
    with torch.no_grad(), order.watching(), Issued(order):
        expected = model(x)
        request = StreamRequest("host", 70_000, None, None)
        weights = _start(model, request, 0, DryComm(0, world_size, "cuda", order)).shardwise_stream
        assert 0 < weights.report().resident_units < 9
        outputs = [model(x) for _ in range(3)]
        weights.close()
    assert world_size > 1 or all(torch.equal(output, expected) for output in outputs)
    return order


class Forgetful(StreamOrder):
    """Leaves out the waits of one place in the code."""

    def __init__(self, left_out=None):
        super().__init__()
        self.left_out = left_out
        self.places = Counter()

    def wait(self, stream, number):
        place = f"{self._place()} ({'the host' if stream == HOST else 'compute' if stream == 'compute' else 'another'})"
        self.places[place] += number is not None
        if place != self.left_out:
            super().wait(stream, number)

    def _place(self):
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename.rpartition("/shardwise/")[2]
            is_engine = name != frame.f_code.co_filename and not name.startswith(("dry_run", "observe", "timing"))
            if is_engine and (name, frame.f_code.co_name) != ("offload/streams.py", "wait"):
                return f"{name}: {frame.f_code.co_qualname}"
            frame = frame.f_back
        return "elsewhere"


# Another wait comes first wherever these are issued in the cases below.
FOLLOWS_ANOTHER = {
    "unit/reduce_scatter.py: ReduceScatter.abandon (compute)",  # after `finish`; alone where a backward is broken off
    "offload/context.py: DeviceBufferPool._drop_scratch (compute)",  # after the wait for the buffers of the pool
    "unit/master.py: RestingPart.wait (compute)",  # after the gather that reads the new weights
}
CASES = [
    ({"preset": "zero3", **BF16}, 2, 1),
    ({"preset": "zero3_hybrid"}, 4, 2),
    ({"preset": "zero3_offload", **SETTINGS["activations on the host"]}, 2, 1),
    ({"preset": "zero3_offload", **SETTINGS["accumulated"]}, 1, 1),
]


def check_without_each_wait(runs):
    """Each of `runs` follows an order; what each finds without the waits of one place is reported by one of them."""
    noticed, unnoticed = set(), set()
    for run in runs:
        complete = run(order=Forgetful())
        assert complete.faults == []
        for place in complete.places.keys() - noticed:
            (noticed if run(order=Forgetful(place)).faults else unnoticed).add(place)
    assert unnoticed - noticed - FOLLOWS_ANOTHER == set()
    return noticed


def test_every_wait_that_is_left_out_is_reported():
    """So that the tests above could fail, and so that each wait of the engine is there for a reason."""
    assert len(check_without_each_wait([partial(follow, *case) for case in CASES])) > 20


def test_inference_with_streamed_weights(monkeypatch):
    assert check_without_each_wait([partial(follow_inference, monkeypatch, world_size) for world_size in (1, 2)])
