"""`shardwise env`: what is there, how fast it is, what is missing."""

import json

import pytest

from shardwise.errors import ConfigError
from shardwise.machine import env, launch


def test_the_command_prints_json_with_versions_and_hardware(cli):
    code, shown, _ = cli("env", "--no-measure", "--json")
    assert code == 0
    found = json.loads(shown)
    assert {"shardwise", "python", "torch"} <= found["versions"].keys()
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 1e8


def test_bandwidths_are_measured(tmp_path):
    found = env.inspect(tmp_path, copy_bytes=1 << 22, disk_bytes=1 << 23)
    assert found.bandwidth_gbs["host memory copy"] > 0.1
    assert len([name for name in found.bandwidth_gbs if name.startswith("disk ")]) == 2
    assert not list(tmp_path.iterdir())
    assert "host memory copy" in str(found)


def test_a_disk_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        env.inspect(tmp_path / "nowhere", measure=False)


def test_notes_say_what_is_missing_and_how_to_get_it(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    notes = "\n".join(env.notes({"nosuchpackage": "plots: pip install it"}, lambda: False))
    assert "nosuchpackage is not installed (plots: pip install it)" in notes
    assert "bf16 matrix products crash here: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in notes


def test_workers_are_told_where_bf16_products_crash(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(launch, "bf16_products_work", lambda: False)
    assert launch.matmul_environment() == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert launch.matmul_environment() == {}


def test_a_result_knows_when_and_on_what_it_was_made():
    made = env.made()
    assert len(made["date"]) == 10
    assert made["hardware"]["cpu"]
