"""From what a user names to a `Model`: a size, a name, a config.json, a model folder, `file.py:function`.

The models that `shardwise compare` knows by name count as functions."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shardwise.config.files import read_file
from shardwise.errors import ConfigError
from shardwise.models.built_in import BUILT_IN
from shardwise.models.catalog import find, from_config
from shardwise.models.dimensions import Dimensions
from shardwise.planning.workload import Model, Workload, from_dimensions, from_parameters


def find_model(name: str | None, parameters: int | None, workload: Workload) -> Model:
    """The one model that is named, one way or another."""
    if (name is None) == (parameters is None):
        raise ConfigError("name the model or its size, one of the two: `shardwise plan llama3-8b`, or --params 8e9")
    if parameters is not None:
        if workload.lora is not None:
            raise ConfigError("--lora needs a model whose dimensions are known: name one instead of --params")
        return from_parameters(parameters)
    assert name is not None
    if name in BUILT_IN or (":" in name and not Path(name).exists()):
        return _from_function(name, workload)
    return from_dimensions(_dimensions(name), workload.lora)


def _dimensions(name: str) -> Dimensions:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{name}: the folder has no config.json")
        path = path / "config.json"
    if path.is_file():
        return from_config(read_file(path), path.parent.name or path.name)
    if path.suffix in (".json", ".py") or name.count("/") > 1:
        raise ConfigError(f"{name}: no such file or folder")
    return find(name)


def _from_function(name: str, workload: Workload) -> Model:
    """The user's own model, built without values to count its parameters."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from shardwise.models import loading

    if workload.lora is not None:
        raise ConfigError("--lora with file.py:function: put the adapters on the model in the function itself")
    loading.check_name(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [*loading.load(name, "cpu")[0].parameters()]
    total = sum(param.numel() for param in params)
    trainable = sum(param.numel() for param in params if param.requires_grad)
    return Model(name, total, trainable, build=partial(loading.load, name, "cpu"))
