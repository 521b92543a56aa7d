from shardwise.compat.names import OffloadDeviceEnum, OffloadStateTypeEnum
from shardwise.compat.settings import offload_section_named as __getattr__
