"""Files that are not as they were written: one of our errors that names the file, never one of Python's."""

import contextlib
import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from shardwise.compare.job import Settings
from shardwise.compare.result import Comparison, Run
from shardwise.deferred.pretrained import PretrainedWeights, close_files
from shardwise.errors import ConfigError, DiskError, ShardwiseError
from shardwise.files import read_json, writing
from shardwise.machine.local_ranks import FailureReport
from shardwise.models.catalog import from_config
from shardwise.train.folder import MetricsFiles, RunFolder, StepMetrics, read
from support.forging import changed, places

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "intermediate_size": 128,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "head_dim": 16,
}
ROW = dataclasses.asdict(StepMetrics(3, 96, 2.5, None, 1e-3, 0.5, 100.0, 1000, 2000, 1.5))
IDENTITY = {"model": {"layers": 2}, "data": {"seed": 0}}
VALUES = st.sampled_from([..., None, True, -1, 0, 3, 2**70, 0.5, 1e308, "abc", "", [], [1], {}, {"a": {"b": 1}}])


def comparison():
    run = Run("zero1", peak_bytes=[5, 6], predicted_peak_bytes=[5, 6], losses=[1.0], step_s_spread=[1.0, 2.0])
    return Comparison(Settings("mlp-100k"), [run], parameters=9, versions={"torch": "2"}).to_dict()


def read_record(path):
    folder = RunFolder(path.parent)
    folder.finished_steps()
    (folder.checkpoints / "step-1").mkdir(parents=True, exist_ok=True)
    (folder.checkpoints / "step-1" / "manifest.json").touch()
    folder.check(IDENTITY, Path("elsewhere"))


def read_metrics(path):
    for row in read(path):
        assert isinstance(row.loss, float)
        assert isinstance(row.step, int)


def read_index(path):
    model = nn.Linear(3, 2)
    close_files()
    PretrainedWeights(path).match(model)


def read_report(path):
    report = FailureReport.read(path.parent, 0)
    assert report is None or isinstance(report.order, float)


READERS = {
    "run.json": (read_record, {"identity": IDENTITY, "resume": None, "finished_steps": 3}),
    "metrics.jsonl": (read_metrics, ROW),
    "result.json": (Comparison.load, comparison()),
    "model.safetensors.index.json": (read_index, {"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}),
    "config.json": (lambda path: from_config(json.loads(path.read_text()), "x").parameters, LLAMA),
    "rank0.json": (read_report, {"message": "x", "order": 1.0}),
}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_file_is_one_of_our_errors_or_read(name, tmp_path, data):
    reader, good = READERS[name]
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "a.safetensors")
    place = data.draw(st.sampled_from([place for place in places(good) if place or name != "config.json"]))
    path = tmp_path / name
    path.write_text(json.dumps(changed(good, place, data.draw(VALUES))))
    with contextlib.suppress(ShardwiseError):
        reader(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]"])
def test_what_is_no_json_object_is_named(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"file\.json.*start over"):
        read_json(path, dict[str, int], ConfigError, "start over")


def test_a_full_disk_names_the_file_in_a_run_too(tmp_path, monkeypatch):
    files = MetricsFiles(tmp_path, 0)
    real = Path.open

    def full(path, *arguments, **more):
        if path.name == "metrics.csv":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(DiskError, match=r"metrics\.csv cannot be written: No space left .* \(\S+ are free\): free"):
        files.add([StepMetrics(**ROW)])


def test_free_space_is_that_of_the_folder_that_exists(tmp_path):
    path = tmp_path / "none" / "none" / "file"
    wanted = r"file cannot be written: .* \(3MB are needed and \S+ are free\)"
    with pytest.raises(DiskError, match=wanted), writing(path, DiskError, 3 * 10**6):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
