"""The API of DeepSpeed over the engine: what `import deepspeed` gives when shardwise takes its place.

    path/deepspeed/               the package `deepspeed`; its modules are rows of a table in `modules`
    path/deepspeed-*.dist-info/   the metadata by which clients find a DeepSpeed and compare its version
    path/bin/deepspeed            its launcher

activation         how that folder gets on the path: `shardwise run --as-deepspeed`, a variable, an import
modules            DeepSpeed's modules by name: where each one's names come from, and what is not served
initialize         `deepspeed.initialize`: arguments and configuration, in DeepSpeed's form
engine             `DeepSpeedEngine`, the methods that clients and users call
engine_facts       what it answers about itself
gradients          what is done with gradients around a backward
optimizer          what `initialize` returns beside the engine
zero               `zero.Init`, `zero.GatheredParameters`, leaf modules
zero_parameters    the attributes of parameters under stage 3, and shards before there is an engine
fragments          `safe_get_full_grad` and its relatives
checkpoints        `save_checkpoint`, `load_checkpoint`, `zero_to_fp32`, `ds_to_universal`
settings           DeepSpeed's configuration classes and enumerations
schedules          DeepSpeed's learning-rate schedules as classes
recompute          `deepspeed.checkpointing`
comm, accelerator  what DeepSpeed puts around torch.distributed and torch.cuda
ops                DeepSpeed's optimizers and kernels by name
launcher           the command `deepspeed`
clients            what single clients need beyond that API
utils              constants and small functions by DeepSpeed's names

Nothing here computes anything of its own: it translates calls. `import deepspeed` loads none of these but `activation`
and `modules`, and the others import the engine inside functions.
"""
