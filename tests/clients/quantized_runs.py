"""What ranks do in the tests of quantised bases: a tiny Llama in 4 or 8 bits with adapters of PEFT."""

import logging
import os
import warnings

import torch
from torch import nn

import shardwise
from shardwise.integrations.detach import detach

VOCABULARY, STEPS = 64, 3
PRESETS = ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]


def quiet():
    os.environ.setdefault("BITSANDBYTES_NOWELCOME", "1")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).bfloat16()


def in_4_bits(model, nested):
    from bitsandbytes.nn import Linear4bit

    return replaced(
        model,
        lambda old: Linear4bit(
            old.in_features,
            old.out_features,
            bias=False,
            compute_dtype=torch.bfloat16,
            compress_statistics=nested,
            quant_type="nf4",
        ),
    )


def in_8_bits(model):
    from bitsandbytes.nn import Linear8bitLt

    return replaced(
        model, lambda old: Linear8bitLt(old.in_features, old.out_features, bias=False, has_fp16_weights=False)
    )


def replaced(model, make):
    """The model with bitsandbytes' layers instead of all linear ones but the head, as transformers does it."""
    for path, old in list(model.named_modules()):
        if isinstance(old, nn.Linear) and path != "lm_head":
            new = make(old)
            new.load_state_dict(old.state_dict())
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new.to("cpu"))
    return model


def by_torchao(model, name):
    import torchao.quantization as torchao

    torchao.quantize_(model.model.layers, getattr(torchao, name)())
    return model


KINDS = {
    "nf4": lambda model: in_4_bits(model, nested=False),
    "nf4 nested": lambda model: in_4_bits(model, nested=True),
    "int8": in_8_bits,
    "torchao int8": lambda model: by_torchao(model, "Int8WeightOnlyConfig"),
    "torchao float8": lambda model: by_torchao(model, "Float8WeightOnlyConfig"),
}


def build(kind, seed=3):
    from peft import LoraConfig, get_peft_model

    model = KINDS[kind](llama()).requires_grad_(False)
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def start(kind, preset):
    model = build(kind)
    trained = [param for param in model.parameters() if param.requires_grad]
    config = {"preset": preset, "precision": {"compute": "bf16"}, "gradients": {"order": "sharded"}}
    return shardwise.initialize(model, torch.optim.AdamW(trained, lr=1e-2), config)


def train(engine, rank, steps=range(STEPS)):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(1, VOCABULARY, (2, 12), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def run(rank, world_size, kind, folder):
    """Losses by preset; whether the base is as it was; what rests; a checkpoint at another stage; the adapters."""
    quiet()
    plain = build(kind)
    ids = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        before = plain.train()(input_ids=ids).logits
    found = {"losses": {}, "same": {}}
    for preset in PRESETS:
        engine = start(kind, preset)
        with torch.no_grad():
            first = engine.train()(input_ids=ids).logits
        found["losses"][preset] = train(engine, rank)
        with engine.module.disable_adapter(), torch.no_grad():
            engine.eval()(input_ids=ids)  # may compute in another way, and may not change the base
            after = engine.train()(input_ids=ids).logits
        found["same"][preset] = torch.equal(before, first), torch.equal(before, after)
        if preset == "zero3":
            found["bytes"] = resting(engine, world_size)
            engine.save(f"{folder}/saved")
            engine.export(f"{folder}/adapters")
            found["rest"] = train(engine, rank, range(STEPS, 5))
        engine.destroy()
    for preset in ("zero2", "zero3_offload"):
        engine = start(kind, preset)
        engine.load(f"{folder}/saved")
        found[f"resumed {preset}"] = train(engine, rank, range(STEPS, 5))
        engine.destroy()
    return found


def resting(engine, world_size):
    """Bytes of frozen weights: at rest on this rank, whole, and of the latter those in 8 bits."""
    frozen = [unit for unit in engine.units if not unit.is_trainable]
    names = {unit.name for unit in frozen}
    held = sum(size for entry, size in engine._ledger.live.items() if entry.unit in names)
    narrow = sum(unit.weights.full_bytes for unit in frozen if unit.weights.policy.weight_dtype.itemsize == 1)
    return {"held": held, "whole": sum(unit.weights.full_bytes for unit in frozen), "narrow": narrow}


def alone(rank, world_size, kind, folder):
    """One rank continues what two have saved, and PEFT reads the adapters."""
    from peft import PeftModel

    quiet()
    engine = start(kind, "zero3")
    engine.load(f"{folder}/saved")
    trained = {name: engine.full_param(name) for name, param in engine.module.named_parameters() if param.requires_grad}
    ids = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        before = engine.train()(input_ids=ids).logits
    detach(engine, {name: param.dtype for name, param in engine.module.named_parameters() if param.requires_grad})
    with torch.no_grad():
        torch.testing.assert_close(engine.module(input_ids=ids).logits, before)  # the base stays usable
    model = PeftModel.from_pretrained(KINDS[kind](llama()), f"{folder}/adapters", autocast_adapter_dtype=False)
    read = dict(model.named_parameters())
    return all(torch.equal(value.bfloat16(), read[name].bfloat16()) for name, value in trained.items())


def by_trainer(rank, world_size, folder):
    """QLoRA as transformers' documentation writes it, in two stages: losses, and bytes of the packed base."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, LlamaForCausalLM, TrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainer

    quiet()
    ids = torch.randint(1, VOCABULARY, (16, 12), generator=torch.Generator().manual_seed(1))
    found = {}
    for preset in ("zero2", "zero3"):
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        model = LlamaForCausalLM.from_pretrained(f"{folder}/base", quantization_config=how, device_map={"": "cpu"})
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=preset == "zero3")
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        quiet_too = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
        args = TrainingArguments(
            f"{folder}/{preset}", max_steps=3, per_device_train_batch_size=2, bf16=True, **quiet_too
        )
        data = [{"input_ids": each, "labels": each} for each in ids]
        trainer = ShardwiseTrainer(model=model, args=args, train_dataset=data, shardwise=preset)
        trainer.train()
        trainer.save_model(f"{folder}/{preset}/final")
        packed = [unit for unit in trainer.engine.units if unit.weights.policy.weight_dtype is torch.uint8]
        found[preset] = {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "packed": sum(unit.weights.full_bytes for unit in packed),
            "mine": sum(unit.weights.master.nbytes for unit in packed),
        }
        trainer.engine.destroy()
    return found


def save_base(folder):
    llama().save_pretrained(f"{folder}/base")
