"""Labels for live storage by kind, for a `StorageObserver`.

The labels come from hooks on any module and any torch optimizer, so every training system is labelled by one rule:

| kind        | storages of                                                                       |
|-------------|-----------------------------------------------------------------------------------|
| weights     | a module's own parameters, at the moment it computes with them                      |
| grads       | `p.grad` once autograd has accumulated it, and the gradients that the optimizer gets |
| master      | the optimizer's parameters if they are not the model's: an fp32 copy                |
| moments     | the optimizer's state                                                               |
| activations | tensors first seen while a module's forward runs (recomputation included)           |
| in flight   | tensors first seen between forwards: gradients of activations, receive buffers, ... |
| other       | tensors that existed before a model was attached                                    |

A label is `kind|name`, or the kind alone. `by_kind` sums the bytes of each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.engine.engine import Engine
from shardwise.observe.storage import StorageObserver
from shardwise.tensors import dtype_name

KINDS = ("weights", "grads", "master", "moments", "activations", "in flight", "other")


class Labelling:
    """Labels for one observer. `names=False` labels kinds alone, which costs less. `before_update` is called before
    each optimizer step.

    Pass `label=labelling.label_new` to the observer, then `attach` it to the model and the optimizer.

    >>> labelling = Labelling()
    >>> with StorageObserver(existing=(), label=labelling.label_new) as memory:
    ...     model = nn.Linear(4, 2)
    ...     labelling.attach(memory, model, torch.optim.SGD(model.parameters(), lr=0.1))
    ...     model(torch.ones(3, 4)).sum().backward()
    >>> by_kind(memory.breakdown)["weights"], by_kind(memory.breakdown)["grads"]
    (40, 40)
    """

    _observer: StorageObserver

    def __init__(self, names: bool = True, before_update: Callable[[], None] = lambda: None) -> None:
        self._names = names
        self._before_update = before_update
        self._depth = 0
        self._handles: list[Any] = []

    def label_new(self, tensor: torch.Tensor) -> str:
        """The label of a storage that is seen for the first time."""
        kind = "activations" if self._depth else "in flight" if self._handles else "other"
        return f"{kind}|{describe(tensor)}" if self._names else kind

    def attach(
        self, observer: StorageObserver, model: nn.Module, optimizer: torch.optim.Optimizer | None, master: bool = False
    ) -> None:
        """Label what `model` and `optimizer` use from now on. `master`: the optimizer has a master copy."""
        self._observer = observer
        for path, module in model.named_modules():
            if module is model or next(module.parameters(recurse=False), None) is not None:
                self._watch_module(path, module)
        for name, param in model.named_parameters():
            if param.requires_grad and param.is_leaf:
                self._handles.append(param.register_post_accumulate_grad_hook(partial(self._label_grad, name)))
        if optimizer is not None:
            names = {id(param): name for name, param in model.named_parameters()}

            def label_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                self._label_optimizer(optimizer, names, master)

            self._handles.append(optimizer.register_step_pre_hook(label_optimizer))
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._before_update()))
            self._handles.append(optimizer.register_step_post_hook(label_optimizer))  # the step may create state

    def attach_engine(self, observer: StorageObserver, engine: Engine) -> None:
        """Label what an engine holds from now on."""
        config = engine.config
        self.attach(observer, engine.module, engine.optimizer, master=config.precision.weights_dtype != "fp32")
        if config.placement.grads.tier == "device":  # a hook would bring others back to it
            engine.register_grad_hook(partial(self.label, "grads"))

    def label(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Label the storage of `tensor`, once attached. One larger than the tensor is named `... and others`."""
        if hasattr(tensor, "to_local"):  # a DTensor; importing its class takes a second
            tensor = tensor.to_local()
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
        self._observer.label(f"{kind}|{name}{' and others' if is_part else ''}" if self._names else kind, tensor)

    def detach(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _watch_module(self, path: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            self._depth += 1
            for name, param in module.named_parameters(path, recurse=False):
                self.label("weights", name, param)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._depth -= 1

        self._handles.append(module.register_forward_pre_hook(enter))
        # Called after an exception too: activation checkpointing stops a recomputation early by raising one.
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _label_grad(self, name: str, param: torch.Tensor) -> None:
        if param.grad is not None:
            self.label("grads", name, param.grad)

    def _label_optimizer(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], master: bool) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            name = names.get(id(param)) or f"part of {describe(param)}"
            self.label("master" if master else "weights", name, param)
            self._label_grad(name, param)
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    self.label("moments", f"{name}.{key}", value)


def by_kind(breakdown: Mapping[str, int]) -> dict[str, int]:
    """The bytes of each kind, from bytes per label. Every kind is present."""
    totals: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for label, size_bytes in breakdown.items():
        totals[label.partition("|")[0]] += size_bytes
    return dict(totals)


def describe(tensor: torch.Tensor) -> str:
    """Shape and dtype, such as `4x128x512 float32`.

    >>> describe(torch.ones(2, 3))
    '2x3 float32'
    """
    return f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {dtype_name(tensor.dtype)}"
