from shardwise.compat.names import ZeroStageEnum
from shardwise.compat.settings import zero_section_named as __getattr__
