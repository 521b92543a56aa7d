"""What ranks do in the tests of Trainer, Accelerate and PEFT: a tiny Llama, made on the spot, trained a few steps.

Importing transformers takes longer than all of these runs, so one start of two processes does them all.
"""

import gc
import hashlib
import os
import warnings

import torch
import torch.distributed as dist

from clients.devices import share_gpu

VOCABULARY = 64
STAGES = ("0", "1", "2", "3", "3 offload")
MORE_STAGES = ("1 offload", "2 offload", "3 nvme")


def run_all(rank, world_size, folder, device):
    """Everything on two ranks; returns rank 0's results by name."""
    import shardwise.as_deepspeed  # noqa: F401  # first, before transformers

    start(folder, rank, device)
    found = {}
    for stage in ("0", "1", "3"):
        found[stage] = train(folder, f"zero{stage}", config(stage))
    for stage in STAGES:
        found[f"K2 {stage}"] = accumulated(folder, stage)
    again = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    found["whole"] = train(folder, "resumed", config("3"), **again)
    found["resumed"] = train(folder, "resumed", config("3"), resume=f"{folder}/resumed/checkpoint-6", **again)
    found["files"] = sorted(os.listdir(f"{folder}/resumed/checkpoint-8"))
    found["best"] = best(folder)
    for stage in ("2", "3"):
        found[f"missing {stage}"] = missing_keys(folder, stage)
        found[f"resized {stage}"] = resized(folder, stage)
        found[f"LoRA {stage}"] = lora(folder, stage)
    found["LoRA resumed"] = lora(folder, "3", resume=f"{folder}/lora3/checkpoint-2")
    found["left out"] = left_out(f"{folder}/lora3/checkpoint-2/global_step2")
    for stage in ("2", "3"):
        found[f"DoRA {stage}"] = lora(folder, stage, use_dora=True, modules_to_save=["lm_head"])
        found[f"prompt {stage}"] = prompt_encoder(folder, stage)
        found[f"LoRA resized {stage}"] = lora(folder, stage, size=VOCABULARY + 6)
    found["saved by all"] = saved_by_all(folder, rank)
    found["generated"] = generated(folder, rank)
    found["batch size"] = found_batch_size(folder)
    found["own optimizer"] = train(folder, "own", {**config("3"), **optimizer_and_schedule()}, warmup_steps=2)
    return found if rank == 0 else None


def run_more(rank, world_size, folder, device):
    """What `make test-clients` runs besides."""
    import shardwise.as_deepspeed  # noqa: F401  # first, before transformers

    start(folder, rank, device)
    found = {f"K2 {stage}": accumulated(folder, stage) for stage in MORE_STAGES}
    for stage in ("2", "3"):
        found[f"T5 {stage}"] = generating(folder, stage)
    found["second train"] = trained_twice(folder)
    found["fp16"] = overflowing(folder)
    return found if rank == 0 else None


def accumulated(folder, stage):
    return train(folder, f"k2-{stage}", config(stage, folder), gradient_accumulation_steps=2)


def alone(rank, world_size, folder, device):
    """On one rank: the same steps with as many micro-batches as there were ranks, and a resumed run of two ranks."""
    import shardwise.as_deepspeed  # noqa: F401  # first, before transformers

    start(folder, rank, device)
    found = {"K2 alone": train(folder, "alone", config("3"), gradient_accumulation_steps=2)}
    again = {"num_train_epochs": 2, "per_device_train_batch_size": 4}
    found["resumed alone"] = train(folder, "smaller", config("2"), resume=f"{folder}/resumed/checkpoint-6", **again)
    return found


def start(folder, rank, device="cpu"):
    import peft  # noqa: F401  # so that it is frozen below
    from accelerate import PartialState
    from transformers import LlamaForCausalLM, Trainer, set_seed  # noqa: F401  # so that they are frozen below
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if device == "cuda":
        share_gpu(rank)
    # With --deepspeed and no GPU, Accelerate chooses no backend: it has to be given here.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="nccl" if device == "cuda" else "gloo")
    del os.environ["ACCELERATE_USE_DEEPSPEED"]
    # Accelerate collects garbage twice a run: without the modules, that takes a tenth of the time of a run.
    gc.collect()
    gc.freeze()
    if rank == 0 and not os.path.exists(f"{folder}/base"):
        set_seed(0)
        LlamaForCausalLM(llama()).save_pretrained(f"{folder}/base")
    dist.barrier()


def llama():
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0, **sizes)


