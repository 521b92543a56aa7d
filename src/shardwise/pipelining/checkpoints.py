"""Checkpoints of a pipeline: a folder of checkpoints for each stage, and one export of the whole model.

    DIR/stage-0-of-2/step-100    DIR/stage-1-of-2/step-100

Each is a checkpoint of that stage's engine, with the parameters' names in the whole model: it loads at any size of
`dp`, under any stage of ZeRO, and with the same cut. A step counts as saved when all stages have it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from shardwise.checkpoint.checkpointable import persistent_buffers
from shardwise.checkpoint.companions import companions
from shardwise.checkpoint.folder import LATEST, keep_newest, list_checkpoints
from shardwise.engine import Engine
from shardwise.errors import CheckpointError
from shardwise.partition.policy import DTYPES

T = TypeVar("T")


def _keep_newest(folders: Sequence[Path], keep: int) -> None:
    for folder in folders:
        keep_newest(folder, keep)


class StageFolders:
    """Saves, loads and exports the stages of this rank, of `count`, together with those of its pipeline's others.

    `skipped` are the names of parameters that an earlier stage has too.
    """

    def __init__(self, engines: Mapping[int, Engine], count: int, group: dist.ProcessGroup, skipped: set[str]) -> None:
        self._engines = engines
        self._count = count
        self._group = group
        self._skipped = skipped

    def save(self, folder: Path, tag: str | None, state: dict[str, Any] | None, keep: int | None) -> None:
        """A collective of all ranks."""
        self._together(lambda: [e.save(self._path(folder, s), tag, state=state) for s, e in self._engines.items()])
        if keep is not None:  # all stages have the new one
            first = [stage for stage, engine in self._engines.items() if engine.comm.rank == 0]
            self._together(lambda: _keep_newest([self._path(folder, stage) for stage in first], keep))

    def load(self, folder: Path, tag: str) -> Any:
        """A collective of all ranks; the user's state."""
        if tag == LATEST:
            tag = self._newest(folder)
        states = self._together(lambda: [e.load(self._path(folder, s), tag) for s, e in self._engines.items()])
        return states[0]

    def export(self, folder: Path, dtype: str | None, files_from: Path | None) -> None:
        """Write one folder as Hugging Face does, with a file for each stage. A collective of all ranks."""
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: take one of {', '.join(DTYPES)}")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                f"{folder} exists and is not an empty folder: export to a new one, or remove it first"
            )
        draft = folder.parent / f".tmp-export-{folder.name}"
        try:
            parts = self._together(lambda: [self._write(draft, s, e, dtype) for s, e in self._engines.items()])
            tables: list[Any] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(tables, parts, group=self._group)
            everything = [part for table in tables for part in table]
            self._together(lambda: self._finish(draft, folder, everything, files_from))
            for engine in self._engines.values():
                engine.comm.share_object(None, "export")  # no rank returns before the folder is there
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _write(self, draft: Path, stage: int, engine: Engine, dtype: str | None) -> tuple[str, list[str], int]:
        """Gather a stage's tensors, parameter by parameter, on its first rank, which writes them."""
        file, tensors = f"model-{stage + 1:05d}-of-{self._count:05d}.safetensors", dict[str, torch.Tensor]()
        for unit in engine.units:
            wanted = DTYPES[dtype] if dtype is not None else unit.weights.policy.weight_dtype
            for name in unit.names:
                value = engine.full_param(name)
                if name not in self._skipped and engine.comm.rank == 0:
                    tensors[name] = value.to("cpu", wanted).contiguous()
        if engine.comm.rank == 0:
            tensors.update({name: each.cpu().clone() for name, each in persistent_buffers(engine.module).items()})
            draft.mkdir(parents=True, exist_ok=True)
            save_file(tensors, draft / file, metadata={"format": "pt"})
        return file, list(tensors), sum(tensor.nbytes for tensor in tensors.values())

    def _finish(self, draft: Path, folder: Path, parts: list[tuple[str, list[str], int]], files: Path | None) -> None:
        engine = self._engines.get(0)
        if engine is None or engine.comm.rank != 0:
            return
        weight_map = {name: file for file, names, _ in parts for name in names}
        index = {"metadata": {"total_size": sum(size for _, _, size in parts)}, "weight_map": weight_map}
        (draft / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        for name, content in companions(engine.module, files).items():
            (draft / name).write_bytes(content)
        os.rename(draft, folder)

    def _newest(self, folder: Path) -> str:
        """The newest tag that all stages have. A collective."""
        mine = [[e.tag for e in list_checkpoints(self._path(folder, s)) if e.is_complete] for s in self._engines]
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        stages = [tags for each in everyone for tags in each]
        common = [tag for tag in stages[0] if all(tag in tags for tags in stages)]
        if not common:
            raise CheckpointError(
                f"{folder} has no checkpoint that all {self._count} stages have saved: give a folder that a pipeline "
                "of as many stages has saved to"
            )
        return str(common[0])

    def _path(self, folder: Path, stage: int) -> Path:
        return folder / f"stage-{stage}-of-{self._count}"

    def _together(self, work: Callable[[], T]) -> T:
        """This rank's result of `work`; a CheckpointError on all ranks of the pipeline if any failed."""
        result: list[T] = []
        failure: Exception | None = None
        try:
            result.append(work())
        except Exception as error:
            failure = error
        failures: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(failures, None if failure is None else str(failure), group=self._group)
        if failure is not None:
            raise failure
        if any(failures):
            raise CheckpointError(f"another stage failed: {next(each for each in failures if each)}")
        return result[0]
