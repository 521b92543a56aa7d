"""Files: comments and trailing commas are normal; duplicate keys and broken files are errors that name the file."""

import sys

import pytest

from shardwise.config import PRESETS, Config
from shardwise.errors import ConfigError

COMMENTED = """{
  // stage 2, as the documentation prints it
  "zero_optimization": {
    "stage": 2, # the stage
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": Infinity, /* no bound */
  },
  "bf16": {"enabled": true,},
}
"""


def test_comments_and_trailing_commas(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(COMMENTED.replace("Infinity", "2e8"))
    config = Config.load(path)
    assert config.placement == PRESETS["zero2"]
    assert config.gradients.reduce_bucket_bytes == 10**9
    assert config.runtime.gather_bucket_bytes == 4 * 10**8


def test_without_hjson_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = tmp_path / "ds.json"
    path.write_text(COMMENTED)
    with pytest.raises(ConfigError, match=r"not valid JSON: .* line 2, column 3; for comments .* install hjson"):
        Config.load(path)


def test_plain_json_needs_no_hjson(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "steps_per_print": Infinity}')
    assert Config.load(path).placement == PRESETS["zero2"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"fp16": {"enabled": true, "enabled": false}}'),
        ("a.json", '{"fp16": {"enabled": true, "enabled": false}, /* hjson */}'),
        ("a.yaml", "preset: zero1\nprecision: {compute: bf16}\npreset: zero1\n"),
    ],
)
def test_duplicate_keys_are_an_error(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"{path}: the key '(enabled|preset)' appears twice in one section"):
        Config.load(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", ""),
        ("a.json", "not json"),
        ("a.json", "[1, 2]"),
        ("a.json", "3"),
        ("a.json", '{"fp16": '),
        ("a.json", '{"fp16" {}}'),
        ("a.json", "zero_stage: 3"),
        ("a.json", '{"train_batch_size": ' + "9" * 5000 + "}"),
        ("a.json", '{"a":' * 20000),
        ("a.yaml", "a: [1, 2"),
        ("a.yaml", "- 1\n- 2\n"),
        ("a.yaml", "? [1, 2]\n: 3\n"),
        ("a.yaml", "preset: !!python/object:os.system x"),
        ("a.yaml", "placement: &a {weights: *a}"),
    ],
)
def test_a_broken_file_is_a_config_error_that_names_it(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        Config.load(path)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match=rf"{path}: is not UTF-8 text"):
        Config.load(path)
    with pytest.raises(ConfigError, match="no such file"):
        Config.load(tmp_path)  # a folder
