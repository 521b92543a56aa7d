from shardwise.compat.comm import *
from shardwise.compat.comm import __getattr__, get_local_rank
