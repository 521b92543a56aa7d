from shardwise.compat.hosts import fetch_hostfile, parse_inclusion_exclusion, parse_resource_filter
from shardwise.compat.hosts import parse_hostfile as _parse_hostfile
from shardwise.compat.launcher import DEEPSPEED_ENVIRONMENT_NAME, main

if __name__ == "__main__":
    main()
