"""A pipeline as checkpoints see it: one model, of which each rank has some stages.

A checkpoint of a pipeline is one of the whole model, keyed by the names that parameters have in it. So any other number
of stages, another cut, a mesh without pp and a plain engine load it, and a pipeline loads theirs. A weight that the
first and the last stage both have is stored once, under its name on the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.checkpoint.checkpointable import ModelParts, persistent_buffers
from shardwise.comm.model_group import Everyone, ModelGroup
from shardwise.engine import Engine
from shardwise.partition.stored import stored_tensors
from shardwise.pipelining.tied import TiedWeights


def names_of(model: nn.Module) -> tuple[str, ...]:
    """The names under which a checkpoint stores the tensors of a whole model."""
    return (*stored_tensors(model), *persistent_buffers(model))


def model_parts(engines: Sequence[Engine], stages: ModelGroup, names: tuple[str, ...], tied: TiedWeights) -> ModelParts:
    """The stages of this rank as parts of the model that all ranks of the pipeline train."""
    everyone = Everyone(engines[0].comm, stages)
    return ModelParts(engines, everyone, stages.size, names, {last: first for first, last in tied.names.items()})
