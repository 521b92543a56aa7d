from shardwise.compat.names import UNIVERSAL_CHECKPOINT_INFO

from . import constants, utils
