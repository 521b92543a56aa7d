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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.comm.model_group import ModelGroup
from shardwise.config import Config
from shardwise.config.auto import UserObjects
from shardwise.config.shape import NodeShape, shape_of
from shardwise.dry_run.comm import DryComm, DryModelGroup, PipelineRank, model_axes
from shardwise.dry_run.kernels import CPU, CUDA, Kernels, kernels_for, replacing
from shardwise.dry_run.observer import DryObserver, LogitsLabelling
from shardwise.engine.engine import Engine
from shardwise.errors import ConfigError
from shardwise.models.built_in import Batch, Build, MakeBatch, ModelAndData
from shardwise.models.decoder import CausalDecoder, adapt
from shardwise.models.loading import arguments, loss_of
from shardwise.models.tensor_parallel import tensor_parallel
from shardwise.models.workload import ModelSpec, Workload
from shardwise.observe.labels import by_kind
from shardwise.partition.policy import DTYPES
from shardwise.partition.stored import stored_tensors
from shardwise.tensors import map_tensors
from shardwise.timing.tape import Issued, Tape

if TYPE_CHECKING:
    from shardwise.dry_run.pipeline import DryPipeline

CATEGORIES = ("weights", "grads", "master", "moments", "in flight", "activations", "logits", "overhead")
_WORKSPACE = -2
MOST_MICRO_BATCHES = 3
"""How many micro-batches of a step the dry run of a plan runs."""


class Untraceable(Exception):
    """The model cannot run without values, or its states would be on a disk; the message says where or which."""


@dataclass(frozen=True)
class Scenario:
    """What a dry run runs: `build` returns the model and its data, as for `shardwise compare`.

    Each of the data-parallel `ranks` is `tp` ranks that hold one copy of the model, or of a stage, together.
    """

    build: Build
    config: Config
    ranks: int | NodeShape
    kernels: Kernels = CPU
    tp: int = 1
    pipeline: PipelineRank | None = None  # which rank of a pipeline

    @property
    def shape(self) -> NodeShape:
        return shape_of(self.ranks)

    @property
    def rank(self) -> int:
        """The rank that represents all: ranks from the third on do not add in place, and so hold the most."""
        return min(2, self.shape.world_size - 1)

    def resolved(self, model: nn.Module) -> Scenario:
        """The same with what the configuration leaves to the ranks, and the precision that it leaves to the model."""
        config = self.config.for_shape(self.shape).for_objects(UserObjects(model), warns=False)
        return replace(self, config=config)


