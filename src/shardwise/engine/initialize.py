"""`shardwise.initialize`: from a model, an optimizer and a configuration to an engine on a process group."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from shardwise.comm import ProcessGroupComm
from shardwise.comm.groups import end_world_at_exit, set_timeout
from shardwise.comm.mesh import RankMesh, make_mesh, mesh_beside
from shardwise.comm.model_group import ModelGroup
from shardwise.config import Config
from shardwise.config.auto import UserObjects
from shardwise.config.presets import offloaded
from shardwise.config.sections import MeshSection, Tier
from shardwise.config.shape import NodeShape
from shardwise.deferred.deferred import DeferredSession, check_deferred, finish, prepare, session_behind
from shardwise.engine.access import is_managed
from shardwise.engine.alike import check_alike, check_stages
from shardwise.engine.engine import Engine
from shardwise.engine.habits import check_scheduler
from shardwise.errors import ConfigError, ConfigWarning
from shardwise.machine.process import end_with_launcher
from shardwise.machine.slurm import SlurmTask
from shardwise.optim.optimizers import OptimizerFactory, resolve_optimizer
from shardwise.partition.dtensors import broken_tie, tp_mesh
from shardwise.partition.stored import stored_tensors


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | OptimizerFactory | None = None,
    config: Any = "zero3",
    lr_scheduler: Any = None,
    mesh: Any = None,
) -> Engine:
    """Put `model` and `optimizer` under the placement of `config` and return the engine.

    `optimizer` is an instance built on `model.parameters()`, a list of several that share them, a callable that takes
    parameters and returns either, or None with an `optimizer` section in the config (without any, the engine only
    evaluates). `lr_scheduler`, an instance or a callable that takes the optimizer, is stepped by `engine.step()`.
    `mesh` is a DeviceMesh with any of the axes pp, dp_replicate, dp_shard (or dp), sp (or cp) and tp, or the
    data-parallel axis of one; without it, the config's `mesh`, or all ranks that torchrun started, or this process
    alone. Parameters may be DTensors over its tp axis.

    >>> import torch, shardwise
    >>> model = torch.nn.Linear(8, 1)
    >>> engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), "zero2")
    >>> engine.backward(engine(torch.ones(4, 8)).mean())
    >>> engine.step()
    """
    end_with_launcher()
    _check_model(model)
    session = session_behind(model)
    device = _device(model, session)
    config, tp = Config.load(config), tp_mesh(model)
    if tp is not None:
        _check_ties(model, dist.get_rank() == 0)
    rank_mesh = join_ranks(mesh, device, config.mesh, tp)
    check_stages(model, ModelGroup.of(rank_mesh.axis("pp")))
    if config.runtime.timeout is not None:
        set_timeout(rank_mesh.group, config.runtime.timeout)
    config = config.for_shape(_shape(rank_mesh, config))
    check_supported(config)
    config = _spilling(config)
    _check_device(config, device)
    if device.type == "cuda":
        let_segments_grow()
    comm = ProcessGroupComm(
        rank_mesh.group, device, () if rank_mesh.is_world else rank_mesh.members, config.communication.reduce
    )
    comm.model_group = ModelGroup.of(tp)
    if comm.model_group.size > 1 or rank_mesh.sizes.get("pp", 1) > 1:
        comm.watch_world([rank_mesh.group_of("pp"), tp and tp.get_group()])
    _take_shape(comm, rank_mesh, config)
    if session is not None:
        prepare(model, session, comm)
    chosen = _optimizer(optimizer, config, [param for param in model.parameters() if param.requires_grad])
    objects = UserObjects(model, chosen, optimizer is not None, lr_scheduler is not None)
    config = config.for_objects(objects, warns=comm.everyone.rank == 0)
    scheduler = _scheduler(lr_scheduler, config, chosen)
    check_alike(model, chosen, config, scheduler, comm)
    engine = Engine(model, chosen, config, comm)
    if session is not None:
        finish()
    engine.lr_scheduler = scheduler
    engine.mesh = rank_mesh
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the blocks that the model as it was built lay in
    return engine


def _optimizer(given: Any, config: Config, params: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    if given is not None:
        return resolve_optimizer(given, params)
    return config.optimizer.build(params) if config.optimizer is not None else None


def _scheduler(given: Any, config: Config, optimizer: torch.optim.Optimizer | None) -> Any:
    if optimizer is None:
        return None
    if given is None:
        return config.scheduler.build(optimizer) if config.scheduler is not None else None
    is_instance = hasattr(given, "step") and not isinstance(given, type)
    scheduler = given if is_instance else given(optimizer)
    check_scheduler(scheduler)
    return scheduler


def _device(model: nn.Module, session: DeferredSession | None) -> torch.device:
    """Training happens where the parameters are, or are to be."""
    if session is not None:
        if session.device.type == "cuda":
            torch.cuda.set_device(session.device)
        return session.device
    devices = {param.device for param in model.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        raise ConfigError(f"the parameters are on several devices ({', '.join(map(str, devices))}): move them to one")
    return devices.pop()


def _check_device(config: Config, device: torch.device) -> None:
    if config.runtime.use_cpu and device.type != "cpu":
        raise ConfigError(
            f"runtime.use_cpu is on, but the model is on {device}: call model.cpu() first, or build it under "
            'shardwise.deferred_init(device="cpu")'
        )


def let_segments_grow() -> None:
    """Set torch's allocator to map memory as it is needed, unless the user has configured it.

    Units are a little larger than round numbers, and the allocator's fixed segments leave the rest of each unused: 15
    to 25 % of what a 0.5 B MLP held. test_gpu bounds it.
    """
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        torch.cuda.empty_cache()
        settings = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
        settings("expandable_segments:True")


def join_ranks(mesh: Any, device: torch.device, section: MeshSection, tp: Any = None) -> RankMesh:
    """The axes of the ranks: those of `mesh`, or as `section` says, next to those over which the model is cut. Makes a
    process group if there is none."""
    if mesh is not None and section.model_fields_set:
        raise ConfigError("a mesh was passed, and the config has a mesh section as well: keep one of the two")
    if mesh is None and not dist.is_initialized():
        _start_process_group(device.type == "cuda")
        end_world_at_exit()
    if mesh is None and tp is not None and not section.model_fields_set:
        mesh = mesh_beside(tp)
    found = make_mesh(section, device) if mesh is None else RankMesh.parse(mesh)
    found.check_model(tp)
    return found


def _shape(mesh: RankMesh, config: Config) -> NodeShape:
    """The nodes that operations distinguish. The backend's own reduce-scatter finds them itself, and a group of the
    user's has no groups for its axes: these are flat."""
    shape = mesh.shape(config.communication.ranks_per_node)
    is_cut_by_node = "node" in (own.sharding for _, own in config.placement)
    if mesh.members and (is_cut_by_node or config.communication.reduce == "exchange"):
        return shape
    if is_cut_by_node and not shape.is_flat:
        raise ConfigError(
            "the config shards over a node, and the mesh is one axis of a larger one, for which no groups in a node "
            "can be made: pass the whole mesh"
        )
    return NodeShape(1, shape.world_size)


