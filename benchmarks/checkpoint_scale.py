"""What a checkpoint of many ranks consists of, and what an asynchronous save makes training wait for.

    python benchmarks/checkpoint_scale.py --json benchmarks/results/DATE-checkpoint-scale.json

`ranks`: a 7 B model (Llama's shapes, AdamW in fp32: 81 GB) saved by 8, 64 and 1024 ranks, by the code that cuts, lists
and reads it: layouts, tables, manifest. Only the values are not written, and checksums are zeros.

files               of the checkpoint: one of each rank, and the manifest
files_meanwhile     while it is written: also a table of each rank, which rank 0 reads and removes
rank_bytes          that a rank writes; it reads none
table_bytes         of all ranks' tables
manifest_bytes      which every rank reads in a load
compose_s, read_s   to make the manifest from the tables, and to read and check it

`stall_foreseen`: seconds for which `engine.save(blocking=False)` of this model stops training on 8 ranks, states on the
GPUs, by the time model of `plan`: a copy of the rank's bytes to host memory over its own PCIe link, and the issue of
the copies. Not in the model: the first save of a process also allocates the pinned memory for them, and host memory
that is slower than the links of all GPUs.

`stall`: the parts of `engine.save(blocking=False)`, with two ranks that share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import shardwise
from shardwise.checkpoint import saving
from shardwise.checkpoint.contents import RankContents
from shardwise.checkpoint.files import TensorSlice, header_of
from shardwise.checkpoint.manifest import BLOCK_BYTES, read_manifest
from shardwise.checkpoint.plain import rng_states, to_plain
from shardwise.machine import env
from shardwise.partition.layout import Layout, Span, TensorSpec
from shardwise.timing.device import published

LAYERS, WIDTH, HIDDEN, VOCABULARY = 32, 4096, 11008, 32000
KINDS = ("param", "optim/exp_avg", "optim/exp_avg_sq")
STEP = {"step": {"$scalar": ["float32", 100.0]}}


def units() -> list[list[TensorSpec]]:
    """The parameters of Llama 7 B, by unit."""
    block = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
    block |= {f"mlp.{name}_proj": (HIDDEN, WIDTH) for name in ("gate", "up")} | {"mlp.down_proj": (WIDTH, HIDDEN)}
    block |= {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}  # type: ignore[dict-item]
    named = [
        [TensorSpec(f"model.layers.{number}.{name}.weight", shape) for name, shape in block.items()]
        for number in range(LAYERS)
    ]
    embedding = [TensorSpec("model.embed_tokens.weight", (VOCABULARY, WIDTH))]
    return [embedding, *named, [TensorSpec("model.norm.weight", (WIDTH,)), TensorSpec("head", (VOCABULARY, WIDTH))]]


def contents(layouts: list[Layout], rank: int) -> RankContents:
    """What one rank writes, as `checkpointable.contents_of` lists it, without the values."""
    tensors: dict[str, torch.Tensor] = {}
    rng = to_plain(rng_states(torch.device("cpu")), tensors, f"rank-{rank}/rng")
    slices, extras = [], {}
    for layout in layouts:
        owned = layout.shard(rank)
        for slot in layout.slots:
            part = slot.span.intersect(owned).shift(-slot.span.start)
            if part:
                slices += [_slice(f"{kind}/{slot.spec.name}", slot.spec.shape, part) for kind in KINDS]
                extras |= {slot.spec.name: STEP} if part.start == 0 else {}
    slices += [TensorSlice.whole(key, tensor) for key, tensor in tensors.items()]
    return RankContents(slices, extras, rng, _params(layouts) if rank == 0 else {})


def _params(layouts: list[Layout]) -> dict[str, dict[str, Any] | None]:
    facts = {"dtype": "float32", "compute": "bfloat16", "group": 0, "aliases": []}
    return {slot.spec.name: {"shape": slot.spec.shape, **facts} for layout in layouts for slot in layout.slots}


def _slice(key: str, shape: tuple[int, ...], part: Span) -> TensorSlice:
    return TensorSlice(key, torch.float32, shape, part, lambda wanted: torch.zeros(wanted.numel))


def of_ranks(world_size: int, folder: Path) -> dict[str, Any]:
    layouts = [Layout.build(specs, world_size, 2) for specs in units()]
    tables, rank_bytes, table_bytes = [], 0, 0
    for rank in range(world_size):
        found = contents(layouts, rank)
        header, offsets = header_of([(each.key, each.dtype, each.shape_in_file) for each in found.slices])
        size_bytes = len(header) + sum(each.size_bytes for each in found.slices)
        checksums = [0] * -(-size_bytes // BLOCK_BYTES)
        table = json.dumps(saving.table_of(found, f"rank-{rank:05d}.safetensors", size_bytes, checksums, offsets))
        rank_bytes, table_bytes = max(rank_bytes, size_bytes), table_bytes + len(table)
        tables.append(table)
    draft = saving.CheckpointDraft(folder, folder, "step-100", 1, "")
    head = {"steps": 100, "world_size": world_size, "written_by": "", "optimizer": "AdamW", "training": {}}
    started = time.perf_counter()
    text = saving.compose(draft, head, [json.loads(table) for table in tables]).to_text()
    composed = time.perf_counter()
    (folder / "manifest.json").write_text(text)
    again = time.perf_counter()
    read_manifest(folder)
    return {
        "ranks": world_size,
        "files": world_size + 1,
        "files_meanwhile": 2 * world_size + 1,
        "rank_bytes": rank_bytes,
        "table_bytes": table_bytes,
        "manifest_bytes": len(text),
        "compose_s": round(composed - started, 2),
        "read_s": round(time.perf_counter() - again, 2),
    }


def foreseen_stall(world_size: int, name: str) -> dict[str, Any]:
    layouts = [Layout.build(specs, world_size, 2) for specs in units()]
    slices, device = contents(layouts, 0).slices, published(name)
    size_bytes = sum(each.size_bytes for each in slices)
    return {
        "ranks": world_size,
        "device": name,
        "rank_bytes": size_bytes,
        "copies": len(slices),
        "down_gb_per_s": round(device.down / 1e9, 1),
        "seconds": round(size_bytes / device.down + len(slices) * device.issue_s, 3),
    }


def stall(rank: int, folder: str, layers: int, width: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), "zero3")
    seconds: dict[str, list[float]] = defaultdict(list)
    for name in ("contents_of", "own_buffers"):
        setattr(saving, name, _timed(getattr(saving, name), seconds[name]))
    saving.CheckpointDraft.begin = _timed(saving.CheckpointDraft.begin, seconds["begin"])  # type: ignore[method-assign]
    for _ in range(6):
        engine.backward(engine(torch.ones(1, width)).sum())
        engine.step()
        engine.finish_save()
        dist.barrier()
        started = time.perf_counter()
        engine.save(f"{folder}/saved", blocking=False, keep=1)
        seconds["save"].append(time.perf_counter() - started)
    engine.finish_save()
    if rank == 0:
        size = sum(file.stat().st_size for file in Path(f"{folder}/saved").rglob("*.safetensors"))
        median = {name: round(statistics.median(values[1:]), 3) for name, values in seconds.items() if values[1:]}
        copied = size / 2 / median["contents_of"] / 1e9
        results.put({"ranks": 2, "rank_bytes": size // 2, "seconds": median, "copied_gb_per_s": round(copied, 2)})
    engine.destroy()
    dist.destroy_process_group()


def _timed(work: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return work(*args, **options)
        finally:
            seconds.append(time.perf_counter() - started)

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,64,1024")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in map(int, options.ranks.split(",")):
            rows.append(of_ranks(ranks, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = processes.get_context("spawn").SimpleQueue()
        processes.spawn(stall, (folder, options.layers, options.width, results), nprocs=2)
        stalled = results.get()
    print(json.dumps(stalled), flush=True)
    foreseen = [foreseen_stall(8, name) for name in ("a100", "h100", "h200")]
    print(json.dumps(foreseen), flush=True)
    if options.json:
        result = {**env.made(), "versions": env.versions(), "model": "7 B, AdamW", "rows": rows}
        result |= {"stall_foreseen": foreseen, "stall": stalled}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
