"""Keys that a DeepSpeed or Accelerate file leaves "auto": what the user's model and optimizer say about them.

`Config.load` knows neither object, so it takes defaults and records the keys as `AutoKey`s. `Config.for_objects`
replaces the defaults once the objects are known. A key that changes training and about which no object says anything
keeps its default, and the caller gets a sentence to warn with.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.config.draft import AutoKey, Provenance, ValueOrigin
from shardwise.config.sections import ConfigSections, Section
from shardwise.config.values import shown
from shardwise.errors import ConfigError

if TYPE_CHECKING:  # torch loads when there is a model, not with the configuration
    import torch
    from torch import nn

S = TypeVar("S", bound=Section)
C = TypeVar("C", bound=ConfigSections)
_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
_PEAK_RATES = ("warmup_max_lr", "cycle_max_lr")  # parameters of schedules that are the optimizer's own learning rate


@dataclass(frozen=True)
class UserObjects:
    """What a caller passes in addition to the configuration.

    optimizer      the optimizer that will train; None if the engine only evaluates
    is_own         whether the caller built it, so that the file's optimizer section has no effect
    has_schedule   whether the caller passes a schedule, so that the file's scheduler section has no effect
    """

    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    is_own: bool = True
    has_schedule: bool = False

    @property
    def dtype(self) -> str | None:
        """The dtype of most of the model's elements, by its name in a configuration."""
        counts: Counter[str] = Counter()
        for param in self.model.parameters() if self.model is not None else ():
            if param.is_floating_point():
                counts[str(param.dtype)] += param.numel()
        return _DTYPES.get(counts.most_common(1)[0][0]) if counts else None

    @property
    def rates(self) -> float | tuple[float, ...]:
        """The learning rate of the optimizer, or one per parameter group where they differ."""
        assert self.optimizer is not None
        rates = tuple(float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group)
        return rates[0] if len(set(rates)) == 1 else rates


def resolve(config: C, provenance: Provenance, objects: UserObjects) -> tuple[C, dict[str, ValueOrigin], list[str]]:
    """The configuration with what `objects` say, the origin of each such value, and a sentence per key left open."""
    values: dict[str, Any] = {}
    origins: dict[str, ValueOrigin] = {}
    open_keys: defaultdict[str, list[str]] = defaultdict(list)
    for auto in _in_effect(config, provenance, objects):
        found = _said(auto, objects)
        if found is None:
            open_keys[auto.target].append(auto.key)
            continue
        values |= found
        origin = ValueOrigin("auto", f"auto {auto.key}: from the {'model' if auto.choices else 'optimizer'}")
        origins |= dict.fromkeys(found, origin)
    resolved = updated(config, values)
    return resolved, origins, [_sentence(path, keys, resolved, objects) for path, keys in open_keys.items()]


def _in_effect(config: ConfigSections, provenance: Provenance, objects: UserObjects) -> Iterator[AutoKey]:
    """The open keys whose value changes this training."""
    sizes = (provenance.origin(f"batch.{name}").kind for name in ("micro_batch_size", "global_batch_size"))
    unused = {
        "batch.accumulation": all(kind == "file" for kind in sizes),  # it follows from the two
        "optimizer.params": objects.is_own or config.optimizer is None,
        "scheduler.params": objects.has_schedule or config.scheduler is None,
        "precision.loss_scale": config.precision.compute != "fp16",
    }
    for auto in provenance.autos:
        section, _, name = auto.target.rpartition(".")
        trains = objects.optimizer is not None or auto.choices
        is_read = name in ("clip_norm", "accumulation") or section.startswith(("precision", "optimizer", "scheduler"))
        if trains and is_read and not unused.get(auto.target, False) and not unused.get(section, False):
            yield auto


def _said(auto: AutoKey, objects: UserObjects) -> Mapping[str, Any] | None:
    """The values, by native path, that the objects give to an open key; None if they say nothing about it."""
    if auto.choices:
        chosen = auto.choices.get(str(objects.dtype))
        if isinstance(chosen, ConfigError):
            raise chosen
        return chosen
    section, _, name = auto.target.rpartition(".")
    if section == "scheduler.params" and name in _PEAK_RATES:
        return {auto.target: objects.rates}
    return None


def _sentence(path: str, keys: list[str], config: ConfigSections, objects: UserObjects) -> str:
    """Names the open keys, the value taken, and the remedy."""
    section, _, name = path.rpartition(".")
    named = " and ".join(keys)
    verb = "is" if len(keys) == 1 else "are"
    if path == "precision.compute":
        taken = f"the model is {objects.dtype or 'of no floating-point dtype'}, so {config.precision.compute} is used"
        return f'{named} {verb} "auto": {taken}; write true for 16-bit training, or false'
    if section == "optimizer.params":
        assert objects.optimizer is not None
        taken = f"no optimizer was passed, so the default {shown(objects.optimizer.param_groups[0].get(name))} is used"
        return f'{named} {verb} "auto": {taken}; write the value, or pass an optimizer'
    value = _value(path, config)
    taken = "no clipping is done" if name == "clip_norm" and value is None else f"the default {shown(value)} is used"
    return f'{named} {verb} "auto", and no object that was passed says its value: {taken}; write the value'


def _value(path: str, config: ConfigSections) -> object:
    section, _, name = path.rpartition(".")
    if section == "scheduler.params":
        from shardwise.config import schedules

        assert config.scheduler is not None
        return schedules.default(config.scheduler.name, name)
    found: Any = config
    for part in path.split("."):
        found = getattr(found, part)
    return found


def updated(section: S, values: Mapping[str, Any]) -> S:
    """The section with other values at paths below it, validated; what was left unset stays unset.

    >>> updated(ConfigSections(), {"gradients.clip_norm": 1.0}).gradients.clip_norm
    1.0
    """
    given = {name: getattr(section, name) for name in section.model_fields_set}
    below: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if rest:
            below[name][rest] = value
        else:
            given[name] = value
    for name, inner in below.items():
        own = getattr(section, name)
        given[name] = updated(own, inner) if isinstance(own, Section) else {**own, **inner}
    return type(section)(**given)
