"""Tensor parallelism x ZeRO: models whose parameters are DTensors, on 4 ranks."""

import contextlib
import io
import math
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu

import shardwise
from shardwise.errors import ConfigError, DiskError, HabitWarning
from shardwise.offload import disk_file
from shardwise.partition.layout import Layout, Span, TensorSpec
from shardwise.partition.part import TensorPart
from support.ranks import ranks

H, B, L, STEPS, CLIP = 16, 2, 4, 3, 0.05


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))))


def blocks(seed=0, width=H):
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(width) for _ in range(3)))


def mesh_of(tp):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # it has meshes of earlier tests, whose groups are gone
    return init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))


def parallelized(model, mesh, sequence=False, **options):
    """Every block cut by columns, then by rows; with `sequence`, norms work on half of the sequence each."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    for block in model:
        parallelize_module(block, mesh, plan, **options)
    return model


def batch(step, dp_rank):
    return torch.randn(B, L, H, generator=torch.Generator().manual_seed(100 * step + dp_rank))


def loss_of(model, mesh, step, sequence):
    x = batch(step, mesh["dp"].get_local_rank())
    if sequence:  # a rank has its part of the sequence, and of the sum that is the loss
        x = x.chunk(mesh["tp"].size(), 1)[mesh["tp"].get_local_rank()]
    return model(x).square().sum() / (B * L * H)


def sgd(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


def engine_on(mesh, preset, sequence=False, make=sgd, seed=0, **config):
    model = parallelized(blocks(seed), mesh["tp"], sequence) if mesh["tp"].size() > 1 else blocks(seed)
    config = {"preset": preset, "gradients": {"clip_norm": CLIP}, **config}
    return shardwise.initialize(model, make(model.parameters()), config, mesh=mesh["dp"])


def train(engine, mesh, sequence=False, steps=range(STEPS)):
    """The norms of the steps."""
    norms = []
    for step in steps:
        engine.backward(loss_of(engine, mesh, step, sequence))
        engine.step()
        norms += [engine.grad_norm.item()] if engine.grad_norm is not None else []
    return norms


def values(engine):
    return {name: engine.full_param(name) for name, _ in engine.module.named_parameters()}


def momenta(engine):
    return {name: engine.full_state(name)["momentum_buffer"] for name, _ in engine.module.named_parameters()}


def trained_plainly(dp):
    model = blocks()
    optimizer, norms = sgd(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(dp):
            (model(batch(step, rank)).square().sum() / (B * L * H * dp)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def trained_by_fsdp2(mesh, sequence):
    from torch.distributed.fsdp import fully_shard

    model = parallelized(blocks(), mesh["tp"], sequence)
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, mesh, step, sequence).backward()
        # torch's clip_grad_norm_ refuses gradients on two meshes
        squares = sum(param.grad.full_tensor().double().square().sum() for param in model.parameters())
        for param in model.parameters():
            param.grad._local_tensor.mul_((CLIP / (squares.sqrt() + 1e-6)).clamp(max=1).float())
        optimizer.step()
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}


def differs_by(these, those):
    return max((these[name] - those[name]).abs().max().item() for name in those)


def test_a_part_knows_where_its_elements_are():
    whole = torch.arange(5 * 7 * 3).view(5, 7, 3)
    for dim in range(3):
        for count in (1, 2, 3, 4):
            stored = torch.cat([chunk.reshape(-1) for chunk in whole.chunk(count, dim)])
            for index in range(count):
                part = TensorPart((5, 7, 3), dim, count, index)
                chunks = whole.chunk(count, dim)
                mine = chunks[index].reshape(-1) if index < len(chunks) else whole.new_empty(0)
                assert math.prod(part.local_shape) == mine.numel()
                assert torch.equal(stored[part.start : part.start + mine.numel()], mine)
                for start, stop, place in part.runs(1, mine.numel()) if mine.numel() > 1 else ():
                    assert torch.equal(whole.view(-1)[place : place + stop - start], mine[start:stop])


def test_the_norm_counts_what_several_ranks_hold_on_the_first_of_them():
    for index, counted in ((0, (Span(0, 96),)), (1, (Span(0, 32), Span(64, 96)))):
        whole, cut = TensorPart((8,), None, 2, index), TensorPart((16,), 0, 2, index)
        specs = [TensorSpec("a", (8,), part=cut), TensorSpec("b", (8,), part=whole), TensorSpec("c", (8,), part=cut)]
        assert Layout.build(specs, 1, 4).counted(0) == counted


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp-sequence"])
@ranks(4)
def test_weights_and_norms_are_those_of_one_process_and_of_fsdp2(rank, world_size, sequence):
    mesh = mesh_of(2)
    plain, norms = trained_plainly(dp=2)
    oracle = trained_by_fsdp2(mesh, sequence)
    first = None
    for preset in ("zero1", "zero2", "zero3", "zero3_offload"):
        engine = engine_on(mesh, preset, sequence)
        assert train(engine, mesh, sequence) == pytest.approx(norms, rel=1e-6)
        got = values(engine)
        assert differs_by(got, plain) <= 1e-6
        assert differs_by(got, oracle) <= 1e-6
        first = first or got
        assert all(torch.equal(first[name], got[name]) for name in got), f"{preset} has other bits than zero1"
        engine.destroy()


@ranks(4)
def test_several_micro_batches_and_precisions_have_the_same_bits_in_all_stages(rank, world_size):
    mesh = mesh_of(2)
    for config in (
        {"batch": {"accumulation": 2}, "precision": {"compute": "bf16"}},
        {"batch": {"accumulation": 2}, "gradients": {"clip_norm": CLIP, "deterministic": True}},
        {"precision": {"compute": "fp16"}},
    ):
        results = {}
        for preset in ("zero1", "zero0", "zero3", "zero2_offload") if "batch" in config else ("zero1", "zero3"):
            engine = engine_on(mesh, preset, sequence=True, **config)
            norms = train(engine, mesh, sequence=True, steps=range(4))
            # The two orders of accumulation round differently.
            order = preset in ("zero0", "zero1") or "batch" not in config
            got, bits = results.setdefault(order, (values(engine), norms))
            assert repr(norms) == repr(bits), (preset, config)  # fp16 begins with overflows: nan
            assert all(torch.equal(got[name], value) for name, value in values(engine).items()), (preset, config)
            assert engine.full_param("0.up.weight").dtype == torch.float32
            engine.destroy()


class Unequal(nn.Module):
    """7 channels: parts of 4 and 3 over two ranks, and of 2, 2, 2 and 1 over four; and a vector of 3 elements."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down, self.last = nn.Linear(H, 7), nn.Linear(7, H), nn.Linear(H, 3)

    def forward(self, x):
        return self.last(self.down(gelu(self.up(x))))


