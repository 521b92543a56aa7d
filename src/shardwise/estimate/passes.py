"""What the passes of a decoder's parts allocate: each kind of part runs once, without values, and is watched.

A part is the embedding, a layer, or the end of the model: the last norm, the head and the loss. All layers of a kind
are alike, so arithmetic sees what a dry run of the whole model would see, at the cost of one layer.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.dry_run.kernels import CUDA, replacing
from shardwise.models.decoder import CausalDecoder, adapt
from shardwise.models.dimensions import Dimensions
from shardwise.models.workload import Lora, Workload
from shardwise.observe import StorageObserver
from shardwise.partition.policy import DTYPES

_UNSET = {name: lambda tensor, *_, **__: tensor for name in ("kaiming_uniform_", "normal_", "ones_", "zeros_")}


class Snapshot(NamedTuple):
    """What is allocated at one time in a pass, without parameters, the part's input, and gradients that have arrived.

    arrived   elements of parameters whose gradients have arrived
    arriving  elements of a gradient that is there, and has yet to be added to those of earlier micro-batches
    """

    activations: int = 0
    logits: int = 0
    arrived: int = 0
    arriving: int = 0


NOTHING = Snapshot()


@dataclass(frozen=True)
class Passes:
    """The forward of a part at its fullest, what it keeps for the backward, and snapshots of that."""

    forward: Snapshot = NOTHING
    kept: Snapshot = NOTHING
    backward: tuple[Snapshot, ...] = ()


def meta_decoder(of: Dimensions, lora: Lora | None) -> CausalDecoder:
    """The decoder of these dimensions, without values."""
    with torch.device("meta"), replacing(_UNSET, of=nn.init):
        model = CausalDecoder(of)
        if lora is not None:
            adapt(model, *lora)
        return model


def decoder_passes(of: Dimensions, workload: Workload, recomputed: Collection[str]) -> dict[str, Passes]:
    """The passes of a decoder's parts, by the path of the module that each begins with, in forward order. Under tensor
    parallelism, `of` is what one rank holds. The layers `recomputed` keep only their input."""
    part, layers = _PartShape.of_step(of, workload), {}
    for index in range(of.layers):
        path, found = f"model.layers.{index}", _layer(part, index)
        layers[path] = replace(found, kept=Snapshot(part.hidden_bytes)) if path in recomputed else found
    return {"model.embed_tokens": _embedding(part), **layers, "lm_head": _passes(part, "end")}


def layer_kept_bytes(of: Dimensions, workload: Workload, index: int) -> int:
    """What one layer keeps for its backward, without recomputation."""
    return _layer(_PartShape.of_step(of, workload), index).kept.activations


class _PartShape(NamedTuple):
    of: Dimensions
    shape: tuple[int, int]
    precision: str
    lora: Lora | None
    tp: int

    @classmethod
    def of_step(cls, of: Dimensions, workload: Workload) -> _PartShape:
        shape = workload.micro_batch, workload.sequence
        return cls(of, shape, workload.precision, workload.lora, workload.tp)

    @property
    def hidden_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.of.hidden * DTYPES[self.precision].itemsize


def _embedding(part: _PartShape) -> Passes:
    """Its output, and in the backward the gradient of that and of the table, which is as large as the table. Where the
    head has the same table, autograd adds the gradients of both uses, in another tensor."""
    output, numel = Snapshot(part.hidden_bytes), part.of.embedding_numel + part.of.positions * part.of.hidden
    if part.lora is not None:
        return Passes(output, output)
    made = (1 + part.of.tied) * numel * DTYPES[part.precision].itemsize
    arriving = Snapshot(part.hidden_bytes + made, arriving=numel)
    return Passes(output, output, (arriving, Snapshot(arrived=numel)))


def _layer(part: _PartShape, index: int) -> Passes:
    dense = part.of.experts.dense_layers if part.of.experts else 0
    # Nothing that is trained precedes the first layer of a model with adapters: its input has no gradient.
    return _passes(part, "dense layer" if index < dense else "layer", has_gradient=index > 0 or part.lora is None)


@lru_cache(maxsize=256)
def _passes(part: _PartShape, kind: str, has_gradient: bool = True) -> Passes:
    of, dtype = part.of, DTYPES[part.precision]
    dense = of.experts.dense_layers if of.experts else 0
    model = meta_decoder(replace(of, layers=dense + 1), part.lora).to(dtype)
    with torch.device("meta"):
        tokens = torch.empty(part.shape, dtype=torch.long)
        hidden = torch.empty(*part.shape, of.hidden, dtype=dtype, requires_grad=has_gradient)

        def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
            if kind == "end":
                return _end(model, hidden, tokens, part.tp), []
            output = model.model.layers[0 if kind == "dense layer" else dense](hidden)
            return _Rest.apply(output), [output]  # type: ignore[no-untyped-call]  # torch

        return _watched(model, (hidden, tokens), of.vocabulary * part.tp if kind == "end" else 0, run)


def _end(model: CausalDecoder, hidden: torch.Tensor, targets: torch.Tensor, tp: int) -> torch.Tensor:
    logits = model.lm_head(model.model.norm(hidden))
    if tp > 1:  # gathered from the ranks that hold the head together
        logits = torch.cat([logits] * tp, -1)
    logits = logits.float()
    return model.loss(logits, targets)


class _Rest(torch.autograd.Function):
    """Stands for what follows a part: the gradient of its output is made in the backward."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.made = output.shape, output.dtype
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        shape, dtype = ctx.made
        return grad.new_empty(shape, dtype=dtype)


