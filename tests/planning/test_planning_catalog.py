"""Descriptions of models: published parameter counts, config.json, adapters."""

import json

import pytest

from shardwise import ConfigError
from shardwise.models.catalog import find, from_config
from shardwise.models.decoder import CausalDecoder, adapt
from shardwise.models.dimensions import Dimensions, Latent
from shardwise.models.workload import Workload, find_model

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "deepseek-v2-lite": 15_706_484_224,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    assert find(name).parameters == PUBLISHED[name]


def test_names_are_found_however_they_are_spelt():
    assert find("meta-llama/Llama-3-8B") is find("llama3-8b")
    with pytest.raises(ConfigError, match=r"did you mean 'llama3-8b'"):
        find("lama3-8b")


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "head_dim": 256,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "vocab_size": 262144,
}
PUBLISHED_BESIDE_THE_CATALOG = {"gemma3-1b": 999_885_952}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


@pytest.mark.parametrize(
    ("config", "name"), [(LLAMA, "llama3-8b"), (MOE, "qwen3-30b-a3b"), (GPT2, "gpt2"), (GEMMA3, "gemma3-1b")]
)
def test_a_config_json_or_its_folder_gives_the_same(config, name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    published = (PUBLISHED | PUBLISHED_BESIDE_THE_CATALOG)[name]
    assert from_config(config, name).parameters == published
    for given in (path, tmp_path):
        assert find_model(str(given), None, Workload()).parameters == published


def test_only_some_parameters_of_a_mixture_are_active():
    assert find("qwen3-30b-a3b").active_parameters == pytest.approx(3.35e9, rel=0.01)


def test_adapters_are_counted():
    # 32 layers; q: 4096 + 4096, v: 4096 + 1024 inputs and outputs.
    model = find_model("llama3-8b", None, Workload(lora=(16, ("q_proj", "v_proj"))))
    assert model.trainable == 32 * 16 * (8192 + 5120) == 6_815_744
    assert model.frozen == PUBLISHED["llama3-8b"]
    with pytest.raises(ConfigError, match="LoRA target 'wq'"):
        find_model("llama3-8b", None, Workload(lora=(16, ("wq",))))


@pytest.mark.parametrize("query_rank", [0, 64])
def test_every_target_that_is_counted_has_an_adapter(query_rank):
    of = Dimensions("latent", 128, 2, 4, 1000, 256, 4, 48, latent=Latent(query_rank, 64, 16, 32, 32))
    targets = tuple(of.linears())
    model = CausalDecoder(of)
    assert sum(param.numel() for param in model.parameters()) == of.parameters
    adapt(model, 8, targets)
    trained = [param.numel() for param in model.parameters() if param.requires_grad]
    assert sum(trained) == of.lora_numel(8, targets)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (None, None, "name the model or its size"),
        ("llama3-8b", 8, "name the model or its size"),
        ("missing.json", None, "no such file"),
        ("mine.py:build", None, "there is no file"),
        ("unheard-of", None, "is not known"),
        (None, 0, "at least one parameter"),
    ],
)
def test_bad_input_is_one_clear_message(name, params, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        find_model(name, params, Workload())


@pytest.mark.parametrize("kind", [None, "gpt_neox", "opt", "falcon", "bert", "phi", "gemma3", ["llama"]])
def test_a_kind_that_would_be_miscounted_is_refused(kind):
    with pytest.raises(ConfigError, match=r"is not known: choose from gpt2, llama, .*file\.py:function"):
        from_config({**LLAMA, "model_type": kind}, "mine")


@pytest.mark.parametrize(
    "broken",
    [
        {**LLAMA, "hidden_size": "wide"},
        {**LLAMA, "num_hidden_layers": 0},
        {**LLAMA, "num_key_value_heads": "eight"},
        {**LLAMA, "intermediate_size": [14336]},
        {**LLAMA, "head_dim": 128.0},
        {**MOE, "num_experts": {}, "n_routed_experts": "many"},
        {**MOE, "num_experts_per_tok": "8"},
        {**GPT2, "n_positions": "1024"},
        {**LLAMA, "kv_lora_rank": "512"},
    ],
)
def test_a_config_json_of_something_else_is_refused(broken, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(broken))
    with pytest.raises(ConfigError, match="expected a whole number"):
        find_model(str(tmp_path), None, Workload())
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_model(str(tmp_path), None, Workload())
