"""Checkpoints that nothing can tear and that load anywhere: what is behind `engine.save` and `engine.load`.

    folder/step-100/manifest.json            what is stored where, sizes and checksums, counters, the user's state
                    rank-00000.safetensors   the elements that rank 0 owned: values, optimizer state, generators
                    rank-00001.safetensors   ...

`save` and `load` tie together: `contents` (what an engine's rank writes), `files` and `blocks` (streamed, checksummed
bytes), `manifest` and `ranges` (what lies where), `folder` (commit and retention), `plain` (values without pickle).
"""

from shardwise.checkpoint.background import Background
from shardwise.checkpoint.load import load
from shardwise.checkpoint.save import prepare, save

__all__ = ["Background", "load", "prepare", "save"]
