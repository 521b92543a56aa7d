from . import base_optimizer, config, dataloader, engine, fp16, lr_schedules, utils, zero
