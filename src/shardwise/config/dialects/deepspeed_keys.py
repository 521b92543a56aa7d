"""The keys of DeepSpeed's JSON by section: how each is read, the native path it sets, and its effect in `explain()`."""

from shardwise.config.dialects.rules import ANY_OTHER, BY_CODE, Alias, KeyRule, Refused, Rules
from shardwise.config.values import any_value, bound, choice, flag, real, text
from shardwise.sizes import parse_bytes, whole

_DTYPE_NAMES = {
    "fp32": ("fp32", "float32", "float", "torch.float32", "torch.float"),
    "bf16": ("bf16", "bfloat16", "bfp16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16", "torch.half"),
}


def dtype(value: object) -> str | None:
    """A dtype by any of its common names; "none" is the default."""
    names = {name: dtype for dtype, names in _DTYPE_NAMES.items() for name in names} | {"none": None}
    return names[choice(*names)(value)]


def clip_norm(value: object) -> float | None:
    """A norm; 0 switches clipping off."""
    norm = real(value)
    if norm < 0:
        raise ValueError("expected a norm >= 0 (0: no clipping)")
    return norm or None


def steps(value: object) -> int | None:
    """A number of steps; None (never) for infinity and 0."""
    return bound(value) or None


def scale_power(value: object) -> float:
    power = whole(value)
    if power > 64:
        raise ValueError("expected a power of two up to 64")
    return float(2**power)


def mean_alone(value: object) -> object:
    """The only value of gradient_allreduce_op that changes nothing."""
    if value != "mean":
        raise ValueError("gradients are averaged over the ranks: remove the key, or multiply the loss by their number")
    return value


def counted(value: object) -> bool:
    """The only value of managed_gradient_accumulation that changes nothing."""
    if not flag(value):
        raise ValueError(
            "the engine counts the micro-batches of a step: remove the key, and say which step() updates with "
            "engine.set_boundary(), or engine.set_gradient_accumulation_boundary() of DeepSpeed's API"
        )
    return True


_BOUND = "derived here; acts as an upper bound"
_UNIT = "no effect: communication goes unit by unit, not in buckets"
_STAYS_GATHERED = "derived here: a unit stays gathered where that does not raise the peak"
_ALWAYS = "no effect: always on here"
_UPDATE = "no effect: the update goes unit by unit"
_MASTER = "16-bit master weights (the master copy is fp32 here)"

