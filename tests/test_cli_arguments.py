"""Every option of every command is checked before work begins: numbers have a range, paths can be written to."""

import inspect
import io
import math
import os
import subprocess
import sys
import typing
import warnings
from pathlib import Path

import pytest

from shardwise import cli as commands
from shardwise.errors import ConfigError
from shardwise.machine import launch
from shardwise.train.job import check_memory, prepare
from shardwise.train.options import SECTIONS, options_of

COMMANDS = {each.name or each.callback.__name__: each.callback for each in commands.app.registered_commands}
NEEDED = {
    "config": ["zero3"],
    "plan": ["llama3-8b"],
    "inspect": ["nowhere"],
    "export": ["nowhere", "out"],
    "import-deepspeed": ["nowhere", "out"],
    "run": ["-m", "json.tool"],
}
"""Arguments without which a command does nothing."""
OUTPUTS = {("compare", "--json"), ("compare", "--plot"), ("plan", "--emit"), ("plan", "--plot"), ("train", "--out")}
OUTPUTS |= {("env", "--disk")}
INPUTS = {("train", "--resume"), ("export", "--files-from"), ("generate", "--prompts")}


def options(*kinds):
    """Command, option and type of every option of these types."""
    for command, function in COMMANDS.items():
        for name, param in inspect.signature(function).parameters.items():
            parsed = next(iter(typing.get_args(param.annotation)), None)
            found = {parsed, *typing.get_args(parsed)} & set(kinds)
            if found and param.default is not param.empty:
                yield command, f"--{name.replace('_', '-')}", found.pop()


@pytest.fixture
def call(cli, monkeypatch):
    """A command that fails the test if it begins to work."""

    def work(*_, **__):
        raise AssertionError("work began")

    monkeypatch.setattr("shardwise.compare.session.CompareSession", work)
    monkeypatch.setattr("shardwise.planning.planner._plan", work)
    monkeypatch.setattr("shardwise.machine.env.host_copy_gbs", work)
    monkeypatch.setattr("shardwise.train.command.run_ranks", work)
    monkeypatch.setattr(os, "execve", work)
    return cli


def is_refused(result):
    code, out, error = result
    return code == 2 and out == "" and "Traceback" not in error and ("error: " in error or "Invalid value" in error)


@pytest.mark.parametrize(("command", "option", "kind"), list(options(int, float)))
def test_every_number_has_a_range(command, option, kind, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in ("-1", "9" * 40, *(["nan"] if kind is float else [])):
        assert is_refused(call(command, option, value, *NEEDED.get(command, []))), value


@pytest.mark.parametrize("section", SECTIONS)
def test_every_number_of_train_has_both_limits(section):
    for name, field in SECTIONS[section].model_fields.items():
        if "int" in str(field.annotation) or "float" in str(field.annotation):
            limits = {word for each in field.metadata for word in vars(type(each))["__annotations__"]}
            assert limits & {"ge", "gt"}, name
            assert limits & {"le", "lt"}, name


@pytest.mark.parametrize(("command", "option"), sorted(OUTPUTS))
def test_an_output_that_cannot_be_written_is_refused_at_once(command, option, call):
    suffix = {"--plot": "/proc/x.png", "--disk": "/proc", "--out": "/proc/x"}.get(option, "/proc/x.json")
    assert is_refused(call(command, option, suffix, *NEEDED.get(command, [])))


def test_no_path_may_be_empty(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command, option in sorted(OUTPUTS | INPUTS):
        assert is_refused(call(command, option, "", *NEEDED.get(command, []))), option
    for words in (["inspect", ""], ["export", "", "out"], ["export", "in", ""], ["import-deepspeed", "", "out"]):
        assert is_refused(call(*words)), words
    for words in (["train", ""], ["plan", ""], ["config", ""], ["train", "--resume", "nowhere"], ["generate", ""]):
        assert is_refused(call(*words)), words
    assert not any(tmp_path.iterdir())


def test_every_path_of_every_command_is_covered():
    assert {(command, option) for command, option, _ in options(Path)} == OUTPUTS | INPUTS


def test_an_existing_output_is_left_as_it_is(call, tmp_path):
    there = tmp_path / "there.json"
    there.write_text("{}")
    with pytest.raises(AssertionError, match="work began"):
        call("compare", "--json", there)
    assert there.read_text() == "{}"


def test_ten_lines_of_nested_aliases_are_refused_at_once(call, tmp_path):
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    bomb, merged, itself = tmp_path / "bomb.yaml", tmp_path / "merged.yaml", tmp_path / "itself.yaml"
    bomb.write_text("\n".join([*lines, "preset: zero3"]))
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 10)]
    merged.write_text("\n".join([*lines, "preset: zero3"]))
    itself.write_text("preset: zero3\nbatch: &a [*a]\n")
    for path in (bomb, merged, itself):
        assert is_refused(call("config", path)), path
    fine = tmp_path / "fine.yaml"
    fine.write_text("preset: zero3\noffload: {aio: &a {threads: 9}}\n")
    code, out, _ = call("config", fine)
    assert code == 0
    assert "9" in out


