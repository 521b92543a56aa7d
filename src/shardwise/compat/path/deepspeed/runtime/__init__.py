from . import base_optimizer, config, dataloader, engine, lr_schedules, utils, zero
