"""The names under which files hold a model's tensors.

transformers renames the tensors of some architectures when it loads them, and makes one parameter of several: files of
Mixtral have matrices for each expert, of which the model has one tensor for all. Such a parameter is its tensors one
after the other, so that ranks still read only the rows that they need.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn


def stored_names(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Of each name that the model may have, the `names` of the tensors that it consists of, in the order of elements.

    A name that files have and the model does not stands for itself.
    """
    if not any(base.__module__.partition(".")[0] == "transformers" for base in type(model).__mro__):
        return {name: (name,) for name in names}
    return _converted(model, names)


def _converted(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """As transformers loads them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # transformers before 5
        return {name: (name,) for name in names}
    own = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    prefix = getattr(model, "base_model_prefix", "") or None  # files of a model without a head lack it
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    joining = [each for each in transforms if isinstance(each, WeightConverter)]
    converters = {pattern: each for each in joining for pattern in each.source_patterns}
    found: dict[str, tuple[str, ...]] = {}
    pieces: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, joining, prefix, own)
        if name in own or renamed not in own:
            found[name] = (name,)
        elif pattern is None:
            found[renamed] = (name,)
        else:
            pieces[renamed][pattern].append(name)
    for renamed, by_pattern in pieces.items():
        converter = converters[next(iter(by_pattern))]
        lists = [by_pattern[pattern] for pattern in converter.source_patterns if pattern in by_pattern]
        if _is_stacked(converter.operations, len(lists)) and len(set(map(len, lists))) == 1:
            found[renamed] = tuple(name for row in zip(*lists, strict=True) for name in row)
        else:
            found.update({name: (name,) for names in lists for name in names})
    return found


def _is_stacked(operations: list[Any], lists: int) -> bool:
    """Whether the result is the tensors one after the other: those of each list stacked, and lists joined by rows."""
    kinds = [(type(each).__name__, getattr(each, "dim", None)) for each in operations]
    return kinds == [("MergeModulelist", 0), ("Concatenate", 1)][: 1 + (lists > 1)]
