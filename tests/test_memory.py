"""Contract C2: what a step holds at its peak, seen from outside; and the ledger beside it."""

import dataclasses
import gc
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.memory.ledger import Buffer, Entry, Kind, Ledger, Tier
from shardwise.models.built_in import GPT, MLP
from shardwise.observe import StorageObserver
from shardwise.schedule.graphs import ForwardGraph
from support import matrix, ranks

STAGES = ["zero0", "zero1", "zero2", "zero3"]


class Giant(nn.Module):
    """Nearly all in one embedding."""

    def __init__(self, rows=4000, width=64):
        super().__init__()
        self.width = None
        self.embed = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().square().mean()


class Single(nn.Module):
    """One single unit: two layers called by name, in nothing that repeats."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(160, 320) / 13)
        self.down = nn.Parameter(torch.randn(320, 160) / 18)

    def forward(self, x):
        return (torch.relu(x @ self.up) @ self.down).float().square().mean()


MODELS = {
    "mlp-100k": (lambda: MLP(width=128, depth=6), lambda rank: torch.randn(4, 128)),
    "mlp-thin": (lambda: MLP(width=448, depth=10), lambda rank: torch.randn(1, 448)),
    "mlp-2-units": (lambda: MLP(width=160, depth=2), lambda rank: torch.randn(4, 160)),
    "single": (Single, lambda rank: torch.randn(4, 160)),
    "giant": (Giant, lambda rank: torch.randint(4000, (2, 8))),
    "giant-wide": (lambda: Giant(1600, 160), lambda rank: torch.randint(1600, (2, 8))),
    "gpt-2m": (
        lambda: GPT(hidden=128, layers=8, heads=4, vocabulary=1000, length=64),
        lambda rank: torch.randint(1000, (4, 64)),
    ),
    "gpt-26m": (
        lambda: GPT(hidden=512, layers=8, heads=8, vocabulary=1000, length=128),
        lambda rank: torch.randint(1000, (4, 128)),
    ),
}


def measure(name, preset, precision, accumulation, steps=2):
    """Bytes of the last step, as the observer sees them beside what was there before, and the engine's ledger."""
    build, batch = MODELS[name]
    torch.manual_seed(0)
    data = batch(dist.get_rank())
    config = {"preset": preset, "precision": {"compute": precision}, "batch": {"accumulation": accumulation}}
    config["gradients"] = {"clip_norm": 1.0}
    gc.collect()
    with StorageObserver() as observer:
        before = observer.current_bytes
        model = build()
        engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), config)
        for _ in range(steps):
            gc.collect()
            observer.reset_peak()
            for _micro in range(accumulation):
                engine.backward(engine(data))
                engine.step()
        for unit in engine.units:
            unit.weights.wait_gather()
        gc.collect()
        seen = Seen(
            peak=observer.peak_bytes - before,
            rest=observer.current_bytes - before,
            ledger=sum(engine.report().memory_bytes.values()),
            ledger_peak=engine.report().peak_bytes,
            unit_numels=[unit.layout.numel for unit in engine.units],
            largest_param=max(param.numel() for param in model.parameters()),
        )
    engine.destroy()
    return seen


@dataclasses.dataclass
class Seen:
    peak: int
    rest: int
    ledger: int
    ledger_peak: int
    unit_numels: list[int]
    largest_param: int


def activation_bytes(name, precision):
    """What the model alone needs beside its weights and gradients."""
    build, batch = MODELS[name]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = build().to(dtype)
    data = batch(0)
    data = data.to(dtype) if data.is_floating_point() else data
    with StorageObserver(existing=[model, data]) as observer:
        for _ in range(2):
            model(data).backward()
    held = sum(p.numel() * p.element_size() * 2 for p in model.parameters())
    return observer.peak_bytes - held


def resting_bytes(preset, precision, accumulation, numel, world_size):
    """The table of DESIGN.md, and its line for fp32 accumulation."""
    if precision == "fp32":
        weights, grads, optim = 4, 4, 8
    else:
        weights, grads, optim = 2, 4 if accumulation > 1 else 2, 12
    share = 1 / world_size
    factor = {
        "zero0": weights + grads + optim,
        "zero1": weights + grads + optim * share,
        "zero2": weights + (grads + optim) * share,
        "zero3": ((weights if precision == "fp32" else 0) + grads + optim) * share,
    }[preset]
    return factor * numel


def is_light(row):
    is_plain = (row["precision"], row["accumulation"]) == ("fp32", 1)
    return row["name"] != "gpt-26m" and (row["name"] != "gpt-2m" or is_plain)


