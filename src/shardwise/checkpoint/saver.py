"""The saves of one training, of which one may be under way."""

from __future__ import annotations

from typing import Any

from shardwise.checkpoint.checkpointable import ModelParts
from shardwise.checkpoint.saving import AsyncSave, prepare, save
from shardwise.checkpoint.storage import Location


class Saver:
    """Saves a model, at once or in the background: then until the next save, `finish` or `leave`."""

    def __init__(self) -> None:
        self._under_way: AsyncSave | None = None

    def save(
        self,
        model: ModelParts,
        root: str | Location,
        tag: str | None,
        blocking: bool,
        state: Any,
        keep: int | None,
        frozen: bool,
        midway: bool = False,
    ) -> Location:
        """Save after what is under way; see `Engine.save`. A collective."""
        self.finish()
        write = prepare(model, root, tag, state, keep, not blocking, frozen, midway)
        if blocking:
            save(write, model.everyone)
        else:
            self._under_way = AsyncSave(write, model.everyone)
        return write.draft.target

    def finish(self) -> None:
        """Wait until what is under way is complete; raise what went wrong. A collective."""
        saving, self._under_way = self._under_way, None
        if saving is not None:
            saving.finish()

    def leave(self) -> None:
        """Wait for this rank's part of what is under way, without the other ranks."""
        saving, self._under_way = self._under_way, None
        if saving is not None:
            saving.leave()
