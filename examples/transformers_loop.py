"""A plain loop that trains a transformers model on a text, without a Trainer. AutoModelForCausalLM reads the result.

torchrun --standalone --nproc-per-node 2 examples/transformers_loop.py book.txt --out trained [--model FOLDER_OR_NAME]
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, get_cosine_schedule_with_warmup

import shardwise

parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path)
parser.add_argument("--out", required=True)
parser.add_argument("--model", help="to start from (default: a small Llama that reads bytes)")
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()

text = args.text.read_text()
ids = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"] if args.model else list(text.encode())
small = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
with shardwise.deferred_init():  # no process ever holds the whole model
    build = AutoModelForCausalLM.from_pretrained if args.model else AutoModelForCausalLM.from_config
    model = build(args.model or small)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
config = {"preset": "zero3", "precision": {"compute": "bf16"}, "gradients": {"clip_norm": 1.0}}
engine = shardwise.initialize(model, optimizer, config, schedule)
samples = torch.tensor(ids)[: len(ids) // 64 * 64].view(-1, 64).to(engine.comm.device)
torch.manual_seed(engine.comm.rank)  # each process has samples of its own
for step in range(args.steps):
    batch = samples[torch.randint(len(samples), (4,))]
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    if engine.comm.rank == 0 and step % 10 == 0:
        print(f"step {step}, loss {loss.item():.3f}", flush=True)
engine.export(args.out)