@ranks(4)
def test_parts_may_be_unequal_or_empty(rank, world_size, tmp_path):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from shardwise.models.tensor_parallel import tensor_parallel

    plan = {"up": "columns", "down": "rows", "last": "logits"}
    plain = Unequal()
    optimizer = sgd(plain.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        plain(batch(step, 0)).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
    found = None
    for tp, preset in ((2, "zero1"), (2, "zero3_offload"), (4, "zero2"), (1, "zero3")):
        mesh = mesh_of(tp)
        config = {"preset": preset, "gradients": {"clip_norm": CLIP}}
        model = tensor_parallel(Unequal(0 if tp == 2 else 1), mesh["tp"], plan) if tp > 1 else Unequal(1)
        engine = shardwise.initialize(model, sgd(model.parameters()), config, mesh=mesh["dp"])
        if tp == 2:
            for step in range(STEPS):
                engine.backward(engine(batch(step, 0)).square().mean())
                engine.step()
            assert differs_by(values(engine), dict(plain.named_parameters())) <= 1e-6
        else:
            engine.load(tmp_path)
        found = found or values(engine)
        assert all(torch.equal(found[name], value) for name, value in values(engine).items()), (tp, preset)
        engine.save(tmp_path)
        engine.destroy()
    model, mesh = Unequal(), mesh_of(2)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    engine = shardwise.initialize(model, sgd(model.parameters()), "zero1", mesh=mesh["dp"])
    with pytest.raises(ConfigError, match=r"'up.weight' of shape \(7, 16\) is cut .* unequal parts \(4, 3\)"):
        engine(batch(0, 0))


@ranks(4)
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank, world_size):
    mesh = mesh_of(2)
    for preset in ("zero1", "zero3"):
        engine = engine_on(mesh, preset, precision={"compute": "fp16", "loss_scale": {"initial": 8.0, "hysteresis": 1}})
        train(engine, mesh)
        before = values(engine)
        assert engine.grad_norm.isfinite()
        hook = engine.module[1].up.weight.register_hook(lambda grad: grad * float("inf") if rank == 3 else grad)
        train(engine, mesh, steps=[7])
        hook.remove()
        assert not engine.grad_norm.isfinite()
        assert all(torch.equal(before[name], value) for name, value in values(engine).items()), preset
        assert engine.loss_scale == 4.0
        train(engine, mesh, steps=[8])
        assert engine.grad_norm.isfinite()
        assert differs_by(values(engine), before) > 0
        engine.destroy()


