"""Sequence parallelism (Ulysses) x ZeRO: two ranks share each sequence, and ZeRO shards the model over all four.

    torchrun --nproc-per-node 4 examples/ulysses.py

Each rank of an sp group has a part of every sequence. Attention needs all of it: an all-to-all gives each rank some
heads of the whole sequence, another one gives the parts back. All else is computed position by position. To ZeRO, an
sp rank is one more rank with data of its own: gradients are reduced over dp x sp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import shardwise

SP, HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH = 2, 32, 4, 64, 16, 4


class Swap(torch.autograd.Function):
    """Cut `x` along one dimension over the ranks of a group, and join what they send along another."""

    @staticmethod
    def forward(ctx, x, group, cut, join):
        ctx.arguments = group, join, cut
        sent = [part.contiguous() for part in x.chunk(group.size(), cut)]
        received = [torch.empty_like(part) for part in sent]
        dist.all_to_all(received, sent, group)
        return torch.cat(received, join)

    @staticmethod
    def backward(ctx, grad):
        return Swap.apply(grad, *ctx.arguments), None, None, None


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group  # of the ranks that share a sequence; None: this one has all of it
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        # batch, heads, length, width of a head
        parts = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        if self.group is not None:
            parts = [Swap.apply(part, self.group, 1, 2) for part in parts]
        mixed = scaled_dot_product_attention(*parts, is_causal=True)
        if self.group is not None:
            mixed = Swap.apply(mixed, self.group, 2, 1)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.blocks = nn.ModuleList(Block(group) for _ in range(3))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def sgd(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


def samples(step, dp_rank):
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def plain(copies):
    """The same steps in one process."""
    model = Model()
    optimizer = sgd(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        for dp_rank in range(copies):
            (model(*samples(step, dp_rank)) / copies).backward()
        optimizer.step()
    return dict(model.named_parameters())


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // SP, SP), mesh_dim_names=("dp", "sp"))
    dp_rank, sp_rank = mesh.get_coordinate()
    expected, weights = plain(mesh["dp"].size()), []
    for stage in ("zero1", "zero2", "zero3"):
        engine = shardwise.initialize(Model(mesh.get_group("sp")), sgd, stage, mesh=mesh)
        for step in range(5):
            tokens, targets = (each.chunk(SP, 1)[sp_rank] for each in samples(step, dp_rank))
            engine.backward(engine(tokens, targets))  # a mean over as many tokens on every rank
            engine.step()
        weights.append({name: engine.full_param(name) for name in expected})
    say(f"ZeRO's group has {engine.comm.world_size} ranks")
    differences = [(weights[0][name] - expected[name]).abs().max().item() for name in expected]
    say(f"as one process, to 1e-06: {max(differences) <= 1e-6}")
    same = all(torch.equal(each[name], weights[0][name]) for each in weights for name in expected)
    say(f"the same bits in all stages: {same}")


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
