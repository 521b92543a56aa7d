"""The dry run: the engine's own code on fake tensors, as one rank of any number, without the other ranks.

Fake tensors have shapes, dtypes and storages of a size, but no values: a model of any size takes no memory and no time
to compute. The observer that measures real runs from outside watches the fake storages, so the prediction contains what
a measurement would: every buffer of the engine, every activation that autograd keeps, every temporary.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.comm import DONE, Comm, Handle, Hop
from shardwise.comm.interface import EVERYWHERE, REDUCE
from shardwise.comm.model_group import ModelGroup
from shardwise.config import Config
from shardwise.config.auto import UserObjects
from shardwise.config.shape import Axis, NodeShape, shape_of
from shardwise.engine.engine import Engine
from shardwise.errors import ConfigError
from shardwise.models.built_in import Batch, Build, MakeBatch, ModelAndData
from shardwise.models.decoder import CausalDecoder, adapt
from shardwise.models.loading import arguments, loss_of
from shardwise.models.tensor_parallel import tensor_parallel
from shardwise.observe import StorageObserver
from shardwise.observe.labels import Labelling, by_kind
from shardwise.partition.policy import DTYPES
from shardwise.partition.stored import stored_tensors
from shardwise.planning.allocator import CachingAllocator
from shardwise.planning.dry_streams import DryHostMemory
from shardwise.planning.estimate import CATEGORIES, Estimate
from shardwise.planning.fakes import Fakes
from shardwise.planning.kernels import CPU, Kernels, cuda, replacing
from shardwise.planning.pp_axis import DryPipeline, PipelineRank, model_axes
from shardwise.planning.tp_axis import DryModelGroup, tp_sent_bytes
from shardwise.planning.workload import ModelSpec, Workload
from shardwise.tensors import map_tensors
from shardwise.timing.tape import Issued, Mark, Tape

_SCRATCH, _WORKSPACE = -1, -2
_MOST_ROWS = 8
"""Of the rows that a reduction adds up, so many are added up in a dry run."""
MOST_MICRO_BATCHES = 3
"""How many micro-batches of a step the dry run of a plan runs."""


class Untraceable(Exception):
    """The model cannot run without values, or its states would be on a disk; the message says where or which."""


@dataclass(frozen=True)
class Scenario:
    """What a dry run runs: `build` returns the model and its data, as for `shardwise compare`.

    Each of `world_size` data-parallel ranks is `tp` ranks that hold one copy of the model, or of a stage, together.
    """

    build: Build
    config: Config
    world_size: int
    kernels: Kernels = CPU
    shape: NodeShape | None = None  # of these ranks; None: one node
    tp: int = 1
    pipeline: PipelineRank | None = None  # which rank of a pipeline

    @property
    def rank(self) -> int:
        """The rank that represents all: ranks from the third on do not add in place, and so hold the most."""
        return min(2, self.world_size - 1)

    def with_dtype_of(self, model: nn.Module) -> Scenario:
        """The same with the precision that the configuration leaves to the model."""
        return replace(self, config=self.config.for_objects(UserObjects(model), warns=False))


@dataclass(frozen=True)
class Foreseen(Estimate):
    """Memory and traffic of one rank; `peak_bytes` is the peak on the device in a step after the first.

    startup_bytes  the peak while the whole model is built on the device, sharded, and takes its first steps
    reserved_bytes what the allocator reserves on a CUDA device for the peak, with the blocks that it cannot reuse
    axis_bytes     bytes sent in a step within the node (inner) and out of it (outer), without control messages
    moved_bytes    bytes of a step from and to `tiers`
    places         the peaks of all ranks of the pipeline that this is the fullest of, in their order
    issued         what the last two steps issue, in their order; the last begins at `last_step`
    """

    startup_bytes: int
    reserved_bytes: int
    sent_bytes: dict[str, int]
    axis_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    parameters: int
    trainable: int
    places: tuple[int, ...] = ()
    issued: list[Issued] = field(default_factory=list, repr=False, compare=False)
    last_step: int = 0


def foresee(
    build: Build,
    config: Any = "zero3",
    world_size: int | None = None,
    device: str | None = None,
    nodes: int = 1,
    tp: int = 1,
) -> Foreseen:
    """What a rank will hold and send in a step, by a dry run: no memory, no weights, any number of ranks.

    `build` returns the model and `make_batch(rank, step)`, which returns a dictionary of the model's arguments; with
    them the model returns the loss. `config` is what `shardwise.initialize` takes, with the optimizer in it (AdamW by
    default). The number of ranks and the device are by default those of this process. The ranks are spread evenly over
    `nodes`. With `tp`, each copy of the model is held by that many of the ranks (see `tensor_parallel`, which must have
    a plan for it). A model that needs values to decide what to compute raises `shardwise.planning.Untraceable`.

    >>> import torch, shardwise
    >>> class Model(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x).square().mean()
    >>> def build():
    ...     return Model(64, 64), lambda rank, step: {"x": torch.ones(8, 64)}
    >>> peaks = [shardwise.foresee(build, preset, 4, "cpu").peak_bytes for preset in ("zero0", "zero3")]
    >>> peaks[0] > peaks[1]
    True
    """
    count = world_size or (dist.get_world_size() if dist.is_initialized() else 1)
    is_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if count % (nodes * tp):
        raise ConfigError(
            f"{count} ranks cannot be spread evenly over {nodes} nodes with tp {tp}: give a multiple of {nodes * tp}"
        )
    shape = NodeShape(nodes, count // nodes // tp)
    loaded = Config.load(config).for_shape(shape)
    with torch.random.fork_rng(devices=[]):
        return dry_run(Scenario(build, loaded, count // tp, cuda() if is_cuda else CPU, shape, tp))


def foresee_workload(
    model: ModelSpec, workload: Workload, preset: str, world_size: int, nodes: int = 1
) -> Foreseen | str:
    """One preset of a plan on CUDA, or a text that says why a dry run is not possible."""
    # Further micro-batches hold what the second and third do.
    short = replace(workload, accumulation=min(workload.accumulation, MOST_MICRO_BATCHES))
    shape = NodeShape(nodes, world_size // nodes)
    config = short.config(preset).for_shape(shape)
    build = model.build or partial(build_decoder, model, workload)
    try:
        return dry_run(Scenario(build, config, world_size, cuda(), shape, workload.tp))
    except Untraceable as failure:
        return str(failure)


def build_decoder(model: ModelSpec, workload: Workload) -> ModelAndData:
    """The decoder of a model's dimensions, with adapters if the workload has them."""
    assert model.dimensions is not None
    built = CausalDecoder(model.dimensions)
    if workload.lora is not None:
        adapt(built, *workload.lora)

    def make_batch(rank: int, step: int) -> Batch:
        samples = torch.zeros(workload.micro_batch, workload.sequence + 1, dtype=torch.long)
        return {"tokens": samples[:, :-1], "targets": samples[:, 1:]}

    return built, make_batch


