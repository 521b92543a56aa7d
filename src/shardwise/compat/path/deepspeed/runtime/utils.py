from shardwise.compat.accelerator import empty_cache, see_memory_usage
from shardwise.compat.names import call_to_str, clip_grad_norm_
