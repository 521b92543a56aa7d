from . import base_optimizer, config, engine, lr_schedules, utils, zero
