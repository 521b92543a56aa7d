"""Whether the ranks of a tp axis get equal gradients for the parameters that each of them holds whole.

A norm sees the same activations on all of them. A projection that is left whole between parts that are cut does not:
each rank has the gradients of its own heads, and the copies of the weight drift apart. Plain torch says nothing either.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.comm import Comm
from shardwise.errors import Notices
from shardwise.unit import Unit, norm

_UPDATES = 2  # in the first, gradients may be zero, as those of half an adapter
_TOLERANCE, _NEGLIGIBLE = 0.05, 1e-3


class ReplicaCheck:
    """Compares these gradients in the first updates, and warns once."""

    def __init__(self, comm: Comm, notices: Notices) -> None:
        self._comm = comm
        self._notices = notices
        # A dry run has no group, and no values.
        self._left = _UPDATES if comm.model_group.group is not None else 0

    def check(self, units: Sequence[Unit]) -> None:
        """Before an update, with final gradients. A collective; waits for the device."""
        if not self._left:
            return
        self._left -= 1
        names, parts = [], []
        for unit in units:
            if unit.is_trainable and not unit.grads.shard.is_offloaded:
                here, shard = unit.layout.shard(self._comm.shard_index), unit.grads.shard.tensor
                for slot in unit.layout.slots:
                    if slot.spec.part is not None and slot.spec.part.dim is None:
                        own = slot.span.intersect(here)
                        names.append(slot.spec.name)
                        parts.append([shard[own.shift(-here.start).slice]] if own else [])
        if not names:
            return
        sums = self._comm.share(norm.sums_of_squares(parts, self._comm)).sum(dim=0)
        norms = self._comm.read(self._comm.model_group.share(sums).sqrt())
        least, most = norms.amin(dim=0), norms.amax(dim=0)
        differ = (most - least > _TOLERANCE * most + _NEGLIGIBLE * most.max()) & most.isfinite()
        if differ.any():
            self._left = 0
            *_, last = (name for name, each in zip(names, differ.tolist(), strict=True) if each)
            self._notices.say(
                "gradients of a copy",
                f"the {len(norms)} ranks of the tp axis have different gradients for {int(differ.sum())} parameters "
                f"that each of them holds whole, the last of them {last!r}, so the copies drift apart. If each rank "
                "has a part of the gradient (some heads, some of the sequence), add the parts up in "
                "param.register_hook, and those of the module's input, or cut the parameter too; if the ranks draw "
                "other random numbers (dropout), give them the same seed",
            )
