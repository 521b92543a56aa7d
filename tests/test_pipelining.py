"""Engines as stages of torch's pipeline schedules: every schedule trains as one plain process does."""

import copy
import doctest
import importlib
import re
import runpy
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.nn import functional as F

import shardwise
from shardwise.errors import CheckpointError, ConfigError
from shardwise.models.built_in import GPT
from shardwise.pipelining import EngineStage
from shardwise.pipelining.cut import cut, prune
from shardwise.pipelining.stage import StageCall
from support import ranks, run_ranks

ROOT = Path(__file__).parents[1]

STAGES = ["zero0", "zero1", "zero2", "zero3"]
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
WIDTH, BLOCKS, MICRO_BATCHES, BATCH, STEPS = 16, 4, 4, 8, 2


def make_blocks():
    """No parameter is near zero: differences are relative to each."""
    torch.manual_seed(0)
    blocks = nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(BLOCKS)
        )
    )
    for param in blocks.parameters():
        nn.init.normal_(param.data, std=0.5)
    return blocks


def batch_of(step, replica):
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def sgd(params):
    return torch.optim.SGD(params, lr=0.01)


def chunks_of(schedule, place):
    """The stages of a pipeline rank, of 2, and their number."""
    if not issubclass(get_schedule_class(schedule), PipelineScheduleMulti):
        return [place], 2
    return ([place, 3 - place] if "V" in schedule else [place, place + 2]), 4


def plain_weights(replicas, steps=STEPS):
    model = make_blocks()
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for replica in range(replicas):
            inputs, targets = batch_of(step, replica)
            (F.mse_loss(model(inputs), targets) / replicas).backward()
        optimizer.step()
    return dict(model.named_parameters())


class Run:
    """One schedule over engines, driven by hand as a user of torch's schedules does."""

    def __init__(self, mesh, schedule, config, make_stage):
        self.mesh = mesh
        self.chunks, self.count = chunks_of(schedule, mesh["pp"].get_local_rank())
        self.per = BLOCKS // self.count
        blocks = make_blocks()
        self.engines = {}
        for chunk in self.chunks:
            part = nn.Sequential(*copy.deepcopy(list(blocks)[chunk * self.per : (chunk + 1) * self.per]))
            self.engines[chunk] = shardwise.initialize(part, sgd, config, mesh=mesh["dp"])
        group = mesh["pp"].get_group()
        stages = [make_stage(engine, chunk, self.count, group) for chunk, engine in self.engines.items()]
        kind = get_schedule_class(schedule)
        self.schedule = kind(
            stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
            MICRO_BATCHES,
            loss_fn=lambda output, target: F.mse_loss(output, target) / MICRO_BATCHES,
            scale_grads=False,
        )

    def step(self, step):
        inputs, targets = batch_of(step, self.mesh["dp"].get_local_rank())
        args = (inputs,) if 0 in self.engines else ()
        kwargs = {"target": targets, "losses": []} if self.count - 1 in self.engines else {}
        self.schedule.step(*args, **kwargs)
        for engine in self.engines.values():
            engine.step()

    def differences(self, reference):
        """The relative difference of each weight from a plain process's."""
        for chunk, engine in self.engines.items():
            for name, _ in engine.module.named_parameters():
                block, _, rest = name.partition(".")
                expected = reference[f"{int(block) + chunk * self.per}.{rest}"]
                yield ((engine.full_param(name) - expected).norm() / expected.norm()).item()

    def destroy(self):
        for engine in self.engines.values():
            engine.destroy()


def make_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


@ranks(4)
@pytest.mark.parametrize("preset", STAGES)
def test_every_schedule_trains_as_one_process_does(rank, world_size, preset):
    mesh, reference = make_mesh(), plain_weights(2)
    for schedule in SCHEDULES:
        run = Run(mesh, schedule, preset, EngineStage)
        for step in range(STEPS):
            run.step(step)
        assert max(run.differences(reference)) < 2e-7, schedule
        run.destroy()


