"""Where a model is cut into stages, and what a stage keeps of it.

    embed │ block 0   block 1 │ block 2   block 3 │ norm   head
    ──────────────────────────┼──────────────────────────────────
            stage 0           │            stage 1

A model that can be cut is a list of blocks with something before it and something after it. Blocks are the members of
that ModuleList or Sequential which holds at least half of the parameters in the smallest parts. What is registered
before the blocks belongs to the first stage, what is registered after them to the last one. A norm or a Linear that is
registered before them may be used at either end, so both stages have it, as a tied weight. Stages are cut evenly by
parameters, or where `split` says.

A stage is a copy of the whole model in which parts of other stages are replaced, so parameters keep their names and the
model's own forward runs on every stage: see `prune`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.errors import ConfigError
from shardwise.pipelining.absent import AbsentValues, check_present, run_without_values, without_values


@dataclass(frozen=True)
class StageCut:
    """Blocks of a model by path, and the index of the first block of each stage."""

    blocks: tuple[str, ...]
    starts: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.starts)

    def own(self, stage: int) -> range:
        """The indices of a stage's blocks."""
        return range(self.starts[stage], (*self.starts, len(self.blocks))[stage + 1])

    def stage_of(self, name: str, names: Sequence[str]) -> int:
        """The stage of a parameter, of a model whose parameters are `names`, in order."""
        for stage in range(self.count):
            if any(_is_inside(name, self.blocks[index]) for index in self.own(stage)):
                return stage
        first = next(i for i, each in enumerate(names) if any(_is_inside(each, block) for block in self.blocks))
        return 0 if names.index(name) < first else self.count - 1


def cut(model: nn.Module, count: int, split: Sequence[str] | None = None) -> StageCut:
    """Cut a model into `count` stages: evenly by parameters, or at the blocks that `split` names.

    >>> cut(nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))), 2).starts
    (0, 2)
    """
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ConfigError(
            "the loss has a part from the routers of all blocks (config.output_router_logits), and a pipeline's last "
            "stage has those of its own blocks alone: set it to False, or use ZeRO alone, shardwise.initialize(model, "
            "optimizer, 'zero3')"
        )
    blocks = find_blocks(model)
    if split is not None:
        return StageCut(blocks, _named_starts(blocks, count, split))
    if len(blocks) < count:
        raise ConfigError(
            f"{count} stages for {len(blocks)} blocks ({blocks[0]} to {blocks[-1]}) leave a stage empty: use fewer "
            "pipeline ranks, or a schedule with one stage a rank (GPipe, 1F1B)"
        )
    names = [name for name, _ in model.named_parameters()]
    sizes = [sum(param.numel() for param in model.get_submodule(block).parameters()) for block in blocks]
    whole = StageCut(blocks, (0, len(blocks) - 1))
    for name, param in model.named_parameters():
        if not any(_is_inside(name, block) for block in blocks):
            sizes[-1 if whole.stage_of(name, names) else 0] += param.numel()
    return StageCut(blocks, even_starts(sizes, count))