def _take_shape(comm: ProcessGroupComm, mesh: RankMesh, config: Config) -> None:
    """Route all operations over the nodes. torchrun tells each rank the size of its own node alone, so the shape is
    part of the name of an operation, and the agreement of ranks stops those that have found another."""
    shape = _shape(mesh, config)
    if not shape.is_flat:
        comm.share(torch.zeros(1, device=comm.device), f"the nodes of the ranks ({shape})")
        comm.take_shape(shape)


def _start_process_group(on_cuda: bool) -> None:
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        # One process and no torchrun: a store in memory, no port.
        _warn_of_tasks()
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _warn_of_tasks() -> None:
    task = SlurmTask.read(os.environ)
    if task is not None and task.world_size > 1:
        warnings.warn(
            f"{task.world_size} tasks of Slurm run this script, and each trains by itself: start it with "
            "`srun shardwise run`, which makes ranks of them",
            ConfigWarning,
            stacklevel=4,
        )


def check_supported(config: Config) -> None:
    """What a configuration may say and this version does not do is refused by name, never ignored."""
    row = config.placement
    is_all_here = {row.optim.tier, row.grads.tier} == {"host"} and row.weights.tier != "disk"
    if config.offload.update != "device" and not is_all_here:
        raise ConfigError(
            f"offload.update is {config.offload.update!r}, which updates what rests on the host: optim and grads both "
            "have to rest there, and weights not on disk (presets zero2_offload and zero3_offload)"
        )
    if config.checkpointing.offload and not config.checkpointing.enabled:
        raise ConfigError("checkpointing.offload is for what checkpointing.enabled keeps: turn that on as well")