def sent_in_a_step(mesh, schedule, preset, **options):
    """Bytes that this rank sends in the second step, by kind, as a multiple of its stages' weights times (W-1)/W."""
    run = Run(mesh, schedule, preset, partial(EngineStage, **options))
    run.step(0)
    before = sum((engine.comm.sent_bytes for engine in run.engines.values()), Counter())
    run.step(1)
    sent = sum((engine.comm.sent_bytes for engine in run.engines.values()), Counter()) - before
    whole = sum(unit.layout.numel * 4 // 2 for engine in run.engines.values() for unit in engine.units)
    assert max(run.differences(plain_weights(2))) < 2e-7
    run.destroy()
    return {kind: sent[kind] / whole for kind in ("gather", "reduce")}


@ranks(4)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_what_stages_send_in_a_step(rank, world_size, schedule):
    """Replicated gradients are reduced once, sharded ones for each micro-batch, kept weights are gathered once."""
    mesh = make_mesh()
    assert sent_in_a_step(mesh, schedule, "zero1")["reduce"] == 1
    assert sent_in_a_step(mesh, schedule, "zero2")["reduce"] == MICRO_BATCHES
    kept = sent_in_a_step(mesh, schedule, "zero3", keep_gathered=True)
    assert kept == {"gather": 1, "reduce": MICRO_BATCHES}
    assert sent_in_a_step(mesh, schedule, "zero3")["gather"] > 1


@ranks(4)
@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3"])
def test_weight_gradients_that_torchs_own_stage_sets_are_taken(rank, world_size, preset):
    """On `p.grad`, past the engine's hooks. Beside a backward through the hooks (DualPipeV) they are refused:
    test_held_gradients_refuse_to_be_read_and_written."""
    config = {"preset": preset, "gradients": {"reduce_at": "step" if preset == "zero1" else "backward"}}
    mesh, reference = make_mesh(), plain_weights(2, steps=1)
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        run = Run(mesh, schedule, config, plain_stage)
        run.step(0)
        assert max(run.differences(reference)) < 2e-7, schedule
        run.destroy()


def plain_stage(engine, chunk, count, group):
    return PipelineStage(engine, chunk, count, torch.device("cpu"), group=group)


@ranks(4)
def test_a_schedule_that_scales_gradients_itself_is_refused(rank, world_size):
    run = Run(make_mesh(), "GPipe", "zero2", EngineStage)
    run.schedule.scale_grads = True
    with pytest.raises(RuntimeError, match=r"scale_grads=False"):
        run.step(0)
    run.destroy()


def make_gpt(tied):
    torch.manual_seed(1)
    model = GPT(16, 4, 2, 32, 8, tied=tied)
    for param in model.parameters():
        nn.init.normal_(param.data, std=0.2)
    return model


def tokens_of(step, replica):
    return torch.randint(0, 32, (BATCH, 9), generator=torch.Generator().manual_seed(10 * step + replica))


def make_llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32, max_position_embeddings=16, num_key_value_heads=1, **sizes)
    )


def make_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))


def make_qwen():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.Qwen3Config(
        vocab_size=32, num_key_value_heads=1, head_dim=8, max_position_embeddings=16, tie_word_embeddings=True, **sizes
    )
    return transformers.Qwen3ForCausalLM(config)


def make_mixtral():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        vocab_size=32, num_key_value_heads=1, num_local_experts=4, max_position_embeddings=16, **sizes
    )
    return transformers.MixtralForCausalLM(config)


