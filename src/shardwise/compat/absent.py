"""What DeepSpeed has and shardwise does not serve, by name: an import or a call says what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from typing import Any, NoReturn

from shardwise.errors import CompatibilityError

_PLAIN = "shard the data alone, with stage 3 for models that do not fit"
_INSTEAD = {
    "pipe": _PLAIN,
    "runtime.pipe": _PLAIN,
    "sequence": _PLAIN,
    "runtime.sequence_parallel": _PLAIN,
    "module_inject": _PLAIN,
    "moe": "models with experts train as they are; their experts are sharded like all parameters",
    "inference": "shardwise.stream(model) generates with models that do not fit",
    "model_implementations": "shardwise.stream(model) generates with models that do not fit",
    "monitor": "log engine.get_global_grad_norm(), engine.get_lr() and the loss from the loop",
    "profiling": "torch.profiler shows the phases of the engine, and engine.shardwise_engine.report() its memory",
    "elasticity": "a checkpoint resumes on any number of ranks; docs/checkpoints.md",
    "autotuning": "`shardwise plan MODEL --search` ranks configurations",
    "compression": "train without it",
    "linear": "PEFT's LoRA works under every stage",
    "nebula": "save_checkpoint writes to any folder",
    "checkpoint": "load_checkpoint takes a checkpoint of any number of ranks and any stage, without a conversion",
    "runtime.checkpoint_engine": "save_checkpoint writes to any folder",
    "runtime.data_pipeline": "sort or sample the data in the loader",
    "runtime.hybrid_engine": "engine.shardwise_engine.generate(...) keeps the weights gathered while it generates",
    "ops": "use torch's own operators and optimizers",
}


def refused(name: str, remedy: str) -> Callable[..., Any]:
    """A function that stands where DeepSpeed has one that shardwise does not serve."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise CompatibilityError(f"deepspeed.{name} is not served by shardwise: {remedy}")

    return refuse


class AbsentModules(MetaPathFinder):
    """The last finder: an import that reaches it names a module of DeepSpeed's that is not here."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        package, _, inside = name.partition(".")
        if package != "deepspeed" or not inside:
            return
        parts = inside.split(".")
        heads = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        remedy = next((_INSTEAD[head] for head in heads if head in _INSTEAD), "docs/from-deepspeed.md lists what is")
        # Clients that can do without catch an ImportError.
        raise ModuleNotFoundError(f"{name} is not in the module deepspeed that shardwise serves: {remedy}", name=name)

    @classmethod
    def install(cls) -> None:
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.append(cls())
