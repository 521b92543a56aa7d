from shardwise.compat.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)
