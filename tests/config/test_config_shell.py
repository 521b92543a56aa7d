"""The command, the examples in docstrings, and what an import costs."""

import doctest
import importlib
import subprocess
import sys

import pytest

CLI = [sys.executable, "-c", "from shardwise.cli import main; main()"]


def run(*arguments):
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=60)


def test_config_explains_a_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "cpu_offload": true}, "bf16": {"enabled": true}}')
    result = run("config", str(path))
    assert result.returncode == 0
    assert "the placements of zero2_offload" in result.stdout
    assert "warning: " in result.stderr
    assert "cpu_offload: is deprecated" in result.stderr


def test_a_config_error_is_one_message_and_code_2(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 9}}')
    result = run("config", str(path))
    assert result.returncode == 2
    assert result.stderr == f"error: {path}: zero_optimization.stage = 9: expected a stage from 0 to 3\n"
    assert "Traceback" in run("config", str(path), "--debug").stderr


@pytest.mark.parametrize(
    "name",
    ["sizes", "config.sections", "config.config", "config.build", "config.elementwise", "config.values"],
)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(f"shardwise.{name}")
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_importing_the_configuration_imports_nothing_optional():
    code = "import sys, shardwise.config as c; c.Config.load('zero3').explain(); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"typer", "rich", "hjson", "matplotlib", "transformers"} & set(modules)
