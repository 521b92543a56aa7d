"""Real architectures, tiny and with random weights: each is trained under the stages and beside DDP."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from support.training import digest

STAGES = ["zero1", "zero2", "zero3"]
STEPS = 3
TOKENS, LENGTH, BATCH = 96, 12, 2
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": TOKENS}
DECODER = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 32}
IMAGE = {"image_size": 16, "patch_size": 8, "num_channels": 3}

Batch = dict[str, torch.Tensor]
Built = tuple[nn.Module, Callable[[torch.Generator], Batch]]

ARCHITECTURES: dict[str, Callable[[], Built]] = {}
"""By name: a function that makes a model and a function that makes its batches."""


def architecture(name: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        ARCHITECTURES[name] = build
        return build

    return register


def causal(kind: str, **options: Any) -> Built:
    """A decoder of transformers: config and model classes have the name of the family in front."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}ForCausalLM")(config), text


def text(generator: torch.Generator) -> Batch:
    tokens = torch.randint(TOKENS, (BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def images(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(BATCH, 3, 16, 16, generator=generator)


for _name, _kind, _options in (
    ("Llama", "Llama", DECODER),
    ("Qwen3", "Qwen3", {**DECODER, "head_dim": 8}),
    (
        "Qwen3-MoE",
        "Qwen3Moe",
        {**DECODER, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"output_router_logits": True},
    ),
    ("Mixtral", "Mixtral", {**DECODER, "num_local_experts": 4, "output_router_logits": True}),
    ("Gemma", "Gemma", {**DECODER, "head_dim": 8}),
    ("Mamba", "Mamba", {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}),
):
    ARCHITECTURES[_name] = lambda kind=_kind, options=_options: causal(kind, **options)


@architecture("GPT-2")
def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(vocab_size=TOKENS, n_embd=32, n_layer=3, n_head=4, n_positions=32, **ends)
    return GPT2LMHeadModel(config), text


@architecture("BERT")
def bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=32)), text


@architecture("T5")
def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=TOKENS, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4)
    config.decoder_start_token_id = config.pad_token_id = 0
    return T5ForConditionalGeneration(config), text


@architecture("ViT")
def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    model = ViTForImageClassification(ViTConfig(**sizes, **IMAGE, intermediate_size=64, num_labels=5))
    return model, lambda generator: {
        "pixel_values": images(generator),
        "labels": torch.randint(5, (BATCH,), generator=generator),
    }


@architecture("CLIP")
def clip() -> Built:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    words = {
        **sizes,
        "vocab_size": TOKENS,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": TOKENS - 1,
    }
    model = CLIPModel(CLIPConfig(text_config=words, vision_config={**sizes, **IMAGE}, projection_dim=16))
    return model, lambda generator: {
        "input_ids": text(generator)["input_ids"],
        "pixel_values": images(generator),
        "return_loss": True,
    }


@architecture("Whisper")
def whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
           (("layers", 3), ("attention_heads", 4), ("ffn_dim", 64))},
        vocab_size=TOKENS, d_model=32, num_mel_bins=8, max_source_positions=12, max_target_positions=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config), lambda generator: {
        "input_features": torch.randn(BATCH, 8, 24, generator=generator),
        "labels": text(generator)["labels"],
    }


class Denoiser(nn.Module):
    """A diffusion model with its loss: the noise it sees in a noisy sample."""

    def __init__(self, model: nn.Module, **inputs: torch.Tensor) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs

    def forward(self, sample: torch.Tensor, noise: torch.Tensor) -> Any:
        steps = torch.arange(len(sample)) * 100
        predicted = self.model(sample + noise, timestep=steps, **self.inputs).sample
        return {"loss": (predicted - noise).square().mean()}


def noisy(channels: int) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        return {name: torch.randn(BATCH, channels, 8, 8, generator=generator) for name in ("sample", "noise")}

    return batch


@architecture("UNet (diffusion)")
def unet() -> Built:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=2, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=4,
    )  # fmt: skip
    return Denoiser(model), noisy(3)


@architecture("DiT (diffusion)")
def dit() -> Built:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=3, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    return Denoiser(model, class_labels=torch.zeros(BATCH, dtype=torch.long)), noisy(4)


def build(name: str) -> Built:
    torch.manual_seed(11)
    model, batch = ARCHITECTURES[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train(), batch


def losses_of(step: Callable[[Batch], torch.Tensor], batch: Callable[..., Batch], rank: int) -> list[float]:
    generators = (torch.Generator().manual_seed(100 * step + rank) for step in range(STEPS))
    torch.manual_seed(13)
    return [step(batch(generator)).item() for generator in generators]


def train_engine(name: str, preset: str, rank: int) -> tuple[list[float], str, int]:
    """Losses, the hash of everything afterwards, and the number of units."""
    model, batch = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = shardwise.initialize(model, optimizer, {"preset": preset, "gradients": {"order": "sharded"}})

    def step(inputs: Batch) -> torch.Tensor:
        loss: torch.Tensor = engine(**inputs)["loss"]
        engine.backward(loss)
        engine.step()
        return loss

    losses = losses_of(step, batch, rank)
    seen = losses, digest(engine), len(engine.units)
    engine.destroy()
    return seen


def train_ddp(name: str, rank: int) -> list[float]:
    model, batch = build(name)
    peer = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(inputs: Batch) -> torch.Tensor:
        loss: torch.Tensor = peer(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return losses_of(step, batch, rank)


def measure(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Train an architecture under the stages and DDP; returns its row of the table in docs/models.md."""
    runs = {preset: train_engine(name, preset, rank) for preset in STAGES}
    losses = {preset: run[0] for preset, run in runs.items()}
    ddp = train_ddp(name, rank)
    return {
        "architecture": name,
        "parameters": sum(param.numel() for param in build(name)[0].parameters()),
        "units": runs["zero3"][2],
        "equal_bits": len({run[1] for run in runs.values()}) == 1 and len({str(one) for one in losses.values()}) == 1,
        "loss": losses["zero3"],
        "loss_ddp": ddp,
        "difference": max(abs(a - b) / abs(b) for a, b in zip(losses["zero3"], ddp, strict=True)),
    }