def test_a_huge_file_is_not_read(call, tmp_path):
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    code, _, error = call("config", huge)
    assert code == 2
    assert "has more than" in error
    assert is_refused(call("plan", huge))


def test_a_batch_that_no_memory_holds_is_refused_before_a_rank_starts(call, tmp_path):
    out = ["--out", tmp_path / "run"]
    for options in (["--batch", 10**9], ["--size", "7b", "--hidden", 65536, "--layers", 4000, "--heads", 64]):
        code, _, error = call("train", *options, "--device", "cpu", "--no-foresee", *out)
        assert code == 2, error
        assert "this machine has" in error


def test_on_a_gpu_only_what_the_host_holds_counts(monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words " * 1000)
    job = prepare(options_of(data={"paths": [str(text)]}, model={"size": "nano"}, updates={"batch": 8}), 2)
    monkeypatch.setattr("shardwise.train.job.host_bytes", lambda _: 50_000)
    check_memory(job, on_cpu=False, local_ranks=2)
    with pytest.raises(ConfigError, match="states of"):
        check_memory(job, on_cpu=True, local_ranks=2)


def test_more_processes_than_a_machine_can_mean(call):
    assert is_refused(call("run", "-n", "1000000", "-m", "json.tool"))
    launch.check_ranks("-n", launch.LEAST_LIMIT)


@pytest.mark.parametrize("size", ["0", "-1", "much"])
def test_a_file_of_no_bytes_is_no_limit(size, call, tmp_path):
    code, _, error = call("export", tmp_path, tmp_path / "out", f"--max-file={size}")
    assert code == 2
    assert "--max-file" in error


def test_ranges_hold_for_what_compares_with_nothing():
    from shardwise.checks import check_range

    with pytest.raises(ConfigError, match="at least"):
        check_range("--clip", math.nan, 0, 1)


def test_a_terminal_that_lacks_characters_gets_question_marks(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(commands, "app", lambda: print("\N{RIGHTWARDS ARROW} zero1"))
    commands.main()
    assert out.buffer.getvalue() == b"? zero1\n"


def test_a_closed_output_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(commands, "app", lambda: print("zero1"))
    commands.main()


def test_files_of_a_run_are_utf8_in_any_locale(tmp_path):
    script = (
        "import sys, pathlib\nfrom shardwise.train.folder import RunFolder\n"
        "run = RunFolder(pathlib.Path(sys.argv[1]))\nrun.write(run.sample, chr(0xE9) + chr(0x2192))\n"
    )
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=ascii_only, check=True)
    assert (tmp_path / "sample.txt").read_text(
        encoding="utf-8"
    ) == "\N{LATIN SMALL LETTER E WITH ACUTE}\N{RIGHTWARDS ARROW}"