def config(stage, disk=None):
    """As a user writes it for Trainer: `auto` wherever Trainer knows better."""
    number, _, offload = stage.partition(" ")
    zero = {"stage": int(number), "reduce_bucket_size": "auto", "overlap_comm": True}
    device = {"device": "nvme", "nvme_path": disk} if offload == "nvme" else {"device": "cpu", "nvme_path": None}
    if offload:
        zero |= {"offload_optimizer": device}
    if offload and number == "3":
        zero |= {"offload_param": device}
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {**dict.fromkeys(keys, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": zero}


def optimizer_and_schedule():
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    schedule = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    return {
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupLR", "params": schedule},
    }


def samples(count=16):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, VOCABULARY, (count, 12), generator=generator)]


def arguments(folder, name, settings, kind=None, **options):
    from accelerate.state import AcceleratorState, PartialState
    from transformers import TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=False)
    chosen = {"num_train_epochs": 1, "per_device_train_batch_size": 2, "save_strategy": "no", "learning_rate": 1e-2}
    return (kind or TrainingArguments)(
        output_dir=f"{folder}/{name}",
        deepspeed=settings,
        accelerator_config={"use_configured_state": True},
        logging_steps=1,
        max_grad_norm=0.5,
        report_to=[],
        use_cpu=PartialState().device.type == "cpu",
        disable_tqdm=True,
        **{**chosen, **options},
    )


def base(folder):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32)


def train(folder, name, settings, resume=None, **options):
    """Losses, and a digest of the weights that the client saves."""
    from transformers import Trainer

    args = arguments(folder, name, settings, **options)
    trainer = Trainer(model=base(folder), args=args, train_dataset=samples())
    trainer.train(resume_from_checkpoint=resume)
    return finish(trainer, f"{folder}/{name}/final")


def finish(trainer, final):
    """Save, read what was saved, and take the engine off the model."""
    trainer.save_model(final)
    history = trainer.state.log_history
    trainer.accelerator.free_memory()
    digest = ""
    if trainer.args.process_index == 0:
        file = next(f"{final}/{name}" for name in os.listdir(final) if name.endswith(".safetensors"))
        with open(file, "rb") as data:
            digest = hashlib.sha256(data.read()).hexdigest()
    dist.barrier()
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "digest": digest,
    }


def best(folder):
    """The best model is reloaded at the end, and only it and the last one are kept."""
    from transformers import Trainer

    every = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    args = arguments(folder, "best", config("3"), load_best_model_at_end=True, save_total_limit=1, **every)
    trainer = Trainer(model=base(folder), args=args, train_dataset=samples(), eval_dataset=samples(4))
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    lowest = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    finish(trainer, f"{folder}/best/final")
    return {"lowest": lowest, "after": after}


def missing_keys(folder, stage):
    """A checkpoint without the head that the model has: `from_pretrained` makes one on rank 0."""
    from transformers import LlamaForSequenceClassification, Trainer, set_seed

    args = arguments(folder, f"missing{stage}", config(stage))
    set_seed(3)
    model = LlamaForSequenceClassification.from_pretrained(f"{folder}/base", num_labels=3, dtype=torch.float32)
    data = [{"input_ids": one["input_ids"], "labels": torch.tensor(n % 3)} for n, one in enumerate(samples())]
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    return finish(trainer, f"{folder}/missing{stage}/final")


def resized(folder, stage):
    """Embeddings that grow after the model was loaded."""
    from transformers import Trainer, set_seed

    args = arguments(folder, f"resized{stage}", config(stage))
    set_seed(3)
    model = base(folder)
    model.resize_token_embeddings(VOCABULARY + 6)
    data = [{key: ids + 6 for key, ids in one.items()} for one in samples()]
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    return finish(trainer, f"{folder}/resized{stage}/final")


