"""The examples of docs/clients.md that need an extra, and the plain loop for transformers."""

import re
import sys
from pathlib import Path

import pytest

from support import run_command

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("package", "word"), [("lightning", "ShardwiseStrategy"), ("transformers", "ShardwiseTrainer")]
)
def test_the_example_for_a_library_runs_as_written(package, word, tmp_path):
    pytest.importorskip(package, reason=f"{package} is not installed: an extra of shardwise")
    blocks = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs/clients.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    code = next(block for block in blocks if f"import {word}" in block)
    (tmp_path / "train.py").write_text(code)
    run_command([sys.executable, "-m", "shardwise", "run", "-n", "2", "train.py"], cwd=tmp_path, timeout=200)


def test_the_plain_loop_trains_and_its_result_is_a_pretrained_model(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    loop = ROOT / "examples" / "transformers_loop.py"
    assert len(loop.read_text().splitlines()) <= 40
    (tmp_path / "book.txt").write_text((ROOT / "docs" / "engine.md").read_text())
    words = ["run", "-n", "2", str(loop), "book.txt", "--out", "trained", "--steps", "31"]
    output = run_command([sys.executable, "-m", "shardwise", *words], cwd=tmp_path, timeout=200).stdout
    losses = [float(each) for each in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert model.config.hidden_size == 64
    # From the trained weights, read shard by shard, the first loss is where it ended.
    words = ["run", "-n", "2", str(loop), "book.txt", "--out", "again", "--steps", "1", "--model", "trained"]
    code = "import sys, transformers; transformers.ByT5Tokenizer().save_pretrained(sys.argv[1])"
    run_command([sys.executable, "-c", code, str(tmp_path / "trained")], timeout=60)
    output = run_command([sys.executable, "-m", "shardwise", *words], cwd=tmp_path, timeout=200).stdout
    assert "step 0, loss" in output