@ranks(4)
def test_all_ranks_of_one_disk_count_its_room_together(rank, world_size, tmp_path):
    mesh, config = mesh_of(2), {"offload": {"nvme_path": str(tmp_path)}}
    engine = engine_on(mesh, "zero3_nvme", **config)
    needed = engine._offload.staging.file(is_weights=False).size_bytes
    engine.destroy()
    disk_file._free_bytes, real = lambda _: 3 * needed, disk_file._free_bytes  # for the two ranks of a dp group
    try:
        with pytest.raises(DiskError, match="the 4 ranks that use this disk need"):
            engine_on(mesh, "zero3_nvme", **config)
    finally:
        disk_file._free_bytes = real


@ranks(4)
def test_other_inputs_on_ranks_of_one_copy_are_noticed(rank, world_size):
    engine = engine_on(mesh_of(4), "zero1")
    wrong = pytest.warns(HabitWarning, match=r"the 4 tensor-parallel ranks that hold one copy .* different inputs")
    with wrong if rank == 0 else contextlib.nullcontext():
        for step in range(10):
            engine.backward(engine(batch(step, rank)).square().mean())
            engine.step()


@ranks(4)
def test_a_checkpoint_loads_at_any_size_of_both_axes(rank, world_size, tmp_path):
    layouts = [(2, "zero1"), (1, "zero3"), (4, "zero2"), (2, "zero3_offload"), (1, "zero0")]
    saved, moments, before = None, None, None
    for number, (tp, preset) in enumerate(layouts):
        mesh = mesh_of(tp)
        engine = engine_on(mesh, preset, seed=number)
        average = shardwise.ema(engine, decay=0.5)
        if before is None:
            train(engine, mesh)
            saved, moments, ema = values(engine), momenta(engine), average.full_param("1.down.weight")
        else:
            engine.load(before)
            assert engine.steps == STEPS
        assert all(torch.equal(saved[name], value) for name, value in values(engine).items()), (tp, preset)
        assert all(torch.equal(moments[name], value) for name, value in momenta(engine).items()), (tp, preset)
        assert torch.equal(average.full_param("1.down.weight"), ema)
        before = engine.save(tmp_path / f"{number}").parent
        if tp > 1:
            train(engine, mesh, steps=[STEPS])
        engine.destroy()


@ranks(4)
def test_resuming_is_never_having_stopped(rank, world_size, tmp_path):
    mesh = mesh_of(2)
    engine = engine_on(mesh, "zero2", make=torch.optim.AdamW)
    train(engine, mesh)
    engine.save(tmp_path)
    train(engine, mesh, steps=[7, 8])
    resumed = engine_on(mesh, "zero3", make=torch.optim.AdamW, seed=1)
    resumed.load(tmp_path)
    train(resumed, mesh, steps=[7, 8])
    expected = values(engine)
    assert all(torch.equal(expected[name], value) for name, value in values(resumed).items())


