from shardwise.compat.comm import (
    __getattr__,
    all_gather_into_tensor,
    configure,
    get_local_rank,
    init_distributed,
    is_available,
    is_initialized,
    log_summary,
)
