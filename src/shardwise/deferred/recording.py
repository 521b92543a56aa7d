"""Tensors whose values come later: what is done to large tensors is noted, and done when the values are asked for.

Within a `Recording`, a large tensor lives on torch's meta device: it has a shape and takes no memory. Operations that
write it are noted. A random one is also done at once, on a scratch tensor, and the state of the generator before it is
kept: so the generator moves on as ever, every value can be made at any time and in any order, and all of them,
and everything random that comes later, are the very ones of a construction that defers nothing.

Values belong to storages, of which tensors are views; so views, `p.data = ...`, parameters and tied weights need no
notes. Small tensors are made at once, and where code asks for a value (`.item()`), that value is made.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SMALL_BYTES = 16 << 10
_META = torch.device("meta")
_NUMBERS = itertools.count()
_OVERWRITING = {f"aten::{name}" for name in ("zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_")}


class Store:
    """The future content of one storage: the operations that write it, in order."""

    def __init__(self, size_bytes: int, device: torch.device, session: Any) -> None:
        self.size_bytes = size_bytes
        self.device = device
        self.session = session
        self.writes: list[Operation] = []


class Place(NamedTuple):
    """A deferred tensor: a view of a store."""

    store: Store
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, store: Store) -> Place:
        return cls(store, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def is_everything(self) -> bool:
        numel = torch.Size(self.size).numel()
        return numel * self.dtype.itemsize == self.store.size_bytes and (0 not in self.stride or numel <= 1)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor on the real content."""
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return view.set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class Operation:
    """One operation: `args` and `kwargs` have places where deferred tensors were, `makes` are its new tensors by
    position in its result, `writes` those it changes in place. A random one keeps its generator and that one's state
    before."""

    func: Any
    args: Any
    kwargs: Any
    makes: dict[int, Place]
    writes: list[Place]
    generator: torch.Generator | None = None
    state: torch.Tensor | None = None
    number: int = field(default_factory=_NUMBERS.__next__)

    def overwrites(self, store: Store) -> bool:
        """Whether what the store held before does not matter."""
        if any(place.store is store for place in self.makes.values()):
            return True
        is_blind = self.func._schema.name in _OVERWRITING
        return is_blind and any(place.store is store and place.is_everything for place in self.writes)

    def repeat(self, store: Store, storage: torch.UntypedStorage | None) -> torch.UntypedStorage:
        """Do it, for what becomes of `store`, whose content so far is `storage`."""
        own = storage

        def real(leaf: Any) -> Any:
            nonlocal own
            if not isinstance(leaf, Place):
                return leaf
            if leaf.store is not store:
                return leaf.on(content(leaf.store, self.number))
            if own is None:
                own = torch.empty(store.size_bytes, dtype=torch.uint8, device=store.device).untyped_storage()
            return leaf.on(own)

        args, kwargs = pytree.tree_map(real, (self.args, self.kwargs), is_leaf=_is_place)
        with _at_state(self.generator, self.state), torch.no_grad():
            results = pytree.tree_leaves(self.func(*args, **kwargs))
        for index, place in self.makes.items():
            if place.store is store:
                return _content_of(results[index], place)
        assert own is not None
        return own


def content(store: Store, before: float = float("inf")) -> torch.UntypedStorage:
    """What a store holds, as of the operation numbered `before`."""
    writes = [operation for operation in store.writes if operation.number < before]
    first = max((index for index, operation in enumerate(writes) if operation.overwrites(store)), default=0)
    storage: torch.UntypedStorage | None = None
    for operation in writes[first:]:
        storage = operation.repeat(store, storage)
    assert storage is not None, "a store is made by its first operation"
    return storage