ZERO: Rules = {
    **dict.fromkeys(("stage", "offload_param", "offload_optimizer", "aio", "zero_hpz_partition_size"), BY_CODE),
    "reduce_bucket_size": KeyRule(bound, _BOUND, "gradients.reduce_bucket_bytes", in_elements=True),
    "allgather_bucket_size": KeyRule(bound, _BOUND, "runtime.gather_bucket_bytes", in_elements=True),
    "stage3_prefetch_bucket_size": KeyRule(bound, _BOUND, "runtime.prefetch_bytes", in_elements=True),
    "stage3_max_live_parameters": KeyRule(bound, _BOUND, "runtime.max_gathered_bytes", in_elements=True),
    "stage3_param_persistence_threshold": KeyRule(bound, _STAYS_GATHERED),
    "stage3_model_persistence_threshold": KeyRule(bound, _STAYS_GATHERED),
    "stage3_max_reuse_distance": KeyRule(bound, "no effect: a unit is released after its use"),
    "stage3_gather_16bit_weights_on_model_save": KeyRule(flag, "no effect: engine.export() always writes full weights"),
    "stage3_use_all_reduce_for_fetch_params": KeyRule(flag, "no effect: weights are gathered"),
    "stage3_module_granularity_threshold": KeyRule(bound, "no effect: whole blocks are units already"),
    "stage3_allgather_sequential": KeyRule(flag, _UNIT),
    "stage3_partition_stream_chunk_size": KeyRule(bound, _UNIT),
    "stage3_adaptive_prefetch_bucket_size": KeyRule(flag, _UNIT),
    "stage3_adaptive_prefetch_min_size": KeyRule(bound, _UNIT),
    "stage3_adaptive_prefetch_max_size": KeyRule(bound, _UNIT),
    "sub_group_size": KeyRule(bound, _UPDATE),
    "overlap_comm": KeyRule(flag, "no effect: communication always overlaps, at no cost in memory or bits"),
    "contiguous_gradients": KeyRule(flag, "no effect: gradients always land in one flat buffer per unit"),
    "reduce_scatter": KeyRule(flag, "no effect: each rank always receives only the sum of its shard"),
    "allgather_partitions": KeyRule(flag, "no effect: updated weights are always gathered"),
    "round_robin_gradients": KeyRule(flag, "no effect: shards are of equal size"),
    "use_multi_rank_bucket_allreduce": KeyRule(flag, _UNIT),
    "load_from_fp32_weights": KeyRule(flag, "no effect: checkpoints always hold the fp32 master"),
    "elastic_checkpoint": KeyRule(flag, "no effect: every checkpoint loads at any world size"),
    "ignore_unused_parameters": KeyRule(flag, "no effect: unused parameters are reduced as zeros"),
    "legacy_stage1": KeyRule(flag, "no effect: there is one implementation"),
    "memory_efficient_linear": KeyRule(flag, "no effect: no layer is replaced"),
    "pipeline_loading_checkpoint": KeyRule(flag, "no effect: loading streams shard by shard"),
    "override_module_apply": KeyRule(flag, "no effect: see shardwise.deferred_init()"),
    "log_trace_cache_warnings": KeyRule(flag, "no effect: there is no trace to invalidate"),
    "enable_sanity_checks": KeyRule(flag, "no effect: agreement of all ranks is always checked"),
    "mics_hierarchical_params_gather": KeyRule(flag, "no effect without mics_shard_size"),
    "leaf_module": KeyRule(any_value, "no effect: whole blocks are units, so branches inside do not matter"),
    "save_muon_momentum_buffer_in_memory": KeyRule(flag, _UPDATE),
    "mics_shard_size": Refused("MiCS (shards inside sub-groups of ranks)"),
    "zenflow": Refused("ZenFlow (stale updates of unimportant gradients)"),
    "zero_quantized_gradients": Refused("ZeRO++ (quantised gradients)"),
    "zero_quantized_nontrainable_weights": Refused("ZeRO++ (quantised weights)"),
    "zero_quantized_weights": Refused("ZeRO++ (quantised weights)"),
    "zeropp_loco_param": Refused("ZeRO++ LoCo"),
    "stage3_gather_fp16_weights_on_model_save": Alias("stage3_gather_16bit_weights_on_model_save", deprecated=True),
    "gather_fp16_weights_on_model_save": Alias("stage3_gather_16bit_weights_on_model_save", deprecated=True),
    "allgather_size": Alias("allgather_bucket_size", deprecated=True),
    "stage3_leaf_module": Alias("leaf_module"),
}
ZERO |= {
    key.removeprefix("stage3_"): Alias(key)
    for key, rule in ZERO.items()
    if key.startswith("stage3_") and isinstance(rule, KeyRule)
}

OFFLOAD: Rules = {
    "device": BY_CODE,
    "pin_memory": KeyRule(flag, "page-locks host buffers", "offload.pin_memory", keep_larger=True),
    "buffer_count": KeyRule(whole, _BOUND, "offload.buffer_count", keep_larger=True),
    "super_offload": Refused("SuperOffload"),
}
OFFLOAD_PARAM: Rules = OFFLOAD | {
    "nvme_path": KeyRule(text, "folder for states on disk", "offload.weights_nvme_path"),
    "buffer_size": KeyRule(bound, _BOUND, "offload.buffer_bytes", in_elements=True),
    "max_in_cpu": KeyRule(bound, "no effect: offload.host_memory is the budget of the host"),
}
OFFLOAD_OPTIMIZER: Rules = OFFLOAD | {
    "nvme_path": KeyRule(text, "folder for states on disk", "offload.nvme_path"),
    "ratio": KeyRule(real, "part of the optimizer states that leaves the device", "offload.ratio"),
    **dict.fromkeys(("pipeline", "pipeline_read", "pipeline_write"), KeyRule(flag, _ALWAYS)),
    "fast_init": KeyRule(flag, "no effect: states are created where they rest"),
    "convert_grad_on_cpu": KeyRule(flag, "no effect: gradients are converted on the device"),
    "cpuadam_cores_perc": KeyRule(real, "no effect: states are updated by the device's own kernel"),
}

