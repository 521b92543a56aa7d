"""The training systems that rows compare, behind one interface: forward, backward, update.

Every system gets the same model with the same initial values, AdamW with torch's fused kernel and the same clipping.
Peers run with their published best settings, from the files in `settings/`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.compare.job import ALONE, LEARNING_RATE, WEIGHT_DECAY, CompareJob, config_for, peer_settings
from shardwise.config.costs import sent, wire_times
from shardwise.config.presets import PRESETS
from shardwise.models.loading import loss_of
from shardwise.observe.labels import Labelling
from shardwise.observe.storage import StorageObserver
from shardwise.partition.units import divide
from shardwise.tensors import map_tensors


class System:
    """Plain torch on one rank, without communication, and the base of the other systems."""

    def __init__(self, job: CompareJob, model: nn.Module) -> None:
        self.job = job
        self.model = model
        self.wrapped, self.optimizer = self.wrap(model)
        self.scaler = torch.amp.GradScaler(job.device.type, enabled=job.dtype == torch.float16)

    def wrap(self, model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
        """What is called instead of the model, and the optimizer."""
        return model, _adamw(model)

    def forward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        """The loss of one micro-batch. `is_last`: the update follows."""
        with torch.autocast(self.job.device.type, self.job.dtype, enabled=self.job.dtype != torch.float32):
            return loss_of(self.wrapped(**batch))

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        self.scaler.scale(loss / self.job.settings.accumulate).backward()

    def update(self) -> None:
        limit = self.job.settings.clip_norm
        if limit:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.wrapped.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def label(self, labelling: Labelling, memory: StorageObserver) -> None:
        """Label what the system holds from now on."""
        labelling.attach(memory, self.model, self.optimizer)

    def watch_wire(self) -> None:
        """Prepare for the wire observer: route collectives that are issued in C++ through Python."""

    def weights(self) -> Iterator[torch.Tensor]:
        """The full trained values of one parameter after another, on every rank."""
        yield from (param.detach() for param in self.model.parameters())

    def expected_wire_bytes(self) -> int | None:
        """The bytes that a rank sends in a step by the formula of contract C3; None without communication."""
        if self.job.row == ALONE:
            return None
        times = sum(wire_times(PRESETS[self.job.row.preset], self.job.settings.accumulate))
        numel = sum(whole_numel(param) for param in self.model.parameters() if param.requires_grad)
        return sent(times * numel * self.wire_dtype.itemsize, self.job.settings.world_size)

    @property
    def wire_dtype(self) -> torch.dtype:
        return self.job.dtype


class EngineSystem(System):
    """A system whose engine clips, scales and updates by itself, once it has had all micro-batches of a step."""

    def forward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        return loss_of(self.wrapped(**batch))

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        self.wrapped.backward(loss)
        if not is_last:
            self.wrapped.step()

    def update(self) -> None:
        self.wrapped.step()


class Shardwise(EngineSystem):
    """shardwise under a preset."""

    def wrap(self, model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
        config = config_for(self.job.settings, self.job.row.preset)
        engine = shardwise.initialize(model, _adamw(model, fused=None), config)
        return engine, cast(torch.optim.Optimizer, engine.optimizer)

    def label(self, labelling: Labelling, memory: StorageObserver) -> None:
        labelling.attach_engine(memory, self.wrapped)

    def weights(self) -> Iterator[torch.Tensor]:
        for unit in self.wrapped.units:
            with shardwise.gathered(unit.params):
                yield from (param.detach() for param in unit.params)

    def expected_wire_bytes(self) -> int:
        count = self.job.settings.accumulate
        sizes = (unit.weights.policy.wire_bytes_each(count) * unit.layout.numel for unit in self.wrapped.units)
        return sent(sum(sizes), self.job.settings.world_size)


class DDP(System):
    """torch's DistributedDataParallel."""

    def wrap(self, model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
        return DistributedDataParallel(model, **peer_settings("ddp")), _adamw(model)

    def forward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        with contextlib.nullcontext() if is_last else self.wrapped.no_sync():
            return super().forward(batch, is_last)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        with contextlib.nullcontext() if is_last else self.wrapped.no_sync():
            super().backward(loss, is_last)

    def watch_wire(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self.wrapped.register_comm_hook(None, allreduce_hook)

    @property
    def wire_dtype(self) -> torch.dtype:
        return torch.float32  # weights and gradients stay fp32 under autocast


class FSDP2(System):
    """torch's fully_shard on each of shardwise's units and the root, with fp32 shards and 16-bit computing."""

    def wrap(self, model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        settings = peer_settings("fsdp2")
        dtype = None if self.job.dtype == torch.float32 else self.job.dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        mesh = dist.device_mesh.init_device_mesh(self.job.device.type, (self.job.settings.world_size,))
        shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
        for spec in divide(model):
            if spec.runs and spec.runs[0] != ("",):  # the root's own modules come last
                modules = [model.get_submodule(path) for path in spec.runs[0]]
                shard(modules, reshard_after_forward=settings["reshard_after_forward"])
        shard(model, reshard_after_forward=settings["root_reshard_after_forward"])
        return model, _adamw(model)

    def forward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        return loss_of(self.wrapped(**batch))

    def weights(self) -> Iterator[torch.Tensor]:
        yield from (cast(Any, param).full_tensor().detach() for param in self.model.parameters())


class DeepSpeed(EngineSystem):
    """DeepSpeed's stages 1 to 3, in an interpreter that has it installed.

    A bucket size of "auto" is the whole model, at most 5e8 elements (DeepSpeed's own default).
    """

    def wrap(self, model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
        os.environ.setdefault("DS_ACCELERATOR", self.job.device.type)
        import deepspeed  # type: ignore[import-not-found]  # a peer

        deepspeed.utils.logger.setLevel("ERROR")
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=self._config(model))
        return engine, engine.optimizer.optimizer

    def forward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        dtype = self.job.dtype
        return super().forward(map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t), is_last)

    def label(self, labelling: Labelling, memory: StorageObserver) -> None:
        labelling.attach(memory, self.model, self.optimizer, master=True)
        for param in self.model.parameters():
            if hasattr(param, "ds_tensor"):  # a shard, which neither the model nor the optimizer references
                labelling.label("weights", "shard", param.ds_tensor)

    def weights(self) -> Iterator[torch.Tensor]:
        import deepspeed

        for param in self.model.parameters():
            with deepspeed.zero.GatheredParameters([param], enabled=self.job.row.preset == "zero3"):
                yield param.detach()

    def _config(self, model: nn.Module) -> dict[str, Any]:
        settings = self.job.settings
        config = peer_settings(f"deepspeed_{self.job.row.preset}")
        numel = sum(param.numel() for param in model.parameters() if param.requires_grad)
        zero = config["zero_optimization"]
        return {
            **config,
            "zero_optimization": {k: min(numel, 500_000_000) if v == "auto" else v for k, v in zero.items()},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": settings.accumulate,
            "gradient_clipping": settings.clip_norm or 0.0,
            **({} if settings.precision == "fp32" else {settings.precision: {"enabled": True}}),
        }


def make_system(job: CompareJob, model: nn.Module) -> System:
    """The system of a job's row."""
    peers: dict[str, type[System]] = {"alone": System, "ddp": DDP, "fsdp2": FSDP2, "deepspeed": DeepSpeed}
    return (peers[job.row.peer] if job.row.peer is not None else Shardwise)(job, model)


def whole_numel(param: nn.Parameter) -> int:
    """The elements of a whole parameter. DeepSpeed empties the model's parameter and records its size as `ds_numel`."""
    return int(getattr(param, "ds_numel", param.numel()))


def _adamw(model: nn.Module, fused: bool | None = True) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=fused)
