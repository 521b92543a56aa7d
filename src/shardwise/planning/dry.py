"""The dry run: the engine's own code on fake tensors, as one rank of any number, with nobody on the other side.

Fake tensors have shapes, dtypes and storages of a size, and no values: a model of any size takes no memory and no time
to compute. The observer that measures real runs from outside watches the fake storages come and go, so the prediction
sees what a measurement would: every buffer of the engine, every activation that autograd keeps, every temporary.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.comm.comm import DONE, Comm, Handle
from shardwise.config import Config
from shardwise.engine.engine import Engine
from shardwise.models.built_in import MakeBatch
from shardwise.observe import StorageObserver
from shardwise.observe.labels import KINDS, Labelling, by_kind
from shardwise.offload.pinned import is_making
from shardwise.planning.fakes import Fakes
from shardwise.planning.kernels import CPU, Kernels, replacing
from shardwise.tensors import map_tensors

LOGITS = "logits"
CATEGORIES = (*KINDS[:5], LOGITS, "in flight", "overhead")
"""What a peak is made of. `logits` are activations, and their gradients, as wide as the vocabulary; `overhead` is what
the device's libraries keep."""


class Untraceable(Exception):
    """The model cannot be run without values: the message says where."""


@dataclass(frozen=True)
class Scenario:
    """What is foreseen: `build` gives the model and its data, as for `shardwise compare`."""

    build: Callable[[], tuple[nn.Module, MakeBatch]]
    config: Config
    world_size: int
    kernels: Kernels = CPU

    @property
    def rank(self) -> int:
        """The rank that stands for all: from the third on, sums are not made in place."""
        return min(2, self.world_size - 1)


@dataclass(frozen=True)
class Foreseen:
    """One rank's memory and traffic. `peak_bytes` is that of a step after the first; `startup_bytes` the most while
    the model is built whole on the device, cut up, and takes its first step. `tiers`: what it holds elsewhere, `host`
    and `disk`; `moved_bytes`: what a step brings from there and takes back."""

    peak_bytes: int
    categories: dict[str, int]
    startup_bytes: int
    tiers: dict[str, int]
    sent_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    parameters: int
    trainable: int


class DryComm(Comm):
    """One rank of `world_size`, alone: what would be sent is counted, what would arrive is left as it is."""

    def __init__(self, rank: int, world_size: int, kernels: str) -> None:
        self.device = torch.device("cpu")
        self.kernels = kernels
        self.rank = rank
        self.world_size = world_size
        self.sent_bytes = Counter()
        self.micro_step = 0
        self._own = []
        self._agreement = None  # there is nobody to agree with
        self._sends_directly = kernels == "cpu"

    def gather(self, full: torch.Tensor, kind: str, unit: str = "") -> Handle:
        if self.world_size > 1 and full.numel():
            self._count(kind, full.nbytes)
        return DONE

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, kind: str, unit: str = ""
    ) -> tuple[Handle, list[torch.Tensor]]:
        """Two rows stand for those of all ranks; our own is among them where it decides how sums are made."""
        self._count(kind, sent.nbytes)
        if not self._sends_directly:
            return DONE, list(received[:2])
        return DONE, [*[received[0]] * min(self.rank, 2), sent[self.rank], received[-1]]

    def blocks(self, tensor: torch.Tensor, block_numel: int) -> Sequence[torch.Tensor]:
        """One block stands for all: they take the same memory, one after the other."""
        return [tensor[:block_numel]] if tensor.numel() else ()

    def share(self, values: torch.Tensor, name: str = "", stream: str = "") -> torch.Tensor:
        if self.world_size == 1:
            return values.unsqueeze(0)
        return values.new_empty(self.world_size, *values.shape)

    def share_object(self, value: Any, name: str = "") -> list[Any]:
        return [value] * self.world_size

    def broadcast(self, tensor: torch.Tensor, source: int = 0, unit: str = "") -> None:
        pass

    def close(self) -> None:
        pass


class _Observer(StorageObserver):
    """Sees what the allocator of the foreseen device would."""

    def __init__(self, kernels: Kernels, label: Callable[[torch.Tensor], str]) -> None:
        # Where the device foreseen is the CPU, host memory is part of it, as in a measurement.
        is_away = None if kernels.name == "cpu" else is_making
        super().__init__("cpu", (), label, kernels.granularity_bytes, is_away)
        self._scratch = kernels.scratch
        self.fakes: Fakes | None = None
        self.is_engine_at_work = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to be skipped takes longer than the frequent answers below

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return self.device  # fake tensors ask for each operator; there is one answer
        if func is torch.ops.aten._local_scalar_dense.default and self.is_engine_at_work:
            return 0  # the engine asks whether gradients overflowed: they did not
        if func.is_view and args[0].__class__ is FakeTensor:
            return self.run(func, args, kwargs or {})  # half of all operators; their storages are known
        result = super().__torch_dispatch__(func, types, args, kwargs)
        scratch = self._scratch.get(func)
        if scratch is not None:
            self.passing(scratch(*args, **(kwargs or {})))
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        assert self.fakes is not None
        return self.fakes.run(func, args, kwargs)

    def _lies_here(self, tensor: torch.Tensor) -> bool:
        return True  # all are fake tensors on the CPU, which would ask for their device at great cost


