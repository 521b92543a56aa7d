from shardwise.compat.names import instrument_w_nvtx
