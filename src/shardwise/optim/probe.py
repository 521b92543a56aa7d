"""What part of a tensor an optimizer has to see at once: an element, the whole tensor, or other tensors too.

The engine steps an optimizer on flat parts of several tensors, one part after the other. For AdamW that is the same
as one step on whole tensors; LAMB, Adafactor or Shampoo need each tensor whole; an optimizer that estimates a step size
from all tensors, or counts its own calls, is right in neither way. Known optimizers are looked up. Any other is built
anew, with the user's options, on small tensors of the probe, and trained on them in each way.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.config.optimizers import Lion, UncorrectedAdam
from shardwise.optim.optimizers import bare_step

_BY_ELEMENT = {
    Lion,
    UncorrectedAdam,
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
}
_BY_TENSOR = tuple(getattr(torch.optim, name) for name in ("Muon", "Adafactor") if hasattr(torch.optim, name))
# Some optimizers treat tensors of up to 4096 elements, or matrices with fewer than 128 rows or columns, differently.
_MATRIX, _VECTOR = (136, 192), (40,)
_STEPS = 12  # some begin to treat a tensor as a whole, or to average their weights, only after a few steps
_RATE = 0.1  # in place of the user's learning rate, which may be zero at the start of a schedule
_NOT_OPTIONS = {"params", "param_names", "initial_lr", "member"}
_TOLERANCE = 1e-4  # of the largest change


class Scope(enum.Enum):
    """What an optimizer's update of an element depends on."""

    ELEMENT = "that element"
    TENSOR = "its tensor"
    GROUP = "other tensors"
    UNKNOWN = "unknown"


_FOUND: dict[tuple[type, str], Scope] = {}


def scope_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> Scope:
    """The scope of an optimizer with the options of one of its groups.

    >>> weight = nn.Parameter(torch.zeros(2, 2))
    >>> adamw = torch.optim.AdamW([weight])
    >>> scope_of(adamw, adamw.param_groups[0], weight.device)
    <Scope.ELEMENT: 'that element'>
    """
    if type(optimizer) in _BY_ELEMENT:
        return Scope.ELEMENT
    if is_by_tensor(optimizer):
        return Scope.TENSOR
    ranks = {param.ndim for param in group["params"]}
    shapes = [_MATRIX if max(ranks, default=2) > 1 else _VECTOR, _MATRIX if min(ranks, default=2) > 1 else _VECTOR]
    key = (type(optimizer), repr((sorted(_options(group).items(), key=lambda item: item[0]), shapes, device)))
    if key not in _FOUND:
        _FOUND[key] = _probe(optimizer, group, shapes, device)
    return _FOUND[key]


def is_by_tensor(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to need whole tensors."""
    return isinstance(optimizer, _BY_TENSOR)


def _probe(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shapes: Sequence[tuple[int, ...]], device: torch.device
) -> Scope:
    """Try in fp64, where rounding differences are negligible; in fp32 for kernels that do not support fp64."""
    devices = [device] if device.type == "cuda" else []
    # A dry run traces with fake tensors, and the user's random numbers must not change.
    with _disable_current_modes(), torch.random.fork_rng(devices), torch.inference_mode(False), _without_hooks():
        for dtype in (torch.float64, torch.float32):
            try:
                return _Probe(optimizer, group, shapes, device, dtype).scope()
            except Exception:  # whatever the user's class raises on tensors that it was not written for
                continue
    return Scope.UNKNOWN


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Within it, hooks on all optimizers are not called: a class whose step calls that of its base would do so."""
    tables: tuple[dict[int, Any], ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    saved = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)


class _Probe:
    """Small tensors and their gradients, and copies of an optimizer that train them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._make = _maker(optimizer, group)
        generator = torch.Generator().manual_seed(0)

        def values(shape: tuple[int, ...]) -> torch.Tensor:
            # Rows and columns of different sizes: factored moments and norms of parts differ.
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return (drawn * torch.linspace(0.5, 2.0, shape[-1], dtype=torch.float64)).to(device, dtype)

        self._start = [values(shape) for shape in shapes]
        self._grads = [[values(shape) for shape in shapes] for _ in range(_STEPS)]

    def scope(self) -> Scope:
        whole = self._train(self._start, self._grads, alone=False, seed=0)
        if not self._equal(whole, self._train(self._start, self._grads, alone=False, seed=1)):
            return Scope.UNKNOWN  # it draws random numbers
        cut = self._train(_cut(self._start), [_cut(grads) for grads in self._grads], alone=True)
        if self._equal(whole, self._join(cut)):
            return Scope.ELEMENT
        one_by_one = self._train(self._start, self._grads, alone=True)
        return Scope.TENSOR if self._equal(whole, one_by_one) else Scope.GROUP

    def _train(
        self, start: Sequence[torch.Tensor], grads: Sequence[Sequence[torch.Tensor]], alone: bool, seed: int = 0
    ) -> list[torch.Tensor]:
        """Train on `start`, all tensors in one step, or each `alone`, as the engine does."""
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds the devices of all ranks
        if start[0].is_cuda:
            with torch.cuda.device(start[0].device):
                torch.cuda.manual_seed(seed)
        params = [nn.Parameter(value.clone()) for value in start]
        optimizer = self._make(params)
        step, (group,) = bare_step(optimizer), optimizer.param_groups
        for each in grads:
            for param, grad in zip(params, each, strict=True):
                param.grad = grad.clone()
            for own in [[param] for param in params] if alone else [params]:
                group["params"] = own
                step()
        return [param.detach() for param in params]

    def _equal(self, one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
        for start, left, right in zip(self._start, one, other, strict=True):
            change, size = (left - start).abs().max().item(), left.abs().max().item()
            bound = _TOLERANCE * change + 8 * torch.finfo(start.dtype).eps * size
            if not (change > 0 and bool(((left - right).abs() <= bound).all())):
                return False
        return True

    def _join(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [value.numel() for value in self._start]
        flats = torch.cat(list(parts)).split(sizes)
        return [flat.view(value.shape) for flat, value in zip(flats, self._start, strict=True)]


def _cut(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors one after the other, in two parts; the cut is inside the first."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return list(flat.split([tensors[0].numel() // 2, flat.numel() - tensors[0].numel() // 2]))


def _maker(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Builds optimizers of the same class with a group of the same options: nothing of the user's is shared."""
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters.keys()

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        options = _options(group)
        arguments = {key: value for key, value in _options(optimizer.defaults).items() if key in accepted}
        made: torch.optim.Optimizer = kind([{"params": params, **options}], **arguments)
        return made

    return make


def _options(group: dict[str, Any]) -> dict[str, Any]:
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in _NOT_OPTIONS}
    if options.get("lr") is not None:
        options["lr"] = _RATE
    return options
