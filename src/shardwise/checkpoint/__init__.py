"""Checkpoints that nothing can tear and that load anywhere: what is behind `engine.save` and `engine.load`.

    folder/step-100/manifest.json            what is stored where, sizes and checksums, counters, the user's state
                    rank-00000.safetensors   the elements that rank 0 owned: values, optimizer state, generators
                    rank-00001.safetensors   ...

`saving` and `loading` tie together: `contents` (what an engine's rank writes), `files` and `blocks` (streamed,
checksummed bytes), `manifest` and `ranges` (what lies where), `folder` (commit and retention), `plain` (values without
pickle), `background` (asynchronous saves). `export`, `inspect` and `deepspeed` work without an engine.
"""

from shardwise.checkpoint.background import Background
from shardwise.checkpoint.export import MAX_FILE_BYTES, export
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.saving import prepare, save

__all__ = ["MAX_FILE_BYTES", "Background", "export", "load", "prepare", "save"]
