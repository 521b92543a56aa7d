"""Generating with a model whose weights do not rest on the GPU: seconds for each pass, GPU peak, bytes and their rate.

    python benchmarks/gpu_inference.py --rows copy,resident,host,host_32,budget     # each row in a process of its own
    python benchmarks/gpu_inference.py --tiny --rows copy,host,budget,files,disk    # the same code on a CPU, in seconds
    python benchmarks/gpu.py inference                                              # all rows, kept as a dated result

A Llama of 13 B parameters (26 GB in bf16, random weights), Hugging Face `generate`, greedy, prompts of 64 tokens.

    copy             the rate of copies from pinned memory, of pieces as large as a layer
    resident         everything on the GPU
    host, host_32    ours, everything on the host, batch 1 and 32
    budget           ours, 22 GiB of the GPU in all
    deepspeed, deepspeed_32   DeepSpeed ZeRO-3 with offload_param on the host, pinned
    cpu_offload      Accelerate's cpu_offload
    dispatch         Accelerate's dispatch_model, 22 GiB on the GPU, the rest on the host
    files            writes the model as safetensors files below --folder, for the rows after it
    disk             ours, everything in those files, no cache on the host
    raw_disk         the same files, read with O_DIRECT by 8 threads and not used
    large            ours, --large-layers layers of a 70 B model (75.8 B parameters), on GPU, host and disk together
"""

import argparse
import contextlib
import gc
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

# hidden, width of the feed-forward, layers, heads, heads of keys and values, vocabulary
SIZES = {
    "13b": (5120, 13824, 40, 40, 40, 32000),
    "70b": (8192, 28672, 80, 64, 8, 32000),
    "1b": (2048, 5632, 22, 32, 4, 32000),
    "tiny": (64, 128, 12, 4, 2, 512),
}
PROMPT = 64
SHARD_BYTES = 4 << 30


