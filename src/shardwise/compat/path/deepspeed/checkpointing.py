from torch.utils.checkpoint import checkpoint

from shardwise.compat.recompute import configure, is_configured, reset
