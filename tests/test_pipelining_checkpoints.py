"""Checkpoints of pipelines: one of the whole model, which any mesh, cut and stage of ZeRO loads, bit for bit."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import shardwise
from shardwise.errors import CheckpointError
from shardwise.models.built_in import GPT
from shardwise.models.tensor_parallel import tensor_parallel
from support import ranks
from support.object_folder import ObjectFolder

BATCH = 8
adamw = partial(torch.optim.AdamW, lr=0.01)


def make_gpt(tied=True, norm_first=False):
    torch.manual_seed(1)
    model = GPT(16, 4, 2, 32, 8, tied=tied, fused=False)
    if norm_first:
        model._modules = {"norm": model.norm, **model._modules}
    model.register_buffer("scale", torch.tensor([3.0]))
    return model


def tokens_of(step, replica):
    return torch.randint(0, 32, (BATCH, 9), generator=torch.Generator().manual_seed(10 * step + replica))


class Training:
    """A model on a mesh of pp x dp x tp; without pp, under a plain engine."""

    def __init__(self, pp, dp, tp, preset, schedule="1F1B", tied=True, optimizer=adamw, norm_first=False, **options):
        self.mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        self.model = make_gpt(tied, norm_first)
        if tp > 1:
            tensor_parallel(self.model, self.mesh["tp"])
        if pp > 1:
            self.engine = shardwise.pipeline(
                self.model, self.mesh, optimizer, preset, schedule=schedule, micro_batches=4, **options
            )
            self.engines = list(self.engine.engines.values())
        else:
            self.engine = shardwise.initialize(self.model, optimizer, preset, mesh=self.mesh)
            self.engines = [self.engine]

    def train(self, step):
        batch = tokens_of(step, self.mesh["dp"].get_local_rank())
        if hasattr(self.engine, "train_step"):
            self.engine.train_step(batch)
        else:
            self.engine.backward(self.engine(batch))
            self.engine.step()

    def values(self):
        """All weights and optimizer states of the model, on every rank."""
        mine = {}
        for engine in self.engines:
            for name, _ in engine.module.named_parameters():
                mine[name] = engine.full_param(name)
                mine |= {f"{name}/{key}": value for key, value in engine.full_state(name).items()}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return {name: value for each in everyone for name, value in each.items()}


LAYOUTS = [
    (2, 2, 1, "zero2", "1F1B"),
    (1, 4, 1, "zero3", None),
    (2, 2, 1, "zero3_offload", "ZBVZeroBubble"),
    (4, 1, 1, "zero0", "GPipe"),
    (2, 1, 2, "zero1", "Interleaved1F1B"),
    (1, 2, 2, "zero2", None),
    (2, 1, 2, "zero3", "1F1B"),
]


@ranks(4)
def test_any_layout_loads_any_other_with_every_bit(rank, world_size, tmp_path):
    _clear_sharding_prop_cache()  # it has meshes of earlier tests, whose groups are gone
    training = Training(*LAYOUTS[0])
    training.train(0)
    training.train(1)
    expected, folder = training.values(), tmp_path / "0"
    training.engine.save(folder, state={"epoch": 3})
    training.engine.destroy()
    for number, layout in enumerate((*LAYOUTS[1:], LAYOUTS[0]), 1):
        training = Training(*layout)
        assert training.engine.load(folder) == {"epoch": 3}
        assert training.engine.steps == 2
        for name, value in training.values().items():
            assert torch.equal(value, expected[name.replace("head.weight", "embed.weight")]), (layout, name)
        folder = tmp_path / str(number)
        training.engine.save(folder, state={"epoch": 3}, blocking=number % 2 == 0)
        if number != 3:
            training.engine.finish_save()
        training.engine.destroy()  # waits for the save
        dist.barrier()  # rank 0 has committed


@ranks(2)
def test_a_norm_that_both_ends_have_is_stored_once(rank, world_size, tmp_path):
    expected = None
    for number, layout in enumerate(((2, 1, "1F1B"), (1, 2, None), (2, 1, "ZBVZeroBubble"), (2, 1, "GPipe"))):
        pp, dp, schedule = layout
        training = Training(pp, dp, 1, "zero2", schedule, norm_first=True)
        if expected is None:
            training.train(0)
            expected = training.values()
        else:
            training.engine.load(tmp_path / str(number - 1))
        for name, value in training.values().items():
            stored = name.replace("head.weight", "embed.weight").replace(".copy", "")
            assert torch.equal(value, expected[stored]), (layout, name)
        assert ("norm.copy.weight" in training.values()) is (pp > 1)
        training.engine.save(tmp_path / str(number))
        training.engine.export(tmp_path / f"export-{number}")
        training.engine.destroy()
        dist.barrier()
        assert "norm.copy.weight" not in load_file(tmp_path / f"export-{number}" / "model.safetensors")


@ranks(4)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_resumed_pipeline_is_never_having_stopped(rank, world_size, tmp_path, schedule):
    pipe = Training(2, 2, 1, "zero2", schedule)
    pipe.train(0)
    pipe.engine.save(tmp_path, keep=1)
    pipe.train(1)
    resumed = Training(2, 2, 1, "zero3", schedule)
    resumed.engine.load(tmp_path)
    resumed.train(1)
    expected = pipe.values()
    for name, value in resumed.values().items():
        assert torch.equal(value, expected[name]), name
    pipe.engine.destroy()
    resumed.engine.destroy()


@ranks(2)
def test_a_pipeline_goes_on_from_an_object_store(rank, world_size, tmp_path):
    address = f"{ObjectFolder.protocol}://{tmp_path}/store"
    pipe = Training(2, 1, 1, "zero1")
    for step, blocking in enumerate((True, False)):
        pipe.train(step)
        path = pipe.engine.save(address, state={"steps": step + 1}, blocking=blocking)
    pipe.engine.finish_save()
    assert str(path) == f"{address}/step-2"
    with pytest.raises(CheckpointError, match="is in an object store: export into a folder"):
        pipe.engine.export(f"{address}/out")
    other = Training(2, 1, 1, "zero2", "GPipe")
    assert other.engine.load(address) == {"steps": 2}
    expected = pipe.values()
    for name, value in other.values().items():
        assert torch.equal(value, expected[name]), name
    pipe.engine.destroy()
    other.engine.destroy()


def a_group_for_each(params):
    """As many groups as parameters: a different number on each stage."""
    return torch.optim.SGD([{"params": [param]} for param in params], lr=0.1)


@ranks(4)
def test_checkpoints_that_do_not_fit_a_pipeline_are_refused(rank, world_size, tmp_path):
    untied = Training(2, 2, 1, "zero2", tied=False)
    untied.train(0)
    untied.engine.save(tmp_path)
    tied = Training(2, 2, 1, "zero2")
    with pytest.raises(CheckpointError, match=r"this one has no parameter 'head.weight'"):
        tied.engine.load(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        tied.engine.load(tmp_path / "nowhere")
    other = shardwise.pipeline(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), tied.mesh, adamw, "zero2")
    with pytest.raises(CheckpointError, match="is of another model"):
        other.load(tmp_path)
    grouped = Training(2, 2, 1, "zero2", optimizer=a_group_for_each)
    with pytest.raises(CheckpointError, match="different parameter groups"):
        grouped.engine.save(tmp_path)
    for pipe in (untied.engine, tied.engine, other, grouped.engine):
        pipe.destroy()
