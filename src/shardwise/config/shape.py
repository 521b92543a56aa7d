"""ZeRO's ranks as nodes of equal size, and the parts that a sharding cuts a unit into. Integers only.

    rank           0     1     2     3     4     5        2 nodes x 3 ranks
    node, local   0,0   0,1   0,2   1,0   1,1   1,2
    shard          0     2     4     1     3     5

The ranks of a shape span two axes: `inner`, the ranks of one node, and `outer`, the ranks with one local index, one in
each node. Shards are in the order of local indices, and of nodes within one: so what the ranks with one local index own
together is contiguous, and is what a rank holds whose part is cut over the inner axis alone.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Sharding = Literal["replicated", "node", "sharded"]
Axis = Literal["inner", "outer"]

AXES: dict[Sharding, tuple[Axis, ...]] = {"replicated": (), "node": ("inner",), "sharded": ("inner", "outer")}
"""The axes over which each sharding cuts, in the order in which a reduction passes them; a gather goes backwards."""


def axes_between(fine: Sharding, coarse: Sharding) -> tuple[Axis, ...]:
    """The axes that `fine` is cut over and `coarse` is not.

    >>> axes_between("sharded", "node")
    ('outer',)
    """
    return tuple(axis for axis in AXES[fine] if axis not in AXES[coarse])


class NodeShape(NamedTuple):
    """`nodes` nodes of `per_node` ranks each.

    >>> shape = NodeShape(nodes=2, per_node=3)
    >>> [shape.shard_index(rank) for rank in range(6)]
    [0, 2, 4, 1, 3, 5]
    """

    nodes: int
    per_node: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.per_node

    @property
    def is_flat(self) -> bool:
        """Whether one axis has all ranks."""
        return self.nodes == 1 or self.per_node == 1

    def size(self, axis: Axis) -> int:
        return self.per_node if axis == "inner" else self.nodes

    def place(self, axis: Axis, rank: int) -> int:
        """The place of a rank on an axis: its local index, or its node."""
        return rank % self.per_node if axis == "inner" else rank // self.per_node

    def along(self, axis: Axis, rank: int) -> list[int]:
        """The ranks that differ from `rank` at most on one axis, in their order there."""
        node, local = divmod(rank, self.per_node)
        if axis == "inner":
            return [node * self.per_node + other for other in range(self.per_node)]
        return [other * self.per_node + local for other in range(self.nodes)]

    def shard_index(self, rank: int) -> int:
        """Which of the W shards a rank owns: in a flat shape, that of its own number."""
        node, local = divmod(rank, self.per_node)
        return local * self.nodes + node

    def parts(self, sharding: Sharding) -> int:
        """How many parts a sharding cuts into."""
        return {"replicated": 1, "node": self.per_node, "sharded": self.world_size}[sharding]

    def part_index(self, sharding: Sharding, rank: int) -> int:
        """Which of these parts a rank holds."""
        return {"replicated": 0, "node": rank % self.per_node, "sharded": self.shard_index(rank)}[sharding]

    def resolve(self, sharding: Sharding) -> Sharding:
        """The same sharding without "node" where an axis has one rank: "node" is all ranks then, or one."""
        if sharding != "node" or not self.is_flat:
            return sharding
        return "sharded" if self.nodes == 1 else "replicated"

    def __str__(self) -> str:
        return f"{self.nodes} nodes x {self.per_node}" if self.nodes > 1 else f"{self.per_node}"


def shape_of(ranks: "int | NodeShape") -> NodeShape:
    """A shape, or the flat one of so many ranks."""
    return ranks if isinstance(ranks, NodeShape) else NodeShape(1, ranks)


def shape_on_nodes(ranks: Sequence[int], ranks_per_node: int) -> NodeShape:
    """The shape of some ranks of the world, whose nodes have `ranks_per_node` consecutive ones; flat where the nodes
    have different numbers of them, or the ranks of a node do not follow one another.

    >>> shape_on_nodes([0, 2, 4, 6], ranks_per_node=4), shape_on_nodes([0, 1, 2], ranks_per_node=2)
    (NodeShape(nodes=2, per_node=2), NodeShape(nodes=1, per_node=3))
    """
    nodes = [rank // ranks_per_node for rank in ranks]
    counts = {node: nodes.count(node) for node in nodes}
    is_even = nodes == sorted(nodes) and len(set(counts.values())) == 1
    return NodeShape(len(counts), len(ranks) // len(counts)) if is_even else NodeShape(1, len(ranks))
