"""What ranks do in the tests of TRL: SFT, DPO and GRPO on a tiny Llama, full and with adapters, under two stages."""

from clients.trainer_runs import arguments, base, config, finish, start

WORDS = 40


def run_all(rank, world_size, folder):
    import shardwise.as_deepspeed  # noqa: F401  # first, before trl

    start(folder, rank)
    found = {}
    for method in (sft, dpo, grpo):
        for stage in ("2", "3"):
            for adapters in (False, True):
                trainer = method(folder, stage, adapters)
                trainer.train()
                found[method.__name__, stage, adapters] = finish(
                    trainer, f"{folder}/{method.__name__}{stage}{adapters}"
                )
    return found if rank == 0 else None


def sft(folder, stage, adapters):
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": text(n, 12)} for n in range(16)]
    return make(SFTTrainer, SFTConfig, rows, folder, stage, adapters, max_length=32)


def dpo(folder, stage, adapters):
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": text(n, 4), "chosen": text(n + 1, 5), "rejected": text(n + 2, 5)} for n in range(16)]
    return make(DPOTrainer, DPOConfig, rows, folder, stage, adapters, max_length=32)


def grpo(folder, stage, adapters):
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": text(n, 4)} for n in range(16)]
    settings = {"max_completion_length": 6, "num_generations": 2, "beta": 0.1}
    return make(GRPOTrainer, GRPOConfig, rows, folder, stage, adapters, reward=different_words, **settings)


def different_words(completions, **details):
    return [float(len(set(completion.split()))) for completion in completions]


def make(trainer, settings, rows, folder, stage, adapters, reward=None, **options):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import set_seed

    plain = arguments(folder, "trl", config(stage)).to_dict()
    kept = ("output_dir", "per_device_train_batch_size", "learning_rate", "logging_steps", "max_grad_norm", "report_to")
    common = {key: plain[key] for key in (*kept, "use_cpu", "disable_tqdm", "save_strategy", "accelerator_config")}
    args = settings(deepspeed=config(stage), max_steps=2, bf16=False, gradient_checkpointing=False, **common, **options)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if adapters else None
    set_seed(1)
    further = {"reward_funcs": reward} if reward is not None else {}
    return trainer(
        model=base(folder),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=lora,
        **further,
    )


def text(number, length):
    return " ".join(f"w{(number * 7 + index * 3) % WORDS}" for index in range(length))


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{n}": n + 3 for n in range(WORDS)}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
