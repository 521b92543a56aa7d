"""The dimensions of the trained model: named sizes, and overrides."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from shardwise.config.sections import Section
from shardwise.config.values import nearest, one_of
from shardwise.errors import ConfigError
from shardwise.models.dimensions import Dimensions
from shardwise.sizes import format_count
from shardwise.train.corpus import BYTES


class Shape(Section):
    """The dimensions of a decoder.

    >>> Shape(layers=2, hidden=64, heads=2, context=128).parameters
    139584
    """

    layers: int = Field(ge=1)
    hidden: int = Field(ge=8)
    heads: int = Field(ge=1)
    context: int = Field(ge=2)
    vocabulary: int = Field(default=BYTES, ge=2)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden {self.hidden} must be a multiple of 2 x heads ({self.heads})")
        return self

    @property
    def dimensions(self) -> Dimensions:
        """Those of a Llama. The width inside a layer is 8/3 of hidden, a multiple of 32."""
        width = -(-8 * self.hidden // 96) * 32
        return Dimensions("llama", self.hidden, self.layers, self.heads, self.vocabulary, width)

    @property
    def parameters(self) -> int:
        return self.dimensions.parameters

    def __str__(self) -> str:
        return (
            f"{format_count(self.parameters)} parameters: {self.layers} layers, hidden {self.hidden}, "
            f"{self.heads} heads, context {self.context}"
        )


SIZES: dict[str, dict[str, int]] = {
    "nano": {"layers": 2, "hidden": 32, "heads": 2, "context": 64},
    "small": {"layers": 4, "hidden": 128, "heads": 4, "context": 128},
    "10m": {"layers": 6, "hidden": 384, "heads": 6, "context": 256},
    "100m": {"layers": 12, "hidden": 768, "heads": 12, "context": 1024},
    "1b": {"layers": 24, "hidden": 2048, "heads": 16, "context": 2048},
    "7b": {"layers": 32, "hidden": 4096, "heads": 32, "context": 4096},
}


def shape_of(size: str, vocabulary: int, **given: int | None) -> Shape:
    """A named size with some of its dimensions replaced. Raises a ConfigError for an invalid one.

    >>> shape_of("small", 256, layers=8).layers
    8
    """
    if size not in SIZES:
        raise ConfigError(f"--size {size}: expected {one_of(SIZES)}{nearest(size, SIZES)}")
    values: dict[str, Any] = SIZES[size] | {key: value for key, value in given.items() if value is not None}
    try:
        return Shape(vocabulary=vocabulary, **values)
    except ValidationError as error:
        first = error.errors()[0]
        where = f"--{first['loc'][0]} {values.get(str(first['loc'][0]), vocabulary)}: " if first["loc"] else ""
        raise ConfigError(f"{where}{first['msg'].removeprefix('Value error, ')}") from None
