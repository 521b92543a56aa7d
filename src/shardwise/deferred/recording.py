"""Deferred tensors: operations on large tensors are recorded, and repeated when their values are needed.

Within `recording`, a large tensor is on torch's meta device: it has a shape and no memory. Operations that write it
are recorded. A random operation also runs at once, on a scratch tensor, and the generator's state before it is
recorded. So the generator advances as in ordinary construction, every value can be computed at any time and in any
order, and all values, and all random numbers drawn later, are those of ordinary construction
(test_values_and_generator_are_those_of_ordinary_construction).

Values belong to storages, and tensors are views of them. So views, `p.data = ...`, parameters and tied weights need no
record. What is known of a storage is an attribute of torch's own storage object and is freed with it. Small tensors are
computed at once, and where code asks for a value (`.item()`), that value is computed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.partition.layout import Span

SMALL_BYTES = 16 << 10
_META = torch.device("meta")
_NUMBERS = itertools.count()
_OVERWRITING = {f"aten::{name}" for name in ("zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_")}


@dataclass(eq=False)
class DeferredStorage:
    """The future content of one storage: the operations that write it, in order."""

    size_bytes: int
    device: torch.device
    writes: list[RecordedOperation] = field(default_factory=list)

    def allocate(self) -> torch.UntypedStorage:
        return torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device).untyped_storage()


@dataclass(frozen=True, eq=False)
class DeferredView:
    """A deferred tensor: a view of a deferred storage."""

    storage: DeferredStorage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Any) -> DeferredView | None:
        """The view that a deferred tensor is; None for any other value."""
        storage = deferred_storage(tensor)
        if storage is None:
            return None
        return cls(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def covers_storage(self) -> bool:
        numel = torch.Size(self.size).numel()
        return numel * self.dtype.itemsize == self.storage.size_bytes and (0 not in self.stride or numel <= 1)

    def on(self, content: torch.UntypedStorage) -> torch.Tensor:
        """The tensor as a view of the real content."""
        view = torch.empty(0, dtype=self.dtype, device=content.device)
        return view.set_(content, self.offset, self.size, self.stride)

    def read(self, part: Span) -> torch.Tensor:
        """The flat elements `part` of its values."""
        return self.on(content_of(self.storage)).reshape(-1)[part.slice]


@dataclass(eq=False)
class RecordedOperation:
    """One recorded operation.

    args, kwargs       its arguments, with a DeferredView in place of each deferred tensor
    makes              its new tensors, by position in its result
    writes             the tensors that it changes in place
    generator, state   of a random operation: its generator, and that generator's state before
    number             the order of all operations
    """

    func: Any
    args: Any
    kwargs: Any
    makes: dict[int, DeferredView]
    writes: list[DeferredView]
    generator: torch.Generator | None = None
    state: torch.Tensor | None = None
    number: int = field(default_factory=_NUMBERS.__next__)

    def overwrites(self, storage: DeferredStorage) -> bool:
        """Whether the result does not depend on what the storage had before."""
        makes = any(view.storage is storage for view in self.makes.values())
        covers = any(view.storage is storage and view.covers_storage for view in self.writes)
        return makes or (covers and self.func._schema.name in _OVERWRITING)

    def repeat(self, storage: DeferredStorage, content: torch.UntypedStorage | None) -> torch.UntypedStorage:
        """Run the operation and return the new content of `storage`; `content` is its content so far."""
        made = next(((index, view) for index, view in self.makes.items() if view.storage is storage), None)
        own: Any = storage.allocate() if content is None and made is None else content

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, DeferredView):
                return leaf
            return leaf.on(own if leaf.storage is storage else content_of(leaf.storage, self.number))

        args, kwargs = pytree.tree_map(real, (self.args, self.kwargs))
        with _at_state(self.generator, self.state), torch.no_grad():
            results = pytree.tree_leaves(self.func(*args, **kwargs))
        return own if made is None else _laid_out(results[made[0]], made[1])


def content_of(storage: DeferredStorage, before: float = float("inf")) -> torch.UntypedStorage:
    """The content of a storage just before the operation numbered `before`."""
    writes = [operation for operation in storage.writes if operation.number < before]
    # Earlier values are overwritten and not computed: test_overwritten_values_are_not_made_again.
    first = max((index for index, operation in enumerate(writes) if operation.overwrites(storage)), default=0)
    content: torch.UntypedStorage | None = None
    for operation in writes[first:]:
        content = operation.repeat(storage, content)
    assert content is not None, "the first operation on a storage makes it"
    return content


def value(leaf: Any) -> Any:
    """The values of a deferred tensor, on the device that its constructor asked for; any other value as it is."""
    view = DeferredView.of(leaf)
    return leaf if view is None else view.on(content_of(view.storage))


def random_operations(storages: list[DeferredStorage]) -> list[RecordedOperation]:
    """All random operations on which the content of `storages` depends, in their order."""
    found: dict[int, RecordedOperation] = {}
    seen = {id(storage): storage for storage in storages}
    waiting = list(seen.values())
    for storage in waiting:
        found |= {operation.number: operation for operation in storage.writes}
        arguments = [(operation.args, operation.kwargs) for operation in storage.writes]
        for leaf in pytree.tree_leaves(arguments):
            if isinstance(leaf, DeferredView) and id(leaf.storage) not in seen:
                seen[id(leaf.storage)] = leaf.storage
                waiting.append(leaf.storage)
    return [found[number] for number in sorted(found) if found[number].state is not None]


def deferred_storage(tensor: Any) -> DeferredStorage | None:
    """The storage of a deferred tensor; None for any other value."""
    return getattr(_storage(tensor), "_shardwise_deferred", None)


def session_of(tensor: torch.Tensor) -> Any:
    """The session of the recording in which a tensor was made, deferred or not; None for any other tensor."""
    return getattr(_storage(tensor), "_shardwise_session", None)


def _storage(tensor: Any) -> torch.UntypedStorage | None:
    is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    return tensor.untyped_storage() if is_dense else None


@contextlib.contextmanager
def recording(session: Any = None, draws: bool = True, small_bytes: int = SMALL_BYTES) -> Iterator[None]:
    """Within it, tensors of more than `small_bytes` are deferred.

    `session` is stored with every tensor that is made. `draws` says whether random values will be needed; without it,
    random operations do not run and the generators do not advance.
    """
    with _FutureDevices(), _RecordingMode(session, draws, small_bytes):
        yield


class _RecordingMode(TorchDispatchMode):
    def __init__(self, session: Any, draws: bool, small_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._session = session
        self._draws = draws
        self._small_bytes = small_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if (deferred := deferred_storage(leaf)) is not None:
                return self._operate(func, args, kwargs, deferred.device)
        result = self._make(func, args, kwargs) if _makes_tensors(func) else func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if (storage := _storage(leaf)) is not None:
                storage._shardwise_session = self._session  # type: ignore[attr-defined]  # ours
        return result

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a new tensor, whose values depend on no other tensor."""
        device = torch.device(kwargs.get("device") or "cpu")
        if device == _META:  # torch's own code asks for a tensor on the device of a deferred one
            device = torch.device("cpu")
        kwargs = {**kwargs, "device": device}
        made = func(*args, **{**kwargs, "device": _META})
        if not isinstance(made, torch.Tensor) or made.nbytes <= self._small_bytes:
            return func(*args, **kwargs)
        if any(argument.name == "dtype" for argument in func._schema.arguments):
            kwargs = {**kwargs, "dtype": made.dtype}  # the default dtype may be another one when it is repeated
        self._record(func, args, kwargs, made, device)
        return made

    def _operate(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """Run an operation on deferred tensors: on shapes, and where that is impossible, on values."""
        if any(deferred_storage(tensor) is None for tensor in _written(func, args, kwargs)):
            return _on_values(func, args, kwargs)  # it writes into a tensor that has its values
        shapes_args, shapes_kwargs = pytree.tree_map(_shape_of, (args, kwargs))
        if kwargs.get("device") is not None:
            device, shapes_kwargs["device"] = torch.device(kwargs["device"]), _META
        try:
            result = func(*shapes_args, **shapes_kwargs)
        except (NotImplementedError, RuntimeError):
            # The result depends on values, or meta tensors do not support the operation. An error of the user's occurs
            # again on values, with torch's own message: test_an_error_of_the_user_is_the_one_that_torch_raises.
            return _on_values(func, args, kwargs)
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self._record(func, args, kwargs, result, device)
            return result
        return _on_values(func, args, kwargs) if func._schema.returns else result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, device: torch.device) -> None:
        writes = [view for tensor in _written(func, args, kwargs) if (view := DeferredView.of(tensor)) is not None]
        makes = {}
        for index, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, torch.Tensor) and deferred_storage(leaf) is None:
                makes[index] = self._defer(leaf, device)
        if not makes and not writes:
            return  # a view
        kept_args, kept_kwargs = pytree.tree_map(_kept, (args, kwargs))
        operation = RecordedOperation(func, kept_args, kept_kwargs, makes, writes)
        if torch.Tag.nondeterministic_seeded in func.tags:
            operation.generator = kwargs.get("generator") or _default_generator(device)
            operation.state = operation.generator.get_state()
        if self._draws and operation.state is not None:
            func(*pytree.tree_map(_scratch, args), **pytree.tree_map(_scratch, kwargs))
        for storage in {view.storage: None for view in (*makes.values(), *writes)}:
            storage.writes.append(operation)

    def _defer(self, tensor: torch.Tensor, device: torch.device) -> DeferredView:
        # torch keeps the Python object of a storage, and so these attributes, as long as any tensor uses the storage:
        # test_nothing_is_remembered_of_a_model_that_is_gone.
        storage: Any = tensor.untyped_storage()
        storage._shardwise_session = self._session
        storage._shardwise_deferred = DeferredStorage(storage.nbytes(), device)
        view = DeferredView.of(tensor)
        assert view is not None
        return view


