"""The commands of docs/clients.md, docs/from-fsdp2.md and docs/lora-24gb.md, run as they are written."""

import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from shardwise import __version__
from support import run_command

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]
ROOT = Path(__file__).parent.parent.parent
CLI = [sys.executable, "-c", "from shardwise.cli import main; main()"]
SCRIPT = "from importlib.metadata import version\nprint('USES', version('deepspeed'), flush=True)\n"
YAML = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_processes": 2,
    "use_cpu": True,
    "deepspeed_config": {"zero_stage": 3},
}


def page(name):
    return (ROOT / "docs" / name).read_text()


def commands():
    return re.findall(r"^\| .* \| `((?:\w+=\d+ )?shardwise run .*)` \|$", page("clients.md"), flags=re.MULTILINE)


def run_line(line, folder, **options):
    """A line of a shell: variables, then a command."""
    words = shlex.split(line.replace("\\\n", " "))
    environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = words[len(environment) :]
    words[:1] = {"shardwise": CLI, "python": [sys.executable]}[words[0]]
    return run_command(words, cwd=folder, timeout=300, env={**environment, **options}).stdout


def test_all_clients_have_a_command():
    assert len(commands()) == 6


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_page_starts_a_script_that_finds_shardwise(command, tmp_path):
    if "accelerate" in command and not find_spec("accelerate"):
        pytest.skip("needs accelerate")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "zero3.yaml").write_text(yaml.safe_dump(YAML))
    # ms-swift is not in this environment (test_swift.py runs it in its own): what it would start is a script.
    swift = tmp_path / "bin" / "swift"
    swift.parent.mkdir()
    swift.write_text(f"#!/bin/sh\n{sys.executable} {tmp_path}/train.py && {sys.executable} {tmp_path}/train.py\n")
    swift.chmod(0o755)
    path = os.pathsep.join([str(swift.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    shown = run_line(command, tmp_path, PATH=path)
    count = 1 if "-- python" in command else 2
    assert re.findall(r"^USES (.*)$", shown, flags=re.MULTILINE) == [f"0.16.3+shardwise.{__version__}"] * count


def test_the_loop_of_fsdp2_and_ours_print_the_same_losses(tmp_path):
    blocks = re.findall(
        r"^```py(?:thon)?\n(# torchrun .*?)^```$", page("from-fsdp2.md"), flags=re.MULTILINE | re.DOTALL
    )
    seen = []
    for block in blocks:
        _, _, count, name = block.splitlines()[0][2:].split()
        (tmp_path / name).write_text(block)
        shown = run_command([*CLI, "run", "-n", count, tmp_path / name], timeout=200).stdout
        seen.append(sorted(re.findall(r"\d \d \d\.\d{5}", shown)))  # the ends of two ranks' lines may come late
    assert len(seen[0]) == 10
    assert seen[0] == seen[1]


def test_the_script_for_lora_trains_with_the_configuration_of_the_plan(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    lines = "".join(re.findall(r"^```sh\n(.*?)^```$", page("lora-24gb.md"), flags=re.MULTILINE | re.DOTALL))
    plan, real, tiny = lines.replace("\\\n", " ").splitlines()
    run_line(plan, tmp_path)
    assert "examples/lora.py" in real
    example = tiny.replace("examples/lora.py", str(ROOT / "examples" / "lora.py")).replace("--steps 20", "--steps 1")
    assert "adapters in adapters" in run_line(f"{example} --config lora.json", tmp_path)
    on_two = example.replace("python ", "shardwise run -n 2 ", 1)
    assert run_line(on_two, tmp_path).count("adapters in adapters") == 1
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(saved) == 8
    assert all(tensor.abs().sum() > 0 for tensor in saved.values())