def _spilling(config: Config) -> Config:
    """Under a budget for the device, what can leave it starts away from it; see `residency`."""
    row = config.placement
    if config.offload.device_memory is None or row.optim.tier != "device":
        return config
    if row.optim.sharding == "replicated":
        raise ConfigError("offload.device_memory needs states that can leave the device: take zero1, zero2 or zero3")
    offload = config.offload
    # Tier by tier, as far as there are budgets: the host's bounds what it takes, the disk takes the rest.
    away: Tier = "disk" if offload.nvme_path is not None and offload.host_memory is not None else "host"
    weights: Tier = away if row.weights.sharding == "sharded" else "device"
    return config.model_copy(update={"placement": offloaded(row, weights=weights, optim=away)})


def _check_model(model: nn.Module) -> None:
    managed = [name for name, param in stored_tensors(model).items() if is_managed(param)]
    if managed:
        raise ConfigError(
            f"parameter {managed[0]!r} is under an engine already: call engine.destroy() on that one first"
        )
    check_deferred(model)
    for name, param in stored_tensors(model).items():
        if param.is_complex():
            raise ConfigError(
                f"parameter {name!r} is {param.dtype}, and weights are fp32, bf16 or fp16: make "
                "torch.view_as_real(value) the parameter, and compute with torch.view_as_complex(parameter)"
            )
    for name, module in model.named_modules():
        _check_module(name, module)


def _check_ties(model: nn.Module, warns: bool) -> None:
    """Weights that were one before the model was cut, and would be trained as two."""
    ends = [getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    weights = [weight for end in ends if (weight := getattr(end, "weight", None)) is not None]
    remedy = "tie them again after the model is cut"
    if (
        getattr(getattr(model, "config", None), "tie_word_embeddings", False)
        and len({id(weight) for weight in weights}) > 1
        and any(weight.requires_grad for weight in weights)
    ):
        raise ConfigError(
            "config.tie_word_embeddings is on, and the embedding and the head are two parameters since the model was "
            f"cut (apply_tensor_parallelism and parallelize_module make one of each name): {remedy}, "
            "model.tie_weights(), or set it to False"
        )
    if warns and (names := broken_tie(model)) is not None:
        warnings.warn(
            f"{names[0]!r} and {names[1]!r} have the same values and are two parameters, as parallelize_module makes "
            f"them of a tied one, so each would be trained by its own gradients: {remedy}, such as model.head.weight = "
            "model.embed.weight. If they are meant to be two, this is fine",
            ConfigWarning,
            stacklevel=3,
        )


def _check_module(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
        raise ConfigError(
            f"{name!r} is compiled by torch.jit, and such modules do not call the engine's hooks: give the model the "
            "module that it was made from; torch.compile works on blocks"
        )
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return
    if module.sparse:
        raise ConfigError(
            f"{name!r} makes sparse gradients, which cannot lie in a flat buffer: build it with sparse=False"
        )
    if module.max_norm is not None:
        raise ConfigError(
            f"{name!r} has max_norm, so each forward writes into its weight, other rows on each rank: build it without "
            "max_norm, and normalise the rows after a step, inside `with shardwise.gathered(weight, write=True):`"
        )
