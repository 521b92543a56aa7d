from shardwise.compat.comm import (
    __getattr__,
    all_gather_into_tensor,
    configure,
    get_all_ranks_from_group,
    get_local_rank,
    get_world_group,
    has_all_gather_into_tensor,
    inference_all_reduce,
    init_distributed,
    is_available,
    is_initialized,
    log_summary,
)
