"""Real architectures of transformers, saved and streamed from their folder: the outputs of the loaded model."""

import pytest
import torch

import shardwise
from shardwise.errors import NotGatheredError
from support.architectures import ARCHITECTURES, DECODER, IMAGE, TOKENS, build

transformers = pytest.importorskip("transformers")
NAMES = [name for name in ARCHITECTURES if "diffusion" not in name]
ORDINARY = ["Qwen3-MoE", "T5", "Whisper"]
PARAMETERS = [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.full) for name in NAMES]


def outputs(model, words):
    """All tensors that a model returns, by name."""
    with torch.no_grad():
        found = model(**words)
    tensors = {name: value.clone() for name, value in found.items() if isinstance(value, torch.Tensor)}
    assert tensors
    return tensors


def check_same(model, expected, words):
    mine, theirs = outputs(model, words), outputs(expected, words)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def tokens(model, words):
    return model.generate(**words, max_new_tokens=3, do_sample=False)


def least_memory(folder):
    """The memory with which one unit at a time is streamed."""
    streamed = shardwise.stream(folder, "host", device="cpu", batch=2, context=16)
    stream = streamed.shardwise_stream
    sizes = sorted(unit.full_bytes for unit in stream.placement.units)
    staying = sum(unit.full_bytes for unit in stream.placement.units if unit.stays)
    stream.close()
    return stream.foreseen_peak_bytes - stream.placement.device_bytes + 2 * sizes[-1] + staying


def streams(folder):
    for weights in ("host", "disk"):
        streamed = shardwise.stream(
            folder, weights, device_memory=least_memory(folder), device="cpu", batch=2, context=16
        )
        assert weights in streamed.shardwise_stream.placement.tiers
        yield streamed
        streamed.shardwise_stream.close()


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_outputs_of_the_loaded_model(name, tmp_path):
    model, batch = build(name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    words = batch(torch.Generator().manual_seed(1))
    for streamed in streams(tmp_path):
        assert type(streamed) is type(model)
        check_same(streamed, loaded, words)
        if loaded.can_generate():
            inputs = {key: value for key, value in words.items() if key != "labels"}
            assert torch.equal(tokens(streamed, inputs), tokens(loaded, inputs))


@pytest.fixture
def qwen2_vl(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {"depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8}
    special = {"image_token_id": 90, "vision_start_token_id": 91, "vision_end_token_id": 92}
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(
        text_config={**DECODER, "rope_parameters": rope, "rope_scaling": rope, **special},
        vision_config=vision,
        **special,
    )
    transformers.Qwen2VLForConditionalGeneration(config).save_pretrained(tmp_path)
    ids = torch.randint(3, 80, (1, 12))
    ids[0, 2:8] = torch.tensor([91, 90, 90, 90, 90, 92])
    kinds = torch.zeros_like(ids)
    kinds[0, 3:7] = 1
    image = torch.randn(16, 3 * 2 * IMAGE["patch_size"] ** 2)
    words = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
    return tmp_path, {**words, "pixel_values": image, "image_grid_thw": torch.tensor([[1, 4, 4]])}


def test_a_model_that_remembers_calls_gives_the_bits_of_one_that_was_called_as_often(qwen2_vl):
    """Qwen2-VL keeps the positions of its last images: what it returns for a text alone depends on earlier calls."""
    folder, words = qwen2_vl
    text = {"input_ids": words["input_ids"][:, 8:]}
    for streamed in streams(folder):
        loaded = type(streamed).from_pretrained(folder).eval()
        for inputs in (text, words, text, words):
            check_same(streamed, loaded, inputs)
            assert torch.equal(tokens(streamed, inputs), tokens(loaded, inputs))


@pytest.fixture
def rwkv(tmp_path):
    torch.manual_seed(0)
    config = transformers.RwkvConfig(
        vocab_size=TOKENS, hidden_size=32, num_hidden_layers=6, context_length=32, rescale_every=2
    )
    transformers.RwkvForCausalLM(config).save_pretrained(tmp_path)
    ids = torch.randint(3, TOKENS, (2, 7))
    return tmp_path, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_a_forward_that_writes_to_its_weights_is_refused(rwkv):
    """RWKV divides the weights of later layers in its first evaluation."""
    folder, words = rwkv
    loaded = transformers.RwkvForCausalLM.from_pretrained(folder).eval()
    for streamed in streams(folder):
        for _ in range(2):
            with pytest.raises(NotGatheredError, match="div_ would write nowhere"):
                streamed(**words)
        if "host" in streamed.shardwise_stream.placement.tiers:
            # As docs/inference.md says.
            with shardwise.gathered(streamed.parameters(), write=True):
                streamed.rwkv._rescale_layers()
            check_same(streamed, loaded, words)
            assert torch.equal(tokens(streamed, words), tokens(loaded, words))
