from shardwise.compat.absent import refused
from shardwise.compat.optimizer import DeepSpeedZeroOptimizer_Stage3

_PLAN = "`shardwise plan MODEL` predicts the memory of every stage"
estimate_zero3_model_states_mem_needs_all_live = refused("estimate_zero3_model_states_mem_needs_all_live", _PLAN)
estimate_zero3_model_states_mem_needs_all_cold = refused("estimate_zero3_model_states_mem_needs_all_cold", _PLAN)
