"""`shardwise compare`: the same model and data trained under each preset and by peers, measured side by side.

rows      what is compared: presets and peers, and which interpreter runs each
workload  the model and its data, built in or from `file.py:function`
crew      the parent's side of a row's processes; `worker` is the processes' side
systems   one way to train per row: shardwise, plain torch, DDP, FSDP2 (`deepspeed_peer`: DeepSpeed)
observed  memory and wire of a step, from outside
session   the order of things: observe every row, then time them all in interleaved rounds
result    the figures and their JSON; `verdict` judges them; `table` and `plot` show them
"""

from shardwise.compare.job import Settings
from shardwise.compare.result import Comparison, Run
from shardwise.compare.session import compare, five_ways

__all__ = ["Comparison", "Run", "Settings", "compare", "five_ways"]