class _FutureDevices(TorchFunctionMode):
    """Makes deferred tensors report the device that they will be on: initialisers skip meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None and (storage := deferred_storage(args[0])) is not None:
            return answer(storage.device)
        return func(*args, **(kwargs or {}))


_PROPERTIES: dict[str, Callable[[torch.device], Any]] = {
    "device": lambda device: device,
    "is_meta": lambda device: False,
    "is_cpu": lambda device: device.type == "cpu",
    "is_cuda": lambda device: device.type == "cuda",
}
_ANSWERS = {getattr(torch.Tensor, name).__get__: answer for name, answer in _PROPERTIES.items()}


def _kept(leaf: Any) -> Any:
    """What is recorded of an argument: of a tensor with values, a copy of them."""
    return (DeferredView.of(leaf) or leaf.detach().clone()) if isinstance(leaf, torch.Tensor) else leaf


def _shape_of(leaf: Any) -> Any:
    is_real = isinstance(leaf, torch.Tensor) and deferred_storage(leaf) is None
    return leaf.detach().to(_META) if is_real else leaf


def _scratch(leaf: Any) -> Any:
    """A tensor to run a random operation on: how far the generator advances depends on shapes only."""
    storage = deferred_storage(leaf)
    if storage is None:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=storage.device)


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation now, on the values of its arguments."""
    return func(*pytree.tree_map(value, args), **pytree.tree_map(value, kwargs))


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The arguments that an operation changes in place."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))


def _makes_tensors(func: Any) -> bool:
    schema = func._schema
    has_device = any(argument.name == "device" for argument in schema.arguments)
    return has_device and (
        schema.name.startswith("aten::new_") or not any("Tensor" in str(a.type) for a in schema.arguments)
    )


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextlib.contextmanager
def _at_state(generator: torch.Generator | None, state: torch.Tensor | None) -> Iterator[None]:
    """Within it, the generator is in `state`; afterwards, in the state that it had before."""
    if generator is None or state is None:
        yield
        return
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def _laid_out(result: torch.Tensor, view: DeferredView) -> torch.UntypedStorage:
    """The storage of a new tensor, in the layout that the meta tensor had."""
    storage = result.untyped_storage()
    is_same = result.stride() == view.stride and result.storage_offset() == view.offset
    if is_same and storage.nbytes() == view.storage.size_bytes:
        return storage
    fresh = view.storage.allocate()
    view.on(fresh).copy_(result)
    return fresh
