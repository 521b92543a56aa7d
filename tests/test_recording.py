"""Deferred tensors have the values of ordinary construction, for all that constructors do."""

import gc
import weakref

import pytest
import torch
from torch import nn

from shardwise.deferred.recording import SMALL_BYTES, deferred_storage, random_operations, recording, session_of, value


class Everything(nn.Module):
    """What constructors of common models do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, 32, padding_idx=3)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64)
        self.copies = nn.ModuleList(nn.modules.transformer._get_clones(nn.Linear(80, 80), 2))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(80, 80))
        self.lstm = nn.LSTM(32, 32, 1)
        self.conv = nn.Conv2d(8, 8, 3)
        nn.init.dirac_(self.conv.weight)
        self.bent = nn.Linear(100, 64)
        nn.init.orthogonal_(self.bent.weight)
        self.cut_off = nn.Linear(100, 64)
        nn.init.trunc_normal_(self.cut_off.weight, std=0.02)
        self.own = nn.Parameter(torch.randn(80, 160) / 13)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]
        self.first = self.own[0, 0].item()
        self.largest = bool((self.own > 0.4).any())
        self.apply(self.again)
        self.product = nn.Parameter(self.own.detach()[:40] @ self.own.detach().t())
        self.own.data.mul_(2)  # does not change the tensors computed from it before
        self.half = nn.Linear(100, 90).half()
        self.tied = nn.Linear(32, 200, bias=False)
        self.tied.weight = self.embed.weight
        self.replaced = nn.Linear(90, 90)
        self.replaced.weight.data = torch.full((90, 90), 0.5)
        self.from_generator = nn.Parameter(torch.empty(90, 90))
        nn.init.normal_(self.from_generator, generator=torch.Generator().manual_seed(5))
        self.register_buffer("mask", torch.tril(torch.ones(100, 100)), persistent=False)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8192, 2) / 8192))

    def again(self, module):
        """A second initialisation after all modules are built, as in transformers."""
        if isinstance(module, nn.Linear) and not nn.utils.parametrize.is_parametrized(module):
            module.weight.data.normal_(0, 0.02)


def everything(model):
    return [*model.named_parameters(), *model.named_buffers()]


@pytest.mark.parametrize("small_bytes", [0, SMALL_BYTES], ids=["all deferred", "large deferred"])
def test_values_and_generator_are_those_of_ordinary_construction(small_bytes):
    torch.manual_seed(3)
    plain = Everything()
    drawn = torch.rand(3)
    torch.manual_seed(3)
    with recording(small_bytes=small_bytes):
        deferred = Everything()
    assert torch.equal(torch.rand(3), drawn)
    assert (deferred.rates, deferred.first, deferred.largest) == (plain.rates, plain.first, plain.largest)
    before = torch.get_rng_state()
    for (name, expected), (_, tensor) in reversed([*zip(everything(plain), everything(deferred), strict=True)]):
        is_deferred = deferred_storage(tensor) is not None
        assert is_deferred or tensor.nbytes <= small_bytes, name
        seen = value(tensor)
        assert torch.equal(seen, expected), name
        assert (seen.dtype, seen.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_remembered_of_a_model_that_is_gone():
    class Session:
        pass

    session = Session()
    with recording(session):
        model = Everything()
    tensors = [tensor for _, tensor in everything(model)]
    assert all(session_of(tensor) is session for tensor in tensors)
    storages = [weakref.ref(deferred_storage(tensor)) for tensor in tensors if deferred_storage(tensor) is not None]
    session = weakref.ref(session)
    gc.collect()
    assert storages
    assert all(storage() for storage in storages)
    del model, tensors
    while gc.collect():
        pass  # the first pass frees the storages of modules in cycles, the next their operations
    assert not any(storage() for storage in storages)
    assert not session()


def test_overwritten_values_are_not_made_again():
    with recording():
        weight = torch.empty(100, 100).normal_()
        weight.uniform_()
        weight[3].fill_(0)
    storage = deferred_storage(weight)
    assert [operation.func._schema.name for operation in storage.writes] == [
        "aten::empty",
        "aten::normal_",
        "aten::uniform_",
        "aten::fill_",
    ]
    done = []
    for operation in storage.writes:
        operation.func = Noted(operation.func, done)
    assert value(weight)[3].sum() == 0
    assert done == ["aten::uniform_", "aten::fill_"]
    assert len(random_operations([storage])) == 2


class Noted:
    def __init__(self, func, done):
        self.func, self.done, self._schema = func, done, func._schema

    def __call__(self, *args, **kwargs):
        self.done.append(self._schema.name)
        return self.func(*args, **kwargs)


def test_an_error_of_the_user_is_the_one_that_torch_raises():
    with recording(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(100, 100) @ torch.ones(99, 100)
