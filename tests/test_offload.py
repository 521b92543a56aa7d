"""States, gradients and weights on the host: the same bits as on the device, the bytes that are moved and held."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import shardwise
from shardwise.memory.ledger import Ledger
from shardwise.offload.context import DeviceBufferPool
from shardwise.offload.streams import Streams
from shardwise.offload.unit_states import buckets_of
from shardwise.partition.layout import Span
from support import matrix, ranks
from support.training import PRECISIONS, digest, make_batch, make_sgd, start, train_step, trained

PLACEMENTS = {
    "zero1_offload": ("zero1", {}),
    "zero2_offload": ("zero2", {}),
    "zero3_offload": ("zero3", {}),
    "zero3, optim": ("zero3", {"optim": {"tier": "host"}}),
    "zero3, weights": ("zero3", {"weights": {"tier": "host"}}),
    "zero3, weights, optim": ("zero3", {"weights": {"tier": "host"}, "optim": {"tier": "host"}}),
    "zero2, grads": ("zero2", {"grads": {"tier": "host"}}),
    "zero3, optim, grads": ("zero3", {"optim": {"tier": "host"}, "grads": {"tier": "host"}}),
}
SMALL = 16 * 1024 * 4
"""Buffers so small that the models here travel in several buckets a unit."""


def config(placement, precision="fp32", accumulation=1, clip=None, **more):
    stage, tiers = PLACEMENTS.get(placement, (placement, {}))
    return {
        "preset": stage if tiers else placement,
        **({"placement": tiers} if tiers else {}),
        "precision": PRECISIONS[precision],
        "batch": {"accumulation": accumulation},
        "gradients": {"clip_norm": clip, **more.pop("gradients", {})},
        **more,
    }


def train(*args, **kwargs):
    hashes, _ = trained(*args, **kwargs)
    return hashes


@matrix(
    {
        "placement": list(PLACEMENTS),
        "precision": list(PRECISIONS),
        "accumulation": [1, 3],
        "world_size": [1, 2, 3],
        "clip": [None, 0.05],
        "model": ["gpt", "odd", "tied"],
        "looks": [False, True],
        "buffer_bytes": [SMALL, None],
    },
)
@ranks()
def test_the_same_bits_as_on_the_device(
    rank, world_size, placement, precision, accumulation, clip, model, looks, buffer_bytes
):
    common = {"precision": precision, "accumulation": accumulation, "clip": clip}
    expected = train(model, config(PLACEMENTS[placement][0], **common), rank, looks)
    offload = {"buffer_bytes": buffer_bytes, "buffer_count": 3}
    seen = train(model, config(placement, offload=offload, **common), rank, looks)
    assert seen == expected


@ranks(1, 2)
@pytest.mark.parametrize("placement", ["zero1_offload", "zero2_offload", "zero3_offload", "zero3, optim"])
def test_schedulers_and_hooks_see_what_they_see_on_the_device(rank, world_size, placement):
    """An update that is issued late uses the rate of its own step, and hooks edit gradients that are away."""

    def run(chosen):
        engine = start("gpt", config(chosen, "fp32", accumulation=2, clip=0.05, gradients={"deterministic": True}))
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.3)
        seen, norms = [], []
        engine.register_grad_hook(lambda name, shard: shard.mul_(0.5))
        engine.register_grad_hook(lambda name, shard: seen.append((name, shard.float().sum().item())))
        for step in range(3):
            train_step(engine, rank, step)
            scheduler.step()
            norms.append(engine.grad_norm.item())
        result = digest(engine)
        engine.destroy()
        return result, seen, norms

    assert run(placement) == run(PLACEMENTS[placement][0])


@ranks(2)
@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_looking_and_writing_between_passes(rank, world_size, placement):
    """Reads find the new values at any moment, and what is written reaches the next step."""

    def run(chosen):
        engine = start("gpt", config(chosen, "bf16"))
        found = []
        for step in range(3):
            loss = engine(make_batch(engine.module, rank, step))
            engine.backward(loss)
            found.append(engine.full_grad("blocks.1.up.weight").float().sum().item())
            found.append(engine.full_state("norm.bias").get("exp_avg", torch.zeros(1)).sum().item())
            engine.step()
            with shardwise.gathered(engine.module.norm.parameters(), write=True), torch.no_grad():
                engine.module.norm.weight.mul_(2.0)
            with torch.no_grad():
                found.append(engine(make_batch(engine.module, rank, 99)).item())
            state = {name: value.clone() for name, value in engine.state_dict().items()}
            engine.load_state_dict({name: value + 0.25 * (name == "norm.bias") for name, value in state.items()})
        found.append(digest(engine))
        engine.destroy()
        return found

    assert run(placement) == run(PLACEMENTS[placement][0])


@ranks(2)
@pytest.mark.parametrize("placement", ["zero2_offload", "zero3_offload", "zero3, optim"])
def test_saved_states_are_loaded_to_where_they_rest(rank, world_size, placement, tmp_path):
    engine = start("gpt", config(placement, "bf16", offload={"buffer_bytes": SMALL}))
    for step in range(4):
        if step == 2:
            engine.save(tmp_path / "saved")
        train_step(engine, rank, step)
    expected = digest(engine)
    held = engine.report().tier_bytes
    engine.destroy()
    other = start("gpt", config(placement, "bf16", offload={"buffer_bytes": SMALL}))
    other.load(tmp_path / "saved")
    assert other.report().tier_bytes["host"] == held["host"]
    for step in (2, 3):
        train_step(other, rank, step)
    assert digest(other) == expected
    other.destroy()


@ranks(2)
@pytest.mark.parametrize("placement", ["zero1_offload", "zero2_offload", "zero3_offload", "zero3, weights, optim"])
def test_gradients_dropped_after_a_step_have_been_used(rank, world_size, placement):
    """`zero_grad` right after `step`, as in a plain loop, while updates may still be due."""
    hashes = set()
    for drops in (False, True):
        engine = start("gpt", config(placement, "bf16", offload={"buffer_bytes": SMALL}))
        for step in range(3):
            train_step(engine, rank, step)
            if drops:
                engine.zero_grad()
        hashes.add(digest(engine))
        engine.destroy()
    assert len(hashes) == 1


@ranks(1)
@pytest.mark.parametrize("placement", ["zero2_offload", "zero3_offload"])
def test_an_overflow_leaves_no_trace(rank, world_size, placement):
    engine = start("odd", config(placement, "fp16"))
    train_step(engine, rank, 0)
    before = digest(engine)
    handle = engine.module.last.weight.register_hook(lambda grad: grad * torch.inf)
    train_step(engine, rank, 1)
    handle.remove()
    assert engine.was_skipped
    assert digest(engine) == before
    train_step(engine, rank, 2)
    assert digest(engine) != before
    engine.destroy()


class Eager(torch.optim.Optimizer):
    """Makes its state when it is made, and counts on it: as some of torch's own do, in some versions."""

    def __init__(self, params):
        super().__init__(params, {})
        for param in self.param_groups[0]["params"]:
            self.state[param]["sum"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= 0.01 * param.grad / self.state[param]["sum"].addcmul_(param.grad, param.grad).sqrt().add(1e-3)


@ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "amsgrad", "foreach", "eager"])
def test_any_element_wise_optimizer(rank, world_size, optimizer):
    """States of other numbers and names, some made before the engine is."""
    build = {
        "sgd": make_sgd,
        "adagrad": lambda m: torch.optim.Adagrad([p for p in m.parameters() if p.requires_grad], lr=0.01),
        "amsgrad": lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad], amsgrad=True),
        "eager": lambda m: Eager([p for p in m.parameters() if p.requires_grad]),
        "foreach": lambda m: torch.optim.NAdam([p for p in m.parameters() if p.requires_grad], foreach=True),
    }[optimizer]
    expected = train("odd", config("zero3", "bf16"), rank, looks=False, optimizer=build)
    for placement in ("zero1_offload", "zero3_offload"):
        assert train("odd", config(placement, "bf16"), rank, looks=False, optimizer=build) == expected


