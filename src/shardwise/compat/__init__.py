"""The API of DeepSpeed over the engine: what `import deepspeed` gives when shardwise takes its place.

    path/deepspeed/               DeepSpeed's modules by their names; each only imports from the modules here
    path/deepspeed-*.dist-info/   the metadata by which clients find a DeepSpeed and compare its version
    path/bin/deepspeed            its launcher

activation         how that folder gets on the path: `shardwise run --as-deepspeed`, a variable, an import
initialize         `deepspeed.initialize`: arguments and configuration, in DeepSpeed's form
engine             `DeepSpeedEngine`, the methods that clients and users call
engine_facts       what it answers about itself
optimizer          what `initialize` returns beside it, and DeepSpeed's optimizers by name
zero               `zero.Init`, `zero.GatheredParameters`, and the attributes of parameters
early_shard        what a rank holds of a parameter before there is an engine
fragments          `safe_get_full_grad` and its relatives
checkpoints        `save_checkpoint`, `load_checkpoint`, `zero_to_fp32`
universal          `ds_to_universal`
settings           DeepSpeed's configuration classes by name, made in setting_models
outputs            what is done to gradients that enter a model
schedules          DeepSpeed's learning-rate schedules as classes
comm, accelerator  what DeepSpeed puts around torch.distributed and torch.cuda
launcher, hosts    the command `deepspeed`
unused             the check for parameters without a gradient
retraining         a second `train()` of Trainer
absent             what is not served, by name
leaves, loading    small contexts and loaders around an engine
names, groups, experts, recompute, op_builder, lazy_schedules   constants and small functions by DeepSpeed's names

Nothing here computes anything of its own: it translates calls. `import deepspeed` loads little more than torch, so
modules import the engine inside functions.
"""
