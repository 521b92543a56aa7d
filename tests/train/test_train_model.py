"""The model is Llama's: its size, its first loss, what each position sees, its rotary positions, its exported names."""

import math

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.models.decoder import rotate, rotation
from shardwise.train.job import SIZES, Shape, model_shape
from shardwise.train.run import LanguageModel, hub_config

SMALL = Shape(layers=2, hidden=32, heads=2, context=16)


def test_parameters_are_counted_without_building():
    for shape in (SMALL, model_shape("small", 256), Shape(layers=1, hidden=48, heads=3, context=8, vocabulary=1000)):
        assert sum(param.numel() for param in LanguageModel(shape).parameters()) == shape.parameters


@pytest.mark.parametrize(("size", "low", "high"), [("nano", 3e4, 6e4), ("small", 7e5, 1e6), ("10m", 9e6, 1.2e7)])
def test_sizes_are_what_they_are_called(size, low, high):
    assert low < model_shape(size, 256).parameters < high


def test_large_sizes_are_what_they_are_called():
    assert [round(model_shape(size, 32000).parameters / 1e9, 1) for size in ("100m", "1b", "7b")] == [0.1, 1.3, 6.7]
    assert all(model_shape(size, 256) for size in SIZES)


def test_the_first_loss_is_that_of_a_guess():
    torch.manual_seed(0)
    tokens = torch.randint(256, (8, 17))
    loss = LanguageModel(SMALL)(tokens[:, :-1], tokens[:, 1:])
    assert abs(loss.item() - math.log(256)) < 0.1


def test_a_position_sees_what_is_before_it_and_nothing_after():
    torch.manual_seed(0)
    model, tokens = LanguageModel(SMALL), torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(-1).all()


def test_rotated_products_depend_on_the_distance_alone():
    q, k = torch.randn(8), torch.randn(8)
    turn = rotation(20, 8, q)
    products = [rotate(q, turn[:, at]) @ rotate(k, turn[:, at + 3]) for at in (0, 5, 16)]
    assert torch.allclose(products[0], torch.stack(products), atol=1e-5)
    assert not torch.allclose(products[0], rotate(q, turn[:, 0]) @ rotate(k, turn[:, 4]), atol=1e-3)


@pytest.mark.full  # importing transformers takes longer than all of this file
def test_hugging_face_reads_the_exported_names():
    transformers = pytest.importorskip("transformers", reason="transformers is the extra hf")
    torch.manual_seed(0)
    ours = LanguageModel(SMALL)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hub_config(SMALL)))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    tokens = torch.randint(256, (2, 16))
    assert torch.allclose(theirs(tokens).logits, ours(tokens), atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": "smal"}, "--size smal: expected .*; did you mean 'small'"),
        ({"layers": 0}, "--layers 0: "),
        ({"hidden": 60}, "hidden 60 must be a multiple of 2 x heads"),
        ({"context": 1}, "--context 1: "),
    ],
)
def test_bad_shapes(given, message):
    with pytest.raises(ConfigError, match=message):
        model_shape(**{"size": "small", "vocabulary": 256} | given)