@ranks(2)
def test_matrix_optimizers_get_whole_tensors_from_the_host(rank, world_size):
    def muon(model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2])]

    expected = train("gpt", config("zero3"), rank, looks=False, optimizer=muon)
    assert train("gpt", config("zero3_offload"), rank, looks=False, optimizer=muon) == expected


def expected_traffic(units, placement, accumulation):
    """Bytes up and down in one step, from the elements this rank owns."""
    up = down = 0
    for unit in units:
        numel, policy = unit.weights.owned.numel, unit.weights.policy
        if not policy.trainable:
            up += 2 * accumulation * numel * 2 * (placement == "zero3_offload")
            continue
        grad = 2 if accumulation == 1 else 4
        away = placement != "zero1_offload"
        up += 12 * numel + away * (grad * numel * accumulation)
        down += 12 * numel + away * (grad * numel * accumulation)
        if placement == "zero3_offload":
            # Gathered from the master: in every pass but the first forward, which gets what was just updated.
            up += 4 * (2 * accumulation - 1) * numel
    return up, down


@ranks(2)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("placement", ["zero1_offload", "zero2_offload", "zero3_offload"])
def test_traffic_equals_the_formula(rank, world_size, placement, accumulation):
    """12 + 12 bytes of state and 2 + 2 of gradient for each parameter owned, and the gathers of sharded weights."""
    engine = start("odd", config(placement, "bf16", accumulation))
    for step in range(2):
        train_step(engine, rank, step)
    before = dict(engine.report().moved_bytes)
    for step in range(2, 4):
        train_step(engine, rank, step)
    after = engine.report().moved_bytes
    up, down = expected_traffic(engine.units, placement, accumulation)
    if placement == "zero3_offload":
        # Less than every gather: what ends the forward stays, and the backward finds some states loaded ahead.
        gathers = sum(4 * (2 * accumulation - 1) * unit.weights.owned.numel for unit in engine.units)
        assert 2 * (up - gathers) < after["host to device"] - before["host to device"] <= 2 * up
    else:
        assert after["host to device"] - before["host to device"] == 2 * up
    assert after["device to host"] - before["device to host"] == 2 * down
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_tier_holds_what_the_table_says(rank, world_size, precision):
    elements = {"fp32": {"weights": 4, "grads": 4, "states": 8}, "bf16": {"weights": 2, "grads": 2, "states": 12}}
    size = elements[precision]
    for placement in ("zero1_offload", "zero2_offload", "zero3_offload"):
        engine = start("gpt", config(placement, precision))
        for step in range(2):
            train_step(engine, rank, step)
        with torch.no_grad():
            engine(make_batch(engine.module, rank, 9))  # does what is due, and gives the pool back
        whole = sum(unit.layout.numel for unit in engine.units)
        owned = whole // world_size
        held = engine.report().tier_bytes
        storages = [storage for unit in engine.units for storage in unit.states.storages.values()]
        assert held["host"] == sum(storage.tensor.untyped_storage().nbytes() for storage in storages)
        expected = owned * (size["states"] + size["grads"] * (placement != "zero1_offload"))
        if placement == "zero3_offload" and precision == "fp32":
            expected += owned * 4  # the weights are their own master
        assert held["host"] == expected
        steps = 4 * sum(len(unit.weights.pieces) for unit in engine.units)
        replicated = 0 if placement == "zero3_offload" else whole * size["weights"]
        assert held["device"] <= replicated + steps
        engine.destroy()
        assert "host" not in engine.report().tier_bytes


