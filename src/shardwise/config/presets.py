"""The placement table: the only place where a stage has a meaning.

| preset       | weights     | grads                                           | optim      |
|--------------|-------------|-------------------------------------------------|------------|
| zero0        | replicated  | replicated                                      | replicated |
| zero1        | replicated  | replicated, reduced once a step                 | sharded    |
| zero2        | replicated  | sharded, reduced every micro-batch              | sharded    |
| zero3        | sharded     | sharded                                         | sharded    |
| zero3_hybrid | over a node | over a node; across nodes, reduced once a step  | sharded    |

`_offload` places optim (and zero3's weights) on the host, `_nvme` on the disk. Gradient shards are then copied to the
host as they are reduced. Replicated gradients stay on the device until they are reduced.
"""

import os
import tempfile
from pathlib import Path

from shardwise.config.sections import KindPlacement, Placement, Tier

_REPLICATED = KindPlacement(sharding="replicated")
_SHARDED = KindPlacement(sharding="sharded")
_NODE = KindPlacement(sharding="node")


def offloaded(row: Placement, *, weights: Tier = "device", optim: Tier = "device") -> Placement:
    """`row` with weights and optim on other tiers; gradient shards go to the host where optim is off the device."""
    grads_leave = optim != "device" and row.grads.sharding == "sharded"
    return Placement(
        weights=KindPlacement(sharding=row.weights.sharding, tier=weights),
        grads=KindPlacement(sharding=row.grads.sharding, tier="host" if grads_leave else "device"),
        optim=KindPlacement(sharding=row.optim.sharding, tier=optim),
    )


STAGES = (
    Placement(weights=_REPLICATED, grads=_REPLICATED, optim=_REPLICATED),
    Placement(weights=_REPLICATED, grads=_REPLICATED, optim=_SHARDED),
    Placement(weights=_REPLICATED, grads=_SHARDED, optim=_SHARDED),
    Placement(weights=_SHARDED, grads=_SHARDED, optim=_SHARDED),
)

STAGE_PRESETS = ("zero0", "zero1", "zero2", "zero3")
PRESETS: dict[str, Placement] = dict(zip(STAGE_PRESETS, STAGES, strict=True)) | {
    "zero3_hybrid": Placement(weights=_NODE, grads=_NODE, optim=_SHARDED),
    "zero1_offload": offloaded(STAGES[1], optim="host"),
    "zero2_offload": offloaded(STAGES[2], optim="host"),
    "zero3_offload": offloaded(STAGES[3], weights="host", optim="host"),
    "zero3_nvme": offloaded(STAGES[3], weights="disk", optim="disk"),
}


def disk_folder() -> str:
    """The folder for states on the disk where a preset needs one and nothing names it: `TMPDIR`, or `/var/tmp`.

    Not `/tmp`, which is in memory on many systems, and not the working directory, which may be a network's.
    """
    usual = Path("/var/tmp")
    return os.environ.get("TMPDIR") or (str(usual) if os.access(usual, os.W_OK) else tempfile.gettempdir())


def preset_name(placement: Placement) -> str | None:
    """The preset whose row `placement` is, if any."""
    return next((name for name, row in PRESETS.items() if row == placement), None)