def can_dry_run(config: Config) -> bool:
    """Whether all states are in memory: a dry run has no values to write to a file."""
    return all(kind.tier != "disk" for _, kind in config.placement)


def dry_run(scenario: Scenario, tape: Tape | None = None) -> Foreseen:
    """Run a few steps of one rank. Raises `Untraceable` for a model that needs values, and for states on a disk."""
    if not can_dry_run(scenario.config):
        raise Untraceable("states rest on the disk, which a dry run does not touch")
    labelling, kernels, tape = _LogitsLabelling(), scenario.kernels, tape or Tape()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    observer = _DryObserver(kernels, labelling.label_new, mode, tape)
    with warnings.catch_warnings(), _traced(), model_axes(scenario.tp, scenario.pipeline) as (axis, pp), mode:
        warnings.simplefilter("ignore")
        with observer, replacing(kernels.replaced):
            model, make_batch = scenario.build()
            _check_fake(model)
            if axis is not None:
                tensor_parallel(model, axis)
                observer.counts_tp = True
            scenario = scenario.with_dtype_of(model)
            batches = _batches(make_batch, mode, scenario.rank)
            subject = _Subject(model, scenario, observer, batches, pp)
            for engine in subject.engines:
                labelling.attach_model(observer, engine)
            observer.allocator.allocate(_WORKSPACE, kernels.overhead_bytes)
            observer.allocator.empty_cache()  # as `initialize` does
            # Later steps are all alike: the first creates the states, and with offload the pool of device buffers
            # reaches its full size in the second.
            is_offloaded = scenario.config.placement.optim.tier != "device"
            for is_last in (False, True) if is_offloaded else (True,):
                tape.is_recording = is_last
                subject.step()
            startup_bytes = observer.peak_bytes
            observer.reset_peak()
            observer.tp_bytes = 0
            for engine in subject.engines:
                engine.comm.sent_bytes.clear()
                engine.comm.axis_bytes.clear()
                engine._offload.streams.moved_bytes.clear()
            tape.begin_step()
            subject.step()
            tape.end()
        return _foreseen(observer, subject, kernels, max(startup_bytes, observer.peak_bytes))


