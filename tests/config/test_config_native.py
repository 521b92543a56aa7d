"""Presets and our own keys: defaults, overrides, the order of accumulation, and errors that name the key."""

import json
import pickle

import pytest

from shardwise.config import PRESETS, Config
from shardwise.config.presets import preset_name
from shardwise.config.sections import Batch, KindPlacement, Placement
from shardwise.errors import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_row(name):
    config = Config.load(name)
    assert config.placement == PRESETS[name]
    assert preset_name(config.placement) == name
    assert config.origin("placement.weights.sharding").kind == "preset"
    assert config.origin("precision.compute").kind == "default"


def test_the_rows_are_those_of_the_design():
    rows = {
        name: " | ".join(str(getattr(row, kind)) for kind in ("weights", "grads", "optim"))
        for name, row in PRESETS.items()
    }
    assert rows == {
        "zero0": "replicated, device | replicated, device | replicated, device",
        "zero1": "replicated, device | replicated, device | sharded, device",
        "zero2": "replicated, device | sharded, device | sharded, device",
        "zero3": "sharded, device | sharded, device | sharded, device",
        "zero3_hybrid": "node, device | node, device | sharded, device",
        "zero1_offload": "replicated, device | replicated, device | sharded, host",
        "zero2_offload": "replicated, device | sharded, host | sharded, host",
        "zero3_offload": "sharded, host | sharded, host | sharded, host",
        "zero3_nvme": "sharded, disk | sharded, host | sharded, disk",
    }


def test_sections_override_the_preset():
    config = Config.load(
        {"preset": "zero2_offload", "precision": {"compute": "bf16"}, "offload": {"device_memory": "24GiB"}}
    )
    assert config.placement == PRESETS["zero2_offload"]
    assert config.precision.compute == "bf16"
    assert config.offload.device_memory == 24 * 2**30
    assert str(config.origin("offload.device_memory")) == "file"


def test_equality_and_hash_ignore_the_origin():
    loaded, built = Config.load("zero3"), Config(placement=PRESETS["zero3"])
    assert loaded == built
    assert hash(loaded) == hash(built)
    assert loaded != Config.load("zero2")
    assert loaded.origin("placement.weights.tier").kind == "preset"
    assert built.origin("placement.weights.sharding").kind == "code"


