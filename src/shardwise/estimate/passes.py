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

from shardwise.dry_run.kernels import cuda, replacing
from shardwise.models.decoder import CausalDecoder, adapt
from shardwise.models.dimensions import Dimensions
from shardwise.models.workload import Workload
from shardwise.observe import StorageObserver
from shardwise.partition.policy import DTYPES

_UNSET = {name: lambda tensor, *_, **__: tensor for name in ("kaiming_uniform_", "normal_", "ones_", "zeros_")}
_KERNELS = cuda()
Lora = tuple[int, tuple[str, ...]]


class Moment(NamedTuple):
    """What is allocated at a moment of a pass, beside parameters, the part's input, and gradients that have arrived.

    arrived   elements of parameters whose gradients have arrived
    arriving  elements of a gradient that is there, and has yet to be added to those of earlier micro-batches
    """

    activations: int = 0
    logits: int = 0
    arrived: int = 0
    arriving: int = 0


NOTHING = Moment()


@dataclass(frozen=True)
class Passes:
    """The forward of a part at its fullest, what it keeps for the backward, and the moments of that."""

    forward: Moment = NOTHING
    kept: Moment = NOTHING
    backward: tuple[Moment, ...] = ()


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
    at, layers = _PartShape.of_step(of, workload), {}
    for index in range(of.layers):
        path, found = f"model.layers.{index}", _layer(at, index)
        layers[path] = replace(found, kept=Moment(at.hidden_bytes)) if path in recomputed else found
    return {"model.embed_tokens": _embedding(at), **layers, "lm_head": _passes(at, "end")}


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


def _embedding(at: _PartShape) -> Passes:
    """Its output, and in the backward the gradient of that and of the table, which is as large as the table. Where the
    head has the same table, autograd adds the gradients of both uses, in another tensor."""
    output, numel = Moment(at.hidden_bytes), at.of.embedding_numel + at.of.positions * at.of.hidden
    if at.lora is not None:
        return Passes(output, output)
    made = (1 + at.of.tied) * numel * DTYPES[at.precision].itemsize
    arriving = Moment(at.hidden_bytes + made, arriving=numel)
    return Passes(output, output, (arriving, Moment(arrived=numel)))


def _layer(at: _PartShape, index: int) -> Passes:
    dense = at.of.experts.dense_layers if at.of.experts else 0
    # Nothing that is trained precedes the first layer of a model with adapters: its input has no gradient.
    return _passes(at, "dense layer" if index < dense else "layer", has_gradient=index > 0 or at.lora is None)


@lru_cache(maxsize=256)
def _passes(at: _PartShape, kind: str, has_gradient: bool = True) -> Passes:
    of, dtype = at.of, DTYPES[at.precision]
    dense = of.experts.dense_layers if of.experts else 0
    model = meta_decoder(replace(of, layers=dense + 1), at.lora).to(dtype)
    with torch.device("meta"):
        tokens = torch.empty(at.shape, dtype=torch.long)
        hidden = torch.empty(*at.shape, of.hidden, dtype=dtype, requires_grad=has_gradient)

        def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
            if kind == "end":
                return _end(model, hidden, tokens, at.tp), []
            output = model.model.layers[0 if kind == "dense layer" else dense](hidden)
            return _Rest.apply(output), [output]  # type: ignore[no-untyped-call]  # torch

        return _watched(model, (hidden, tokens), of.vocabulary * at.tp if kind == "end" else 0, run)


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

    watch = _Watch("cpu", (), label, _KERNELS.granularity_bytes)
    with replacing(_KERNELS.replaced), watch:
        watch.begin(model, *inputs)
        loss, outputs = run()
        kept, (forward,) = watch.now(), watch.moments.values()
        outputs.clear()  # what follows keeps it as long as it needs it
        if not loss.requires_grad:
            return Passes(forward, kept)
        with watch.gradients_of(model):
            loss.backward()
        return Passes(forward, kept, tuple(watch.moments.values()))


class _Watch(StorageObserver):
    """Notes the fullest moment for each set of gradients that have arrived."""

    _before = _arrived_bytes = _arrived = _arriving = 0
    # Nothing is compiled here; torch's wrapper around it would import the compiler, which takes seconds.
    __torch_dispatch__ = inspect.unwrap(StorageObserver.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def begin(self, *existing: Any) -> None:
        """Memory counts from here on, beside these."""
        self.moments: dict[tuple[int, int], Moment] = {}
        self.label("there before", *existing)
        self._before = self.current_bytes
        self.moments.clear()

    def now(self) -> Moment:
        used, logits = self.current_bytes - self._before - self._arrived_bytes, self._by_label["logits"]
        return Moment(used - logits, logits, self._arrived, self._arriving)

    @contextlib.contextmanager
    def gradients_of(self, model: nn.Module) -> Iterator[None]:
        """Within it, moments are noted anew, and the gradients of the model's parameters counted as they arrive."""
        for param in model.parameters():
            if param.requires_grad:
                param.register_hook(partial(self._arrives, param.numel()))
                param.register_post_accumulate_grad_hook(self._has_arrived)
        self.moments.clear()
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
        if (scratch := _KERNELS.scratch.get(func)) is not None:
            self._watch_all(result)
            self.add_scratch(scratch(*args, **kwargs))
        return result

    def _lies_here(self, tensor: torch.Tensor) -> bool:
        return True

    def _note_peak(self) -> None:
        super()._note_peak()
        moment = self.now()
        key = moment.arrived, moment.arriving
        if key not in self.moments or sum(self.moments[key][:2]) < sum(moment[:2]):
            self.moments[key] = moment