def make_opt():
    """Its last norm is registered before the blocks, and used after them."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.OPTConfig(
        vocab_size=32, word_embed_proj_dim=16, max_position_embeddings=16, dropout=0.0, **sizes
    )
    return transformers.OPTForCausalLM(config)


def labelled(step, replica):
    tokens = tokens_of(step, replica)
    return {"input_ids": tokens, "labels": tokens}


MODELS = {
    "GPT": (partial(make_gpt, False), tokens_of),
    "tied GPT": (partial(make_gpt, True), tokens_of),
    "Llama": (make_llama, labelled),
    "GPT-2, tied": (make_gpt2, labelled),
    "Qwen, tied": (make_qwen, labelled),
    "Mixtral": (make_mixtral, labelled),
    "OPT, tied": (make_opt, labelled),
    "Sequential": (make_blocks, batch_of),
}


def loss_of(model, batch):
    if isinstance(batch, tuple):
        return F.mse_loss(model(batch[0]), batch[1])
    return model(**batch).loss if isinstance(batch, dict) else model(batch)


@ranks(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_models_train_in_a_pipeline_as_in_one_process(rank, world_size, name, schedule):
    mesh, (make, batch) = make_mesh(), MODELS[name]
    model, clip = make(), 0.5
    optimizer = sgd(model.parameters())
    loss_fn = F.mse_loss if name == "Sequential" else None
    config = {"preset": "zero2" if schedule == "1F1B" else "zero3", "gradients": {"clip_norm": clip}}
    split = ["1"] if (name, schedule) == ("Sequential", "1F1B") else None
    pipe = shardwise.pipeline(
        make(), mesh, sgd, config, schedule=schedule, micro_batches=4, loss_fn=loss_fn, split=split
    )
    for step in range(STEPS):
        loss = pipe.train_step(batch(step, mesh["dp"].get_local_rank()))
        optimizer.zero_grad()
        losses = [loss_of(model, batch(step, replica)) for replica in range(2)]
        (sum(losses) / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        torch.testing.assert_close(loss, losses[mesh["dp"].get_local_rank()].detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pipe.grad_norm, norm, rtol=1e-5, atol=1e-6)
    seen = 0
    for param_name, param in model.named_parameters(remove_duplicate=False):
        value = pipe.full_param(param_name)
        if value is not None:
            torch.testing.assert_close(value, param.detach(), rtol=1e-5, atol=1e-6, msg=param_name)
            seen += 1
    assert seen
    assert split is None or pipe.where.starts == (0, 1)
    pipe.destroy()


def test_stages_are_cut_evenly_by_parameters():
    assert cut(make_gpt(False), 2).starts == (0, 2)
    assert cut(nn.Sequential(nn.Linear(64, 64), *(nn.Linear(8, 8) for _ in range(5))), 2).starts == (0, 1)
    nested = nn.Sequential(nn.Embedding(4, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.Linear(8, 4))
    assert cut(nested, 2).blocks == ("1.0", "1.1", "1.2", "1.3")
    assert cut(make_gpt(False), 2, ["blocks.1"]).starts == (0, 1)


def test_examples_in_docstrings_run():
    result = doctest.testmod(importlib.import_module("shardwise.pipelining.cut"))
    assert (result.attempted, result.failed) == (2, 0)


@pytest.mark.parametrize(
    ("count", "split", "message"),
    [
        (5, None, "leave a stage empty"),
        (2, ["head"], "'head', which is no block"),
        (2, ["blocks.1", "blocks.2"], "there are 2 stages"),
        (3, ["blocks.2", "blocks.1"], "leaves a stage empty"),
    ],
)
def test_cuts_that_cannot_be_made_are_refused(count, split, message):
    with pytest.raises(ConfigError, match=message):
        cut(make_gpt(False), count, split)


def test_models_that_cannot_be_cut_are_refused():
    with pytest.raises(ConfigError, match="Linear cannot be cut into stages"):
        cut(nn.Linear(4, 4), 2)
    model = nn.Module()
    model.stem, model.blocks = nn.Conv1d(2, 2, 1), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    with pytest.raises(ConfigError, match=r"'stem' \(Conv1d\)"):
        prune(model, cut(model, 2), 1)


class Mixer(nn.Module):
    """A decoder written by hand. `way` is how its forward goes from block to block."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.embed, self.place = nn.Embedding(32, 16), nn.Parameter(torch.randn(9, 16))
        self.trunk = nn.ModuleList(Layer(way) for _ in range(4))
        self.gains, self.norm, self.head = nn.Parameter(torch.rand(4)), nn.LayerNorm(16), nn.Linear(16, 32)
        if way in ("norm first", "stem norm"):
            self._modules = {"norm": self.norm, **self._modules}

    def forward(self, *, tokens):
        first = hidden = self.embed(tokens) + self.place
        if self.way == "stem norm":
            hidden = self.norm(hidden)
        seen = []
        for number, layer in enumerate(self.trunk):
            if self.way == "keywords":
                hidden = layer(hidden=hidden, mask=torch.ones_like(hidden))
            elif self.way in ("unpacks", "routes and unpacks", "adds up"):
                hidden, extra = layer(hidden)
                seen.append(extra)
                continue
            elif self.way == "asks for the type":
                hidden = layer(hidden)
                if isinstance(hidden, tuple):
                    hidden, extra = hidden
                    seen.append(extra)
                continue
            elif self.way in ("tuples", "routes"):
                hidden = layer(hidden)[0]
            elif self.way == "dictionaries":
                hidden = layer(hidden)["hidden"]
            else:
                hidden = layer(hidden)
            if self.way == "between":
                hidden = 1.5 * hidden
            if self.way == "gains":
                hidden = hidden * self.gains[number]
            if self.way == "skips":
                hidden = hidden + first
            seen.append(hidden.square().mean())
        hidden = hidden if self.way == "stem norm" else self.norm(hidden)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())
        if self.way == "keeps":
            seen = [module.extra for module in self.modules() if hasattr(module, "extra")]
        return loss + sum(seen) if self.way in ("sums up", "adds up", "keeps", "asks for the type") else loss


