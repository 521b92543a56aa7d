"""A plain loop that trains a transformers model on a text, without a Trainer.

torchrun --standalone --nproc-per-node 2 examples/transformers_loop.py book.txt --out trained
torchrun --standalone --nproc-per-node 8 examples/transformers_loop.py book.txt --out trained --model FOLDER_OR_NAME

Without --model, a small Llama that reads bytes is made. AutoModelForCausalLM.from_pretrained reads the result.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, get_cosine_schedule_with_warmup

import shardwise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    args = parser.parse_args()

    torch.manual_seed(0)
    with shardwise.deferred_init():  # no process ever holds the whole model
        if args.model:
            model = AutoModelForCausalLM.from_pretrained(args.model)
        else:
            small = LlamaConfig(
                vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
            )
            model = AutoModelForCausalLM.from_config(small)
    content = args.text.read_bytes()
    ids = AutoTokenizer.from_pretrained(args.model)(content.decode())["input_ids"] if args.model else list(content)

    config = {"preset": "zero3", "precision": {"compute": "bf16"}, "gradients": {"clip_norm": 1.0}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    engine = shardwise.initialize(model, optimizer, config, schedule)
    samples = torch.tensor(ids)[: len(ids) // args.length * args.length].view(-1, args.length).to(engine.comm.device)
    generator = torch.Generator().manual_seed(dist.get_rank())  # each process has samples of its own
    for step in range(args.steps):
        batch = samples[torch.randint(len(samples), (4,), generator=generator).to(samples.device)]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
    engine.export(args.out)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