def generating(folder, stage):
    """A model with an encoder, which `generate` calls by itself, and tied embeddings; evaluation generates."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, set_seed

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    shape = T5Config(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0, **sizes)
    options = {"predict_with_generate": True, "generation_max_length": 6, "eval_strategy": "steps", "eval_steps": 2}
    args = arguments(folder, f"t5-{stage}", config(stage), Seq2SeqTrainingArguments, **options)
    set_seed(3)
    made = []
    trainer = Seq2SeqTrainer(
        model=T5ForConditionalGeneration(shape),
        args=args,
        train_dataset=samples(),
        eval_dataset=samples(5),
        compute_metrics=lambda found: made.append(found.predictions.tolist()) or {},
    )
    trainer.train()
    return {**finish(trainer, f"{folder}/t5-{stage}/final"), "made": made}


def trained_twice(folder):
    """`evaluate()` and `train()` twice: each time Trainer destroys the engine of the call before."""
    from transformers import Trainer

    losses = {}
    for stage in ("2", "3"):
        args = arguments(folder, f"twice{stage}", config(stage))
        trainer = Trainer(model=base(folder), args=args, train_dataset=samples(), eval_dataset=samples())
        if stage == "3":  # Trainer itself refuses to evaluate first under others
            trainer.evaluate()
        for attempt in range(2):
            trainer.train()
            losses[stage, attempt] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        finish(trainer, f"{folder}/twice{stage}/final")
    return losses


def overflowing(folder):
    """Computes in fp16; the scale is too large for the first steps, which are skipped."""
    from transformers import Trainer

    found = {}
    for stage in ("1", "3"):
        settings = {**config(stage), "fp16": {"enabled": True, "initial_scale_power": 26, "hysteresis": 1}}
        del settings["bf16"]
        args = arguments(folder, f"half{stage}", settings, num_train_epochs=4, fp16=True)
        trainer = Trainer(model=base(folder), args=args, train_dataset=samples())
        trainer.train()
        engine = trainer.model_wrapped
        counts = {"steps": engine.global_steps, "skipped": engine.skipped_steps, "scale": engine.loss_scale()}
        found[stage] = {**finish(trainer, f"{folder}/half{stage}/final"), **counts}
    return found


def left_out(folder):
    """How many parameters a checkpoint has, and how many frozen ones it was saved without."""
    from pathlib import Path

    from shardwise.checkpoint.manifest import read_manifest

    manifest = read_manifest(Path(folder))
    return len(manifest.params), len(manifest.left_out)


def lora(folder, stage, resume=None, size=None, **options):
    """Adapters on a frozen base, which stays as it was, to the bit; embeddings of another `size` are saved, too."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, set_seed

    saved = {"save_strategy": "steps", "save_steps": 2} if not options else {}
    args = arguments(folder, f"lora{stage}", config(stage), **saved)
    set_seed(3)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    plain_model = base(folder)
    if size is not None:
        plain_model.resize_token_embeddings(size)
    model = get_peft_model(plain_model, adapters)
    trainer = Trainer(model=model, args=args, train_dataset=samples())
    trainer.train(resume_from_checkpoint=resume)
    if size is not None:
        return finish(trainer, f"{folder}/lora{stage}/final")
    engine = trainer.model_wrapped.shardwise_engine
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    plain = base_state(folder)
    same = [torch.equal(engine.full_param(name).cpu(), plain[plain_name(name)]) for name in frozen]
    return {**finish(trainer, f"{folder}/lora{stage}/final"), "frozen": len(frozen), "unchanged": sum(same)}


def prompt_encoder(folder, stage):
    """PEFT saves what its prompt encoder computes on rank 0, not what is in the state_dict of all ranks."""
    from peft import PromptEncoderConfig, get_peft_model
    from transformers import Trainer, set_seed

    args = arguments(folder, f"prompt{stage}", config(stage), save_strategy="steps", save_steps=2)
    set_seed(3)
    encoder = PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM")
    trainer = Trainer(model=get_peft_model(base(folder), encoder), args=args, train_dataset=samples())
    trainer.train()
    return finish(trainer, f"{folder}/prompt{stage}/final")


def base_state(folder):
    from safetensors.torch import load_file

    return load_file(f"{folder}/base/model.safetensors")


def plain_name(name):
    parts = name.removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


def saved_by_all(folder, rank):
    """All ranks call `save_pretrained`, as Accelerate's guide says, and only rank 0 has a state_dict."""
    from transformers import Trainer

    args = arguments(folder, "by-all", config("3"))
    trainer = Trainer(model=base(folder), args=args, train_dataset=samples())
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    trainer.model.save_pretrained(f"{folder}/by-all/first", is_main_process=rank == 0, state_dict=state)
    trainer.model.save_pretrained(f"{folder}/by-all/second", is_main_process=rank == 0)  # whole values on all ranks
    finish(trainer, f"{folder}/by-all/final")
    return [os.path.getsize(f"{folder}/by-all/{name}/model.safetensors") for name in ("first", "second", "final")]


def generated(folder, rank):
    """Ranks generate different numbers of tokens: those that are done keep taking part."""
    from transformers import Trainer

    args = arguments(folder, "generated", config("3"))
    trainer = Trainer(model=base(folder), args=args, train_dataset=samples())
    trainer.train()
    prompt = samples(2)[rank]["input_ids"][None].to(args.device)
    made = trainer.model_wrapped.generate(prompt, max_new_tokens=2 + rank, do_sample=False)
    finish(trainer, f"{folder}/generated/final")
    return made.shape[1] - prompt.shape[1]


def found_batch_size(folder):
    """Memory runs out once: Trainer takes the engine off, halves the batch and starts again with the same model."""
    from transformers import Trainer

    steps = []

    class Failing(Trainer):
        def training_step(self, *args, **kwargs):
            steps.append(self._train_batch_size)
            if len(steps) == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    args = arguments(folder, "found", config("2"), auto_find_batch_size=True, max_steps=2)
    trainer = Failing(model=base(folder), args=args, train_dataset=samples())
    trainer.train()
    finish(trainer, f"{folder}/found/final")
    return steps