@dataclass(frozen=True)
class Estimate:
    """Device bytes of a rank at its peak by category, and what rests on other tiers (host, disk)."""

    categories: dict[str, int]
    tiers: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.categories.values())


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
    if count % (nodes * tp):
        raise ConfigError(
            f"{count} ranks cannot be spread evenly over {nodes} nodes with tp {tp}: give a multiple of {nodes * tp}"
        )
    scenario = Scenario(build, Config.load(config), NodeShape(nodes, count // nodes // tp), kernels_for(device), tp)
    with torch.random.fork_rng(devices=[]):
        return dry_run(scenario)


def foresee_workload(model: ModelSpec, workload: Workload, preset: str, ranks: int | NodeShape) -> Foreseen:
    """One preset of a plan on CUDA. Raises `Untraceable` if a dry run is not possible."""
    # Further micro-batches hold what the second and third do.
    short = replace(workload, accumulation=min(workload.accumulation, MOST_MICRO_BATCHES))
    return dry_run(Scenario(build_of(model, workload), short.config(preset), ranks, CUDA, workload.tp))


def build_of(model: ModelSpec, workload: Workload) -> Build:
    """What builds a model: its own function, or one for the decoder of its dimensions."""
    return model.build or partial(_build_decoder, model, workload)


def _build_decoder(model: ModelSpec, workload: Workload) -> ModelAndData:
    """With adapters if the workload has them."""
    assert model.dimensions is not None
    built = CausalDecoder(model.dimensions)
    if workload.lora is not None:
        adapt(built, *workload.lora)

    return built, blank_text(workload.micro_batch, workload.sequence)


def blank_text(samples: int, length: int) -> MakeBatch:
    """Micro-batches of a decoder: texts of `length` tokens, and as targets what follows each."""

    def make_batch(rank: int, step: int) -> Batch:
        texts = torch.zeros(samples, length + 1, dtype=torch.long)
        return {"tokens": texts[:, :-1], "targets": texts[:, 1:]}

    return make_batch


def can_dry_run(config: Config) -> bool:
    """Whether all states are in memory: a dry run has no values to write to a file."""
    return all(kind.tier != "disk" for _, kind in config.placement)


def dry_run(scenario: Scenario, tape: Tape | None = None) -> Foreseen:
    """Run a few steps of one rank. Raises `Untraceable` for a model that needs values, and for states on a disk."""
    if not can_dry_run(scenario.config):
        raise Untraceable("states rest on the disk, which a dry run does not touch")
    labelling, kernels, tape = LogitsLabelling(), scenario.kernels, tape or Tape()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    observer = DryObserver(kernels, labelling.label_new, mode, tape)
    with warnings.catch_warnings(), _traced(), model_axes(scenario.tp, scenario.pipeline) as (axis, pp), mode:
        warnings.simplefilter("ignore")
        with observer, replacing(kernels.replaced):
            model, make_batch = scenario.build()
            _check_fake(model)
            if axis is not None:
                tensor_parallel(model, axis)
                observer.counts_tp = True
            scenario = scenario.resolved(model)
            batches = _batches(make_batch, mode, scenario.rank)
            subject = _subject(model, scenario, observer, batches, pp)
            for engine in subject.engines:
                labelling.attach_model(observer, engine)
            observer.allocator.allocate(_WORKSPACE, kernels.overhead_bytes)
            observer.allocator.empty_cache()  # as `initialize` does
            # Later steps are all alike: the first creates the states, and with offload the pool of device buffers
            # reaches its full size in the second.
            is_offloaded = scenario.config.placement.optim.tier != "device"
            for is_last in (False, True) if is_offloaded else (True,):
                tape.is_recording = is_last
                subject.step(batches)
            startup_bytes = observer.peak_bytes
            observer.reset_peak()
            observer.tp_bytes = 0
            before = _traffic(subject.engines)
            tape.begin_step()
            subject.step(batches)
            tape.end()
        return _foreseen(observer, subject, before, kernels, max(startup_bytes, observer.peak_bytes))


class DryEngine:
    """One engine, in the training loop that `shardwise compare` measures."""

    sent_bytes = 0  # to other stages of a pipeline

    def __init__(self, engine: Engine, observer: DryObserver) -> None:
        self.engines = [engine]
        self._observer = observer

    def step(self, batches: Iterator[dict[str, Any]]) -> None:
        """A step, on the next micro-batches."""
        [engine], total = self.engines, torch.zeros(())
        count = engine.config.batch.accumulation
        for _ in range(count):
            loss = loss_of(engine(**next(batches)))
            engine.backward(loss)
            total += loss.detach() / count
            del loss
            self._observer.is_updating = True
            engine.step()
            self._observer.is_updating = False


def _subject(
    model: nn.Module, scenario: Scenario, observer: DryObserver, batches: Iterator[dict[str, Any]], pp: ModelGroup
) -> DryEngine | DryPipeline:
    """What a dry run trains: an engine, or those of a rank of a pipeline."""
    make_engine = partial(_engine, scenario=scenario, observer=observer)
    if scenario.pipeline is None:
        return DryEngine(make_engine(model), observer)
    from shardwise.dry_run.pipeline import DryPipeline  # torch's pipelining takes seconds to import

    example = next(batches), DTYPES[scenario.config.precision.weights_dtype]
    return DryPipeline(model, scenario.pipeline, pp, make_engine, example)


def _traffic(engines: Sequence[Engine]) -> list[Counter[str]]:
    """The bytes that were sent, by kind and by axis, and moved so far."""
    reports = [engine.report() for engine in engines]
    each = [(report.sent_bytes, report.axis_bytes, report.moved_bytes) for report in reports]
    return [sum(map(Counter, counts), Counter[str]()) for counts in zip(*each, strict=True)]


def _batches(make_batch: MakeBatch, mode: FakeTensorMode, rank: int) -> Iterator[dict[str, Any]]:
    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    return (map_tensors(arguments(make_batch, rank, number), fake) for number in itertools.count())


def _engine(model: nn.Module, scenario: Scenario, observer: DryObserver) -> Engine:
    config = scenario.config
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = config.optimizer.build(params) if config.optimizer else torch.optim.AdamW(params, lr=1e-3)
    comm = DryComm(scenario.rank, scenario.shape, scenario.kernels.name, observer.tape)
    comm.model_group = DryModelGroup(size=scenario.tp)
    return Engine(model, optimizer, config, comm, observer.host)


def _foreseen(
    observer: DryObserver,
    subject: DryEngine | DryPipeline,
    before: list[Counter[str]],
    kernels: Kernels,
    startup_bytes: int,
) -> Foreseen:
    split = by_kind(observer.breakdown_at_peak)
    split["in flight"] += split.pop("other")
    split["overhead"] = kernels.overhead_bytes
    engines = subject.engines
    params = [param for engine in engines for param in engine.module.parameters()]
    tier_bytes = sum((Counter(engine.report().tier_peak_bytes) for engine in engines), Counter[str]())
    sent, by_axis, moved = (dict(now - then) for now, then in zip(_traffic(engines), before, strict=True))
    axes = {"tp": observer.tp_bytes, "pp": subject.sent_bytes}
    return Foreseen(
        categories={name: split.get(name, 0) for name in CATEGORIES},
        startup_bytes=startup_bytes + kernels.overhead_bytes,
        reserved_bytes=observer.allocator.peak_bytes,
        tiers={tier: size for tier in ("host", "disk") if (size := tier_bytes.get(tier))},
        sent_bytes=sent | {k: v for k, v in axes.items() if v},
        axis_bytes=by_axis,
        moved_bytes=moved,
        parameters=sum(param.numel() for param in params),
        trainable=sum(param.numel() for param in params if param.requires_grad),
        issued=observer.tape.entries,
        last_step=observer.tape.start,
    )


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
