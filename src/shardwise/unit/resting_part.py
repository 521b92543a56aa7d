"""Weights that a rank holds and does not update: its node's part, where the masters are sharded over all ranks.

The master's segment is a part of it. An update is followed by a gather of the new weights over the other nodes, into
this part; a use of the unit, by a gather over the node, into the full buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.comm import DONE, Handle
from shardwise.config.shape import Axis
from shardwise.memory import Buffer
from shardwise.partition import Span


@dataclass
class RestingPart:
    """Weights that rest beside the master: elements `span`, whose place in the full buffer is `place`. After an update
    they are gathered over `axes`, and `arriving` until that has ended."""

    span: Span
    buffer: Buffer
    place: torch.Tensor
    axes: Sequence[Axis]
    arriving: Handle = DONE

    def wait(self) -> None:
        self.arriving.wait()
        self.arriving = DONE
