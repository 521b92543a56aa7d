"""Tensor parallelism x ZeRO: two ranks hold one copy of the model together, and ZeRO shards it over two such pairs.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py

On a cluster, tp is the GPUs of one node, whose links are fast, and dp the nodes. It trains the same model with stages
1, 2 and 3, which end with the same bits, then loads the checkpoint of the last one without tensor parallelism.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.models.built_in import GPT
from shardwise.models.tensor_parallel import tensor_parallel

TP = 2


def build(mesh=None):
    torch.manual_seed(0)
    with shardwise.deferred_init():
        model = GPT(hidden=64, layers=4, heads=4, vocabulary=256, length=32, fused=False)
        if mesh is not None:
            tensor_parallel(model, mesh["tp"])  # a plan of your own: a third argument, or torch's parallelize_module
    return model


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3)


def main():
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    if dist.get_world_size() % TP:
        raise SystemExit(f"copies of {TP} ranks cannot be made of {dist.get_world_size()}: start a multiple of {TP}")
    shape = (dist.get_world_size() // TP, TP)
    mesh = init_device_mesh("cuda" if on_cuda else "cpu", shape, mesh_dim_names=("dp", "tp"))
    weights = []
    for stage in ("zero1", "zero2", "zero3"):
        config = {"preset": stage, "gradients": {"clip_norm": 1.0}}
        engine = shardwise.initialize(build(mesh), adamw, config, mesh=mesh["dp"])
        for step in range(5):
            # The ranks of one pair read the same batch: it depends on the data-parallel rank.
            generator = torch.Generator().manual_seed(1000 * step + mesh["dp"].get_local_rank())
            tokens = torch.randint(256, (4, 33), generator=generator).to(engine.comm.device)
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
        weights.append(engine.full_param("blocks.0.down.weight"))
        say(f"{stage}: loss {loss.item():.4f}, gradient norm {engine.grad_norm.item():.4f}")
    say(f"the same bits in all stages: {all(torch.equal(weights[0], each) for each in weights)}")

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    engine.save(folder[0])
    plain = shardwise.initialize(build(), adamw, "zero3")  # all ranks are data-parallel
    plain.load(folder[0])
    same = torch.equal(plain.full_param("blocks.0.down.weight"), weights[-1])
    say(f"loaded at tp 1 x dp {dist.get_world_size()} with the same bits: {same}")


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