def even_starts(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Where to cut a list into `count` runs, none empty, so that the largest sum is smallest.

    >>> even_starts([5, 1, 1, 1, 4], 2)
    (0, 2)
    """
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    # best[k][i]: the largest run and the cuts, of the first i items in k runs
    best: list[dict[int, tuple[int, tuple[int, ...]]]] = [{0: (0, ())}]
    for runs in range(1, count + 1):
        best.append(
            {
                stop: min(
                    (max(largest, sums[stop] - sums[start]), (*starts, start))
                    for start, (largest, starts) in best[-1].items()
                    if start < stop
                )
                for stop in range(runs, len(sizes) + 1)
            }
        )
    return best[count][len(sizes)][1]


def _named_starts(blocks: Sequence[str], count: int, split: Sequence[str]) -> tuple[int, ...]:
    if isinstance(split, str):
        raise ConfigError(f"split is {split!r}: pass a list of names, [{split!r}]")
    for name in split:
        if name not in blocks:
            raise ConfigError(f"split names {name!r}, which is no block: take some of {', '.join(blocks)}")
    starts = (0, *(blocks.index(name) for name in split))
    if len(starts) != count:
        raise ConfigError(
            f"split names {len(split)} blocks, and there are {count} stages: name the first block of each stage but "
            "the first"
        )
    if sorted(set(starts)) != list(starts):
        raise ConfigError(
            f"split leaves a stage empty: name the first block of each stage but the first ({blocks[0]}), in ascending "
            f"order, not {list(split)}"
        )
    return starts


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """The paths of a model's blocks."""
    whole = sum(param.numel() for param in model.parameters())
    found: list[tuple[int, tuple[str, ...]]] = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            sizes = [sum(param.numel() for param in child.parameters()) for child in module]
            if 2 * sum(sizes) >= whole:
                found.append(
                    (max(sizes), tuple(f"{path}.{name}" if path else name for name, _ in module.named_children()))
                )
    if not found:
        raise ConfigError(
            f"{type(model).__name__} cannot be cut into stages: no ModuleList or Sequential in it holds half of its "
            "parameters; use ZeRO alone, shardwise.initialize(model, optimizer, 'zero3')"
        )
    return min(found)[1]


def _is_inside(name: str, path: str) -> bool:
    return name.startswith(f"{path}.")


class StageEnd(Exception):
    """Leaves a model's forward after the last block of a stage. `value` is what the next stage receives."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__("the end of a stage")
        self.value = value


class _Part(nn.Module):
    """Stands for a part of another stage, and has its plain attributes, which a model's forward may read."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        plain = (str, int, float, bool, type(None))
        own = vars(self).keys()
        vars(self).update({k: v for k, v in vars(part).items() if k not in own and isinstance(v, plain)})
        params = part._parameters.items()
        vars(self).update({name: AbsentValues.like(param) for name, param in params if param is not None})
        self._first_name = _first_name(part)

    def first(self, args: Any, kwargs: Any) -> Any:
        """The first argument of a call: of a block, the hidden states."""
        return args[0] if args else kwargs.get(self._first_name)


@dataclass
class Reception:
    """What the stage before has sent, while a micro-batch runs.

    is_over   whether the stage's first block has it
    guesses   what was taken for the hidden states alone, as a block before the stage could not be run without values
    blocks    the stage's own, by path
    """

    values: torch.Tensor | None = None
    is_over: bool = False
    guesses: list[AbsentValues] = field(default_factory=list)
    blocks: dict[str, nn.Module] = field(default_factory=dict)

    def clear(self) -> None:
        self.values, self.is_over = None, False
        self.guesses.clear()


class PartBefore(_Part):
    """A norm before the stage: computes nothing."""

    def __init__(self, part: nn.Module, path: str, reception: Reception) -> None:
        super().__init__(part)
        self.path = path
        self.reception = reception

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.reception.is_over:
            raise ConfigError(
                f"the forward uses {self.path!r} after the blocks of other stages, and its parameters are on a stage "
                "before, because it is registered there: register modules in the order of their use"
            )
        assert self.reception.values is not None, "the stage has received nothing"
        return self.blank(self.reception.values, *args, **kwargs)

    def blank(self, received: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """What the part would give."""
        return AbsentValues.like(self.first(args, kwargs))


class _BlockBefore(PartBefore):
    """A block before the stage. After the last of them, the next one takes what the stage has received.

    `shapes` is a copy of the block on the meta device. It says which container the block returns, if it runs there.
    """

    shapes: nn.Module

    def __init__(self, part: nn.Module, path: str, reception: Reception, shapes: nn.Module, is_last: bool) -> None:
        super().__init__(part, path, reception)
        self.is_last = is_last
        vars(self)["shapes"] = shapes  # not registered: none of the stage's modules
        self._returned: dict[torch.Size, Any] = {}

    def blank(self, received: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        x = self.first(args, kwargs)
        hidden = AbsentValues.like(received, received) if self.is_last else AbsentValues.like(x)
        if x.shape not in self._returned:
            self._returned[x.shape] = run_without_values(self.shapes, received.dtype, args, kwargs)
        leaves, spec = tree_flatten(self._returned[x.shape])
        places = [place for place, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
        if not places:
            self.reception.guesses.append(hidden)
            return hidden
        for place in places:
            leaves[place] = AbsentValues(leaves[place].shape, leaves[place].dtype, x.device)
        leaves[places[0]] = hidden
        return tree_unflatten(leaves, spec)


class _ProjectionBefore(PartBefore):
    """An embedding or a projection before the blocks."""

    def __init__(self, part: nn.Embedding | nn.Linear, path: str, reception: Reception) -> None:
        super().__init__(part, path, reception)
        self.is_embedding = isinstance(part, nn.Embedding)
        self.width = part.embedding_dim if isinstance(part, nn.Embedding) else part.out_features

    def blank(self, received: torch.Tensor, /, *args: Any, **kwargs: Any) -> AbsentValues:
        x = self.first(args, kwargs)
        return AbsentValues((*(x.shape if self.is_embedding else x.shape[:-1]), self.width), received.dtype, x.device)


class _EitherEnd(_Part):
    """On the last stage, a norm or a projection that is registered before the blocks: the forward uses it before them,
    where the stage computes nothing, or after them."""

    def __init__(self, part: nn.Module, path: str, reception: Reception) -> None:
        super().__init__(part)
        self.copy = part
        self.before = _stand_in(part, path, reception)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.copy if self.before.reception.is_over else self.before)(*args, **kwargs)


class _EndBlock(_Part):
    """The first block after the stage."""

    def __init__(self, part: nn.Module, path: str) -> None:
        super().__init__(part)
        self.path = path

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = self.first(args, kwargs)
        check_present(x, lambda: f"the first argument of block {self.path!r} is computed")
        if not isinstance(x, torch.Tensor):
            raise ConfigError(
                f"the model cannot be cut before block {self.path!r}: its first argument is a {type(x).__name__}, and "
                "stages send each other one tensor, the hidden states"
            )
        # A schedule detaches what it has sent in place, which a view does not allow.
        raise StageEnd(x.clone() if x._is_view() else x)


def _first_name(module: nn.Module) -> str | None:
    """The name of the first argument of a module's forward."""
    return next(iter(inspect.signature(module.forward).parameters), None)


def _check_arguments(path: str, block: nn.Module, args: Any, kwargs: Any) -> None:
    check_present((args, kwargs), lambda: f"an argument of block {path!r} is computed")


def _enter(path: str, reception: Reception, name: str | None, block: nn.Module, args: Any, kwargs: Any) -> Any:
    """The stage's first block begins with what the stage has received, also when it is recomputed."""
    reception.is_over = True
    values = args[0] if args else kwargs.get(name)
    if isinstance(values, AbsentValues) and values.received is not None:
        if args:
            args = (values.received, *args[1:])
        else:
            kwargs = {**kwargs, name: values.received}
    _check_arguments(path, block, args, kwargs)
    return args, kwargs


def _check_returned(reception: Reception, block: nn.Module, args: Any, output: Any) -> None:
    """Blocks before the stage return what its first one does."""
    if not isinstance(output, torch.Tensor) and not all(each.is_indexed for each in reception.guesses):
        raise ConfigError(
            f"blocks return {type(output).__name__} objects, and what those of other stages return cannot be told "
            "without values: take the hidden states as the first item, block(...)[0], or return them alone"
        )


class _Absent(_Part):
    """A part of the last stage: the stages before never reach it."""

    def __init__(self, part: nn.Module, path: str) -> None:
        super().__init__(part)
        self.path = path

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"the forward uses {self.path!r} before the blocks, and its parameters are on the last stage, because it "
            "is registered after them: register modules in the order of their use"
        )


def prune(model: nn.Module, where: StageCut, stage: int) -> nn.Module:
    """A copy of `model` that computes one stage. Its parameters are those of `model`; others have been taken out.

    Blocks before the stage, and on later stages what lies before the blocks, give `AbsentValues`. The stage's first
    block takes what the stage has received in their place, and the block after the stage raises `StageEnd` with what it
    is given. A parameter that the first and the last stage use is a parameter of each: see `names_on_last`.
    """
    names = [name for name, _ in model.named_parameters()]
    tensors = [*model.parameters(), *model.buffers()]
    part = copy.deepcopy(model, {id(each): each for each in tensors})
    blanks = {id(each): without_values(each) for each in tensors} if stage else {}
    own, last, reception = where.own(stage), where.count - 1, Reception()
    for index, path in enumerate(where.blocks):
        block = part.get_submodule(path)
        if index >= own.stop:
            _replace(part, path, _EndBlock(block, path))
        elif index < own.start:
            shapes = _plain(copy.deepcopy(block, dict(blanks)))
            _replace(part, path, _BlockBefore(block, path, reception, shapes, index == own.start - 1))
        elif stage:
            reception.blocks[path] = block
            check = partial(_check_arguments, path)
            if index == own.start:
                check = partial(_enter, path, reception, _first_name(block))
                block.register_forward_hook(partial(_check_returned, reception))
            block.register_forward_pre_hook(check, with_kwargs=True)
    for path, module in list(part.named_modules()):
        direct = [f"{path}.{name}" if path else name for name in module._parameters]
        outside = [name for name in direct if not any(_is_inside(name, block) for block in where.blocks)]
        if not outside or isinstance(module, _Part):
            continue
        home = 0 if _is_before(outside[0], part, where, names) else last
        if home == stage:
            if home == last and home:
                _untie(module, {name for name in names if where.stage_of(name, names) == 0}, model)
        elif home == last:
            _replace(part, path, _Absent(module, path)) if path else _blank(module)
        elif stage == last and is_at_either_end(module):
            _untie(module, {name for name in names if where.stage_of(name, names) == 0}, model)
            _replace(part, path, _EitherEnd(module, path, reception))
        elif path and not list(module.children()):
            _replace(part, path, _stand_in(module, path, reception))
        else:
            _blank(module)
    return part


def _is_before(name: str, part: nn.Module, where: StageCut, names: Sequence[str]) -> bool:
    """Whether a parameter, also a tied one by its further name, is registered before the blocks."""
    everything = [each for each, _ in part.named_modules()]
    holder = name.rpartition(".")[0]
    if name in names:
        return where.stage_of(name, names) == 0
    return everything.index(holder) < everything.index(where.blocks[0])


def is_at_either_end(module: nn.Module) -> bool:
    """Whether a module that is registered before the blocks may be used before or after them: OPT has its last norm
    there."""
    return isinstance(module, nn.Linear) or (_is_norm(module) and not list(module.children()))


def names_on_last(model: nn.Module, where: StageCut) -> dict[str, str]:
    """Parameters that the first and the last stage both have, with their names on the last one."""
    names, modules = list(dict(model.named_parameters())), dict(model.named_modules(remove_duplicate=False))
    paths = list(modules)
    first = {id(param): name for name, param in model.named_parameters() if where.stage_of(name, names) == 0}
    found: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        if where.count == 1 or id(param) not in first:
            continue
        if paths.index(path) > paths.index(where.blocks[-1]):
            found.setdefault(first[id(param)], name)
        elif paths.index(path) < paths.index(where.blocks[0]) and is_at_either_end(modules[path]):
            found.setdefault(first[id(param)], f"{path}.copy.{leaf}")
    return found


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _stand_in(module: nn.Module, path: str, reception: Reception) -> PartBefore:
    if isinstance(module, (nn.Embedding, nn.Linear)):
        return _ProjectionBefore(module, path, reception)
    if _is_norm(module):
        return PartBefore(module, path, reception)
    raise ConfigError(
        f"the model cannot be cut: stages after the first do not know what to compute for {path!r} "
        f"({type(module).__name__}), which comes before the blocks; known are Embedding, Linear and norms"
    )


def _blank(module: nn.Module) -> None:
    """Replace parameters that the model holds itself."""
    for name, param in list(module._parameters.items()):
        if param is not None:
            del module._parameters[name]
            vars(module)[name] = AbsentValues.like(param)


def _plain(module: nn.Module) -> nn.Module:
    """A copy on the meta device computes eagerly with whole tensors: the hooks of tensor parallelism cut them."""
    for each in module.modules():
        each._forward_hooks.clear()
        each._forward_pre_hooks.clear()
        each._compiled_call_impl = None
    return module


def _untie(module: nn.Module, elsewhere: set[str], model: nn.Module) -> None:
    """Give a module of the last stage parameters of its own in place of those that the first stage has too."""
    theirs = {id(param) for name, param in model.named_parameters() if name in elsewhere}
    for name, param in module._parameters.items():
        if param is not None and id(param) in theirs:
            module._parameters[name] = nn.Parameter(param.detach().clone(), param.requires_grad)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module
