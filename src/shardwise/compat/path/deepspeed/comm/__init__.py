from shardwise.compat.comm import (
    __getattr__,
    configure,
    get_local_rank,
    init_distributed,
    is_available,
    is_initialized,
    log_summary,
)
