from shardwise.compat.comm import is_initialized
from shardwise.compat.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from shardwise.compat.leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from shardwise.compat.loading import OnDevice, RepeatingLoader
from shardwise.compat.names import instrument_w_nvtx, log_dist, logger

from . import groups, init_on_device, logging, nvtx, tensor_fragment, torch, zero_to_fp32