_ALONE = ("keywords", "between", "norm first", "stem norm", "keeps", "keeps its own", "sums up", "gains", "skips")


class Layer(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.up, self.down = way, nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden, mask=None):
        hidden = hidden + self.down(F.gelu(self.up(hidden)))
        extra = hidden.square().mean()
        if self.way in ("routes", "routes and unpacks", "asks for the type"):  # a mixture of experts looks at values
            hidden = hidden.index_put((hidden[..., 0].gt(9).nonzero(as_tuple=True)), torch.zeros(()))
        if self.way == "keeps":
            self.up.extra = extra
        if self.way == "keeps its own":
            self.extra = self.up.bias.mean()
            hidden = hidden * torch.sigmoid(self.extra)
        if self.way == "dictionaries":
            return {"hidden": hidden, "extra": extra}
        return hidden if self.way in _ALONE else (hidden, extra)


def make_mixer(way):
    torch.manual_seed(1)
    return Mixer(way)


@ranks(2)
@pytest.mark.parametrize(
    "way",
    ["keywords", "tuples", "routes", "unpacks", "dictionaries", "between", "norm first", "stem norm", "keeps its own"],
)
def test_models_written_by_hand_train_as_in_one_process(rank, world_size, way):
    """Blocks called by keyword, blocks that return tuples or other containers, what is computed between blocks, what a
    block keeps for its own use, and a norm that is registered before the blocks, used there or after them. A parameter
    of the model itself is no buffer on other stages: the broadcast of one without memory crashed them."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    plain, tokens = make_mixer(way), tokens_of(0, 0)
    optimizer = sgd(plain.parameters())
    pipe = shardwise.pipeline(make_mixer(way), mesh, sgd, "zero2", micro_batches=4)
    for _ in range(2):
        optimizer.zero_grad()
        loss = plain(tokens=tokens)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(pipe.train_step({"tokens": tokens}), loss.detach(), rtol=1e-5, atol=1e-6)
    for name, param in plain.named_parameters():
        if (value := pipe.full_param(name)) is not None:
            torch.testing.assert_close(value, param.detach(), rtol=1e-5, atol=1e-6, msg=name)
    pipe.destroy()


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("skips", "an argument of block 'trunk.3' is computed from values that only another stage has"),
        ("sums up", "the loss is computed from values that only another stage has"),
        ("gains", "values.* that only another stage has"),
        ("adds up", "the loss is computed from values that only another stage has"),
        ("routes and unpacks", "the forward unpacks what another stage computes"),
        ("asks for the type", "blocks return tuple objects, and what those of other stages return cannot be told"),
        ("keeps", "the loss has a part that block 'trunk.3' keeps in an attribute"),
    ],
)
def test_what_a_stage_would_compute_from_values_of_another_is_refused(way, message):
    """It was computed from zeros, and another model was trained without a word."""
    model = make_mixer(way)
    part = prune(model, cut(model, 2), 1)
    call = StageCall(part, None)
    call.micro_batches = [{"tokens": tokens_of(0, 0)}]
    with pytest.raises(ConfigError, match=message):
        part.forward(torch.randn(BATCH, 9, WIDTH), index=torch.zeros(1))


def test_a_loss_with_a_part_from_every_block_is_refused():
    model = make_mixtral()
    model.config.output_router_logits = True
    with pytest.raises(ConfigError, match="output_router_logits"):
        cut(model, 2)


@ranks(4)
def test_what_a_pipeline_cannot_do_is_refused(rank, world_size):
    mesh = make_mesh()
    wrong = {
        "pass a callable": {"optimizer": torch.optim.SGD(make_gpt(False).parameters(), lr=0.1)},
        "micro_batches is 0": {"micro_batches": 0},
        "compute in bf16": {"config": {"preset": "zero2", "precision": {"compute": "fp16"}}},
        "set micro_batches instead": {"config": {"preset": "zero2", "batch": {"accumulation": 2}}},
        "schedule is '2F2B'": {"schedule": "2F2B"},
        "schedule is None": {"schedule": None},
        "micro_batches is '8'": {"micro_batches": "8"},
        "micro_batches is True": {"micro_batches": True},
        "loss_fn is 'mse': pass a callable": {"loss_fn": "mse"},
        r"split is 'blocks.2': pass a list of names, \['blocks.2'\]": {"split": "blocks.2"},
        r"name the first block of each stage but the first \(blocks.0\), in": {"split": ["blocks.0"]},
    }
    for message, options in wrong.items():
        with pytest.raises(ConfigError, match=message):
            shardwise.pipeline(make_gpt(False), mesh, **{"optimizer": sgd, **options})
    for no_mesh in ("pp", None):
        with pytest.raises(ConfigError, match="pass a DeviceMesh"):
            shardwise.pipeline(make_gpt(False), no_mesh, sgd)
    with pytest.raises(ConfigError, match="pass a DeviceMesh"):
        shardwise.initialize(make_gpt(False), sgd, "zero2", mesh=(2, 2))
    part = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("pp", "dp"))
    with pytest.raises(ConfigError, match=r"mesh has 2 of 4 ranks" if rank < 2 else rf"rank {rank} of 4 is not in the"):
        shardwise.pipeline(make_gpt(False), part, sgd)
    with pytest.raises(ConfigError, match="needs pp first"):
        shardwise.pipeline(make_gpt(False), mesh["dp"], sgd)
    pipe = shardwise.pipeline(make_gpt(False), mesh, sgd, micro_batches=3)
    tokens = tokens_of(0, 0)
    for batch, shapes in (tokens, r"\[\(8, 9\)\]"), (None, r"\[\]"), ((tokens[:6], tokens[0, 0]), r".*\(\)\]"):
        with pytest.raises(ConfigError, match=rf"a batch of shapes {shapes} cannot be cut into 3 micro-batches"):
            pipe.train_step(batch)
    pipe.train_step(tokens_of(0, 0)[:6])
    with pytest.raises(ConfigError, match=r"shapes \[\(6, 5\)\], and those before had \[\(6, 9\)\]"):
        pipe.train_step(tokens_of(0, 0)[:6, :5])
    pipe.destroy()


@ranks(2)
def test_a_pipeline_that_cannot_train_says_what_is_missing(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    pipe = shardwise.pipeline(make_gpt(False), mesh, None, micro_batches=4)
    with pytest.raises(ConfigError, match=r"no optimizer, so it only evaluates: pass one to shardwise\.pipeline"):
        pipe.train_step(tokens_of(0, 0))
    assert pipe.evaluate(tokens_of(0, 0)).isfinite()
    pipe.destroy()
    model = make_blocks()
    call = StageCall(prune(model, cut(model, 2), 0), F.mse_loss)
    call.micro_batches = [torch.randn(BATCH, WIDTH)]
    with pytest.raises(ConfigError, match=r"a batch is \(\*inputs, target\), and this one is a Tensor"):
        call._run(lambda x: x, index=torch.zeros(1))
    call.micro_batches = [batch_of(0, 0)]
    for loss_fn, message in ((None, "the model returned"), (torch.sub, "loss_fn returned")):
        call._loss_fn = loss_fn
        with pytest.raises(ConfigError, match=rf"{message} a tensor of shape \(8, 16\)"):
            call._run(lambda x, target=None: x, index=torch.zeros(1))


def run_the_example(rank, world_size):
    runpy.run_path(str(ROOT / "examples" / "pipeline.py"), run_name="__main__")


def test_the_example_learns():
    outcomes = run_ranks(run_the_example, 4, fresh=True, init=False, torchrun=True, check=False)
    assert all(outcome.ok for outcome in outcomes), [outcome.describe() for outcome in outcomes]
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", outcomes[0].describe())]
    assert losses[-1] < losses[0] - 0.5


@ranks(4)
@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_an_export_is_one_folder_that_transformers_loads(rank, world_size, tmp_path, make):
    mesh = make_mesh()
    pipe = shardwise.pipeline(make(), mesh, sgd, "zero3", micro_batches=4)
    pipe.train_step(labelled(0, mesh["dp"].get_local_rank()))
    pipe.export(tmp_path / "exported")
    loaded = type(make()).from_pretrained(tmp_path / "exported")
    for name, param in loaded.named_parameters():
        value = pipe.full_param(name)
        assert value is None or torch.equal(value, param), name
    with pytest.raises(CheckpointError, match="not an empty folder"):
        pipe.export(tmp_path / "exported")
    pipe.destroy()