@matrix(
    {
        "world_size": [1, 2, 4],
        "name": [name for name in MODELS if name != "mlp-thin"],
        "precision": ["fp32", "bf16"],
        "accumulation": [1, 3],
    },
    ordinary=is_light,
)
@ranks(timeout=240)
def test_peak_is_bounded_and_never_upside_down(rank, world_size, name, precision, accumulation):
    activations = activation_bytes(name, precision)
    peaks = []
    for preset in STAGES:
        seen = measure(name, preset, precision, accumulation)
        resting = resting_bytes(preset, precision, accumulation, sum(seen.unit_numels), world_size)
        item = 4 if precision == "fp32" else 2
        grad_item = item if preset in ("zero2", "zero3") or accumulation == 1 else 4
        unit = max(seen.unit_numels)
        working = 2 * unit * item + 3 * unit * grad_item + seen.largest_param * max(item, grad_item)
        assert seen.peak <= resting + activations + working, preset
        assert seen.rest == pytest.approx(seen.ledger, rel=0.01, abs=64), preset
        assert seen.rest <= resting * 1.01 + 64, preset
        peaks.append(seen.peak)
    assert peaks == sorted(peaks, reverse=True), dict(zip(STAGES, peaks, strict=True))


@matrix(
    {"world_size": [2], "precision": ["fp32", "bf16"], "accumulation": [1, 3], "preset": STAGES, "steps": [1, 2]},
)
@ranks()
def test_the_ledger_knows_the_peak(rank, world_size, precision, accumulation, preset, steps):
    """On a model whose activations are nothing, so that all there is to see is the engine's. The first step makes the
    states."""
    seen = measure("mlp-thin", preset, precision, accumulation, steps)
    assert seen.peak == pytest.approx(seen.ledger_peak, rel=0.01)


@ranks(2)
@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["kept", "recomputed", "recomputed re-entrantly"])
def test_forwards_before_their_backwards_hold_no_more_units(rank, world_size, checkpointed):
    """zero3, on a model whose activations are nothing: micro-batches that run as in a pipeline hold the units that one
    after the other hold, and forget the forward that has no backward.

    Under re-entrant checkpoints the last holds more: the earlier forwards could have a part in the backward, see
    test_models.test_one_backward_of_two_forwards_through_reentrant_checkpoints.
    """
    peaks, sent = [], []
    for order in ("f0b0f1b1f2b2", "f0f1f2b0b1b2", "f0f1b0f2b1b2", "f9f0f1b1b0f2b2")[: 3 if checkpointed else 4]:
        model = MLP(width=448, depth=8)
        if checkpointed is not None:
            for number in range(1, len(model.layers), 2):
                model.layers[number - 1].forward = recomputed(model.layers[number - 1].forward, checkpointed)
        engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-4), "zero3")
        x = torch.randn(1, 448, requires_grad=True)
        for _ in range(2):
            gc.collect()
            before = engine.comm.sent_bytes.copy()
            with StorageObserver() as observer:
                losses = {}
                for what, index in zip(order[::2], order[1::2], strict=True):
                    if what == "f":
                        losses[index] = engine(x)
                    else:
                        engine.backward(losses.pop(index))
                engine.step()
        peaks.append(observer.peak_bytes)
        sent.append((engine.comm.sent_bytes - before)["reduce"])
        engine.destroy()
    assert max(peaks) <= 1.02 * peaks[0], peaks
    assert len(set(sent)) == 1


def recomputed(forward, reentrant):
    return partial(checkpoint, forward, use_reentrant=reentrant)


@ranks(2)
def test_a_forward_without_a_backward_is_freed(rank, world_size):
    """Also the first one, which hooks on saved tensors watch: ReLU saves its own output."""
    model = MLP(width=64, depth=8)
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-4), "zero3")
    x = torch.randn(2048, 64)
    with StorageObserver() as observer:
        before = observer.current_bytes
        for _ in range(3):
            engine(x)
        gc.collect()
        assert observer.current_bytes - before < x.nbytes  # the units that the backward would begin with
    engine.destroy()


@ranks(2)
def test_losses_that_are_kept_slow_no_later_step(rank, world_size):
    """They hold the graphs of their forwards, as a list of losses to plot does."""
    model = MLP(width=8, depth=4)
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-4), "zero3")
    kept, looks = [], []
    with mock.patch.object(ForwardGraph, "has_used", autospec=True, side_effect=ForwardGraph.has_used) as look:
        for _ in range(6):
            look.reset_mock()
            kept.append(engine(torch.randn(2, 8)))
            engine.backward(kept[-1])
            engine.step()
            looks.append(look.call_count)
    assert 0 < looks[2] == looks[5]
    engine.destroy()


def test_fresh_buffers_are_poisoned_if_the_environment_says_so(monkeypatch):
    monkeypatch.setenv("SHARDWISE_POISON", "0")
    assert not Ledger.from_environment().poison
    monkeypatch.setenv("SHARDWISE_POISON", "1")
    entry = Entry(Kind.WORK, "test", Tier.DEVICE)
    buffer = Buffer(Ledger.from_environment(), entry, 8, torch.float32, torch.device("cpu"))
    for _ in range(2):
        assert buffer.allocate().isnan().all()
        buffer.tensor.fill_(1.0)
        buffer.free()
