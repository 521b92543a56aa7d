"""The command as a user sees it: table, files, messages; and the figures of docs/claims.md and docs/lora-24gb.md."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise.cli import main
from shardwise.config import Config
from shardwise.errors import ConfigError
from shardwise.planning import Hardware

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `shardwise ...` in this process; its exit code and what it printed."""

    def call(line):
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as end:
            main()
        seen = capsys.readouterr()
        return end.value.code or 0, seen.out, seen.err

    return call


def claims(page):
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^```\n(\$ .*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    found = []
    for line in lines:
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line.removeprefix("→ "))
    return found


def guide():
    """The same of the guide to LoRA. A dry run of billions of parameters is for `make test-full`."""
    for command, expected in claims("lora-24gb.md"):
        yield pytest.param(command, expected, marks=[pytest.mark.full] if "--detailed" in command else [])


@pytest.fixture(scope="module")
def seen_before():
    """What commands printed: two claims may be proven by one comparison."""
    return {}


@pytest.mark.parametrize(
    ("command", "expected"), [*claims("claims.md"), *guide()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_claim_is_proven_by_its_command(command, expected, run, seen_before, forked_ranks):
    if command not in seen_before:
        with forked_ranks():
            seen_before[command] = run(command)
    code, out, err = seen_before[command]
    assert code == 0, err
    assert expected
    for figure in expected:
        assert shows(out, figure), (figure, out)


def test_the_page_on_nodes_shows_what_plan_prints(run):
    command, printed = re.search(
        r"```\n(shardwise plan [^\n]*)\n```.*?```\n(.*?)```", (ROOT / "docs/parallelism.md").read_text(), re.DOTALL
    ).groups()
    code, out, err = run(command)
    assert code == 0, err
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for line in printed.splitlines():
        assert " ".join(line.split()) in rows, out


def shows(out, figure):
    """Whether a line has the figure as whole cells: 4.0 is not in 24.0."""
    return any(cells(figure) in cells(line) for line in out.splitlines())


def cells(line):
    return f" {' '.join(word.rstrip(':;,.') for word in line.split())} "


def test_figures_of_claims_are_whole_cells():
    assert shows("a  24.0  1", "24.0 1")
    assert not shows("a  24.0  1", "4.0")
    assert not shows("a  4.00\nb", "4.0")
    assert not shows("a\nb", "a b")


def test_the_table_names_all_presets_and_one_recommendation(run):
    code, out, _ = run("shardwise plan llama3-8b --gpus 5 --gpu-memory 44GB --host-memory 512GB --disk 2TB --explain")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 112
    assert "…" not in out
    for preset in ("zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload", "zero3_nvme"):
        assert preset in out
    assert out.count("→ zero3") == 2
    assert "2Ψ + 2Ψ + 12Ψ" in out


def test_a_host_that_is_too_small_is_named(run):
    _, out, _ = run("shardwise plan llama3-8b --gpus 5 --gpu-memory 44GB --host-memory 50GB --disk 2TB")
    assert "no host" in out
    assert "zero2_offload: host memory too small" in out
    assert "…" not in out


def test_what_cannot_be_started_never_fits(monkeypatch):
    def refuse(config):
        if config.placement.optim.tier == "disk":
            raise ConfigError("this version keeps nothing there")

    monkeypatch.setattr("shardwise.engine.initialize.check_supported", refuse)
    foreseen = shardwise.plan("llama3-8b", hardware=Hardware(8, 80 * 10**9, 10**13, 10**13))
    for row in foreseen.rows:
        is_refused = "nvme" in row.preset
        assert row.is_supported != is_refused
        assert ("this version keeps nothing" in row.note) == is_refused
    alone = shardwise.plan("llama3-8b", hardware=foreseen.hardware, presets=["zero3_nvme"])
    assert alone.advice.preset is None
    assert "this version keeps nothing there" in alone.advice.reason
    assert "not yet" in str(alone)


def test_a_gpu_keeps_as_much_free_as_the_figures_may_be_off():
    peak = shardwise.plan("gpt2", hardware=Hardware(2)).row("zero3").peak_bytes
    for used, fits in ((0.84, True), (0.86, False)):
        foreseen = shardwise.plan("gpt2", hardware=Hardware(2, int(peak / used)), presets=["zero3"])
        assert foreseen.row("zero3").fits == fits
        assert any("arithmetic cannot tell" in note for note in foreseen.notes) != fits
    dry = shardwise.plan("mlp-100k", hardware=Hardware(2), presets=["zero3"]).row("zero3").peak_bytes
    for used, fits in ((0.96, True), (0.98, False)):
        foreseen = shardwise.plan("mlp-100k", hardware=Hardware(2, int(dry / used)), presets=["zero3"])
        assert foreseen.row("zero3").fits == fits


def test_arithmetic_in_a_table_of_dry_runs_is_marked():
    mixed = str(shardwise.plan("mlp-100k", hardware=Hardware(2), presets=["zero3", "zero3_nvme"]))
    assert "by a dry run of the engine (~ by arithmetic)" in mixed
    marked = [line.split()[0] for line in mixed.splitlines() if re.search(r"~\d", line)]
    assert marked == ["zero3_nvme"]
    assert "~" not in str(shardwise.plan("mlp-100k", hardware=Hardware(2), presets=["zero3", "zero3_offload"]))


def test_json_emitted_configuration_and_picture(run, tmp_path):
    files = f"--emit {tmp_path}/config.json --plot {tmp_path}/plan.png"
    code, out, _ = run(f"shardwise plan llama3-8b --gpus 5 --gpu-memory 44GB --accumulate 2 --json {files}")
    assert code == 0
    data = json.loads(out)
    assert data["advice"]["preset"] == "zero3"
    assert {row["preset"] for row in data["rows"]} >= {"zero0", "zero3_nvme"}
    for row in data["rows"]:
        assert sum(row["categories"].values()) == row["peak_bytes"]
    config = Config.load(tmp_path / "config.json")
    assert config.placement == Config.load("zero3").placement
    assert config.batch.accumulation == 2
    assert json.loads((tmp_path / "config.json").read_text())["zero_optimization"]["stage"] == 3
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        ("llama3-70b --gpus 8..32 --plot", "plan-llama3-70b.png"),
        ("llama3-8b --plot --gpus 8", "plan-llama3-8b.png"),
        ("--params 8e9 --plot=plan.svg", "plan.svg"),
        ("llama3-8b --plot plots", "plots/plan-llama3-8b.png"),
        ("models/mine/config.json --plot --json", "plan-mine.png"),
    ],
)
def test_a_picture_has_a_name_without_being_given_one(run, tmp_path, monkeypatch, arguments, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plots").mkdir()
    (tmp_path / "models" / "mine").mkdir(parents=True)
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    config |= {"model_type": "llama", "intermediate_size": 128}
    (tmp_path / "models" / "mine" / "config.json").write_text(json.dumps(config))
    code, _, err = run(f"shardwise plan {arguments}")
    assert code == 0, err
    assert err.splitlines()[-1] == f"wrote {file}"
    assert (tmp_path / file).is_file()


def test_what_a_file_cannot_bring_about_is_said_beside_it(run, tmp_path):
    _, _, err = run(f"shardwise plan llama3-8b --lora 16 --emit {tmp_path}/c.json")
    assert "c.json: the plan assumes LoRA of rank 16 on q_proj, v_proj: add the adapters to the model\n" in err
    assert "for DeepSpeed, switch it on in the model" in err
    _, _, err = run(f"shardwise plan llama3-8b --no-checkpointing --emit {tmp_path}/c.json")
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "name the model or its size"),
        ("llama3-8c", "did you mean"),
        ("--params eight", "--params eight: expected a count"),
        ("--params 8e9 --gpu-memory much", "--gpu-memory much: expected a size"),
        ("--params 8e9 --gpus 0", "at least one"),
        ("--params 8e9 --gpus 5 --nodes 2", "cannot be spread evenly"),
        ("--params 8e9 --gpu-memory 100MB", "the driver's context"),
        ("--params 8e9 --precision fp8", "unknown precision 'fp8'"),
        ("--params 8e9 --optimizer Adamm", "Adamm"),
        ("--params 8e9 --presets zero9", "unknown preset 'zero9'"),
        ("--params 8e9 --accounting half", "unknown accounting"),
        ("--params 8e9 --detailed", "needs a model"),
        ("llama3-8b --global-batch 7 --gpus 2", "is no multiple"),
        ("llama3-8b --lora 0", "at least 1"),
        ("llama3-8b --lora-targets q_proj", "needs --lora"),
        ("llama3-8b --seq 0", "at least 1"),
        ("llama3-8b --emit nowhere/config.json", "there is no folder"),
        ("llama3-8b --emit .", "--emit .: cannot be written: Is a directory"),
        ("llama3-8b --emit /proc/config.json", "cannot be written"),
        ("llama3-8b --plot /proc/plan.png", "--plot /proc/plan.png: cannot be written"),
        ("llama3-8b --plot /proc", "--plot /proc/plan-llama3-8b.png: cannot be written"),
        ("--plot llama3-8b", "--plot llama3-8b: the name must end in one of"),
        ("llama3-405b --gpus 1 --host-memory 1TB --disk 1TB --emit config.json", "nothing fits"),
        ("llama3-405b --gpus 1 --host-memory 1TB --disk 1TB --search --emit config.json", "nothing fits"),
        ("llama3-8b --gpu-link fast", "--gpu-link fast: expected bytes or bits a second"),
        ("llama3-8b --gpu-link 0GB/s", "--gpu-link 0GB/s: expected"),
        ("llama3-8b --host-link=-5GB/s", "--host-link -5GB/s: expected"),
        ("llama3-8b --tflops 0", "--tflops 0.0: more than 0"),
        ("llama3-8b --gpus -3", "at least one"),
        ("llama3-8b --host-memory 0.5", "not a fraction"),
        ("mine.py:build", "there is no file"),
        ("tests:build", "tests"),
        ("nowhere/config.json", "no such file"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, message, run):
    code, _, err = run(f"shardwise plan {arguments}")
    assert code == 2
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", ["llama3-8b --gpus many", "llama3-8b --tflops fast", "llama3-8b --seq 1.5"])
def test_a_word_where_a_number_belongs_is_a_message_and_exit_code_2(arguments, run):
    code, _, err = run(f"shardwise plan {arguments}")
    assert code == 2
    assert "Invalid value for" in err
    assert "Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", ["--params 8e9", "--params 8e9 --accounting full --json"])
def test_what_cannot_be_printed_is_one_message_and_exit_code_2(arguments):
    command = [sys.executable, "-m", "shardwise", "plan", *arguments.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: nothing can be printed: No space left on device\n")


def test_shares_of_the_step_are_told_where_the_rates_are_given(run):
    line = "shardwise plan llama3-8b --gpus 8 --presets zero1,zero3"
    assert "share" not in run(line)[1]
    assert "share" not in run(f"{line} --gpu-link 100GB/s")[1]
    shares = []
    for link in ("--gpu-link 100GB/s", "--gpu-link 800Gb/s", "--gpu-link 50GB/s"):
        out = run(f"{line} --tflops 400 {link}")[1]
        shares.append([int(row.split()[-1].rstrip("%")) for row in out.splitlines() if re.search(r"zero\d +\d", row)])
    assert shares[0] == shares[1]
    # 2Ψ and 3Ψ in 16 bit, times 7/8, at 100 GB/s, over 8 operations for each token and weight, attention's included.
    sent_s, computed_s = 2 * 8.03e9 * 2 * 7 / 8 / 100e9, 8 * (8.03e9 + 32 * 4096 * 2048) * 2048 / 400e12
    assert shares[0] == [round(100 * sent_s / computed_s), round(150 * sent_s / computed_s)]
    assert shares[2] == pytest.approx([2 * share for share in shares[0]], abs=2)


def test_a_model_that_cannot_be_traced_gets_arithmetic_and_a_note(run, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        y = super().forward(x).sum()\n"
        "        return y if y > 0 else -y\n"
        "def build():\n"
        "    return Model(8, 4), lambda rank, step: {'x': torch.ones(2, 8)}\n"
    )
    code, out, err = run(f"shardwise plan {tmp_path}/mine.py:build --gpus 2 --presets zero3")
    assert code == 0, err
    assert "no dry run: DataDependent" in out
    assert "arithmetic" in out