class _Subject:
    """What a dry run trains: an engine, or those of a rank of a pipeline."""

    def __init__(
        self,
        model: nn.Module,
        scenario: Scenario,
        observer: _DryObserver,
        batches: Iterator[dict[str, Any]],
        pp: ModelGroup,
    ) -> None:
        self._observer = observer
        self._batches = batches
        self._pipeline: DryPipeline | None = None
        if scenario.pipeline is None:
            self._count = scenario.config.batch.accumulation
            self.engines = [_engine(model, scenario, observer)]
            return
        self._count = scenario.pipeline.micro_batches
        computed = DTYPES[scenario.config.precision.weights_dtype]

        def make_engine(part: nn.Module) -> Engine:
            return _engine(part, scenario, observer)

        self._pipeline = DryPipeline(model, scenario.pipeline, pp, make_engine, (next(batches), computed))
        self.engines = self._pipeline.engines

    @property
    def pp_bytes(self) -> int:
        """What is sent to the stages before and after in a step."""
        return self._pipeline.sent_bytes if self._pipeline is not None else 0

    def step(self) -> None:
        if self._pipeline is None:
            _step(self.engines[0], self._batches, self._observer, self._count)
        else:
            self._pipeline.step([next(self._batches) for _ in range(self._count)])


class DryComm(Comm):
    """One rank of `world_size`, alone: it counts what it would send, and leaves as it is what it would receive."""

    def __init__(self, rank: int, ranks: int | NodeShape, kernels: str, tape: Tape | None = None) -> None:
        self.device = torch.device("cpu")
        self.kernels = kernels
        self.rank = rank
        self.shape = shape_of(ranks)
        self.world_size = self.shape.world_size
        self.sent_bytes = Counter()
        self.axis_bytes = Counter()
        self.micro_step = 0
        self._sends_directly = kernels == "cpu"
        self._tape = tape or Tape()
        self._rows_each = 1.0

    def gather(self, full: torch.Tensor, kind: str, unit: str = "", axes: Sequence[Axis] = EVERYWHERE) -> Handle:
        size_bytes, sizes = full.nbytes, list[tuple[Hop, int]]()
        for hop in self.hops(axes):
            self._count(kind, size_bytes, hop)
            sizes.insert(0, (hop, size_bytes))
            size_bytes //= hop.size
        mark: Mark | None = None
        for hop, each in sizes if full.numel() else ():
            mark = self._send("gather", "gather", each, hop, mark)
        return mark or DONE

    def _send(self, channel: str, what: str, size_bytes: int, hop: Hop, after: Mark | None = None) -> Mark | None:
        return self._tape.send(channel, what, size_bytes, hop.size, hop.axis, after)

    @contextlib.contextmanager
    def following(self, handle: Handle, channel: str = REDUCE) -> Iterator[None]:
        if self._sends_directly:
            handle.wait()
            yield
            return
        issued = self._tape.mark()
        with self._tape.on(channel):
            handle.wait()
            issued.wait()
            yield

    def rows_received(self, hop: Hop) -> int:
        return hop.size - self._sends_directly

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, kind: str, unit: str, hop: Hop
    ) -> tuple[Handle, list[torch.Tensor]]:
        """Two rows are those of all ranks; this rank's own row is among them where it decides how sums are made.

        `test_the_peak_is_the_measured_one` with three ranks fails otherwise.
        """
        self._count(kind, sent.nbytes, hop)
        if self._sends_directly:
            rows = [*[received[0]] * min(hop.place, 2), sent[hop.place], received[-1]]
        else:
            rows = [received[row % 2] for row in range(min(hop.size, _MOST_ROWS))]
        self._rows_each = hop.size / len(rows)
        return self._send("reduce", "reduce", sent.nbytes, hop) or DONE, rows

    def blocks(self, tensor: torch.Tensor, block_numel: int) -> Sequence[torch.Tensor]:
        """One block represents all: they use the same memory, one after the other."""
        if not tensor.numel():
            return ()
        return _OneBlock(tensor[:block_numel], -(-tensor.numel() // block_numel) * self._rows_each, self._tape)

    def share(self, values: torch.Tensor, name: str = "", channel: str = "") -> torch.Tensor:
        if self.world_size == 1:
            return values.unsqueeze(0)
        axis: Axis = "outer" if self.shape.nodes > 1 else "inner"
        everyone = Hop(axis, self.world_size, self.rank)
        (self._send(channel or REDUCE, "share", values.nbytes * self.world_size, everyone) or DONE).wait()
        return values.new_empty(self.world_size, *values.shape)

    def share_object(self, value: Any, name: str = "") -> list[Any]:
        return [value] * self.world_size

    def broadcast(self, tensor: torch.Tensor, source: int = 0, unit: str = "") -> None:
        pass

    def note(self, what: str) -> None:
        pass

    @property
    def is_checked(self) -> bool:
        return False

    def begin_close(self) -> None:
        pass

    def close(self) -> None:
        pass


class _OneBlock(list[torch.Tensor]):
    """A block that stands for `times`; the tape counts what is done with it so often."""

    def __init__(self, block: torch.Tensor, times: float, tape: Tape) -> None:
        super().__init__([block])
        self._times, self._tape = times, tape

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._tape.times = self._times
        yield from super().__iter__()
        self._tape.times = 1.0


class _DryObserver(StorageObserver):
    """Sees what the allocator of the foreseen device would see."""

    def __init__(
        self, kernels: Kernels, label: Callable[[torch.Tensor], str], mode: FakeTensorMode, tape: Tape
    ) -> None:
        self.tape, self._is_new = tape, False
        self.host = DryHostMemory(tape if kernels.name != "cpu" else None)
        # If the foreseen device is the CPU, host memory is part of it, as in a measurement.
        is_away = None if kernels.name == "cpu" else lambda: self.host.is_allocating
        super().__init__("cpu", (), label, kernels.granularity_bytes, is_away)
        self.allocator = CachingAllocator()
        self._scratch = kernels.scratch
        self._fakes = Fakes(mode, self.device)
        self.is_updating = False
        self.counts_tp, self.tp_bytes = False, 0

    def add_scratch(self, size_bytes: int) -> None:
        self.allocator.allocate(_SCRATCH, size_bytes)
        self.allocator.free(_SCRATCH)
        super().add_scratch(size_bytes)

    def reset_peak(self) -> None:
        super().reset_peak()
        self.allocator.reset_peak()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping takes longer than the frequent answers below

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return self.device  # fake tensors ask for every operator, and the answer is always the same
        if func is torch.ops.aten._local_scalar_dense.default and self.is_updating:
            return 0  # the engine asks whether gradients overflowed: they did not
        if self.counts_tp and func.namespace == "_c10d_functional":
            self._note_tp(tp_sent_bytes(func, args))
        if func.is_view and args[0].__class__ is FakeTensor:
            return self.run(func, args, kwargs or {})  # half of all operators; their storages are known
        result = super().__torch_dispatch__(func, types, args, kwargs)
        scratch = self._scratch.get(func)
        if scratch is not None:
            self.add_scratch(scratch(*args, **(kwargs or {})))
        if func.namespace == "aten":
            self.tape.add(func, args, kwargs or {}, result)
        return result

    def _add(self, storage: torch.UntypedStorage, label: str) -> Any:
        self._is_new = True
        try:
            return super()._add(storage, label)
        finally:
            self._is_new = False

    def _resized(self, entry: Any, nbytes: int) -> None:
        if not self._is_new:  # a buffer of the engine's; results of operators count with their kernels
            self.tape.allocate(nbytes - entry.nbytes)
        if entry.nbytes != nbytes and entry.nbytes:
            self.allocator.free(id(entry))
        if entry.nbytes != nbytes and nbytes:
            self.allocator.allocate(id(entry), nbytes)
        super()._resized(entry, nbytes)

    def _note_tp(self, sent_bytes: int) -> None:
        self.tp_bytes += sent_bytes
        if sent_bytes:  # two ranks send the half of what they have
            (self.tape.send("tp", "tp", 2 * sent_bytes, 2, "inner") or DONE).wait()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._fakes.run(func, args, kwargs)

    def _lies_here(self, tensor: torch.Tensor) -> bool:
        return True  # all tensors are fake ones on the CPU; to ask each for its device would take long


class _LogitsLabelling(Labelling):
    """Labels tensors as wide as the vocabulary as logits instead of activations."""

    def __init__(self) -> None:
        super().__init__(names=False)
        self._vocabulary: int | None = None

    def attach_model(self, observer: StorageObserver, engine: Engine) -> None:
        """Label what the engine's model and optimizer hold from here on."""
        model, config = engine.module, engine.config
        self._vocabulary = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=None)
        self.attach(observer, model, engine.optimizer, master=config.precision.weights_dtype != "fp32")
        for unit in engine.units:
            if (part := unit.weights.resting_part) is not None:
                self.label(observer, "weights", unit.name, part)
        if config.placement.grads.tier == "device":  # a hook would bring others back to the device
            engine.register_grad_hook(lambda name, shard: self.label(observer, "grads", name, shard))

    def label_new(self, tensor: torch.Tensor) -> str:
        kind = super().label_new(tensor)
        is_wide = self._vocabulary is not None and tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary
        return "logits" if is_wide and kind in ("activations", "in flight") else kind


def _step(engine: Engine, batches: Iterator[dict[str, Any]], observer: _DryObserver, count: int) -> None:
    """A step of `count` micro-batches, in the training loop that `shardwise compare` measures."""
    total = torch.zeros(())
    for _ in range(count):
        loss = loss_of(engine(**next(batches)))
        engine.backward(loss)
        total += loss.detach() / count
        del loss
        observer.is_updating = True
        engine.step()
        observer.is_updating = False


def _batches(make_batch: MakeBatch, mode: FakeTensorMode, rank: int) -> Iterator[dict[str, Any]]:
    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    return (map_tensors(arguments(make_batch, rank, number), fake) for number in itertools.count())


def _engine(model: nn.Module, scenario: Scenario, observer: _DryObserver) -> Engine:
    shape = scenario.shape or NodeShape(1, scenario.world_size)
    config = scenario.config.for_shape(shape)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = config.optimizer.build(params) if config.optimizer else torch.optim.AdamW(params, lr=1e-3)
    comm = DryComm(scenario.rank, shape, scenario.kernels.name, observer.tape)
    comm.model_group = DryModelGroup(size=scenario.tp)
    return Engine(model, optimizer, config, comm, observer.host)


def _foreseen(observer: _DryObserver, subject: _Subject, kernels: Kernels, startup_bytes: int) -> Foreseen:
    split = by_kind(observer.breakdown_at_peak)
    split["in flight"] += split.pop("other")
    split["overhead"] = kernels.overhead_bytes
    engines = subject.engines
    params = [param for engine in engines for param in engine.module.parameters()]
    tier_bytes = sum((Counter(engine.report().tier_peak_bytes) for engine in engines), Counter[str]())
    axes = {"tp": observer.tp_bytes, "pp": subject.pp_bytes}
    return Foreseen(
        categories={name: split.get(name, 0) for name in CATEGORIES},
        startup_bytes=startup_bytes + kernels.overhead_bytes,
        reserved_bytes=observer.allocator.peak_bytes,
        tiers={tier: size for tier in ("host", "disk") if (size := tier_bytes.get(tier))},
        sent_bytes=_added([engine.comm.sent_bytes for engine in engines]) | {k: v for k, v in axes.items() if v},
        axis_bytes=_added([engine.comm.axis_bytes for engine in engines]),
        moved_bytes=_added([engine._offload.streams.moved_bytes for engine in engines]),
        parameters=sum(param.numel() for param in params),
        trainable=sum(param.numel() for param in params if param.requires_grad),
        issued=observer.tape.entries,
        last_step=observer.tape.start,
    )


def _added(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))


def _check_fake(model: nn.Module) -> None:
    stored = stored_tensors(model).items()
    real = [name for name, tensor in stored if not isinstance(tensor, FakeTensor) and not tensor.is_meta]
    if real:
        raise Untraceable(f"its parameter {real[0]!r} has values of its own (loaded from a file?)")


@contextlib.contextmanager
def _traced() -> Iterator[None]:
    """Turn every failure for lack of values into one `Untraceable` of one line."""
    try:
        yield
    except (Untraceable, ConfigError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise Untraceable(f"{type(error).__name__}: {text[:200]}") from error
