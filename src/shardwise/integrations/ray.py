"""Ray Train on shardwise: `resume` and `report` in the loop of a TorchTrainer.

Ray starts the workers and their process group, which `shardwise.initialize` joins. All workers write checkpoints
straight into the storage of the run, without a copy; Ray knows them as its own, so that FailureConfig, CheckpointConfig
and `result.checkpoint` work. A run continues on any number of workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray.train
from pyarrow.fs import LocalFileSystem
from ray.train import Checkpoint, CheckpointUploadMode

from shardwise.checkpoint.folder import LATEST, candidates
from shardwise.checkpoint.storage import Location
from shardwise.engine.engine import Engine
from shardwise.errors import ConfigError


def resume(engine: Engine) -> Any:
    """Continue from the newest checkpoint of the run, if there is one; the state that was saved with it.

    A collective. A run without checkpoints continues from that of `TorchTrainer(resume_from_checkpoint=...)`. Of its
    own checkpoints, the newest that is complete counts. If a worker died before Ray noted it, it is reported now,
    without metrics, so that `CheckpointConfig(num_to_keep=...)` removes it in its turn.
    """
    state, known = engine.load(_storage(), missing_ok=True), ray.train.get_checkpoint()
    if engine.steps:
        # Not by its tag: a checkpoint that replaced one of the same step has another name.
        newest = candidates(_storage(), LATEST, fallback=False)[0]
        if known is None or Path(known.path) != newest:
            _report(newest, {})
    elif known is not None:
        path = Path(known.path)
        state = engine.load(path.parent, tag=path.name)
    return state


def report(engine: Engine, metrics: dict[str, Any], state: dict[str, Any] | None = None) -> None:
    """Save a checkpoint in the storage of the run, with `state`, and report it to Ray with `metrics`. A collective."""
    _report(engine.save(_storage(), state=state), metrics)


def _report(path: Location, metrics: dict[str, Any]) -> None:
    is_first = ray.train.get_context().get_world_rank() == 0
    checkpoint = Checkpoint.from_directory(path) if is_first else None
    ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def _storage() -> Path:
    """The folder of the run, which all workers share."""
    storage = ray.train.get_context().get_storage()
    if not isinstance(storage.storage_filesystem, LocalFileSystem):
        raise ConfigError(
            f"RunConfig(storage_path=...) is on {type(storage.storage_filesystem).__name__}: workers write checkpoints "
            "into it together, so give a folder that all nodes have mounted"
        )
    return Path(storage.experiment_fs_path)
