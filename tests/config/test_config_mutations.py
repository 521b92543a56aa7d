"""Mutated configurations: the outcome is a valid Config or a ConfigError, never another exception."""

import copy
import json
import math
import os
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.config import Config
from shardwise.errors import ConfigError, ConfigWarning

NATIVE = {
    "preset": "zero2_offload",
    "deterministic": False,
    "placement": {"weights": {"sharding": "replicated", "tier": "device"}, "grads": {"tier": "host"}},
    "precision": {"compute": "fp16", "loss_scale": {"initial": 1024, "window": 10}, "reduce_dtype": None},
    "gradients": {"clip_norm": 1.0, "order": "sharded", "reduce_bucket_bytes": "25MB"},
    "offload": {"nvme_path": "/nvme", "device_memory": "24GiB", "ratio": 0.5, "aio": {"queue_depth": 4}},
    "batch": {"accumulation": 2, "micro_batch_size": 2, "global_batch_size": 16},
    "optimizer": {"name": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
    "scheduler": {"name": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": [0.1, 0.2]}},
    "checkpointing": {"enabled": True},
    "runtime": {"units": ["Block"], "prefetch": 2, "steps_per_print": 10},
}
CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text())
LARGE = sorted((case["config"] for case in CORPUS if not case["refused"]), key=lambda config: -len(json.dumps(config)))
SEEDS = [NATIVE, *LARGE[:12], *(config for config in LARGE if "deepspeed_config" in config)]

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 5),
    st.floats(),
    st.sampled_from(
        ["auto", "none", "cpu", "nvme", "bf16", "fp16", "true", "5e8", "", "inf", "zero3", "local", "no", "AdamW"]
    ),
    st.sampled_from([math.inf, -math.inf, math.nan, 1e400, 10**5000, "\0", "9" * 5000, b"x"]),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-2, 3), st.sampled_from([10**5000, "a", None, 0.5, math.nan])), max_size=3),
    st.dictionaries(
        st.sampled_from(["enabled", "device", "stage", "type", "name", "params", "x"]), st.integers(-1, 4), max_size=2
    ),
)
KEYS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["stage", "device", "enabled", "cpu_offload", "zero_stage", "nvme_path", "tier", "order", "zero_optimization"]
    ),
    st.sampled_from(
        ["max_live_parameters", "deepspeed_config_file", "preset", "bf16", "aio", "units", "amp", "use_cpu", 3, None]
    ),
)


def sections(config, found=None):
    found = [] if found is None else found
    found.append(config)
    for value in config.values():
        if isinstance(value, dict):
            sections(value, found)
    return found


@st.composite
def mutated(draw):
    config = copy.deepcopy(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        section = draw(st.sampled_from(sections(config)))
        action = draw(st.sampled_from(["replace", "replace", "remove", "add", "move"]))
        if action == "add" or not section:
            section[draw(KEYS)] = draw(VALUES)
            continue
        key = draw(st.sampled_from(list(section)))
        if action == "replace":
            section[key] = draw(VALUES)
        elif action == "remove":
            del section[key]
        else:
            section[draw(KEYS)] = section.pop(key)
    return config


def outcome(config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        try:
            return Config.load(config)
        except ConfigError as error:
            return str(error)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(mutated())
def test_a_mutated_configuration_loads_or_is_a_config_error(config):
    result = outcome(config)
    if isinstance(result, Config):
        assert Config.load(result.model_dump()) == result
        assert max(map(len, result.explain().splitlines())) <= 100
        hash(result)
    else:
        assert result.startswith("config")


@settings(max_examples=200)
@given(st.sampled_from(SEEDS[:6]), st.data())
def test_a_damaged_file_loads_or_is_a_config_error(tmp_path_factory, seed, data):
    text = json.dumps(seed, indent=1)
    start = data.draw(st.integers(0, len(text)))
    damaged = text[:start] + data.draw(st.text(max_size=4)) + text[start + data.draw(st.integers(0, 6)) :]
    path = tmp_path_factory.mktemp("damaged") / data.draw(st.sampled_from(["a.json", "a.yaml"]))
    path.write_text(damaged, encoding="utf-8", errors="replace")
    result = outcome(path)
    assert isinstance(result, Config) or result.startswith(str(path))


@given(st.one_of(VALUES, st.text(), st.dictionaries(KEYS, VALUES)))
def test_anything_at_all(config):
    if not isinstance(config, str) or not os.path.isfile(config):
        outcome(config)


def test_the_seeds_load():
    for config in SEEDS:
        assert isinstance(outcome(config), Config) or "deepspeed_config_file" in str(config)


@pytest.mark.full
@settings(max_examples=20_000, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_many_mutated_configurations(config):
    outcome(config)