@ranks(1)
def test_the_ring_is_bounded_whatever_the_model(rank, world_size):
    peaks = []
    for layers in (8, 24):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        settings = {"preset": "zero2_offload", "runtime": {"min_unit_bytes": 1}}
        engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), settings)
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 64)).square().mean())
            engine.step()
        replicated = sum(4 * unit.layout.numel for unit in engine.units)
        peaks.append(engine.report().tier_peak_bytes["device"] - replicated)
        engine.destroy()
    assert peaks[1] <= 1.1 * peaks[0]


@matrix({"world_size": [1, 3], "preset": ["zero1", "zero2", "zero3_offload"], "precision": ["fp32", "bf16"]})
@ranks()
def test_what_fits_moves_to_the_device_and_keeps_its_bits(rank, world_size, preset, precision):
    def run(settings, budget=None):
        offload = {} if budget is None else {"device_memory": budget}
        engine = start("gpt", config(settings, precision, clip=0.05, offload=offload))
        for step in range(6):
            train_step(engine, rank, step)
        result = digest(engine)
        report, away = engine.report(), [unit.name for unit in engine.units if unit.states.is_offloaded]
        engine.destroy()
        return result, report, away

    expected, _, _ = run(preset.removesuffix("_offload"))
    seen, report, away = run(preset, 1)
    assert seen == expected
    units = len(away)
    assert units >= 4, "nothing fits into one byte"
    budget = report.tier_peak_bytes["device"] + report.tier_bytes["host"] // 2
    seen, report, away = run(preset, budget)
    assert seen == expected
    assert 0 < len(away) < units
    assert report.tier_peak_bytes["device"] <= 1.1 * budget
    seen, report, away = run(preset, "1TB")
    assert seen == expected
    assert not away
    assert "host" not in report.tier_bytes


@ranks(1)
def test_a_ratio_of_the_states_leaves(rank, world_size):
    for ratio, expected in ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0)):
        engine = start("mlp", config("zero2_offload", "bf16", offload={"ratio": ratio}))
        train_step(engine, rank, 0)
        away = sum(unit.layout.numel for unit in engine.units if unit.states.is_offloaded)
        assert away / sum(unit.layout.numel for unit in engine.units) == pytest.approx(expected, abs=0.21)
        assert away <= ratio * sum(unit.layout.numel for unit in engine.units)
        engine.destroy()


def test_parcels_hold_every_element_once():
    for numel in (0, 1, 4096, 10_000):
        for most in (1024, 4096):
            for pieces in ([], [Span(0, 1000)], [Span(0, 4096), Span(4096, 9000), Span(9100, 9900)]):
                fitting = [span for span in pieces if span.stop <= numel]
                buckets = list(buckets_of(numel, fitting, most))
                assert [i for p in buckets for i in p.pieces] == list(range(len(fitting)))
                assert sum(bucket.span.numel for bucket in buckets) == numel
                borders = [bucket.span for bucket in buckets]
                assert all(first.stop == second.start for first, second in pairwise(borders))
                assert all(p.span.start <= fitting[i].start for p in buckets for i in p.pieces)


def test_slots_are_cut_without_overlap():
    pool = DeviceBufferPool(Ledger(), Streams(torch.device("cpu")))
    pool.fit(4096)
    views = pool.take().cut(100, {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32})
    for number, view in enumerate(views.values()):
        view.fill_(number)
    assert [view.unique().tolist() for view in views.values()] == [[0], [1], [2]]
    assert all(view.data_ptr() % 128 == views["a"].data_ptr() % 128 for view in views.values())