def _watched(model: nn.Module, inputs: Any, vocabulary: int, run: Callable[[], Any]) -> Passes:
    def label(tensor: torch.Tensor) -> str:
        is_wide = vocabulary and tensor.ndim > 1 and tensor.shape[-1] == vocabulary
        return "logits" if is_wide else "activations"

    watch = _Watch("cpu", (), label, CUDA.granularity_bytes)
    with replacing(CUDA.replaced), watch:
        watch.begin(model, *inputs)
        loss, outputs = run()
        kept, (forward,) = watch.now(), watch.snapshots.values()
        outputs.clear()  # what follows keeps it as long as it needs it
        if not loss.requires_grad:
            return Passes(forward, kept)
        with watch.gradients_of(model):
            loss.backward()
        return Passes(forward, kept, tuple(watch.snapshots.values()))


class _Watch(StorageObserver):
    """Takes the fullest snapshot for each set of gradients that have arrived."""

    _before = _arrived_bytes = _arrived = _arriving = 0
    # Nothing is compiled here; torch's wrapper around it would import the compiler, which takes seconds.
    __torch_dispatch__ = inspect.unwrap(StorageObserver.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def begin(self, *existing: Any) -> None:
        """Count memory from here on, without these."""
        self.snapshots: dict[tuple[int, int], Snapshot] = {}
        self.label("there before", *existing)
        self._before = self.current_bytes
        self.snapshots.clear()

    def now(self) -> Snapshot:
        used, logits = self.current_bytes - self._before - self._arrived_bytes, self._by_label["logits"]
        return Snapshot(used - logits, logits, self._arrived, self._arriving)

    @contextlib.contextmanager
    def gradients_of(self, model: nn.Module) -> Iterator[None]:
        """Within it, snapshots are taken anew, and the gradients of the model's parameters counted as they arrive."""
        for param in model.parameters():
            if param.requires_grad:
                param.register_hook(partial(self._arrives, param.numel()))
                param.register_post_accumulate_grad_hook(self._has_arrived)
        self.snapshots.clear()
        self._note_peak()
        yield

    def _arrives(self, numel: int, grad: torch.Tensor) -> None:
        self._arriving = numel
        self._note_peak()

    def _has_arrived(self, param: torch.Tensor) -> None:
        self._arriving = 0
        self._arrived += param.numel()
        self._arrived_bytes += -(-param.nbytes // self._granularity_bytes) * self._granularity_bytes
        self._note_peak()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().run(func, args, kwargs)
        if (scratch := CUDA.scratch.get(func)) is not None:
            self._watch_all(result)
            self.add_scratch(scratch(*args, **kwargs))
        return result

    def _lies_here(self, tensor: torch.Tensor) -> bool:
        return True

    def _note_peak(self) -> None:
        super()._note_peak()
        found = self.now()
        key = found.arrived, found.arriving
        if key not in self.snapshots or sum(self.snapshots[key][:2]) < sum(found[:2]):
            self.snapshots[key] = found