@ranks(4)
def test_an_export_has_the_whole_tensors(rank, world_size, tmp_path):
    from safetensors.torch import load_file

    from shardwise.checkpoint.export import export_checkpoint

    mesh = mesh_of(2)
    engine = engine_on(mesh, "zero3")
    train(engine, mesh)
    expected = values(engine)
    engine.export(tmp_path / "export")
    path = engine.save(tmp_path / "checkpoints")
    if rank == 0:
        export_checkpoint(path, tmp_path / "tool")
        for folder in ("export", "tool"):
            found = load_file(tmp_path / folder / "model.safetensors")
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        blocks(seed=3).load_state_dict(found)


@ranks(4)
def test_a_deferred_model_begins_with_the_values_of_an_ordinary_one(rank, world_size, tmp_path):
    from safetensors.torch import save_file

    mesh = mesh_of(2)
    ordinary = dict(blocks(width=96).named_parameters())
    with shardwise.deferred_init(device="cpu"):
        model = blocks(10 * mesh["dp"].get_local_rank(), width=96)  # those of dp rank 0 are taken
        parallelized(model, mesh["tp"], src_data_rank=None)
    assert model[0].up.weight.is_meta
    engine = shardwise.initialize(model, sgd(model.parameters()), "zero3", mesh=mesh["dp"])
    assert all(torch.equal(value, ordinary[name]) for name, value in values(engine).items())
    engine.backward(engine(torch.ones(2, 3, 96)).square().mean())
    engine.step()
    engine.destroy()
    if rank == 0:
        save_file({name: param.detach() * 2 for name, param in ordinary.items()}, tmp_path / "model.safetensors")
    dist.barrier()
    with shardwise.deferred_init(tmp_path, device="cpu"):
        model = parallelized(blocks(width=96), mesh["tp"], src_data_rank=None)
    engine = shardwise.initialize(model, sgd(model.parameters()), "zero2", mesh=mesh["dp"])
    assert all(torch.equal(value, ordinary[name] * 2) for name, value in values(engine).items())


