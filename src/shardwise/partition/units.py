"""The division of a model into units: parameters that are gathered and reduced together, and the modules that use them.

    Decoder                            (root)     pos, norm            the whole forward
    ├── embed       Embedding          embed      embed.weight         embed; head (tied)
    ├── pos         Parameter
    ├── layers      ModuleList
    │   ├── 0       Block              layers.0   everything inside    layers.0
    │   └── 1       Block              layers.1   everything inside    layers.1
    ├── norm        LayerNorm
    └── head        Linear (tied to embed)

1. *Blocks* are children of one class that repeat in a ModuleList, ModuleDict or Sequential. Of nested repetitions the
   outermost counts, and a block is never divided, so branches inside it (experts that no token reached) do not matter.
   Only *block lists*, siblings that each hold different blocks (the stages of a ResNet), are searched in turn. Small
   neighbouring blocks are merged.
2. *Leftovers* are the largest subtrees without a block. Those of some size become units of their own.
3. The *root unit* holds the rest, and is in use for the whole forward.

Hooks are registered on the modules of a unit's runs, so a run names only modules that have a forward. A module or
parameter that is registered twice belongs to its first name. A hook on a shared module serves all its names; other
modules that register a tied parameter are further runs.
"""

import difflib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from shardwise.partition.dtensors import local, locals_of
from shardwise.partition.stored import stored_tensors
from shardwise.sizes import format_bytes, format_count
from shardwise.tensors import dtype_name

Run = tuple[str, ...]  # modules of one unit, by path
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MERGE_BYTES = 2**25  # small units are merged: each costs as much host time as a large one
_MERGE_SHARE = 16  # merging stops at this part of the model, or small models would become one unit
_LEFTOVER_SHARE = 8  # a leftover smaller than this part of a block joins the root unit


@dataclass(frozen=True)
class UnitSpec:
    """The parameters of a unit, and the modules whose forward uses them.

    `params` are canonical names (the first ones under which `named_parameters()` reports them) in registration order;
    of a quantised parameter, the names of the tensors that hold it (see `stored`), which are `inner` and frozen.
    Each run is a group of modules: the unit is in use from the first entry into one of them to the last exit. The first
    run is that of the owners, further ones use tied parameters; ("",) is the model itself. A unit without runs belongs
    to a model that has no forward, so its uses cannot be seen.
    """

    name: str
    params: tuple[str, ...]
    runs: tuple[Run, ...]
    trainable: bool
    dtype: torch.dtype
    inner: bool = False


def divide(
    model: nn.Module,
    *,
    classes: Collection[str] | None = None,
    modules: Collection[str] | None = None,
    min_bytes: int | None = None,
    max_bytes: int | None = None,
    floor_bytes: int = 0,
) -> tuple[UnitSpec, ...]:
    """The units of a model: the root unit, then the others in registration order. Each parameter is in exactly one.

    `classes` (names of classes) and `modules` (paths) name the blocks and replace the automatic search; each block is
    then a unit of its own unless `min_bytes` is given. By default, neighbouring blocks of a list are merged up to
    32 MiB, 1/16 of the model or `max_bytes`, whichever is least, but at least up to `floor_bytes`.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> [(unit.name, unit.params) for unit in divide(model)]
    [('0', ('0.weight', '0.bias')), ('2', ('2.weight', '2.bias'))]
    """
    tree = _Tree(model)
    explicit = classes is not None or modules is not None
    blocks = _named_blocks(tree, classes or (), modules or ()) if explicit else _find_blocks(tree, "")
    if min_bytes is None:
        enough = _MERGE_BYTES if max_bytes is None else min(_MERGE_BYTES, max_bytes)
        min_bytes = 0 if explicit else max(min(enough, tree.bytes("") // _MERGE_SHARE), floor_bytes)
    merged = _merge(tree, blocks, min_bytes)
    holders = {above for block in blocks for above in _above(block)}
    owners = _owning_runs(tree, merged, _leftovers(tree, set(blocks), holders))
    return _specs(tree, owners, _tied_users(tree, owners, holders))


def describe_units(
    model: nn.Module,
    *,
    classes: Collection[str] | None = None,
    modules: Collection[str] | None = None,
    min_bytes: int | None = None,
) -> str:
    """The division of a model as a printable table; the arguments are those of `divide`.

    >>> print(describe_units(nn.Linear(4, 4)))
    unit    modules  parameters  elements  bytes  dtype    trainable  also used by
    (root)  (root)            2        20    80B  float32  yes
    total                     2        20    80B
    """
    params = stored_tensors(model)
    header = ("unit", "modules", "parameters", "elements", "bytes", "dtype", "trainable", "also used by")
    units = divide(model, classes=classes, modules=modules, min_bytes=min_bytes)
    rows = [header, *(_row(unit, params) for unit in units), ("total", "", *_sizes(params.values()), "", "", "")]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{align}{width}}}" for align, width in zip("<<>>><<<", widths, strict=True))
    return "\n".join(line.format(*row).rstrip() for row in rows)


