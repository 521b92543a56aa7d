"""Meshes of several axes: nodes x ranks of a node x tp, and sp beside dp."""

import contextlib
import io
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.observe import WireObserver
from support.ranks import ranks
from test_tensor_parallel import CLIP, B, H, L, batch, blocks, differs_by, momenta, parallelized, sgd, values

STEPS = 2


def mesh_of(nodes, per_node, tp):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # it has meshes of earlier tests, whose groups are gone
    names = ("dp_replicate", "dp_shard", "tp")
    return init_device_mesh("cpu", (nodes, per_node, tp), mesh_dim_names=names)


def engine_on(axes, preset, seed=0, **config):
    """A model whose norms work on a part of the sequence each: their gradients are Partial."""
    model = parallelized(blocks(seed), axes["tp"], sequence=True) if axes["tp"].size() > 1 else blocks(seed)
    config = {"preset": preset, "gradients": {"clip_norm": CLIP}, **config}
    return shardwise.initialize(model, sgd(model.parameters()), config, mesh=None if "mesh" in config else axes)


def train(engine, mesh, steps, count=1):
    node, local, tp_rank = mesh.get_coordinate()
    norms = []
    for number in (step * count + micro for step in steps for micro in range(count)):
        x = batch(number, node * mesh.size(1) + local).chunk(mesh.size(2), 1)[tp_rank]
        engine.backward(engine(x).square().sum() / (B * L * H))
        engine.step()
        norms.append(engine.grad_norm.item() if engine.grad_norm is not None else None)
    return norms


def same(these, those):
    return all(torch.equal(these[name], those[name]) for name in those)


@ranks(8, timeout=120)
def test_nodes_and_tp_together_end_as_one_process_does_with_the_same_bits_in_every_row(rank, world_size, tmp_path):
    plain = blocks()
    optimizer, norms = sgd(plain.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for copy in range(4):
            (plain(batch(step, copy)).square().sum() / (B * L * H * 4)).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), CLIP).item())
        optimizer.step()
    mesh, first = mesh_of(2, 2, 2), None
    for preset in ("zero2", "zero3_nvme", "zero3_hybrid"):
        more = {"offload": {"nvme_path": str(tmp_path)}} if "nvme" in preset else {"mesh": {"tp": 2, "dp_replicate": 2}}
        engine = engine_on(mesh, preset, **more)
        average = shardwise.ema(engine, decay=0.5)
        assert str(engine.comm.shape) == "2 nodes x 2"
        assert train(engine, mesh, range(STEPS)) == pytest.approx(norms, rel=1e-6)
        found = values(engine) | {"average": average.full_param("1.down.weight")}
        first = first or found
        assert same(found, first), preset
        if preset != "zero3_hybrid":
            engine.destroy()
    del found["average"]
    assert differs_by(found, dict(plain.named_parameters())) <= 1e-6
    check_wire(engine, mesh, rank)
    check_checkpoints(engine, tmp_path)


def check_wire(engine, mesh, rank):
    """ZeRO's bytes in the node and out of it; those of tp are torch's own."""
    before = engine.report().axis_bytes
    with WireObserver(control=lambda record: record.dtype == torch.float64) as wire:
        train(engine, mesh, [STEPS])
        for unit in engine.units:
            unit.weights.wait_streams()
    sent = {axis: size - before[axis] for axis, size in engine.report().axis_bytes.items()}
    outside = sum(record.sent_bytes for record in wire.data if any(to // 4 != rank // 4 for to in record.targets))
    padded = 4 * sum(unit.layout.numel for unit in engine.units)
    assert sent["outer"] == outside == 2 * padded // 2 // 2  # gradients and weights; half of a half


def check_checkpoints(engine, folder):
    """From nodes x tp to no tp, flat, and back."""
    saved, moments = values(engine), momenta(engine)
    engine.save(folder / "0")
    engine.destroy()
    for number, (shape, preset) in enumerate([((1, 8, 1), "zero3"), ((2, 2, 2), "zero3_hybrid")]):
        mesh = mesh_of(*shape)
        other = engine_on(mesh, preset, seed=9)
        other.load(folder / f"{number}")
        assert same(values(other), saved), (shape, preset)
        assert same(momenta(other), moments), (shape, preset)
        other.save(folder / f"{number + 1}")
        if shape == (2, 2, 2):
            train(other, mesh, [STEPS + 1])
        other.destroy()


@ranks(4)
def test_micro_batches_without_a_reduction_are_in_the_step_of_the_hybrid(rank, world_size):
    mesh, results = mesh_of(2, 2, 1), {}
    for preset in ("zero2", "zero3_hybrid"):
        for way in ("accumulation", "no_sync"):
            config = {"batch": {"accumulation": 3}} if way == "accumulation" else {}
            engine = engine_on(mesh, preset, **config)
            average = shardwise.ema(engine, decay=0.5)
            if way == "accumulation":
                train(engine, mesh, range(STEPS), count=3)
            else:
                for number in range(3 * STEPS):
                    is_last = number % 3 == 2
                    with contextlib.nullcontext() if is_last else engine.no_sync():
                        engine.backward(engine(batch(number, rank)).square().sum() / (B * L * H) / 3)
                    if is_last:
                        engine.step()
            results[preset, way] = values(engine) | {"average": average.full_param("1.down.weight")}
            engine.destroy()
    first = results["zero2", "accumulation"]
    assert all(differs_by(found, first) <= 1e-6 for found in results.values())
    assert differs_by(first, dict(blocks().named_parameters()) | {"average": first["average"]}) > 1e-3


@ranks(4, fresh=True, init=False, torchrun=True)
def test_the_sequence_parallel_example_ends_as_one_process_does(rank, world_size):
    """Ranks of one sp group have parts of the same sequences: ZeRO's group is dp x sp."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(Path(__file__).parent.parent / "examples" / "ulysses.py"), run_name="__main__")
    if rank == 0:
        assert "ZeRO's group has 4 ranks" in output.getvalue()
        assert "as one process, to 1e-06: True" in output.getvalue()
        assert "the same bits in all stages: True" in output.getvalue()
    dist.destroy_process_group()