@ranks(2)
def test_ranks_that_all_hold_one_copy_need_no_mesh(rank, world_size, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from shardwise.models.built_in import GPT
    from shardwise.models.tensor_parallel import tensor_parallel

    _clear_sharding_prop_cache()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    sizes = {"hidden": 16, "layers": 2, "heads": 2, "vocabulary": 33, "length": 8, "tied": True, "fused": False}
    plain = GPT(**sizes)
    torch.manual_seed(0)
    model = tensor_parallel(GPT(**sizes), mesh)
    assert model.head.weight is model.embed.weight
    engine = shardwise.initialize(model, sgd(model.parameters()), "zero3")
    assert (engine.comm.world_size, engine.comm.everyone.world_size) == (1, 2)
    batch = torch.arange(18).view(2, 9)
    optimizer = sgd(plain.parameters())
    for _ in range(3):
        engine.backward(engine(batch))
        engine.step()
        optimizer.zero_grad()
        plain(batch).backward()
        optimizer.step()
    assert differs_by(values(engine), dict(plain.named_parameters())) <= 1e-6
    engine.save(tmp_path)
    with pytest.raises(ConfigError, match="build it with fused=False"):
        tensor_parallel(GPT(**sizes | {"fused": True}), mesh)
    with pytest.raises(ConfigError, match=r"names 'blocks.\*.in', and the model has no such module"):
        tensor_parallel(GPT(**sizes), mesh, {"blocks.*.in": "columns"})
    with pytest.raises(ConfigError, match=r"says 'column' of 'blocks.0.up': take one of .* such as 'columns'"):
        tensor_parallel(GPT(**sizes), mesh, {"blocks.*.up": "column"})
    with pytest.raises(ConfigError, match=r"'blocks.0' is a Block, which cannot be cut by rows"):
        tensor_parallel(GPT(**sizes), mesh, {"blocks.*": "rows"})
    with pytest.raises(ConfigError, match="3 attention heads cannot be cut into 2 parts"):
        tensor_parallel(GPT(**sizes | {"heads": 3, "hidden": 18}), mesh)
    with pytest.raises(ConfigError, match="there is no tensor-parallel plan for Linear: pass one"):
        tensor_parallel(nn.Linear(2, 2), mesh)
    with pytest.raises(ConfigError, match="mesh is None: pass a DeviceMesh"):
        tensor_parallel(GPT(**sizes), None)
    with pytest.raises(ConfigError, match=r"the axes \('dp', 'tp'\): pass the one to cut over, mesh\['tp'\]"):
        tensor_parallel(GPT(**sizes), mesh_of(2))
    with pytest.raises(ConfigError, match="the tensor-parallel plan is 'auto': pass a dictionary"):
        tensor_parallel(GPT(**sizes), mesh, "auto")


@ranks(4)
def test_what_is_not_supported_is_refused_by_name(rank, world_size):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = mesh_of(2)

    def refused(model, match, mesh=mesh["dp"], make=sgd):
        with pytest.raises(ConfigError, match=match):
            shardwise.initialize(model, make(model.parameters()), "zero2", mesh=mesh)

    model = parallelized(blocks(), mesh["tp"])
    refused(model, "the mesh is the axis 'tp', whose ranks hold different parameters", mesh=mesh["tp"])
    refused(model, "'0.up.weight' whole, and tensor parallelism has cut it", make=muons)
    model[1].up.weight = nn.Parameter(distribute_tensor(model[1].norm.weight.detach(), mesh["tp"], [Partial()]))
    refused(model, r"'1.up.weight' has the placement .*Partial.*, and only Shard and Replicate are supported")
    packed = _StridedShard(0, split_factor=2)  # as transformers cuts the gate and up matrices of its experts
    model[1].up.weight = nn.Parameter(DTensor.from_local(torch.ones(H, H), mesh["tp"], [packed], run_check=False))
    refused(
        model, r"'1.up.weight' is packed .*leave its module out of the plan, such as apply_tensor_parallelism\(model"
    )
    sharded = parallelized(blocks(), mesh["tp"])
    fully_shard(sharded, mesh=mesh["dp"])
    refused(sharded, r"'0.norm.weight' and '0.up.weight'|is a DTensor over 2 axes \(dp, tp\)")
    others = r"DTensors over the ranks \[\d, \d\], and the tp axis of the mesh has \[0, 1, 2, 3\]: cut the model over"
    refused(parallelized(blocks(), mesh["tp"]), others, mesh=mesh_of(4))
    across = parallelized(blocks(), mesh["dp"])
    with pytest.raises(ConfigError, match=r"cut over the ranks \[\d, \d\] of 4, which are not a row of neighbours"):
        shardwise.initialize(across, sgd(across.parameters()), "zero2")


def muons(params):
    params = list(params)
    matrices = [param for param in params if param.ndim == 2]
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.SGD([p for p in params if p.ndim != 2], lr=0.1)]


@ranks(4)
def test_values_that_differ_between_tp_ranks_become_those_of_the_first(rank, world_size):
    mesh = mesh_of(2)
    torch.manual_seed(rank)
    model = blocks(seed=rank)  # parallelize_module scatters what it cuts; the norms differ
    parallelized(model, mesh["tp"])
    engine = shardwise.initialize(model, sgd(model.parameters()), "zero3", mesh=mesh["dp"])
    got = values(engine)
    everyone = [None] * 4
    dist.all_gather_object(everyone, got)
    assert all(torch.equal(other[name], got[name]) for other in everyone for name in got)