FP16: Rules = {
    "loss_scale_window": KeyRule(whole, "good steps before the scale doubles", "precision.loss_scale.window"),
    "hysteresis": KeyRule(whole, "overflows before the scale halves", "precision.loss_scale.hysteresis"),
    "consecutive_hysteresis": KeyRule(
        flag, "a good step resets the hysteresis count", "precision.loss_scale.consecutive_hysteresis"
    ),
    "min_loss_scale": KeyRule(real, "the scale never goes below this", "precision.loss_scale.minimum"),
    "initial_scale_power": KeyRule(scale_power, "the first scale, as a power of two", "precision.loss_scale.initial"),
    "auto_cast": KeyRule(flag, "casts the model's inputs", "precision.cast_inputs"),
    "opt_level": KeyRule(any_value, "no effect: a setting of Apex"),
    **dict.fromkeys(("enabled", "loss_scale"), BY_CODE),
}
BF16: Rules = {
    **{key: KeyRule(any_value, "no effect: bf16 has the range of fp32 and needs no loss scale") for key in FP16},
    "check_grad_overflow": Refused("skipping steps in bf16 whose gradients are not finite (it is done in fp16)"),
    "immediate_grad_update": KeyRule(flag, _ALWAYS),
    "enabled": BY_CODE,
    "bf16_master_weights_and_grads": Refused(_MASTER),
    "bf16_optimizer_states": Refused("16-bit optimizer states (they are fp32 here)"),
}
FP16["fp16_master_weights_and_grads"] = Refused(_MASTER)

HALVES = {"fp16": FP16, "bf16": BF16}

TORCH_AUTOCAST: Rules = {
    **dict.fromkeys(("enabled", "dtype"), BY_CODE),
    "lower_precision_safe_modules": KeyRule(any_value, "no effect: torch.autocast's own lists decide"),
}

OPTIMIZER: Rules = {
    **dict.fromkeys(("type", "params"), BY_CODE),
    "legacy_fusion": KeyRule(any_value, "no effect: a setting of Apex"),
}
SCHEDULER: Rules = dict.fromkeys(("type", "params"), BY_CODE)

# Sections that the rules alone describe.
SECTIONS: dict[str, Rules] = {
    "data_types": {
        "grad_accum_dtype": KeyRule(dtype, "dtype gradients are added up in", "precision.accumulate_dtype"),
    },
    "aio": {
        "block_size": KeyRule(whole, "size of one read or write", "offload.aio.block_bytes"),
        "queue_depth": KeyRule(whole, "requests in flight", "offload.aio.queue_depth"),
        "thread_count": KeyRule(whole, "threads that issue them", "offload.aio.threads"),
        "intra_op_parallelism": KeyRule(whole, "threads that issue them", "offload.aio.threads"),
        "single_submit": KeyRule(flag, "no effect: requests are submitted as they arrive"),
        "overlap_events": KeyRule(flag, _ALWAYS),
        "use_gds": KeyRule(flag, "no effect: files are read and written through pinned host memory", warns=True),
    },
    "activation_checkpointing": {
        "cpu_checkpointing": KeyRule(flag, "keeps saved activations in host memory", "checkpointing.offload"),
        "partition_activations": KeyRule(flag, "no effect: there is no tensor parallelism to partition over"),
        "contiguous_memory_optimization": KeyRule(flag, "no effect: saved activations are not copied into one buffer"),
        "number_checkpoints": KeyRule(any_value, "no effect: each unit is one checkpoint"),
        "synchronize_checkpoint_boundary": KeyRule(flag, "no effect: checkpoint boundaries do not synchronize"),
        "profile": KeyRule(flag, "no effect: wall_clock_breakdown times every phase"),
    },
    "checkpoint": {
        "load_universal": KeyRule(flag, "no effect: every checkpoint loads at any world size, stage and tier"),
        "tag_validation": KeyRule(choice("ignore", "warn", "fail"), "no effect: all ranks save under one tag"),
        "parallel_write": KeyRule(any_value, "no effect: every rank writes its own shard"),
        "writer": KeyRule(any_value, "no effect: there is one writer"),
        "checkpoint_serialization": KeyRule(flag, "no effect: there is one format"),
        "use_node_local_storage": KeyRule(
            any_value, "no effect: all ranks write into one folder, which all nodes must reach", warns=True
        ),
    },
    # Settings that DeepSpeed does not have. It ignores unknown top-level keys, so such a file still works there.
    "shardwise": {
        "checkpointing": KeyRule(flag, "recomputes each unit's activations in backward", "checkpointing.enabled"),
        "device_memory": KeyRule(parse_bytes, "states beyond this budget are offloaded", "offload.device_memory"),
    },
    "compile": {
        "deepcompile": Refused("DeepCompile"),
        "enabled": Refused("compilation by DeepSpeed (call torch.compile on the model instead)"),
        "passes": Refused("DeepCompile's passes"),
        ANY_OTHER: KeyRule(any_value, "no effect: call torch.compile on the model instead"),
    },
}

