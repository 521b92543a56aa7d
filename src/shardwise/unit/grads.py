"""The gradients of a unit: where autograd leaves them, how they are reduced, what is held of them.

Names, used throughout:
- *strays*: gradients as autograd itself makes them, in `p.grad`.
- *full*: where gradients are replicated, the unit's flat gradients of this rank. AutogradGrads are moved there when the
  backward leaves the unit, and `p.grad` is then a view of it, to which later micro-batches add in place, until the
  reduction.
- *held*: where gradients are sharded, this rank's shard of the reduced gradients. Those of autograd are packed
  as they are sent, all at once or in pieces (see `budget`), and live for one micro-batch.
  Where gradients rest on the host, it leaves when it is made, and is recalled to add the next micro-batch.
- *reduced*: the mean over the ranks of this rank's shard, wherever it is: `held`, or its slot in `full`.

Until the reduction, what `p.grad` says is the truth, also if the user changed or replaced it; after it, it is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import nn

from shardwise.comm.comm import Comm, Handle
from shardwise.memory.ledger import Buffer, Entry, Kind, Ledger, Tier
from shardwise.memory.reduce_plan import GradSizes, ReducePlan, UpdateSizes
from shardwise.offload.streams import Event
from shardwise.offload.unit_states import GRADS, UnitStates
from shardwise.partition.layout import Layout
from shardwise.partition.policy import Policy
from shardwise.profiling import mark
from shardwise.unit import norm
from shardwise.unit.reduce import PLAINLY, AutogradGrads, FlatGrads, Packing, ReduceScatter, Source, block_numel


class Grads:
    """The gradients of one trainable unit."""

    def __init__(
        self,
        name: str,
        params: Sequence[nn.Parameter],
        layout: Layout,
        policy: Policy,
        comm: Comm,
        ledger: Ledger,
        states: UnitStates | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self._states = states if states is not None and GRADS in states else None
        self._sum: torch.Tensor | None = None
        self._recalled: Event | None = None
        self.is_reduced = False
        self.has_gradients = False
        self.reduce_plan = ReducePlan()
        self._params = list(params)
        self._layout = layout
        self._comm = comm
        self._ledger = ledger
        self._shard = layout.shard(comm.rank)
        self._gathering: Handle | None = None
        self._exchange: ReduceScatter | None = None
        self._strays = Entry(Kind.GRADS, f"{name} (local)", Tier.DEVICE)
        entry = Entry(Kind.GRADS, name, Tier.DEVICE)
        self._held = Buffer(ledger, entry, layout.shard_numel, policy.accumulate_dtype, comm.device)
        self._full: Buffer | None = None
        self._whole: Buffer | None = None
        # At W = 1 there is nobody to send to: gradients go straight to where they are held.
        self._is_alone = comm.world_size == 1 and policy.reduce_dtype == policy.grad_dtype
        if not policy.grads_sharded:
            self._full = Buffer(ledger, entry, layout.numel, policy.grad_dtype, comm.device)
            self._packing = Packing(self._full, layout)
        elif self._is_alone:
            self._packing = Packing(self._held, layout)
        else:
            work = Entry(Kind.WORK, name, Tier.DEVICE)
            self._packing = Packing(Buffer(ledger, work, layout.numel, policy.reduce_dtype, comm.device), layout)
        for param in self._params:
            param.grad = None
            # Lets an fp32 view collect the gradients of a 16-bit parameter.
            param.grad_dtype = policy.grad_dtype

    @property
    def reduced(self) -> torch.Tensor:
        """This rank's shard of the reduced gradients; in a fresh tensor, where they rest on the host."""
        assert self.is_reduced, f"the gradients of {self.name} are not reduced yet"
        if self._states is not None:
            dtype = self._states.storages[GRADS].dtype
            copy = torch.empty(self._states.numel, dtype=dtype, device=self._comm.device)
            self._states.offload.streams.wait(self._states.recall(GRADS, copy))
            return copy
        return self._held.tensor if self._full is None else self._full.tensor[self._shard.slice]

    @property
    def sum_of_squares(self) -> torch.Tensor:
        """Of the reduced shard, fp64, on the device; where it rests on the host, known since it left."""
        return norm.sums_of_squares([self.reduced], self._comm)[0] if self._sum is None else self._sum

    @property
    def is_away(self) -> bool:
        """Whether the reduced shard rests on the host."""
        return self._states is not None

    @property
    def is_in_flight(self) -> bool:
        """Whether a reduction is under way."""
        return self._exchange is not None

    def edit(self, change: Callable[[torch.Tensor], None]) -> None:
        """Call `change` on the reduced shard, which it may write to."""
        shard = self.reduced
        change(shard)
        if self._states is not None:
            self._sum = norm.sums_of_squares([shard], self._comm)[0]
            keep = [shard]
            self._states.rest(GRADS, shard, keep.clear)

    @cached_property
    def sizes(self) -> GradSizes:
        """What the unit's gradients take, for the choice of their reduce_plan."""
        item = self.policy.grad_dtype.itemsize
        largest = max((slot.span.numel for slot in self._layout.slots), default=0)
        row = self._layout.shard_numel * self.policy.reduce_dtype.itemsize
        is_exact = self.policy.reduce_dtype == torch.float32  # added up where the parts lie
        return GradSizes(
            full=self._layout.numel * item,
            rested=self._layout.numel * self.policy.accumulate_dtype.itemsize,
            largest=largest * item,
            held=self._held.size_bytes if self._states is None else 0,  # it leaves at once
            sent=row * self._comm.world_size,
            received=row * self._comm.rows_received,
            shard_numel=self._layout.shard_numel,
            block_numel=0 if is_exact else block_numel(self._layout.shard_numel, self._comm.kernels),
        )

    @cached_property
    def cast_bytes(self) -> int:
        """What the gradients that an update of this rank needs take in fp32; nothing where they are in fp32."""
        is_exact = self._resting.tensor.dtype == torch.float32
        return 0 if is_exact else self._owned_numel * torch.float32.itemsize

    @cached_property
    def update_sizes(self) -> UpdateSizes:
        """What the unit's update makes of its gradients, where they are on the device."""
        whole = self._layout.numel * self._resting.tensor.dtype.itemsize if self._makes_whole else 0
        cast = self.cast_bytes
        return UpdateSizes(self._owned_numel, whole + cast, cast - self._resting.size_bytes if cast else whole)

    @property
    def _resting(self) -> Buffer:
        """What gradients rest in from the reduction to the update."""
        return self._held if self._full is None else self._full

    @property
    def _owned_numel(self) -> int:
        """How many elements this rank updates."""
        return self._layout.shard_numel if self.policy.optim_sharded else self._layout.numel

    def open(self) -> None:
        """The backward reaches the unit: gradients are about to arrive."""
        self._begin()
        self._recall()
        self._ledger.set_bytes(self._strays, self._arriving_bytes())

    def _arriving_bytes(self) -> int:
        """What autograd makes: all gradients of the unit, or, to add to those that are there, one at a time."""
        sizes, weights, grads = self.sizes, self.policy.weight_dtype, self.policy.grad_dtype
        if self._full is None or not self._full.live:
            return sizes.full
        cast = sizes.largest // grads.itemsize * weights.itemsize if weights != grads else 0
        return sizes.largest + cast

    def _begin(self) -> None:
        self.has_gradients = True
        if self.is_reduced and self._full is not None:
            raise RuntimeError(
                f"the gradients of {self.name} were already reduced in this step, and another backward would add to "
                "them: call backward once on the sum of the losses, or inside engine.no_sync() all but the last "
                'time, or set gradients.reduce_at to "step"'
            )

    def collect(self) -> None:
        """Move the strays of this micro-batch into `full`, where gradients are replicated."""
        if self._full is None:
            return
        if not self._full.live:
            self._full.allocate()
        views, params = self._packing.views, self._params
        if not any(param.grad is view for param, view in zip(params, views, strict=True)):
            self._packing.fill(params)
        else:
            for param, view in zip(params, views, strict=True):
                if param.grad is None:
                    view.zero_()
                elif param.grad is not view:
                    view.copy_(param.grad.detach())
        for param, view in zip(params, views, strict=True):
            param.grad = view
        self._ledger.set_bytes(self._strays, 0)

    def start_reduce(self) -> None:
        """Send every rank its part. `finish_reduce` waits for ours and adds it up."""
        with mark("reduce", self.name):
            self._begin()
            self.collect()
            if self._is_alone:
                self._keep()
                return
            source = self._source()
            self._exchange = ReduceScatter(
                self.name, source, self._layout, self.policy.reduce_dtype, self.reduce_plan.pieces, self._ledger
            )
            self._exchange.start(self._comm)
            if self._full is not None:
                self._let_go()

    def _source(self) -> Source:
        if self._full is not None:
            return FlatGrads(self._full.tensor.view(self._layout.world_size, -1))
        return AutogradGrads(self._params, self._layout, self._packing, self._let_go)

    def _keep(self) -> None:
        """One rank's gradients are the sum over all ranks."""
        self._recall()
        self._await_recalled()
        if self._full is None and self._held.live:
            self._packing.add(self._params)
        elif self._full is None:
            self._held.allocate()
            self._packing.fill(self._params)
        self._let_go()
        self.is_reduced = True
        self._offload_shard()

    def finish_reduce(self) -> None:
        """Hold the mean over the ranks of this rank's shard, added to that of earlier micro-batches."""
        assert self._exchange is not None
        with mark("reduce", self.name):
            self._exchange.finish(self._comm, self._target)
            self._exchange = None
            self.is_reduced = True
            self._offload_shard()

    def late_gradient(self) -> bool:
        """Whether a gradient arrived after the unit was reduced, and so is in nobody's sum."""
        with PLAINLY():
            return self.is_reduced and any(param.grad is not None for param in self._params)

    def start_gather(self) -> None:
        """Where the optimizer is replicated: bring the reduced gradients of all ranks to every rank."""
        if self.policy.optim_sharded or self._comm.world_size == 1 or self._gathering is not None:
            return
        if self._makes_whole:
            self._whole = self._whole_buffer()
        self._gathering = self._comm.gather(self._everything, "reduce", self.name)

    def owned(self) -> torch.Tensor:
        """The reduced gradients of the elements whose optimizer state this rank holds."""
        if self.policy.optim_sharded or self._comm.world_size == 1:
            return self.reduced
        self.start_gather()
        assert self._gathering is not None
        self._gathering.wait()
        return self._everything

    def full_copy(self) -> torch.Tensor:
        """The whole unit's reduced gradients, in a fresh tensor. A collective."""
        full = self.reduced.new_empty(self._layout.numel)
        full[self._shard.slice] = self.reduced
        self._comm.gather(full, "control", self.name).wait()
        return full

    def forget(self) -> None:
        """The gradients of this step are used, or on their way to it: the next ones start anew."""
        self.abandon()
        self.is_reduced = self.has_gradients = False
        self._sum = None

    def clear(self) -> None:
        """Forget the gradients of this step and free their buffers."""
        self.forget()
        self._await_recalled()
        if self._states is not None:
            self._states.offload.streams.drain()
        self._held.free()
        if self._whole is not None:
            self._whole.free()
            self._whole = None
        self._let_go()
        if self._full is not None:
            self._full.free()

    def abandon(self) -> None:
        """Wait out what is in flight and drop it."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self._exchange is not None:
            self._exchange.abandon()
            self._exchange = None

    def _let_go(self) -> None:
        with PLAINLY():
            for param in self._params:
                param.grad = None
        self._ledger.set_bytes(self._strays, 0)

    @property
    def _makes_whole(self) -> bool:
        """Whether gradients that are held in shards have to be brought together for a replicated optimizer."""
        return self._full is None and not self.policy.optim_sharded and self._comm.world_size > 1

    @property
    def _everything(self) -> torch.Tensor:
        buffer = self._full or self._whole
        assert buffer is not None
        return buffer.tensor

    def _whole_buffer(self) -> Buffer:
        entry = Entry(Kind.WORK, self.name, Tier.DEVICE)
        whole = Buffer(self._ledger, entry, self._layout.numel, self.policy.accumulate_dtype, self._comm.device)
        whole.allocate()[self._shard.slice] = self.reduced
        return whole

    def _target(self) -> tuple[torch.Tensor, bool]:
        """Where the mean goes, and whether it is added to what is there."""
        if self._full is not None:
            return self._full.tensor[self._shard.slice], False
        self._recall()
        self._await_recalled()
        if self._held.live:
            return self._held.tensor, True
        return self._held.allocate(), False

    # Where the held shard rests on the host

    def move_in(self) -> None:
        """Let the shard rest on the device. Not while there is one."""
        assert not self.is_reduced, f"the gradients of {self.name} are away"
        self._states = None

    def _offload_shard(self) -> None:
        """Let the shard leave the device; what the global norm needs of it stays."""
        if self._states is not None:
            self._sum = norm.sums_of_squares([self._held.tensor], self._comm)[0]
            self._states.rest(GRADS, self._held.tensor, self._held.free)

    def _recall(self) -> None:
        """Bring back what earlier micro-batches left, ahead of what is added to it."""
        if self._states is not None and self.is_reduced and self._recalled is None:
            self._states.offload.streams.drain()
            self._recalled = self._states.recall(GRADS, self._held.allocate())

    def _await_recalled(self) -> None:
        if self._states is not None and self._recalled is not None:
            self._states.offload.streams.wait(self._recalled)
            self._recalled = None