class _Labelling(Labelling):
    """Tells tensors as wide as the vocabulary from other activations."""

    def __init__(self) -> None:
        super().__init__(names=False)
        self.vocabulary: int | None = None

    def first_sight(self, tensor: torch.Tensor) -> str:
        kind = super().first_sight(tensor)
        is_wide = self.vocabulary is not None and tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary
        return LOGITS if is_wide and kind in ("activations", "in flight") else kind


def dry_run(scenario: Scenario) -> Foreseen:
    """A few steps of one rank. A model that needs values to decide what to do raises `Untraceable`, as disks do."""
    if not can_be_run(scenario.config):
        raise Untraceable("states rest on the disk, which a dry run does not touch")
    labelling, kernels = _Labelling(), scenario.kernels
    observer = _Observer(kernels, labelling.first_sight)
    with warnings.catch_warnings(), _traced(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        warnings.simplefilter("ignore")
        observer.fakes = Fakes(mode, observer.device)
        with observer, replacing(kernels.replaced):
            model, make_batch = scenario.build()
            _check_fake(model)
            engine = _engine(model, scenario)
            labelling.vocabulary = _vocabulary(model)
            labelling.attach(
                observer, model, engine.optimizer, master=scenario.config.precision.weights_dtype != "fp32"
            )
            if scenario.config.placement.grads.tier == "device":  # others would be brought back for it
                engine.register_grad_hook(lambda name, shard: labelling.label(observer, "grads", name, shard))
            train = _Step(engine, make_batch, mode, observer, scenario)
            warm_steps = _warm_steps(scenario.config)
            for number in range(warm_steps):
                train.step(number)
            startup_bytes = observer.peak_bytes
            observer.reset_peak()
            engine._comm.sent_bytes.clear()
            engine._offload.streams.moved_bytes.clear()
            train.step(warm_steps)
        return _foreseen(observer, engine, kernels, max(startup_bytes, observer.peak_bytes))


def can_be_run(config: Config) -> bool:
    """Whether all of it is memory."""
    placement = config.placement
    return all(kind.tier != "disk" for kind in (placement.weights, placement.grads, placement.optim))


def _warm_steps(config: Config) -> int:
    """The steps after which all are alike: the first makes the states, and what passes through the pool of buffers has
    its full size in the second."""
    return 1 if config.placement.optim.tier == "device" else 2


class _Step:
    """The loop that `shardwise compare` measures."""

    def __init__(
        self, engine: Engine, make_batch: MakeBatch, mode: FakeTensorMode, observer: _Observer, scenario: Scenario
    ) -> None:
        self._engine = engine
        self._make_batch = make_batch
        self._mode = mode
        self._observer = observer
        self._rank = scenario.rank
        self._count = scenario.config.batch.accumulation

    def step(self, number: int) -> None:
        from shardwise.models.loading import loss_of

        total = torch.zeros(())
        for micro in range(self._count):
            loss = loss_of(self._engine(**self._batch(number * self._count + micro)))
            self._engine.backward(loss)
            total += loss.detach() / self._count
            del loss
            self._update()

    def _update(self) -> None:
        self._observer.is_engine_at_work = True
        self._engine.step()
        self._observer.is_engine_at_work = False

    def _batch(self, number: int) -> dict[str, Any]:
        from shardwise.models.loading import arguments

        batch = arguments(self._make_batch, self._rank, number)
        moved: dict[str, Any] = map_tensors(
            batch, lambda tensor: tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)
        )
        return moved


def _engine(model: nn.Module, scenario: Scenario) -> Engine:
    config = scenario.config
    params = [param for param in model.parameters() if param.requires_grad]
    section = config.optimizer
    optimizer = section.build(params) if section is not None else torch.optim.AdamW(params, lr=1e-3)
    return Engine(model, optimizer, config, DryComm(scenario.rank, scenario.world_size, scenario.kernels.name))


def _foreseen(observer: _Observer, engine: Engine, kernels: Kernels, startup_bytes: int) -> Foreseen:
    split = by_kind(observer.breakdown_at_peak)
    split["in flight"] += split.pop("other")
    split["overhead"] = kernels.overhead_bytes
    params = [*engine.module.parameters()]
    held_bytes = engine.report().tier_peak_bytes
    return Foreseen(
        peak_bytes=observer.peak_bytes + kernels.overhead_bytes,
        categories={name: split.get(name, 0) for name in CATEGORIES},
        startup_bytes=startup_bytes + kernels.overhead_bytes,
        tiers={tier: held for tier in ("host", "disk") if (held := held_bytes.get(tier))},
        sent_bytes=dict(engine._comm.sent_bytes),
        moved_bytes=dict(engine._offload.streams.moved_bytes),
        parameters=sum(param.numel() for param in params),
        trainable=sum(param.numel() for param in params if param.requires_grad),
    )


def _vocabulary(model: nn.Module) -> int | None:
    """The rows of the largest embedding."""
    return max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=None)


def _check_fake(model: nn.Module) -> None:
    real = [name for name, param in model.named_parameters() if not isinstance(param, FakeTensor) and not param.is_meta]
    if real:
        raise Untraceable(f"its parameter {real[0]!r} has values of its own (loaded from a file?)")


@contextlib.contextmanager
def _traced() -> Iterator[None]:
    """Whatever fails for want of values is one exception with one line."""
    try:
        yield
    except Untraceable:
        raise
    except Exception as error:
        from shardwise.errors import ConfigError

        if isinstance(error, ConfigError):
            raise
        text = " ".join(str(error).split())
        raise Untraceable(f"{type(error).__name__}: {text[:200]}") from error
