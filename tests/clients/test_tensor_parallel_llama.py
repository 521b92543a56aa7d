"""Hugging Face's Llama under tensor parallelism x ZeRO: cut by transformers' own plan, by ours, and by its loader."""

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import ConfigError
from support.ranks import ranks
from test_tensor_parallel import CLIP, differs_by, mesh_of, sgd, values

pytestmark = pytest.mark.clients


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **options, use_cache=False))


def tokens(step, dp_rank):
    return torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(100 * step + dp_rank))


@ranks(4)
def test_a_llama_cut_by_its_own_plan_or_by_ours_trains_and_exports_as_one_process_does(rank, world_size, tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from shardwise.models.tensor_parallel import DECODER_PLAN, tensor_parallel

    mesh, plain = mesh_of(2), llama()
    optimizer = sgd(plain.parameters())
    for step in range(2):
        batches = [tokens(step, dp_rank) for dp_rank in range(2)]
        optimizer.zero_grad()
        (sum(plain(input_ids=each, labels=each).loss for each in batches) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
    cuts = {
        "theirs": lambda model: apply_tensor_parallelism(model, mesh["tp"]),
        "ours": lambda model: tensor_parallel(model, mesh["tp"], DECODER_PLAN),
    }
    for name, cut in cuts.items():
        model = cut(llama())
        config = {"preset": "zero3", "gradients": {"clip_norm": CLIP}}
        engine = shardwise.initialize(model, sgd(model.parameters()), config, mesh=mesh)  # its dp part is ZeRO's group
        for step in range(2):
            batch = tokens(step, mesh["dp"].get_local_rank())
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        got = values(engine)
        assert differs_by(got, dict(plain.named_parameters())) <= 1e-6
        engine.export(tmp_path / name)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert all(torch.equal(param, got[key]) for key, param in exported.named_parameters())
        engine.destroy()


@ranks(4, fresh=True, init=False, torchrun=True)
def test_accelerates_mesh_and_loader_serve_a_pretrained_model(rank, world_size, tmp_path):
    """Accelerate makes the mesh and gives the ranks of one copy the same batches; weights come from files, cut."""
    from accelerate import PartialState
    from accelerate.data_loader import prepare_data_loader
    from accelerate.parallelism_config import ParallelismConfig
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    PartialState(cpu=True)  # Accelerator itself takes a ParallelismConfig on GPUs alone
    mesh, plain = ParallelismConfig(dp_shard_size=2, tp_size=2).build_device_mesh("cpu"), llama()
    if rank == 0:
        plain.save_pretrained(tmp_path)
    torch.distributed.barrier()
    with shardwise.deferred_init(tmp_path, device="cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        apply_tensor_parallelism(model, mesh["tp"])
    config = {"preset": "zero3", "gradients": {"clip_norm": CLIP}}
    engine, optimizer = shardwise.initialize(model, sgd, config, mesh=mesh), sgd(plain.parameters())
    assert (engine.comm.world_size, engine.comm.everyone.world_size) == (2, 4)
    assert engine.units[1].layout.numel < sum(param.numel() for param in plain.model.layers[0].parameters()) * 0.6
    rows = [tokens(number, 0)[0] for number in range(8)]
    loader = prepare_data_loader(DataLoader(rows, batch_size=2), torch_device_mesh=mesh)
    seen = []
    for batch in loader:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        both: list[torch.Tensor] = [torch.empty_like(batch) for _ in range(4)]
        torch.distributed.all_gather(both, batch)
        assert torch.equal(both[0], both[1])
        assert torch.equal(both[2], both[3])
        seen.append(both[::2])
    assert len(seen) == 2
    for batches in seen:
        optimizer.zero_grad()
        (sum(plain(input_ids=each, labels=each).loss for each in batches) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
    assert differs_by(values(engine), dict(plain.named_parameters())) <= 1e-6
    engine.destroy()
    torch.distributed.destroy_process_group()


@ranks(2)
def test_a_loader_that_cuts_over_all_ranks_needs_no_mesh(rank, world_size, tmp_path):
    from transformers import AutoModelForCausalLM

    mesh_of(2)
    if rank == 0:
        llama().save_pretrained(tmp_path)
    torch.distributed.barrier()
    model, plain = AutoModelForCausalLM.from_pretrained(tmp_path, tp_plan="auto"), llama()
    engine, optimizer = shardwise.initialize(model, sgd(model.parameters()), "zero3"), sgd(plain.parameters())
    for step in range(2):
        batch = tokens(step, 0)
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        optimizer.zero_grad()
        plain(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    assert differs_by(values(engine), dict(plain.named_parameters())) <= 1e-6


@ranks(2)
def test_an_embedding_and_a_head_that_are_not_tied_any_more_are_refused(rank, world_size):
    """`apply_tensor_parallelism` makes two parameters of them; each was trained by its own gradients without a word."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = mesh_of(2)
    model = apply_tensor_parallelism(llama(tie_word_embeddings=True), mesh["tp"])
    with pytest.raises(ConfigError, match=r"tie them again after the model is cut, model.tie_weights\(\)"):
        shardwise.initialize(model, sgd, "zero3", mesh=mesh)
    model.tie_weights()
    plain = llama(tie_word_embeddings=True)
    engine, optimizer, batch = (
        shardwise.initialize(model, sgd, "zero3", mesh=mesh),
        sgd(plain.parameters()),
        tokens(0, 0),
    )
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    plain(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    assert differs_by(values(engine), dict(plain.named_parameters())) <= 1e-6
    engine.destroy()
