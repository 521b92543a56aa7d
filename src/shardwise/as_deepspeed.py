"""Import this module first, and `import deepspeed` is shardwise in the rest of the script and in its clients.

>>> import shardwise.as_deepspeed
>>> import deepspeed
>>> deepspeed.__version__.partition("+")[0]
'0.16.3'
"""

from shardwise.compat.activation import activate

activate()
