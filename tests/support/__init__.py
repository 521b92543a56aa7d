"""What the tests stand on: functions run on real ranks, commands under a time limit, covering arrays.

A multi-process test is a function of (rank, world_size); it runs in `world_size` processes over Gloo::

    from support import ranks

    @ranks(1, 2, 3, 4)
    def test_sum(rank, world_size):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        assert x.item() == sum(range(world_size))
"""

from support.commands import CommandFailed, run_command
from support.matrix import covering, matrix
from support.pool import Outcome
from support.ranks import RanksFailed, close_pools, ranks, run_ranks

__all__ = [
    "CommandFailed",
    "Outcome",
    "RanksFailed",
    "close_pools",
    "covering",
    "matrix",
    "ranks",
    "run_command",
    "run_ranks",
]
