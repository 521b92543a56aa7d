"""Checkpoints that are complete or absent and load at any layout: what `engine.save` and `engine.load` do.

    folder/step-100/manifest.json            what is stored where, sizes and checksums, counters, the user's state
                    rank-00000.safetensors   the elements that rank 0 owned: values, optimizer state, generators
                    rank-00001.safetensors   ...

checkpointable           what this package needs of an engine
contents                 what one rank writes of it
saving, loading          between an engine and a folder; one save may be under way
files, manifest, plain   tensors in checksummed files, where they lie, other values without pickle
folder                   commit, retention
storage, object_store    where files live: a file system, or an object store
training_state           counters, groups and schedules, checked before an engine takes them over
export, hub_folder       a folder as Hugging Face reads it; PEFT's adapters in it
inspect                  a description in words
deepspeed                conversion from DeepSpeed's checkpoints
"""

from shardwise.checkpoint.export import MAX_FILE_BYTES, export
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.saving import Saver

__all__ = ["MAX_FILE_BYTES", "Saver", "export", "load"]
