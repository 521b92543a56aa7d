from shardwise.compat.names import ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LION_OPTIMIZER
from shardwise.compat.settings import config_named as __getattr__
from shardwise.errors import ConfigError as DeepSpeedConfigError
