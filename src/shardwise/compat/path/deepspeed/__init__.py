"""DeepSpeed's API, served by shardwise: the table in `shardwise.compat.modules` says where its names come from."""

import sys

from shardwise.compat.activation import git_branch, git_hash, version
from shardwise.compat.modules import serve

serve(sys.modules[__name__])

__version__ = version
__version_major__, __version_minor__, __version_patch__ = map(int, __version__.partition("+")[0].split("."))
__git_hash__, __git_branch__ = git_hash, git_branch
dist = sys.modules[__name__].comm
