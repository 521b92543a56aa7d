"""`shardwise compare`: trains the same model on the same data under each preset and by peers, and measures all.

command   the command line's part: checks, progress, output
job       settings, rows (presets and peers), and what one process of a row needs to know
session   the order of a comparison: observe every row, then time all rows in interleaved rounds; the processes of a row
worker    one rank of a row
systems   how each row trains: shardwise, plain torch, DDP, FSDP2, DeepSpeed
result    the figures, their JSON and the verdicts
report    both as tables and as a figure
"""

from shardwise.compare.job import Settings
from shardwise.compare.result import Comparison, Run
from shardwise.compare.session import compare, five_ways

__all__ = ["Comparison", "Run", "Settings", "compare", "five_ways"]