def llama(size: str, layers: int | None = None) -> Any:
    """The model on meta, except for its buffers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, width, usual, heads, key_heads, vocabulary = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers or usual,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=1,
    )
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def filled(model: nn.Module, device: str) -> Any:
    """The model with random values, which are the same 16 M in every tensor: cheap, and as good as any here."""
    torch.manual_seed(0)
    tile = (torch.randn(1 << 24) * 0.02).to(torch.bfloat16).to(device)
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                value = torch.empty(param.shape, dtype=param.dtype, device=device)
                flat = value.view(-1)
                for start in range(0, flat.numel(), tile.numel()):
                    part = flat[start : start + tile.numel()]
                    part.copy_(tile[: part.numel()])
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = buffer.to(device)
    return model


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Row:
    """One row: makes a model, generates, and prints what was measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.size = "tiny" if args.tiny else args.size
        self.batch = 32 if args.row.endswith("_32") else 1
        self.started = time.perf_counter()

    def budget(self, gib: float) -> int:
        """A budget for the 13 B model, in proportion for the others."""
        ratio = sum(param.numel() for param in llama(self.size).parameters()) / 13.0e9
        return int(gib * 2**30 * (1.0 if self.size == "13b" else ratio))

    def working_bytes(self) -> int:
        from shardwise.inference.working_memory import dimensions_in, working_memory

        of = dimensions_in(llama(self.size).config)
        return working_memory(of, self.batch, PROMPT + self.args.tokens, 2).total_bytes

    def least(self) -> int:
        """Room for four layers, and for what the passes need."""
        hidden, width, *_ = SIZES[self.size]
        return int(4.1 * 2 * (4 * hidden * hidden + 3 * hidden * width)) + 2 * 10**4 + self.working_bytes()

    def generate(self, model: Any, tokens: int, **more: Any) -> dict[str, Any]:
        """Seconds for each pass of `generate`, after a short one that warms up."""
        built_s = time.perf_counter() - self.started
        ids = torch.randint(SIZES[self.size][-1], (self.batch, PROMPT), device=device())
        settings = {"do_sample": False, "attention_mask": torch.ones_like(ids), "use_cache": True, **more}
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, **settings)
        synchronize()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **settings)
        synchronize()
        seconds = time.perf_counter() - begun
        assert out.shape[1] == PROMPT + tokens
        found = {
            "row": self.args.row,
            "size": self.size,
            "batch": self.batch,
            "pass_s": round(seconds / tokens, 4),
            "tokens_per_s": round(self.batch * tokens / seconds, 1),
            "built_s": round(built_s, 1),
            "tokens": out[0, -8:].tolist(),
        }
        if torch.cuda.is_available():
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        return found

    def streamed(self, source: Any, weights: str, budget: int | None, **more: Any) -> dict[str, Any]:
        """A row of ours."""
        import shardwise

        model = shardwise.stream(
            source,
            weights,
            device_memory=budget,
            batch=self.batch,
            context=PROMPT + self.args.tokens,
            device=device(),
            **more,
        )
        gc.collect()
        stream = model.shardwise_stream
        row = self.generate(model, self.args.tokens)
        row["fetched_gb_a_pass"] = round(stream.placement.fetched_bytes / 1e9, 3)
        row["fetched_gbs"] = round(stream.placement.fetched_bytes / row["pass_s"] / 1e9, 2)
        row["resident_units"] = stream.placement.resident_units
        row["units"] = len(stream.units)
        row["ahead"] = stream.placement.ahead
        row["foreseen_gib"] = round(stream.foreseen_peak_bytes / 2**30, 2)
        begun = time.perf_counter()
        stream.close()
        row["closed_s"] = round(time.perf_counter() - begun, 1)
        return row

    # The rows

    def copy(self) -> dict[str, Any]:
        """Pinned pieces as large as a layer, copied to three buffers in turn, as often as a pass does."""
        from shardwise.offload.pinned import HostMemory

        hidden, width, layers, *_ = SIZES[self.size]
        numel = 4 * hidden * hidden + 3 * hidden * width
        host = HostMemory(pinned=torch.cuda.is_available())
        sources = [host.zeros(numel, torch.bfloat16) for _ in range(8)]
        targets = [torch.empty(numel, dtype=torch.bfloat16, device=device()) for _ in range(3)]
        for _ in range(2):
            synchronize()
            begun = time.perf_counter()
            for number in range(layers):
                targets[number % 3].copy_(sources[number % 8], non_blocking=True)
            synchronize()
            seconds = time.perf_counter() - begun
        return {"row": "copy", "gbs": round(layers * numel * 2 / seconds / 1e9, 2)}

    def resident(self) -> dict[str, Any]:
        return self.generate(filled(llama(self.size), device()), max(16, self.args.tokens))

    def host(self) -> dict[str, Any]:
        return self.streamed(filled(llama(self.size), "cpu"), "host", self.least())

    host_32 = host

    def budget_row(self) -> dict[str, Any]:
        more = 0 if self.size == "13b" else self.working_bytes()
        return self.streamed(filled(llama(self.size), "cpu"), "host", self.budget(22) + more)

    def deepspeed(self) -> dict[str, Any]:
        import deepspeed
        import torch.distributed as dist

        deepspeed.utils.logger.setLevel("ERROR")
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        hidden = SIZES[self.size][0]
        zero = {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_prefetch_bucket_size": 2 * hidden * hidden,
            "stage3_param_persistence_threshold": hidden,
            "stage3_max_live_parameters": 2e9,
        }
        config = {
            "fp16": {"enabled": False},
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": self.batch,
            "steps_per_print": 10**9,
        }
        engine = deepspeed.initialize(model=filled(llama(self.size), "cpu"), config=config)[0]
        engine.module.eval()
        gc.collect()
        return self.generate(engine.module, self.args.tokens, synced_gpus=False)

    deepspeed_32 = deepspeed

    def cpu_offload(self) -> dict[str, Any]:
        from accelerate import cpu_offload

        model = filled(llama(self.size), "cpu")
        cpu_offload(model, execution_device=device())
        return self.generate(model, min(4, self.args.tokens))

    def dispatch(self) -> dict[str, Any]:
        from accelerate import dispatch_model, infer_auto_device_map

        model = filled(llama(self.size), "cpu")
        rooms = {0: self.budget(22), "cpu": "100GiB"}
        placed = infer_auto_device_map(model, rooms, no_split_module_classes=["LlamaDecoderLayer"])
        return self.generate(dispatch_model(model, placed), self.args.tokens)

    def files(self) -> dict[str, Any]:
        """Written tensor by tensor: the model is never whole in memory."""
        folder = Path(self.args.folder)
        begun = time.perf_counter()
        size = write_model(llama(self.size), folder)
        return {"row": "files", "gb": round(size / 1e9, 2), "seconds": round(time.perf_counter() - begun, 1)}

    def disk(self) -> dict[str, Any]:
        return self.streamed(self.args.folder, "disk", self.least(), host_memory=0)

    def raw_disk(self) -> dict[str, Any]:
        files = sorted(Path(self.args.folder).glob("*.safetensors"))
        return {"row": "raw_disk", "gbs": round(read_directly(files), 3)}

    def large(self) -> dict[str, Any]:
        """A model larger than the GPU, on GPU, host and disk together. Only what rests on the disk is in files: the
        whole model need not fit there."""
        self.size = "tiny" if self.args.tiny else "70b"
        model = llama(self.size, self.args.large_layers)
        total = sum(param.numel() for param in model.parameters())
        stream = self.assemble(model, total * 2)
        row = {**self.generate(model, self.args.tokens), "parameters": total, "weights_gb": round(total * 2 / 1e9, 1)}
        row["rests_gb"] = {tier: round(stream.placement.bytes_on(tier) / 1e9, 2) for tier in ("device", "host", "disk")}
        row["fetched_gb_a_pass"] = round(stream.placement.fetched_bytes / 1e9, 3)
        row["foreseen_gib"] = round(stream.foreseen_peak_bytes / 2**30, 2)
        stream.close()
        return row

    def assemble(self, model: Any, weights_bytes: int) -> Any:
        """A stream of a model on meta: random values, and files for the units that rest on the disk."""
        from shardwise.comm import ProcessGroupComm
        from shardwise.config.sections import MeshSection, Precision
        from shardwise.engine.initialize import join_ranks, let_segments_grow
        from shardwise.inference import start
        from shardwise.inference.streamed_model import WeightStream
        from shardwise.memory.placement import place

        where = torch.device(device(), 0) if torch.cuda.is_available() else torch.device("cpu")
        comm = ProcessGroupComm(join_ranks(None, where, MeshSection()).group, where)
        for module in model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None:
                    blank = torch.zeros((), dtype=param.dtype, device=where).expand(param.shape)
                    module._parameters[name] = nn.Parameter(blank, requires_grad=False)
            for name, buffer in list(module._buffers.items()):
                module._buffers[name] = buffer.to(where)
        plans = start.plan_units(model, None, 1)
        working = self.working_bytes()
        room = weights_bytes * 9 // 10
        if torch.cuda.is_available():
            let_segments_grow()
            room = int(torch.cuda.mem_get_info()[0] * 0.95) - working
        sizes = start.unit_sizes(plans)
        away = weights_bytes - room
        placement = place(sizes, "disk", room, max(away // 2, 2 * max(size.full_bytes for size in sizes)))
        plans = [start.placed(plan, tier) for plan, tier in zip(plans, placement.tiers, strict=True)]
        files = self.give_origins(model, plans, where)
        return WeightStream(model, plans, placement, Precision(compute="model"), comm, files, working)

    def give_origins(self, model: Any, plans: Any, where: torch.device) -> list[str]:
        """Random values for each parameter; returns the files of those that rest on the disk."""
        from safetensors.torch import save_file

        from shardwise.deferred.pretrained import PretrainedParam, PretrainedTensor
        from shardwise.unit.master import ORIGIN

        tile = (torch.randn(1 << 24) * 0.02).to(torch.bfloat16)
        near, params, files = tile.to(where), dict(model.named_parameters()), []

        def values(part: Any) -> torch.Tensor:
            return near.repeat(-(-part.numel // near.numel()))[: part.numel]

        folder = Path(self.args.folder)
        folder.mkdir(parents=True, exist_ok=True)
        for plan in plans:
            names = plan.spec.params
            on_disk = plan.policy.weights_tier == "disk"
            if on_disk:
                files.append(str(folder / f"unit-{len(files)}.safetensors"))
                each = {name: params[name] for name in names}
                save_file({name: repeated(tile, param) for name, param in each.items()}, files[-1])
                with Path(files[-1]).open("rb") as file:
                    os.fsync(file.fileno())
            for name in names:
                shape = tuple(params[name].shape)
                stored = PretrainedParam((PretrainedTensor(files[-1], name, shape),), shape) if on_disk else values
                setattr(params[name], ORIGIN, stored)
        return files

    def run(self) -> dict[str, Any]:
        make: Callable[[], dict[str, Any]] = getattr(self, {"budget": "budget_row"}.get(self.args.row, self.args.row))
        return make()


def repeated(tile: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tile.repeat(-(-like.numel() // tile.numel()))[: like.numel()].view(like.shape)


def write_model(model: Any, folder: Path) -> int:
    """Write a model that is on meta as Hugging Face does; returns the bytes of its weights."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tile = (torch.randn(1 << 24) * 0.02).to(torch.bfloat16)
    named, held, number, index = {}, 0, 0, {}

    def flush() -> None:
        nonlocal named, held, number
        if named:
            number += 1
            name = f"model-{number:05d}.safetensors"
            save_file(named, folder / name)
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
            index.update(dict.fromkeys(named, name))
            named, held = {}, 0

    total = 0
    for name, param in model.named_parameters():
        named[name] = repeated(tile, param)
        held += param.numel() * 2
        total += param.numel() * 2
        if held > SHARD_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    return total


def read_directly(files: list[Path], block: int = 8 << 20, threads: int = 8) -> float:
    """GB/s of reading files with O_DIRECT."""
    jobs = [(path, start) for path in files for start in range(0, path.stat().st_size, block)]

    def work(number: int) -> int:
        total, handles = 0, {}
        with contextlib.closing(mmap.mmap(-1, block)) as room:
            for path, start in jobs[number::threads]:
                if path not in handles:
                    handles[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
                total += os.preadv(handles[path], [room], start)
        for handle in handles.values():
            os.close(handle)
        return total

    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(work, range(threads)))
    return total / (time.perf_counter() - begun) / 1e9


ROWS = [
    *("copy", "resident", "host", "host_32", "budget", "deepspeed", "deepspeed_32", "cpu_offload", "dispatch"),
    *("files", "raw_disk", "disk", "large"),
]


def each(args: argparse.Namespace, given: list[str]) -> Iterator[dict[str, Any]]:
    """The rows, each in a process of its own."""
    for row in args.rows.split(","):
        print(f"-- {row}", file=sys.stderr, flush=True)
        words = [word for word in given if not word.startswith("--rows") and word != args.rows]
        done = subprocess.run(
            [sys.executable, __file__, "--row", row, *words], stdout=subprocess.PIPE, text=True, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        yield json.loads(lines[-1]) if lines else {"row": row, "error": f"exit code {done.returncode}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS[:-1]), help="rows, each in a process of its own")
    parser.add_argument("--row", choices=ROWS, help="one row, in this process")
    parser.add_argument("--size", choices=SIZES, default="13b")
    parser.add_argument("--tokens", type=int, default=12, help="passes that are timed")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the CPU where there is no GPU")
    folder = str(Path(tempfile.gettempdir()) / "shardwise-inference")
    parser.add_argument("--folder", default=folder, help="a folder on the disk to use")
    parser.add_argument("--large-layers", type=int, default=88, help="of the row `large`")
    args = parser.parse_args()
    if args.row is None:
        for row in each(args, sys.argv[1:]):
            print(json.dumps(row), flush=True)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    print(json.dumps(Row(args).run()), flush=True)
    os._exit(0)  # a peer's threads may not end


if __name__ == "__main__":
    main()