class _Tree:
    """The modules of a model by path, and the parameters that each owns, including those of its descendants."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.params = stored_tensors(model)
        self.aliases = [
            (name, param) for name, param in stored_tensors(model, False).items() if name not in self.params
        ]
        self.registrations = Counter(id(module) for module in self.modules.values())
        self._first: dict[int, str] = {}
        self.children: dict[str, list[str]] = defaultdict(list)
        for path, module in self.modules.items():
            if self._first.setdefault(id(module), path) == path and path:
                self.children[path.rpartition(".")[0]].append(path)
        self.owned: dict[str, list[str]] = defaultdict(list)
        for name, param in self.params.items():
            if nn.parameter.is_lazy(param):
                raise ValueError(f"parameter {name!r} has no shape yet; run one forward before dividing the model")
            for path in _above(name):
                self.owned[path].append(name)

    def first(self, path: str) -> str:
        """The first path under which the module at `path` is registered."""
        return self._first[id(self.modules[path])]

    def bytes(self, *paths: str) -> int:
        return sum(local(self.params[name]).nbytes for path in paths for name in self.owned[path])

    def has_forward(self, path: str) -> bool:
        if path not in self.modules:
            return False  # a parameter that consists of several tensors
        forward = self.modules[path].forward
        return getattr(forward, "__func__", forward) is not nn.Module.forward

    def shapes(self, path: str) -> tuple[tuple[str, torch.Size], ...]:
        """Relative names and shapes of the owned parameters: equal for blocks that are alike, not only of one class."""
        return tuple((name.removeprefix(path), self.params[name].shape) for name in self.owned[path])


def _find_blocks(tree: _Tree, path: str) -> list[str]:
    """The paths of the repeated blocks below `path`, in registration order."""
    kids = [kid for kid in tree.children[path] if tree.owned[kid]]
    is_list = isinstance(tree.modules[path], _LISTS)
    whole, blocks = _repeated(tree, path, kids) if is_list else (set(), set())
    found: list[str] = []
    for kid in kids:
        if kid in blocks:
            found.append(kid)
        elif kid not in whole:
            found += _find_blocks(tree, kid)
    return found


def _repeated(tree: _Tree, path: str, kids: Sequence[str]) -> tuple[set[str], set[str]]:
    """The children of a list that are not searched further, and those among them that are blocks."""
    by_class: dict[type, list[str]] = defaultdict(list)
    for kid in filter(tree.has_forward, kids):
        by_class[type(tree.modules[kid])].append(kid)
    layers = [set(alike) - _block_lists(tree, alike) for alike in by_class.values()]
    blocks = {kid for alike in layers if len(alike) > 1 for kid in alike}
    if not blocks and isinstance(tree.modules[path], nn.Sequential):
        return set(), set()  # a chain of different parts, such as a backbone and a head
    return set().union(*layers), blocks


def _block_lists(tree: _Tree, alike: Sequence[str]) -> set[str]:
    """Those of these siblings of one class that are block lists, no two of them alike.

    A plain Sequential is one if blocks repeat in it, because its class says nothing about it. Siblings of another class
    must all consist mostly of repeated blocks that are modules of modules. Layers of various widths, and a mixture of
    dense layers and layers with experts, are therefore not block lists.
    """
    shapes = {kid: tree.shapes(kid) for kid in alike}
    counts = Counter(shapes.values())
    unlike = [kid for kid in alike if counts[shapes[kid]] == 1]
    if type(tree.modules[alike[0]]) is nn.Sequential:
        return {kid for kid in unlike if _find_blocks(tree, kid)}
    if len(unlike) < max(2, len(alike)):
        return set()
    blocks = {kid: [block for block in _find_blocks(tree, kid) if tree.children[block]] for kid in alike}
    mostly_blocks = all(2 * tree.bytes(*blocks[kid]) >= tree.bytes(kid) > 0 for kid in alike)
    return set(alike) if mostly_blocks else set()


def _named_blocks(tree: _Tree, classes: Collection[str], modules: Collection[str]) -> list[str]:
    """The blocks that the user named, in registration order; of nested modules of named classes, the outermost."""
    class_of = {path: type(module).__name__ for path, module in tree.modules.items()}
    _refuse_unknown("class", classes, set(class_of.values()))
    _refuse_unknown("module", modules, set(tree.modules))
    blocks = {tree.first(path) for path in modules}
    for path in filter(lambda path: class_of[path] in classes and tree.first(path) == path, tree.modules):
        if not any(class_of[above] in classes for above in _above(path)):
            blocks.add(path)
    for name in set(classes) - {class_of[path] for path in blocks}:
        raise ValueError(f"every module of class {name!r} lies inside another block; name only the outer class")
    for path in blocks:
        if outer := [above for above in _above(path) if above in blocks]:
            raise ValueError(f"blocks overlap: {path!r} lies inside {_label((outer[0],))!r}; name one of them")
        if not tree.has_forward(path):
            remedy = "name the modules inside it instead"
            raise ValueError(f"{path!r} ({class_of[path]}) has no forward to hook; {remedy}")
    return [path for path in tree.modules if path in blocks]


def _refuse_unknown(kind: str, names: Iterable[str], valid: set[str]) -> None:
    if unknown := [name for name in names if name not in valid]:
        nearest = {near: None for name in unknown for near in difflib.get_close_matches(name, valid, n=2, cutoff=0.4)}
        hint = f"; the nearest are {', '.join(map(repr, nearest))}" if nearest else ""
        raise ValueError(f"the model has no {kind} {', '.join(map(repr, unknown))}{hint}")


def _merge(tree: _Tree, blocks: Sequence[str], min_bytes: int) -> list[Run]:
    """Runs of neighbouring blocks of one list, each of at least `min_bytes` if the list has that many."""

    def chain(path: str) -> str:
        parent = path.rpartition(".")[0]
        # A module that is registered twice also runs elsewhere, so its unit must not stay in use until neighbours exit.
        alone = tree.registrations[id(tree.modules[path])] > 1 or not isinstance(tree.modules[parent], _LISTS)
        return path if alone else parent

    return [run for _, members in groupby(blocks, key=chain) for run in _fill(tree, members, min_bytes)]


def _fill(tree: _Tree, chain: Iterable[str], min_bytes: int) -> list[Run]:
    runs: list[list[str]] = []
    filled_bytes = min_bytes
    for path in chain:
        if filled_bytes >= min_bytes:
            runs.append([])
            filled_bytes = 0
        runs[-1].append(path)
        filled_bytes += tree.bytes(path)
    if len(runs) > 1 and filled_bytes < min_bytes:
        runs[-2:] = [runs[-2] + runs[-1]]
    return [tuple(run) for run in runs]


def _leftovers(tree: _Tree, blocks: Collection[str], holders: Collection[str], path: str = "") -> Iterator[str]:
    """The largest modules with a forward that contain no block and lie in none."""
    if path in holders or not tree.has_forward(path):
        for kid in tree.children[path]:
            yield from _leftovers(tree, blocks, holders, kid)
    elif path not in blocks:
        yield path


def _owning_runs(tree: _Tree, merged: Sequence[Run], leftovers: Iterable[str]) -> dict[str, Run]:
    """For each parameter, the run of the unit that owns it."""
    runs = {path: run for run in merged for path in run}
    largest_bytes = max((tree.bytes(path) for path in runs), default=0)
    for path in leftovers:
        if tree.bytes(path) * _LEFTOVER_SHARE >= largest_bytes:
            runs[path] = (path,)
    owners = {}
    for name in tree.params:
        above = _above(name)
        # The outermost module with a forward: the model itself, unless it is only a container.
        rest = next(((path,) for path in above if tree.has_forward(path)), ())
        owners[name] = next((runs[path] for path in above if path in runs), rest)
    return owners


def _tied_users(tree: _Tree, owners: dict[str, Run], holders: Collection[str]) -> dict[str, dict[str, None]]:
    """For each parameter with several names, the modules outside its own run that use it and are to be hooked."""
    canonical = {id(param): name for name, param in tree.params.items()}
    users: dict[str, dict[str, None]] = defaultdict(dict)
    for alias, param in tree.aliases:
        name = canonical[id(param)]
        above = [tree.first(path) for path in _above(alias) if tree.has_forward(path)]
        if not set(above) & set(owners[name]):
            # Whole blocks and leftovers, as for owners; else the module itself, which contains blocks.
            users[name] |= dict.fromkeys([path for path in above if path not in holders][:1] or above[-1:])
    return users


def _specs(tree: _Tree, owners: dict[str, Run], users: dict[str, dict[str, None]]) -> tuple[UnitSpec, ...]:
    """One unit per run, trainability and dtype, in the order in which their modules were registered."""
    parts: dict[tuple[Run, bool, torch.dtype, bool], list[str]] = defaultdict(list)
    for name, run in owners.items():
        param = tree.params[name]
        parts[run, param.requires_grad, param.dtype, not isinstance(param, nn.Parameter)].append(name)
    dtypes = Counter((run, trainable) for run, trainable, _, _ in parts)
    position = {path: index for index, path in enumerate(tree.modules)}
    units = []
    for run, trainable, dtype, inner in sorted(parts, key=lambda part: position[part[0][0]] if part[0] else -1):
        names = parts[run, trainable, dtype, inner]
        tags = [*([] if trainable else ["frozen"]), *(["inner"] if inner else [])]
        tags += [dtype_name(dtype)] if dtypes[run, trainable] > 1 else []
        label = _label(run) + (f" ({', '.join(tags)})" if tags else "")
        further = {user: None for name in names for user in users.get(name, ())}
        runs = ((run,) if run else ()) + tuple((user,) for user in further)
        units.append(UnitSpec(label, tuple(names), runs, trainable, dtype, inner))
    return tuple(units)


def _row(unit: UnitSpec, params: dict[str, torch.Tensor]) -> tuple[str, ...]:
    owner, *others = [_label(run) for run in unit.runs] or ["none"]
    sizes = _sizes([params[name] for name in unit.params])
    return (unit.name, owner, *sizes, dtype_name(unit.dtype), "yes" if unit.trainable else "no", ", ".join(others))


def _sizes(params: Collection[torch.Tensor]) -> tuple[str, str, str]:
    here = locals_of(params)
    elements, size = sum(param.numel() for param in here), sum(param.nbytes for param in here)
    return str(len(params)), format_count(elements), format_bytes(size)


def _label(run: Sequence[str]) -> str:
    """The name of a run: "layers.3-5", or "(root)" for the model itself and for parameters that no forward uses."""
    if not run or run == ("",):
        return "(root)"
    return run[0] if len(run) == 1 else f"{run[0]}-{run[-1].rpartition('.')[2]}"


def _above(path: str) -> list[str]:
    """The modules that contain a module or parameter, from the model itself down: "", "layers", "layers.0"."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts))]
