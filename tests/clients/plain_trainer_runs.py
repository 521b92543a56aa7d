"""What ranks do in the tests of ShardwiseTrainer: the runs of `trainer_runs`, with and without DeepSpeed's API."""

import os

import torch
import torch.distributed as dist

from clients import trainer_runs
from clients.trainer_runs import base, finish, samples

AGAIN = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}


def through_deepspeed(rank, world_size, folder):
    """Rank 0's results of plain Trainers with DeepSpeed's configuration."""
    import shardwise.as_deepspeed  # noqa: F401  # first, before transformers

    trainer_runs.start(folder, rank)
    found = {stage: trainer_runs.train(folder, f"ds{stage}", trainer_runs.config(stage)) for stage in ("1", "3")}
    for stage in ("2", "3"):
        options = {"gradient_accumulation_steps": 2}
        found[f"K2 {stage}"] = trainer_runs.train(folder, f"ds-k2-{stage}", trainer_runs.config(stage), **options)
    found["bf16 3"] = trainer_runs.train(folder, "ds-bf16", trainer_runs.config("3"), bf16=True)
    found["smooth 3"] = trainer_runs.train(folder, "ds-smooth", trainer_runs.config("3"), label_smoothing_factor=0.1)
    return found if rank == 0 else None


def without(rank, world_size, folder):
    """Rank 0's results of ShardwiseTrainers, on the base that `through_deepspeed` has written."""
    found = {stage: train(folder, f"zero{stage}", stage) for stage in ("1", "3", "3 offload")}
    for stage in ("2", "3"):
        found[f"K2 {stage}"] = train(folder, f"k2-{stage}", stage, gradient_accumulation_steps=2)
    found["bf16 3"] = train(folder, "bf16", "3", bf16=True)
    found["smooth 3"] = train(folder, "smooth", "3", label_smoothing_factor=0.1)  # shifts labels by the model's class
    found["fp16 3"] = train(folder, "fp16", "3", fp16=True)
    found["whole"] = train(folder, "resumed", "3", **AGAIN)
    found["resumed"] = train(folder, "resumed", "2", resume=f"{folder}/resumed/checkpoint-6", **AGAIN)
    found["files"] = sorted(os.listdir(f"{folder}/resumed/checkpoint-8"))
    found["best"] = best(folder)
    found["LoRA"] = lora(folder)
    found["refused"] = refused(folder)
    return found if rank == 0 else None


def alone(rank, world_size, folder):
    """One rank resumes what two have saved."""
    again = {"num_train_epochs": 2, "per_device_train_batch_size": 4}
    return train(folder, "smaller", "2", resume=f"{folder}/resumed/checkpoint-6", **again)


def arguments(folder, name, **options):
    from transformers import TrainingArguments

    chosen = {"num_train_epochs": 1, "per_device_train_batch_size": 2, "save_strategy": "no", "learning_rate": 1e-2}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "max_grad_norm": 0.5, "use_cpu": True}
    return TrainingArguments(output_dir=f"{folder}/{name}", **quiet, **{**chosen, **options})


def make(folder, name, stage, model=None, data=None, **options):
    from shardwise.integrations.transformers import ShardwiseTrainer

    number, _, offload = stage.partition(" ")
    preset = f"zero{number}" + (f"_{offload}" if offload else "")
    args = arguments(folder, name, **options)
    return ShardwiseTrainer(
        model=model or base(folder),
        args=args,
        train_dataset=samples(),
        eval_dataset=data,
        shardwise=preset,
    )


def train(folder, name, stage, resume=None, **options):
    trainer = make(folder, name, stage, **options)
    trainer.train(resume_from_checkpoint=resume)
    return ended(trainer, f"{folder}/{name}/final")


def ended(trainer, final):
    found = finish(trainer, final)
    trainer.engine.destroy()
    return found


def best(folder):
    """The best model is reloaded at the end."""
    every = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make(folder, "best", "3", data=samples(4), load_best_model_at_end=True, save_total_limit=1, **every)
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    lowest = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    ended(trainer, f"{folder}/best/final")
    return {"lowest": lowest, "after": after}


def lora(folder):
    """Adapters on a frozen base: what is saved are the adapters, and the base stays as it was."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import set_seed

    set_seed(3)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make(folder, "lora", "3", model=get_peft_model(base(folder), adapters))
    trainer.train()
    model, engine = trainer.model, trainer.engine
    whole = {name: engine.full_param(name) for name, _ in model.named_parameters()}
    plain = trainer_runs.base_state(folder)
    kept = [torch.equal(whole[name], plain[trainer_runs.plain_name(name)]) for name in whole if "lora_" not in name]
    ended(trainer, f"{folder}/lora/final")
    dist.barrier()
    read = dict(PeftModel.from_pretrained(base(folder), f"{folder}/lora/final").named_parameters())
    saved = [torch.equal(read[name], whole[name]) for name in whole if "lora_" in name]
    return {"kept": all(kept), "saved": all(saved), "adapters": len(saved)}


def refused(folder):
    from shardwise.integrations.transformers import ShardwiseTrainer

    config = {"preset": "zero2", "precision": {"compute": "fp16"}, "batch": {"accumulation": 1}}
    trainer = ShardwiseTrainer(
        model=base(folder), args=arguments(folder, "no", bf16=True), train_dataset=samples(), shardwise=config
    )
    try:
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
