"""Taking an engine off a model that keeps its values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwise.engine.engine import Engine
from shardwise.partition.dtensors import local, set_dtype
from shardwise.partition.stored import prepare_quantized, rebind_copies


def detach(engine: Engine, dtypes: Mapping[str, torch.dtype]) -> None:
    """Destroy an engine; its model has whole values on the host afterwards. A collective.

    `dtypes` gives the dtypes of parameters by name, those before the engine; others have that in which they rest.

    >>> import torch, shardwise
    >>> model = torch.nn.Linear(2, 1)
    >>> engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    >>> detach(engine, {})
    >>> model(torch.ones(1, 2)).shape
    torch.Size([1, 1])
    """
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for unit in engine.units:
        unit.finish_update()
        whole = unit.weights.whole(unit.weights.master)
        for name, param in zip(unit.names, unit.params, strict=True):
            value = unit.view(whole, name)
            kept.append((param, value.to("cpu", dtypes.get(name, value.dtype), copy=True)))
    prepare_quantized(engine.module)
    engine.destroy()
    for param, value in kept:
        set_dtype(param, value.dtype)
        local(param).data = value
        rebind_copies(param, value)
