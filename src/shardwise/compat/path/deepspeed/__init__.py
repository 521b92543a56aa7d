"""DeepSpeed's API, served by shardwise: the table in `shardwise.compat.modules` says where its names come from."""

import sys

from shardwise.compat.modules import serve

serve(sys.modules[__name__])

from . import comm as dist  # noqa: E402  # found by what `serve` installs
from .git_version_info import git_branch as __git_branch__  # noqa: E402
from .git_version_info import git_hash as __git_hash__  # noqa: E402
from .git_version_info import version as __version__  # noqa: E402

version = __version__
__version_major__, __version_minor__, __version_patch__ = map(int, __version__.partition("+")[0].split("."))
