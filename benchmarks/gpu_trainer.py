"""Hugging Face's Trainer, unchanged, on one GPU: tokens/s, peak and loss of every way to train that it offers.

    python benchmarks/gpu.py trainer              # the comparison, with its result file
    python benchmarks/gpu_trainer.py --tiny       # the same rows on the CPU, with a small model

Rows, each in fresh processes started by torchrun: `plain` (DDP), `fsdp2` (Accelerate's FSDP2), `zero2` and `zero3`
(shardwise behind `--deepspeed`), `deepspeed_zero3` (DeepSpeed itself with the same file, where it is installed).
All train a Llama in TinyLlama's shape from the same random weights on the same data: `bf16=True`, torch's fused AdamW,
clipping at 1.0, non-re-entrant activation checkpointing of every layer, everything else as Trainer has it.

One JSON line per row. Peaks count from the start of the process. `loss` is the mean of the last four steps. Every row
updates fp32 weights; `precision` says what it computes with. On the CPU Accelerate does not shard, and `fsdp2` is DDP.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {
    False: {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    True: {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 64,
    },
}
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
ZERO2 = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 2e8}
ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
FSDP = {"version": 2, "activation_checkpointing": True, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
AUTOCAST = "fp32 weights are updated, cast to bf16 by autocast at every use; fp32 gradients"
SHARDS = "fp32 shards are updated, gathered in bf16; gradients reduced in bf16"
MASTERS = "fp32 master weights are updated; bf16 weights, activations and gradients"


def with_zero(section: dict[str, Any]) -> dict[str, Any]:
    settings = {**dict.fromkeys(AUTO, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": section}
    return {"deepspeed": settings, **CHECKPOINTING}


# By row: what Trainer is given, and what it makes of bf16=True there.
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": (CHECKPOINTING, AUTOCAST),
    "fsdp2": (
        {"fsdp": True, "fsdp_config": FSDP},
        "fp32 shards are updated, gathered in bf16; gradients reduced in bf16",
    ),
    "zero3": (with_zero(ZERO3), MASTERS),
    "zero2": (with_zero(ZERO2), MASTERS),
    "deepspeed_zero3": (with_zero(ZERO3), MASTERS),
}
OURS = ("zero2", "zero3")
BATCH, WARM_STEPS, LOGGED_STEPS = 4, 4, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated; a name may stand there twice")
    parser.add_argument("--steps", type=int, default=16, help="after the warm ones")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds that a row may take")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        train(args)
        return
    from shardwise.compat.activation import installed_deepspeed

    for row in args.rows.split(","):
        if row.startswith("deepspeed") and installed_deepspeed() is None:
            print(json.dumps({"row": row, "error": "DeepSpeed is not installed"}), flush=True)
            continue
        start(row, args)


def start(row: str, args: argparse.Namespace) -> None:
    """Run a row as a user would start it; it prints its line itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc}"]
    options = ["--row", row, "--steps", str(args.steps), *(["--tiny"] if args.tiny else [])]
    command = [*launcher, str(Path(__file__)), *options]
    if row in OURS:
        command = [sys.executable, "-m", "shardwise", "run", "--as-deepspeed", "--force", "--", *command]
    # What shardwise chooses by itself, for every row alike.
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1"}
    # torchrun's own default, given here so that it does not print a warning for each row.
    settings |= {"OMP_NUM_THREADS": "1"} | ({"DS_ACCELERATOR": "cpu"} if args.tiny else {})
    process = subprocess.Popen(command, env={**os.environ, **settings}, start_new_session=True)
    try:
        code = process.wait(args.timeout)
        problem = f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        problem = f"took longer than {args.timeout:g} s"
    if problem:
        print(json.dumps({"row": row, "error": problem}), flush=True)


def train(args: argparse.Namespace) -> None:
    """The script of a user: Transformers' own classes and nothing else."""
    started = time.perf_counter()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

    chosen, precision = ROWS[args.row]
    if args.tiny and "deepspeed" in chosen:
        choose_gloo()
    total = WARM_STEPS + args.steps
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=total,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            bf16=True,
            logging_steps=LOGGED_STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=args.tiny,
            accelerator_config={"use_configured_state": args.tiny and "deepspeed" in chosen},
            **chosen,
        )
    config = LlamaConfig(**SHAPES[args.tiny], use_cache=False)
    set_seed(0)
    with torch.device(settings.device):
        model = LlamaForCausalLM(config)
    numel = model.num_parameters()
    generator = torch.Generator().manual_seed(0)
    length = config.max_position_embeddings
    texts = torch.randint(config.vocab_size, (2 * BATCH, length), generator=generator)
    # Few texts that come again and again, so that the loss falls.
    data = [{"input_ids": ids, "labels": ids} for ids in texts] * (total * args.nproc)
    clock = make_clock(total)
    trainer = Trainer(model=model, args=settings, train_dataset=data, callbacks=[clock])
    trainer.remove_callback(PrinterCallback)  # its lines look like results
    trainer.train()
    step_s = clock.measured_s / args.steps
    wrapper = type(trainer.model_wrapped).__name__
    result: dict[str, Any] = {
        "row": args.row,
        "world_size": settings.world_size,
        "wrapped_by": wrapper,
        "tokens_per_s": round(BATCH * length * settings.world_size / step_s),
        "step_ms": round(step_s * 1e3, 2),
        "loss": round([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1], 4),
        "precision": AUTOCAST if wrapper == "DistributedDataParallel" else precision,
        "parameters": numel,
    }
    if torch.cuda.is_available():
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        result["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    result["process_s"] = round(time.perf_counter() - started, 1)
    if settings.process_index == 0:
        print(json.dumps(result), flush=True)
    os._exit(0)  # a peer's threads may not end


def choose_gloo() -> None:
    """With `--deepspeed` and no GPU, Accelerate chooses no backend."""
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    del os.environ["ACCELERATE_USE_DEEPSPEED"]


def make_clock(total: int) -> Any:
    """A callback that times the steps after the warm ones. It waits for the device only at both ends."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        measured_s = 0.0
        _started = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step not in (WARM_STEPS, total):
                return
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if state.global_step == total:
                self.measured_s = time.perf_counter() - self._started
            else:
                self._started = time.perf_counter()

    return Clock()


if __name__ == "__main__":
    main()
