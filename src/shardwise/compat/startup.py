"""Imported by the start-up file of `shardwise as-deepspeed --install` in processes that have the variable set."""

import os
import sys

from shardwise.compat.activation import FORCE, VARIABLE, activate, installed_deepspeed

_VERSION = None if os.environ.get(VARIABLE) == FORCE else installed_deepspeed()
if _VERSION is None:
    activate()
elif os.environ.get("RANK", "0") == "0":
    print(
        f"shardwise: DeepSpeed {_VERSION} is installed and is used; {VARIABLE}={FORCE} puts shardwise in its place",
        file=sys.stderr,
    )
