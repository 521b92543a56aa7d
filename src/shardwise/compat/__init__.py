"""The API of DeepSpeed over the engine: what `import deepspeed` gives when shardwise takes its place.

    path/deepspeed/               the package `deepspeed`; its modules are rows of a table in `modules`
    path/deepspeed-*.dist-info/   the metadata by which clients find a DeepSpeed and compare its version
    path/bin/deepspeed            its launcher

activation         how that folder gets on the path: `shardwise run --as-deepspeed`, a variable, an import
modules            DeepSpeed's modules by name: where each one's names come from, and what is not served
launcher           the command `deepspeed`
checkpoints        `save_checkpoint`, `load_checkpoint`, `zero_to_fp32`, `ds_to_universal`

standalone/        what works without an engine
  comm, accelerator  what DeepSpeed puts around torch.distributed and torch.cuda
  settings           DeepSpeed's configuration classes and enumerations
  schedules          DeepSpeed's learning-rate schedules as classes
  recompute          `deepspeed.checkpointing`
  monitors           `deepspeed.monitor`
  ops                DeepSpeed's optimizers and kernels by name
  utils              timers, constants and small functions by DeepSpeed's names

zero/              parameters as `deepspeed.zero` shows them
  zero               `zero.Init`, `zero.GatheredParameters`, leaf modules
  parameters         the attributes of parameters under stage 3, and shards before there is an engine
  fragments          `safe_get_full_grad` and its relatives

engine/            `deepspeed.initialize` and what it returns
  initialize         `deepspeed.initialize`: arguments and configuration, in DeepSpeed's form
  engine             `DeepSpeedEngine`, the methods that clients and users call
  facts              what it answers about itself
  gradients          what is done with gradients around a backward
  optimizer          what `initialize` returns beside the engine
  clients            what single clients need beyond that API

Nothing here computes anything of its own: it translates calls. `import deepspeed` loads none of these but `activation`
and `modules`, and the others import the engine inside functions.
"""
