from shardwise._version import __version__ as _own_version
from shardwise.compat.activation import DEEPSPEED_VERSION as _version
from shardwise.compat.names import torch_info

version = f"{_version}+shardwise.{_own_version}"
git_hash = git_branch = None
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}