TOP: Rules = {
    "gradient_clipping": KeyRule(clip_norm, "clips the exact global norm under any placement", "gradients.clip_norm"),
    "steps_per_print": KeyRule(steps, "steps between printed lines", "runtime.steps_per_print"),
    "wall_clock_breakdown": KeyRule(flag, "times every phase", "runtime.timers"),
    "communication_data_type": KeyRule(dtype, "dtype of gradients on the wire", "precision.reduce_dtype"),
    "train_batch_size": KeyRule(whole, "samples per step over all ranks", "batch.global_batch_size"),
    "train_micro_batch_size_per_gpu": KeyRule(whole, "samples per rank and micro-batch", "batch.micro_batch_size"),
    "gradient_accumulation_steps": KeyRule(whole, "micro-batches per step (K)", "batch.accumulation"),
    "zero_allow_untested_optimizer": KeyRule(flag, "no effect: every element-wise optimizer is supported"),
    "zero_force_ds_cpu_optimizer": KeyRule(
        flag, "no effect: states off the device are updated by the device's own kernel"
    ),
    "sparse_gradients": KeyRule(flag, "no effect: gradients of embeddings are sent whole", warns=True),
    "gradient_allreduce_op": KeyRule(mean_alone, "the mean over the ranks"),
    "managed_gradient_accumulation": KeyRule(counted, "the engine counts the micro-batches of a step"),
    "prescale_gradients": KeyRule(flag, "no effect: the sum is divided once, after it is reduced"),
    "gradient_predivide_factor": KeyRule(real, "no effect: the sum is divided once, after it is reduced"),
    "log_level": KeyRule(text, "no effect: `import deepspeed` sets the level of DeepSpeed's logger"),
    "disable_allgather": KeyRule(flag, "no effect: updated weights are always gathered, during the next forward"),
    "dataloader_drop_last": KeyRule(flag, "no effect: the data loader is the caller's"),
    "seq_parallel_communication_data_type": KeyRule(dtype, "no effect: there is no sequence parallelism"),
    "dump_state": KeyRule(flag, "no effect: explain() shows the configuration, engine.report() the state"),
    "memory_breakdown": KeyRule(flag, "no effect: engine.report() always includes it"),
    "use_data_before_expert_parallelism": KeyRule(flag, "no effect: there is no expert parallelism"),
    **dict.fromkeys(SECTIONS, BY_CODE),
    **dict.fromkeys(("bf16", "fp16", "optimizer", "scheduler", "torch_autocast", "zero_optimization"), BY_CODE),
    # These log and do not change the weights, so a warning is enough.
    **dict.fromkeys(
        ("comet", "comms_logger", "csv_monitor", "flops_profiler", "tensorboard", "timers", "wandb"),
        KeyRule(any_value, "no effect: shardwise writes no such logs; see engine.report()", warns=True),
    ),
    "bfloat16": Alias("bf16", deprecated=True),
    "train_micro_batch_size": Alias("train_micro_batch_size_per_gpu", deprecated=True),
    "amp": Refused("NVIDIA Apex's mixed precision (use fp16, bf16 or torch_autocast)"),
    "autotuning": Refused("DeepSpeed's autotuner"),
    "compression_training": Refused("compression (quantisation, pruning, layer reduction)"),
    "curriculum_learning": Refused("curriculum learning"),
    "data_efficiency": Refused("data efficiency (random-LTD, curriculum sampling)"),
    "eigenvalue": Refused("eigenvalues for quantisation"),
    "elasticity": Refused("DeepSpeed's elastic batch sizes"),
    "expert_parallel": Refused("expert parallelism"),
    "fp8": Refused("fp8"),
    "graph_harvesting": Refused("harvesting of CUDA graphs"),
    "hybrid_engine": Refused("the hybrid engine of DeepSpeed-Chat"),
    "nebula": Refused("checkpoints in Azure Nebula"),
    "pipeline": Refused("pipeline parallelism"),
    "progressive_layer_drop": Refused("progressive layer drop"),
    "quantize_training": Refused("quantised training (MoQ)"),
    "sequence_parallel_size": Refused("sequence parallelism (Ulysses)"),
    "sparse_attention": Refused("sparse attention"),
    "tensor_parallel": Refused("tensor parallelism (AutoTP)"),
    "weight_quantization": Refused("quantised weights"),
}

OPTIMIZER_FEATURES = {
    "onebitadam": "compressed communication (1-bit Adam)",
    "zerooneadam": "compressed communication (0/1 Adam)",
    "onebitlamb": "compressed communication (1-bit LAMB)",
    **dict.fromkeys(("lamb", "fusedlamb"), "LAMB, which is not element-wise"),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "µP scaling"),
}
OPTIMIZER_NO_EFFECT = {
    "torch_adam": "the kernel is always torch's; with true, the default weight decay is torch's too",
    "adam_w_mode": "decides between Adam and AdamW",
    "set_grad_none": "no effect: gradients are views of flat buffers",
    "fp32_optimizer_states": "no effect: states are fp32",
}
