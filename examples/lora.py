"""Fine-tune a language model with LoRA on one GPU, with Transformers' Trainer and PEFT. docs/lora-24gb.md explains it.

shardwise plan qwen2.5-14b --gpus 1 --gpu-memory 24GB --host-memory 64GB --lora 16 \\
  --micro-batch 2 --accumulate 8 --presets zero3_offload --emit lora.json
python examples/lora.py --model Qwen/Qwen2.5-14B --text notes.txt --config lora.json
python examples/lora.py --tiny                                     # the same with a tiny model, also on the CPU
shardwise run -n 2 examples/lora.py --tiny                         # on two processes
"""

import shardwise.as_deepspeed  # noqa: F401, I001  # before Transformers, which then finds it as DeepSpeed

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ON_THE_HOST = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
    "shardwise": {"checkpointing": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder, or a name on the Hub")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to train on: a file of text")
    parser.add_argument("--config", type=Path, help="a file that `shardwise plan --emit` wrote")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="adapters")
    parser.add_argument("--tiny", action="store_true", help="make a tiny model and train that")
    args = parser.parse_args()
    if not (args.model or args.tiny):
        parser.error("give --model or --tiny")

    with tempfile.TemporaryDirectory() as folder:
        if args.tiny:
            args.model, args.length = make_tiny(folder), 64
        train(args)


def train(args: argparse.Namespace) -> None:
    config = json.loads(args.config.read_text()) if args.config else ON_THE_HOST
    # Before the model: Transformers loads it as the configuration says.
    settings = training_arguments(args, config)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    targets = ["q_proj", "v_proj"]  # those that `shardwise plan --lora` counts
    model = get_peft_model(model, LoraConfig(r=args.rank, target_modules=targets, task_type="CAUSAL_LM"))
    trainer = Trainer(model=model, args=settings, train_dataset=samples(args))
    trainer.train()
    trainer.save_model(args.out)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; adapters in {args.out}", flush=True)


def training_arguments(args: argparse.Namespace, config: dict[str, Any]) -> TrainingArguments:
    """Trainer wants the values of the configuration to be its own."""
    return TrainingArguments(
        output_dir=args.out,
        deepspeed=config,
        per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        max_grad_norm=config["gradient_clipping"],
        learning_rate=config["optimizer"]["params"]["lr"],
        max_steps=args.steps,
        bf16=True,
        logging_steps=max(1, args.steps // 10),
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )


def samples(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """The text, cut into samples of equal length. The tiny model reads bytes."""
    text = args.text.read_text()
    ids = list(text.encode()) if args.tiny else AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
    rows = torch.tensor(ids[: len(ids) // args.length * args.length]).view(-1, args.length)
    if not len(rows):
        raise SystemExit(f"{args.text} has {len(ids)} tokens, fewer than one sample: give more text, or --length")
    return [{"input_ids": row, "labels": row} for row in rows]


def make_tiny(folder: str) -> str:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
