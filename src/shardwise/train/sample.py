"""Text from the model in training. Its weights may be cut up over the ranks, so all ranks call this alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.engine.engine import Engine

TEMPERATURE = 0.85
"""Less, and a small model repeats itself; more, and it stammers."""


@torch.no_grad()
def sample(engine: Engine, prompt: Sequence[int], count: int, context: int, seed: int = 0) -> list[int]:
    """The prompt and `count` tokens more, drawn one by one; each sees at most `context` before it."""
    device = next(engine.module.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    engine.eval()
    for _ in range(count):
        logits = engine(torch.tensor([tokens[-context:]], device=device))[0, -1]
        chances = torch.softmax(logits.double().cpu() / TEMPERATURE, dim=-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    engine.train()
    return tokens


def as_text(tokens: Sequence[int], is_text: bool) -> str:
    """Bytes as the text they stand for (a file's end is a line's end), other tokens as numbers.

    >>> as_text([104, 105, 0, 27, 106], is_text=True)
    'hi\\n�j'
    """
    if not is_text:
        return " ".join(map(str, tokens))
    text = bytes(tokens).replace(b"\0", b"\n").decode(errors="replace")
    # A terminal would obey control codes.
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