@ranks(4)
def test_state_dicts_copies_and_gathered_values_are_dtensors(rank, world_size):
    import copy

    from torch.distributed.tensor import DTensor

    mesh = mesh_of(2)
    engine = engine_on(mesh, "zero3")
    train(engine, mesh)
    whole = values(engine)
    state = engine.state_dict()
    assert isinstance(state["0.down.weight"], DTensor)
    assert all(torch.equal(getattr(v, "full_tensor", lambda v=v: v)(), whole[name]) for name, v in state.items())
    plain = copy.deepcopy(engine.module)
    assert torch.equal(plain[0].down.weight.full_tensor(), whole["0.down.weight"])
    with shardwise.gathered(engine.module[0].down.weight, write=True), torch.no_grad():
        engine.module[0].down.weight.mul_(2)
    assert torch.equal(engine.full_param("0.down.weight"), 2 * whole["0.down.weight"])
    engine.load_state_dict(state)
    assert torch.equal(engine.full_param("0.down.weight"), whole["0.down.weight"])
    train(engine, mesh, steps=[5])
    average = shardwise.ema(engine)
    train(engine, mesh, steps=[6])
    average.load_state_dict(average.state_dict())
    assert torch.equal(average.full_param("0.down.weight"), engine.full_param("0.down.weight"))


@ranks(4, fresh=True, init=False, torchrun=True)
def test_the_example_runs(rank, world_size):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(Path(__file__).parent.parent / "examples" / "tensor_parallel.py"), run_name="__main__")
    if rank == 0:
        assert "the same bits in all stages: True" in output.getvalue()
        assert "loaded at tp 1 x dp 4 with the same bits: True" in output.getvalue()


class Gained(Block):
    """A parameter that every tp rank holds whole, and of whose gradient each has the part of its own channels."""

    def __init__(self, width):
        super().__init__(width)
        self.gain = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))) * self.gain)


def gained_on(mesh):
    torch.manual_seed(0)
    return nn.Sequential(Gained(H), Gained(H)) if mesh is None else parallelized(gained_on(None), mesh["tp"])


@ranks(4)
def test_a_hook_that_adds_a_gradient_up_over_tp_sees_that_of_one_micro_batch(rank, world_size):
    """Transformers' plans add the gradients of Qwen 3's norms up so. Where micro-batches were added in place, the hook
    added those before up again."""
    mesh, K, plain = mesh_of(2), 3, gained_on(None)
    optimizer = sgd(plain.parameters())
    for number in range(K):
        x = [batch(number, dp_rank) for dp_rank in range(2)]
        (sum(plain(each).square().sum() for each in x) / (B * L * H * 2 * K)).backward()
    optimizer.step()
    for preset in ("zero0", "zero1", "zero2"):
        model = gained_on(mesh)
        for block in model:
            block.gain.register_post_accumulate_grad_hook(
                lambda p: dist.all_reduce(p.grad, group=mesh["tp"].get_group())
            )
        config = {"preset": preset, "batch": {"accumulation": K}}
        engine = shardwise.initialize(model, sgd(model.parameters()), config, mesh=mesh)
        train(engine, mesh, steps=range(K))
        assert engine.steps == 1
        assert differs_by(values(engine), {name: param.detach() for name, param in plain.named_parameters()}) <= 1e-6
        engine.destroy()


@ranks(4)
def test_copies_that_would_drift_apart_are_noticed(rank, world_size):
    """Also where the gradient of an input is one rank's part: that of the last block's is right, so it is not named."""
    mesh = mesh_of(2)
    model = gained_on(mesh)
    engine = shardwise.initialize(model, sgd(model.parameters()), "zero2", mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(engine, mesh, steps=range(1))
    said = [str(each.message) for each in caught if "drift apart" in str(each.message)]
    assert len(said) == (rank == 0)
    assert all("2 parameters" in each and "'1.gain'" in each for each in said)
    engine.destroy()


@ranks(4)
def test_a_tie_that_the_cut_has_broken_is_noticed(rank, world_size):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, H), nn.Linear(H, 8, bias=False))
    model[1].weight = model[0].weight
    parallelize_module(model, mesh["tp"], {"0": RowwiseParallel(), "1": ColwiseParallel()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardwise.initialize(model, sgd, "zero2", mesh=mesh).destroy()
    assert sum("'0.weight' and '1.weight' have the same values" in str(each.message) for each in caught) == (rank == 0)
    model[1].weight = model[0].weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardwise.initialize(model, sgd, "zero2", mesh=mesh).destroy()