@pytest.mark.parametrize("name", PRESETS)
def test_round_trips(name, tmp_path):
    config = Config.load({"preset": name, "batch": {"global_batch_size": 24, "micro_batch_size": 3}})
    assert Config.load(config) is config
    assert Config.load(config.model_dump()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    path = tmp_path / "native.json"
    path.write_text(config.model_dump_json())
    again = Config.load(path)
    assert again == config
    assert again.batch.resolve(4).accumulation == 2  # a dump must not fix what was left open


def test_json_text_and_yaml(tmp_path):
    assert Config.load('{"preset": "zero1"}') == Config.load("zero1")
    path = tmp_path / "a.yaml"
    path.write_text("preset: zero1\ngradients:\n  reduce_bucket_bytes: 25MB\n")
    assert Config.load(path).gradients.reduce_bucket_bytes == 25_000_000
    path.write_text("")
    assert Config.load(path) == Config()


@pytest.mark.parametrize(
    ("preset", "order", "grads"),
    [
        ("zero1", "sharded", "sharded, device"),
        ("zero2", "local", "replicated, device"),
        ("zero2_offload", "local", "replicated, device"),
        ("zero3", "local", "replicated, device"),
    ],
)
def test_a_given_order_moves_the_gradients_of_a_preset(preset, order, grads):
    config = Config.load({"preset": preset, "gradients": {"order": order}})
    assert str(config.placement.grads) == grads
    assert config.order == order
    assert config.origin("placement.grads.sharding").kind == "derived"


def test_auto_leaves_the_default():
    config = Config.load({"preset": "zero3", "gradients": {"clip_norm": "auto"}, "runtime": {"prefetch": "auto"}})
    assert config == Config.load("zero3")
    assert config.origin("runtime.prefetch").kind == "auto"
    section = {"name": "AdamW", "params": {"lr": "auto"}}
    assert Config.load({"optimizer": section}).optimizer.params == {}
    assert Config.load({"offload": {"device_memory": "auto"}}).offload.device_memory == "auto"


def test_deterministic_is_a_top_level_shorthand():
    assert Config.load({"preset": "zero2", "deterministic": True}).gradients.deterministic
    with pytest.raises(ConfigError, match=r"deterministic = true: contradicts gradients\.deterministic"):
        Config.load({"deterministic": True, "gradients": {"deterministic": False}})


NVME = {"preset": "zero3", "placement": {"weights": {"tier": "disk"}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"placment": {}}, r"'placment'; did you mean 'placement'\?"),
        ({"preset": "zero4"}, r"preset = 'zero4': expected zero0, .* or zero3_nvme; did you mean 'zero\d'\?"),
        ({"preset": "zero3", "placment": {}}, r"placment = {}: unknown key; did you mean 'placement'\?"),
        ({"placement": {"weight": {}}}, r"placement\.weight = {}: unknown key; did you mean 'weights'\?"),
        ({"placement": 3}, r"placement = 3: expected a section"),
        (
            {"placement": {"grads": {"tier": "hots"}}},
            r"placement\.grads\.tier = 'hots': expected 'device', 'host' or 'disk'",
        ),
        ({"precision": {"compute": "fp8"}}, r"precision\.compute = 'fp8': expected 'fp32', 'bf16', 'fp16' or 'model'"),
        ({"precision": {"autocast": "maybe"}}, r"precision\.autocast = 'maybe': Input should be a valid boolean"),
        ({"runtime": {"prefetch": -1}}, r"runtime\.prefetch = -1: expected a whole number .*, not a negative one"),
        ({"runtime": {"prefetch": 1.5}}, r"runtime\.prefetch = 1\.5: expected a whole number .*, not a fraction"),
        ({"runtime": {"prefetch": True}}, r"runtime\.prefetch = true: expected a whole number"),
        ({"runtime": {"units": 3}}, r"runtime\.units"),
        ({"offload": {"host_memory": "lots"}}, r"offload\.host_memory = 'lots': expected a size such as 44GB, 44GiB"),
        ({"offload": {"ratio": 1.5}}, r"offload\.ratio = 1\.5: Input should be less than or equal to 1"),
        ({"gradients": {"clip_norm": -1}}, r"gradients\.clip_norm = -1: .*greater than 0"),
        ({"gradients": {"clip_norm": float("nan")}}, r"gradients\.clip_norm = nan: expected a finite number"),
        ({"precision": {"loss_scale": {"initial": 8}}}, r"loss_scale applies to compute: fp16 only"),
        ({"precision": {"autocast": True}}, r"autocast needs a 16-bit dtype"),
        ({"placement": {"weights": {"tier": "host"}}}, r"weights can leave the device only when sharded"),
        ({"placement": {"weights": {"sharding": "sharded"}}}, r"sharded weights need sharded optim"),
        ({"preset": "zero3", "placement": {"grads": {"tier": "disk"}}}, r"grads rest on device or host"),
        (NVME, r"weights rest on disk \(nvme\): give the folder, offload\.nvme_path"),
        ({"preset": "zero2", "gradients": {"reduce_at": "step"}}, r"reduce_at: step needs replicated grads"),
        (
            {"preset": "zero2", "placement": {"grads": {"sharding": "sharded"}}, "gradients": {"order": "local"}},
            r"gradients\.order is local, but placement\.grads\.sharding is sharded",
        ),
        ({"preset": "zero2", "offload": {"update": "host"}}, r"offload\.update: host needs optim off the device"),
        (
            {"batch": {"global_batch_size": 10, "micro_batch_size": 4}},
            r"global_batch_size 10 is no multiple of micro_batch_size 4",
        ),
        ({"batch": {"accumulation": 0}}, r"batch\.accumulation = 0: Input should be greater than or equal to 1"),
        (
            {"optimizer": {"name": "AdamX"}},
            r"optimizer: name 'AdamX': neither Lion nor a name of torch\.optim; did you mean",
        ),
        ({"optimizer": {"name": "LBFGS"}}, r"LBFGS is not supported: it evaluates the loss several times"),
        (
            {"optimizer": {"name": "Adam", "params": {"lrr": 1}}},
            r"params\.lrr: unknown key of Adam; did you mean 'lr'\?",
        ),
        ({"optimizer": {"name": "Adam", "params": {"betas": 0.9}}}, r"params\.betas = 0\.9: expected two numbers"),
        ({"optimizer": "Adam"}, r"optimizer = 'Adam': expected a section"),
        ({"scheduler": {"name": "Cosine"}}, r"scheduler: name 'Cosine': expected WarmupLR, .*or LRRangeTest"),
        (
            {"zero_optimization": {}, "placement": {}},
            r"mixes keys of several dialects \(native: placement; DeepSpeed: zero_",
        ),
        (
            {"deepspeed_config": {}, "fp16": {}},
            r"mixes keys of several dialects \(DeepSpeed: fp16; Accelerate: deepspeed",
        ),
        ({"preset": "zero3", "deepspeed_config": {}}, r"mixes keys of several dialects"),
        ({3: 4}, r"keys must be strings, found int"),
        ("zero33", r"neither a file nor a preset .*; did you mean 'zero3'\?"),
        ("nowhere/ds.json", r"nowhere/ds\.json: no such file"),
        (3, r"config is int, expected a preset's name, a path, a dict or a Config"),
        (None, r"config is NoneType"),
    ],
)
def test_bad_input_names_key_value_and_remedy(config, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(config)


def test_a_constructor_raises_config_error_too():
    with pytest.raises(ConfigError, match="sharded weights need sharded optim"):
        Config(placement={"weights": {"sharding": "sharded"}})
    with pytest.raises(ConfigError, match=r"precison = {}: unknown key; did you mean 'precision'"):
        Config(precison={})


def test_models_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().placement = Placement()
    with pytest.raises(ValueError, match="frozen"):
        KindPlacement().tier = "host"


def test_every_field_is_described():
    from shardwise.config.draft import subsection

    def check(section):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            if subsection(field):
                check(subsection(field))

    check(Config)


@pytest.mark.parametrize(
    ("given", "world_size", "triple"),
    [
        ({}, 4, (None, 1, None)),
        ({"accumulation": 3}, 4, (None, 3, None)),
        ({"micro_batch_size": 2}, 4, (2, 1, 8)),
        ({"micro_batch_size": 2, "accumulation": 3}, 4, (2, 3, 24)),
        ({"global_batch_size": 24, "micro_batch_size": 2}, 4, (2, 3, 24)),
        ({"global_batch_size": 24, "accumulation": 3}, 4, (2, 3, 24)),
        ({"global_batch_size": 24}, 4, (6, 1, 24)),
        ({"global_batch_size": 24, "micro_batch_size": 2, "accumulation": 3}, 4, (2, 3, 24)),
    ],
)
def test_any_two_of_the_batch_triple_give_the_third(given, world_size, triple):
    batch = Batch(**given).resolve(world_size)
    assert (batch.micro_batch_size, batch.accumulation, batch.global_batch_size) == triple


@pytest.mark.parametrize(
    "given",
    [
        {"global_batch_size": 24, "micro_batch_size": 2, "accumulation": 1},
        {"global_batch_size": 24, "micro_batch_size": 3, "accumulation": 1},
        {"global_batch_size": 10, "micro_batch_size": 2},
        {"global_batch_size": 9},
    ],
)
def test_a_triple_that_does_not_multiply_is_an_error(given):
    with pytest.raises(ConfigError, match=r"global_batch_size is \d+, but .*W 4 = \d+; change one"):
        Batch(**given).resolve(4)


def test_a_configuration_for_a_world_size():
    config = Config.load({"preset": "zero2", "batch": {"global_batch_size": 24, "micro_batch_size": 3}})
    resolved = config.for_world_size(4)
    assert resolved.batch.accumulation == 2
    assert resolved.origin("batch.accumulation").kind == "derived"
    assert resolved.origin("batch.micro_batch_size").kind == "file"
    assert config.origin("batch.accumulation").kind == "default"
    assert resolved.placement == config.placement
    with pytest.raises(ConfigError, match="does not multiply"):
        config.for_world_size(5)


def test_native_files_name_themselves_in_errors(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"preset": "zero3", "runtime": {"prefetch": "many"}}))
    with pytest.raises(ConfigError, match=rf"{path}: runtime\.prefetch = 'many': expected a whole number"):
        Config.load(path)
