"""`shardwise generate` and `shardwise plan --inference`."""

import contextlib
import io
import json

import pytest
import torch

from shardwise.errors import DiskError
from shardwise.inference import command
from shardwise.inference.command import ByteTexts, LiveText, _batches, padded, read_prompts, run
from shardwise.models.catalog import find
from support.ranks import run_ranks
from test_stream import SHAPE, budget_for, layer_bytes

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level Llama, as `shardwise train` exports one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SHAPE, "vocab_size": 256})
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    made = tmp_path_factory.mktemp("model")
    model.save_pretrained(made)
    return made, model


def continued(model, text, tokens):
    ids = torch.tensor([list(text.encode())])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return ByteTexts().decode(out[0].tolist())


def test_a_prompt_is_continued_and_the_account_given(folder, cli):
    path, model = folder
    budget = budget_for(model, 5 * layer_bytes(model), 1, 16)
    for weights in ("host", "disk"):
        words = ["--prompt", "import", "--max-new-tokens", 4, "--device-memory", budget, "--device", "cpu"]
        code, out, error = cli("generate", path, *words, "--weights", weights)
        assert code == 0, error
        assert out == continued(model, "import", 4) + "\n"
        account = error.splitlines()[-1]
        for part in ("tokens/s", "s a pass", "fetched a pass at", "foreseen and", "measured"):
            assert part in account


def test_prompts_from_a_file_have_a_line_each(folder, cli, tmp_path):
    path, model = folder
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\nthree and\ntwo\n")
    code, out, _ = cli("generate", path, "--prompts", prompts, "--max-new-tokens", 3, "--batch", 2, "--device", "cpu")
    assert code == 0
    lines = out.removesuffix("\n").split("\n")
    assert [line[:3] for line in lines] == ["one", "thr", "two"]
    assert lines[2] == continued(model, "two", 3).replace("\\", "\\\\").replace("\n", "\\n")


def test_what_is_missing_is_said_before_anything_runs(folder, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = folder
    (tmp_path / "empty.txt").write_text("\n")
    for words, message in [
        (["--prompt", "x"], "there is no trained model in runs/train/export"),
        ([tmp_path / "nowhere", "--prompt", "x"], "is not a folder"),
        ([tmp_path, "--prompt", "x"], "has no config.json"),
        ([path], "--prompt TEXT, or --prompts FILE"),
        ([path, "--prompts", tmp_path / "empty.txt"], "has no line with text"),
        ([path, "--prompt", "x", "--device-memory", "much"], "--device-memory is 'much'"),
        ([path, "--prompt", "x", "--device-memory", "1kB", "--device", "cpu"], "one unit at a time takes"),
        ([path, "--prompt", "x", "--weights", "tape"], "weights is 'tape'"),
    ]:
        code, out, error = cli("generate", *words)
        assert (code, out) == (2, ""), words
        assert message in error, words


def test_what_cannot_generate_is_one_message_and_no_traceback(folder, cli, tmp_path):
    path, _ = folder
    for device, message in [("gpu7", "device is 'gpu7'"), ("meta", "on which nothing"), ("cuda:99", "torch sees")]:
        code, out, error = cli("generate", path, "--prompt", "x", "--device", device)
        assert (code, out) == (2, "")
        assert message in error
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.BertModel(transformers.BertConfig(vocab_size=256, **shape)).save_pretrained(tmp_path / "bert")
    code, _, error = cli("generate", tmp_path / "bert", "--prompt", "x", "--device", "cpu")
    assert code == 2
    assert "a BertModel, does not generate text" in error
    (tmp_path / "bert" / "tokenizer.json").write_text("{")
    code, _, error = cli("generate", tmp_path / "bert", "--prompt", "x", "--device", "cpu")
    assert code == 2
    assert "cannot read the tokenizer of" in error


def test_a_disk_that_fails_is_one_message(folder, cli, monkeypatch):
    """A DiskError is an OSError too, and those are shown with their traceback."""

    def fail(*args, **options):
        raise DiskError(5, "model.safetensors ends at 4096")

    monkeypatch.setattr(command, "run", fail)
    code, out, error = cli("generate", folder[0], "--prompt", "x")
    assert (code, out) == (2, "")
    assert "model.safetensors ends at 4096" in error


def test_without_a_model_it_continues_what_train_has_exported(folder, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "train").mkdir(parents=True)
    (tmp_path / "runs" / "train" / "export").symlink_to(folder[0])
    code, out, _ = cli("generate", "--max-new-tokens", 2, "--device", "cpu")
    assert code == 0
    assert out.startswith("import os\n\n\ndef ")


def test_all_ranks_call_equally_often_and_every_prompt_is_there():
    for count, batch, world_size in [(1, 8, 3), (7, 2, 2), (12, 4, 3)]:
        calls = list(_batches(count, batch, world_size))
        assert {number for call in calls for mine in call for number in mine} == set(range(count))
        assert all(len(call) == world_size and all(call) for call in calls)


def test_a_text_is_shown_as_whole_characters(capsys):
    show = LiveText(ByteTexts())
    for token in "aé!".encode():
        show.put(torch.tensor([token]))
    show.end()
    assert capsys.readouterr().out == "aé!\n"


def test_rows_are_filled_up_on_the_left():
    ids, mask = padded([[1, 2, 3], [4]], 0, torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def generate_on_ranks(rank, world_size, path, prompts):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        where = {"weights": "disk", "kv": "device", "device": "cpu", "device_memory": "200KB", "host_memory": None}
        run(path, read_prompts(None, prompts), **where, precision=None, max_new_tokens=3, batch=2)
    return out.getvalue()


def test_ranks_share_the_prompts(folder, tmp_path):
    path, model = folder
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a1\nb2\nc3\nd4\ne5\n")
    outputs = run_ranks(generate_on_ranks, 2, path, prompts)
    texts = [
        continued(model, text, 3).replace("\\", "\\\\").replace("\n", "\\n") for text in prompts.read_text().split()
    ]
    assert outputs == ["\n".join(texts) + "\n", ""]


def test_the_plan_is_what_a_stream_foresees(folder, cli):
    code, out, _ = cli("plan", "llama2-13b", "--inference", "--gpus", 1, "--gpu-memory", "22GiB", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["peak_bytes"] < 22 * 2**30
    assert plan["weights_bytes"]["device"] + plan["weights_bytes"]["host"] == 2 * find("llama2-13b").parameters
    code, out, _ = cli("plan", "llama2-13b", "--inference", "--gpus", 1, "--gpu-memory", "22GiB")
    assert code == 0
    assert "fetched a pass" in out
    for words in (["--search"], ["--price", 2], ["--lora", 8]):
        code, _, error = cli("plan", "llama3-8b", "--inference", *words)
        assert code == 2
        assert f"{words[0]} is about training" in error
    code, _, error = cli("plan", "--params", "8e9", "--inference")
    assert code == 2
    assert "dimensions are known" in error
