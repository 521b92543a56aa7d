"""What torch functions do with a tensor, as far as guards on parameters have to know."""

import pytest
import torch
from torch import nn

from shardwise.unit.tensor_use import _ALIAS_ATTRIBUTES, _ALIASES, _METADATA, Use, kind_of, name_of, uses

ATTRIBUTE = {"numpy_T": "T", "matrix_H": "H"}
# On sparse and nested tensors, of forward-mode differentiation, of TorchScript, of storage that is pinned already.
NO_ALIAS_OF_A_PARAMETER = """
as_tensor ccol_indices coalesce col_indices crow_indices get indices keys lift_fresh local_value pin_memory pop
row_indices setdefault slice_inverse to_here values
"""


def test_all_of_torchs_views_are_aliases():
    views = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    }
    public = {ATTRIBUTE.get(name, name) for name in views if not name.startswith("_") or name == "__getitem__"}
    assert public - _ALIASES - _ALIAS_ATTRIBUTES == set(NO_ALIAS_OF_A_PARAMETER.split())


def test_every_name_is_one_of_torchs():
    places = (torch.Tensor, torch, torch.autograd, torch.autograd.graph)
    for name in _METADATA | _ALIASES | _ALIAS_ATTRIBUTES:
        assert any(hasattr(place, name) for place in places) or name in ("alias", "slice", "linalg_diagonal"), name


@pytest.mark.parametrize(
    ("func", "use"),
    [
        (torch.Tensor.shape.__get__, Use.METADATA),
        (torch.Tensor.is_cuda.__get__, Use.METADATA),
        (torch.Tensor.grad.__set__, Use.METADATA),
        (torch.Tensor.data.__get__, Use.ALIAS),
        (torch.Tensor.T.__get__, Use.ALIAS),
        (torch.Tensor.data.__set__, Use.WRITE),
        (torch.Tensor.detach, Use.ALIAS),
        (torch.ops.aten.detach.default, Use.ALIAS),
        (torch.is_floating_point, Use.METADATA),
        (torch.Tensor.is_nonzero, Use.READ),
        (torch.Tensor.__cuda_array_interface__.__get__, Use.READ),
        (torch.Tensor.__eq__, Use.READ),
        (torch.Tensor.__setitem__, Use.WRITE),
        (torch.Tensor.fill_, Use.WRITE),
        (nn.init.zeros_, Use.WRITE),
        (nn.functional.linear, Use.READ),
    ],
)
def test_kinds(func, use):
    assert kind_of(func) is use


def test_names():
    assert name_of(torch.Tensor.sum) == "sum"
    assert name_of(torch.Tensor.T.__get__) == "T"
    assert name_of(torch.Tensor.data.__set__) == "data = ..."


def test_what_becomes_of_each_argument():
    ours, other = torch.zeros(2), torch.zeros(2)

    def found(func, *args, **kwargs):
        return [use for _, use in uses(func, args, kwargs, lambda value: value is ours)]

    assert found(torch.Tensor.copy_, ours, other) == [Use.WRITE]
    assert found(torch.Tensor.copy_, other, ours) == [Use.READ]
    assert found(torch._foreach_add_, [other, ours], [other, other]) == [Use.WRITE]
    assert found(torch._foreach_add_, [other], [ours]) == [Use.READ]
    assert found(torch.add, other, other, out=ours) == [Use.WRITE]
    assert found(nn.init.zeros_, tensor=ours) == [Use.WRITE]
    assert found(torch.Tensor.expand_as, ours, other) == [Use.ALIAS]
    assert found(torch.Tensor.expand_as, other, ours) == []
    assert found(torch.Tensor.to, other, ours) == []
    assert found(torch.Tensor.__getitem__, other, ours) == [Use.READ]
    assert found(torch.cat, [other, ours]) == [Use.READ]
    assert found(torch.Tensor.size, ours) == []
