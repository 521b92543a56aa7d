"""`swift sft` with the presets of ms-swift, unmodified, on two ranks: full training and LoRA (`make test-swift`)."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support import run_command

pytestmark = [
    pytest.mark.swift,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not find_spec("swift"), reason="needs ms-swift, which `make test-swift` installs"),
]
CLI = [sys.executable, "-c", "from shardwise.cli import main; main()"]
PRESETS = ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OPTIONS = {
    "model_type": "llama",
    "template": "chatml",
    "ddp_backend": "gloo",
    "use_cpu": "true",
    "torch_dtype": "bfloat16",
    "num_train_epochs": 1,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 2,
    "split_dataset_ratio": 0,
    "max_length": 64,
    "add_version": "false",
    "report_to": "none",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama with a tokenizer of single bytes, and sixteen conversations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    folder = tmp_path_factory.mktemp("base")
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "additional_special_tokens": SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    set_seed(0)
    config = LlamaConfig(vocab_size=len(tokens), max_position_embeddings=128, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)
    with open(folder / "talk.jsonl", "w") as file:
        for number in range(16):
            asked = {"role": "user", "content": f"{number} and {number}?"}
            print(json.dumps({"messages": [asked, {"role": "assistant", "content": f"{2 * number}."}]}), file=file)
    return folder


def sft(base, folder, preset, tuner, **options):
    """What `swift sft` prints, its losses, and the folder of its last checkpoint."""
    given = {"model": base, "dataset": base / "talk.jsonl", "deepspeed": preset, "tuner_type": tuner}
    given |= {"output_dir": folder, **OPTIONS, **options}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    environment = {
        "NPROC_PER_NODE": "2",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HF_HUB_OFFLINE": "1",
        "MODELSCOPE_REPO_TREE_PAGE_MAX_ATTEMPTS": "1",
        "MODELSCOPE_CACHE": str(folder / "cache"),
    }
    command = [*CLI, "run", "--as-deepspeed", "--", "swift", "sft", *words]
    done = run_command(command, timeout=300, env=environment)
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    return done.stdout + done.stderr, losses, folder / "checkpoint-4"


def run_presets(base, folder, tuner):
    runs = {preset: sft(base, folder / preset, preset, tuner) for preset in PRESETS}
    for preset, (shown, _, last) in runs.items():
        assert "serves DeepSpeed's API" in shown
        assert ("weights sharded" in shown) == preset.startswith("zero3")
        assert ("weights sharded, host" in shown) == (preset == "zero3_offload")
        assert len(list((last / "global_step4").glob("rank-*.safetensors"))) == 2
    losses = [found for _, found, _ in runs.values()]
    assert len(losses[0]) == 4
    assert losses[0][-1] < losses[0][0]
    assert all(each == losses[0] for each in losses)
    return [last for _, _, last in runs.values()]


def test_every_preset_trains_all_weights_alike_and_resumes(base, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folders = run_presets(base, tmp_path, "full")
    files = {(folder / "model.safetensors").read_bytes() for folder in folders}
    assert len(files) == 1
    model = AutoModelForCausalLM.from_pretrained(folders[0])
    tokens = AutoTokenizer.from_pretrained(folders[0])("2 and 2?", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()

    first = tmp_path / "zero3" / "checkpoint-2"
    _, losses, last = sft(base, tmp_path / "resumed", "zero3", "full", resume_from_checkpoint=first)
    assert len(losses) == 2
    assert (last / "model.safetensors").read_bytes() in files


def test_every_preset_trains_adapters_alike(base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folders = run_presets(base, tmp_path, "lora")
    assert len({(folder / "adapter_model.safetensors").read_bytes() for folder in folders}) == 1
    saved = load_file(folders[0] / "adapter_model.safetensors")
    assert all(tensor.abs().sum() > 0 for tensor in saved.values())
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folders[0])
    held = dict(model.named_parameters())
    for name, tensor in saved.items():
        loaded = held[name.replace(".weight", ".default.weight")]
        assert tensor.to(loaded.dtype).equal(loaded)
