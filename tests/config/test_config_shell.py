"""The command, the examples in docstrings, and what an import costs."""

import subprocess
import sys


def test_config_explains_a_file(tmp_path, cli):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "cpu_offload": true}, "bf16": {"enabled": true}}')
    code, shown, errors = cli("config", path)
    assert code == 0
    assert "the placements of zero2_offload" in shown
    assert "warning: " in errors
    assert "cpu_offload: is deprecated" in errors


def test_a_config_error_is_one_message_and_code_2(tmp_path, cli):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 9}}')
    message = f"error: {path}: zero_optimization.stage = 9: expected a stage from 0 to 3\n"
    assert cli("config", path) == (2, "", message)
    shell = [sys.executable, "-m", "shardwise", "config", str(path)]
    result = subprocess.run([*shell, "--debug"], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert "Traceback" in result.stderr


def test_importing_the_configuration_imports_nothing_optional():
    code = "import sys, shardwise.config as c; c.Config.load('zero3').explain(); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"typer", "rich", "hjson", "matplotlib", "transformers"} & set(modules)
