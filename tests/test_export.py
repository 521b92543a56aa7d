"""Every export loads with transformers, or with PEFT, and computes what the engine's model computed."""

import json
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise
from shardwise.checkpoint.export import export_checkpoint
from shardwise.errors import CheckpointError
from support import ranks

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TOKENS = torch.arange(12).view(2, 6)
TOKENIZER = {"tokenizer_config.json": '{"model_max_length": 32}\n', "special_tokens_map.json": "{}\n"}


class Wrapper(nn.Module):
    """As DistributedDataParallel names what it wraps."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def llama(tied=False):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def lora(model, **more):
    chosen = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(r=3, **chosen | more)).eval()


def checkpointed(model):
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    return model


def injected(model):
    model.add_adapter(peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False))
    return model


WRAPPED = {
    "plain": lambda: llama(),
    "tied": lambda: llama(tied=True),
    "in a wrapper": lambda: Wrapper(llama()),
    "checkpointed": lambda: checkpointed(llama()),
}
COMPILED = {  # by themselves: torch's compiler takes seconds to import in each process
    "compiled": lambda: torch.compile(llama()),
    "compiled in a wrapper": lambda: Wrapper(torch.compile(checkpointed(llama()))),
}
ADAPTED = {
    "lora": lambda: lora(llama()),
    "dora": lambda: lora(llama(), use_dora=True),
    "with a trained head": lambda: lora(llama(), modules_to_save=["lm_head"], bias="all"),
    "injected": lambda: injected(llama()),
}


def begin(model, preset, **more):
    """An engine, and the logits of the model before it."""
    inner = getattr(model, "_orig_mod", model)  # nothing is compiled here
    inner = getattr(getattr(inner, "module", inner), "_orig_mod", inner)
    with torch.no_grad():
        expected = inner(TOKENS).logits
    trained = [param for param in model.parameters() if param.requires_grad]
    return shardwise.initialize(model, torch.optim.SGD(trained, lr=0.1), {"preset": preset, **more}), expected


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def loaded(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


@ranks(2)
def test_an_export_has_the_names_of_the_model_inside(rank, world_size, tmp_path):
    check_names(rank, tmp_path, WRAPPED)


def test_an_export_of_a_compiled_model_has_its_own_names(tmp_path):
    check_names(0, tmp_path, COMPILED)
    engine, expected = begin(torch.compile(lora(llama())), "zero3")
    engine.export(tmp_path / "adapter")
    engine.destroy()
    assert torch.equal(logits(peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")), expected)


def check_names(rank, path, models):
    for name, build in models.items():
        engine, expected = begin(build(), "zero3")
        folder = path / name
        engine.export(folder / "live")
        engine.save(folder / "saved")
        engine.destroy()
        if rank == 0:
            export_checkpoint(folder / "saved", folder / "offline")
            for kind in ("live", "offline"):
                assert torch.equal(logits(loaded(folder / kind)), expected), (name, kind)
            assert json.loads((folder / "live" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
            assert (folder / "live" / "generation_config.json").is_file()


@ranks(2)
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_adapters_are_exported_as_peft_writes_them_or_merged(rank, world_size, preset, tmp_path):
    for name, build in ADAPTED.items():
        engine, expected = begin(build(), preset)
        folder = tmp_path / f"{name}-{preset}"
        engine.export(folder / "adapter")
        engine.export(folder / "merged", merged=True, max_file_bytes=2_000)
        names = {each: value.clone() for each, value in engine.state_dict().items()}
        engine.destroy()
        if rank == 0:
            files = {path.name for path in (folder / "adapter").iterdir()}
            assert {"adapter_model.safetensors", "adapter_config.json"} <= files <= {*files, "README.md"}
            assert "config.json" not in files
            with_adapter = peft.PeftModel.from_pretrained(llama(), folder / "adapter")
            assert torch.equal(logits(with_adapter), expected), name
            torch.testing.assert_close(logits(loaded(folder / "merged")), expected, msg=name)
            assert any("lora_A" in each for each in names), "the engine's model is as it was"


def test_weights_that_were_trained_are_exported(tmp_path):
    """In the precision that is asked for, from the masters; what the engine has stays as it is."""
    model = lora(llama())
    engine, before = begin(model, "zero3", precision={"compute": "bf16"})
    engine.backward(engine(TOKENS, labels=TOKENS).loss)
    engine.step()
    expected = {name: engine.full_param(name) for name, param in model.named_parameters()}
    engine.export(tmp_path / "adapter", dtype="fp32")
    engine.export(tmp_path / "merged", dtype="fp32", merged=True)
    again = lora(llama())
    again.load_state_dict(expected)
    after = logits(again)
    assert not torch.allclose(after, before)
    base = llama()
    for param in base.parameters():
        param.data = param.data.bfloat16().float()  # as what is frozen rests
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    for name, value in again.state_dict().items():
        assert torch.equal(with_adapter.state_dict()[name], value), name
    torch.testing.assert_close(logits(with_adapter), after)  # the addresses of weights may change the last bit
    torch.testing.assert_close(logits(loaded(tmp_path / "merged")), after)
    for name, value in expected.items():
        assert torch.equal(engine.full_param(name), value)
    engine.destroy()


def test_files_of_the_tokenizer_come_along(tmp_path):
    source = tmp_path / "source"
    llama().save_pretrained(source)
    for name, text in TOKENIZER.items():
        (source / name).write_text(text)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    engine, expected = begin(model, "zero1")
    engine.export(tmp_path / "own")
    engine.save(tmp_path / "saved")
    engine.destroy()
    export_checkpoint(tmp_path / "saved", tmp_path / "offline", files_from=source)
    engine, _ = begin(llama(), "zero1")
    engine.export(tmp_path / "given", files_from=source)
    engine.destroy()
    engine, _ = begin(lora(transformers.AutoModelForCausalLM.from_pretrained(source)), "zero1")
    engine.export(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="there is no folder"):
        engine.export(tmp_path / "new", files_from=tmp_path / "nowhere")
    engine.destroy()
    for name, text in TOKENIZER.items():
        for folder in ("own", "offline", "given", "adapter"):
            assert (tmp_path / folder / name).read_text() == text
    assert torch.equal(logits(loaded(tmp_path / "own")), expected)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        source
    )


def test_a_checkpoint_of_adapters_and_prompts_are_refused_with_the_words_to_write(tmp_path):
    engine, _ = begin(lora(llama()), "zero1")
    engine.save(tmp_path / "saved")
    engine.destroy()
    with pytest.raises(CheckpointError, match=r"adapters of PEFT.*call engine\.export\(folder\)"):
        export_checkpoint(tmp_path / "saved", tmp_path / "out")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, _ = begin(peft.get_peft_model(llama(), config), "zero1")
    with pytest.raises(CheckpointError, match="cannot be merged: export without merged=True"):
        engine.export(tmp_path / "out", merged=True)
    with pytest.raises(CheckpointError, match=r"PEFT computes .* call model\.save_pretrained within"):
        engine.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    engine.destroy()