def value(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a deferred tensor, on the device they were meant for."""
    store = store_of(tensor)
    assert store is not None, "the tensor is not deferred"
    return Place.of(tensor, store).on(content(store))


def random_operations(stores: list[Store]) -> list[Operation]:
    """All random operations on which the content of `stores` depends, in the order they were done."""
    found: dict[int, Operation] = {}
    seen: set[int] = set()
    waiting = list(stores)
    while waiting:
        store = waiting.pop()
        if id(store) in seen:
            continue
        seen.add(id(store))
        for operation in store.writes:
            if operation.state is not None:
                found[operation.number] = operation
            leaves = pytree.tree_leaves((operation.args, operation.kwargs), is_leaf=_is_place)
            waiting += [leaf.store for leaf in leaves if isinstance(leaf, Place)]
    return [found[number] for number in sorted(found)]


class _Alive(weakref.ref):  # type: ignore[type-arg]  # not generic at run time
    """A meta storage that is still in use, and its store."""

    __slots__ = ("key", "store")

    key: int
    store: Store


_alive: dict[int, _Alive] = {}
_present: dict[int, _Alive] = {}
"""Storages with values to come, and with values, that were made in a recording; by address, unique while they live."""


def store_of(tensor: Any) -> Store | None:
    """The store behind a deferred tensor; None for any other."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return None
    alive = _alive.get(tensor.untyped_storage()._cdata)
    return alive.store if alive is not None else None


def session_of(tensor: torch.Tensor) -> Any:
    """The session of the recording in which a tensor was made, deferred or not; None for any other."""
    key = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
    alive = _alive.get(key) or _present.get(key)
    return alive.store.session if alive is not None else None


class Recording(TorchDispatchMode):
    """Within it, large tensors are deferred. `session` is kept with each; `draws`: random values will be wanted."""

    def __init__(self, session: Any = None, draws: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._session = session
        self._draws = draws
        self._disguise = _Disguise()

    def __enter__(self) -> Recording:
        self._disguise.__enter__()  # type: ignore[no-untyped-call]  # torch
        super().__enter__()  # type: ignore[no-untyped-call]  # torch
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]  # torch
        self._disguise.__exit__(*exception)  # type: ignore[no-untyped-call]  # torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stores = [store for leaf in pytree.tree_leaves((args, kwargs)) if (store := store_of(leaf)) is not None]
        if stores:
            return self._operate(func, args, kwargs, stores[0].device)
        result = self._make(func, args, kwargs) if _makes_tensors(func) else func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and store_of(leaf) is None and leaf.layout == torch.strided:
                _begin(leaf, leaf.device, self._session, _present)
        return result

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor, whose values depend on no other."""
        device = torch.device(kwargs.get("device") or "cpu")
        if device == _META:  # torch's own code asks for a tensor beside a deferred one
            device = torch.device("cpu")
        kwargs = {**kwargs, "device": device}
        made = func(*args, **{**kwargs, "device": _META})
        if not isinstance(made, torch.Tensor) or made.nbytes <= SMALL_BYTES:
            return func(*args, **kwargs)
        if any(argument.name == "dtype" for argument in func._schema.arguments):
            kwargs = {**kwargs, "dtype": made.dtype}  # the default may be another one by the time it is done
        self._note(func, args, kwargs, made, device)
        return made

    def _operate(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """An operation on deferred tensors."""
        if any(store_of(tensor) is None for tensor in _written(func, args, kwargs)):
            return _really(func, args, kwargs)  # its result goes where values are real
        shapes_args, shapes_kwargs = pytree.tree_map(_shape_of, (args, kwargs))
        if kwargs.get("device") is not None:
            device, shapes_kwargs["device"] = torch.device(kwargs["device"]), _META
        try:
            result = func(*shapes_args, **shapes_kwargs)
        except (NotImplementedError, RuntimeError):
            # Values decide about the result, or meta tensors cannot do it. If it is an error, it is the user's.
            return _really(func, args, kwargs)
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self._note(func, args, kwargs, result, device)
            return result
        return _really(func, args, kwargs) if func._schema.returns else result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, device: torch.device) -> None:
        writes = [place for tensor in _written(func, args, kwargs) if (place := _place(tensor)) is not None]
        makes = {}
        for index, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, torch.Tensor) and store_of(leaf) is None:
                makes[index] = Place.of(leaf, _begin(leaf, device, self._session, _alive))
        if not makes and not writes:
            return  # a view
        noted_args, noted_kwargs = pytree.tree_map(_noted, (args, kwargs))
        operation = Operation(func, noted_args, noted_kwargs, makes, writes)
        if torch.Tag.nondeterministic_seeded in func.tags:
            operation.generator = kwargs.get("generator") or _default_generator(device)
            operation.state = operation.generator.get_state()
        if self._draws and operation.state is not None:
            func(*pytree.tree_map(_scratch, args), **pytree.tree_map(_scratch, kwargs))
        for store in {place.store: None for place in (*makes.values(), *writes)}:
            store.writes.append(operation)


class _Disguise(TorchFunctionMode):
    """Lets deferred tensors say that they are where they will be: initialisers pass meta tensors over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None and (store := store_of(args[0])) is not None:
            return answer(store.device)
        return func(*args, **(kwargs or {}))


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_ANSWERS: dict[Any, Callable[[torch.device], Any]] = {
    _getter("device"): lambda device: device,
    _getter("is_meta"): lambda device: False,
    _getter("is_cpu"): lambda device: device.type == "cpu",
    _getter("is_cuda"): lambda device: device.type == "cuda",
}


def _begin(tensor: torch.Tensor, device: torch.device, session: Any, among: dict[int, _Alive]) -> Store:
    storage = tensor.untyped_storage()
    alive = _Alive(storage, _forget)
    alive.key, alive.store = storage._cdata, Store(storage.nbytes(), device, session)
    among[alive.key] = alive
    return alive.store


def _forget(alive: _Alive) -> None:
    for among in (_alive, _present):
        if among.get(alive.key) is alive:
            del among[alive.key]


def _place(tensor: Any) -> Place | None:
    store = store_of(tensor)
    return Place.of(tensor, store) if store is not None else None


def _noted(leaf: Any) -> Any:
    """What is kept of an argument: of a real tensor its present values."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return _place(leaf) or leaf.detach().clone()


def _shape_of(leaf: Any) -> Any:
    return leaf if not isinstance(leaf, torch.Tensor) or store_of(leaf) is not None else leaf.detach().to(_META)


def _scratch(leaf: Any) -> Any:
    """Something to try a random operation on: how much it draws depends on shapes."""
    store = store_of(leaf)
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=store.device) if store else leaf


def _really(func: Any, args: Any, kwargs: Any) -> Any:
    """Do an operation now, on the values."""

    def real(leaf: Any) -> Any:
        return value(leaf) if store_of(leaf) is not None else leaf

    return func(*pytree.tree_map(real, args), **pytree.tree_map(real, kwargs))


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
    """Within it, the generator draws again what it drew then."""
    if generator is None or state is None:
        yield
        return
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def _content_of(result: torch.Tensor, place: Place) -> torch.UntypedStorage:
    """The storage of a new tensor, laid out as it was foreseen."""
    storage = result.untyped_storage()
    as_foreseen = result.stride() == place.stride and result.storage_offset() == place.offset
    if as_foreseen and storage.nbytes() == place.store.size_bytes:
        return storage
    fresh = torch.empty(place.store.size_bytes, dtype=torch.uint8, device=result.device).untyped_storage()
    place.on(fresh).copy_(result)
    return fresh


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, Place)
