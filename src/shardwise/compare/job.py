"""What a comparison is about, and what one of its processes is told."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.compare.rows import Row
from shardwise.partition.policy import DTYPES

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
SEED = 17
SETTINGS_FOLDER = Path(__file__).parent / "settings"


@dataclass(frozen=True)
class Settings:
    """The same for every row."""

    model: str
    world_size: int = 2
    precision: str = "fp32"
    device: str = "cpu"
    accumulate: int = 1
    clip_norm: float | None = 1.0
    deterministic: bool = False
    steps: int = 20


def config_for(settings: Settings, preset: str) -> dict[str, object]:
    """The configuration of a row of ours."""
    return {
        "preset": preset,
        "precision": {"compute": settings.precision},
        "batch": {"accumulation": settings.accumulate},
        "gradients": {"clip_norm": settings.clip_norm, "deterministic": settings.deterministic},
    }


@dataclass(frozen=True)
class Job:
    """One rank of one row. `store` is a file through which the ranks find each other."""

    settings: Settings
    row: Row
    rank: int
    store: str
    threads: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.settings.precision]

    @property
    def device(self) -> torch.device:
        """The ranks share what there is: rank r computes on GPU r modulo their number."""
        if self.settings.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", self.rank % torch.cuda.device_count())

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        data = json.loads(text)
        return cls(**{**data, "settings": Settings(**data["settings"]), "row": Row(**data["row"])})


def peer_settings(name: str) -> dict[str, object]:
    """The settings file of a peer, committed beside this one."""
    settings: dict[str, object] = json.loads((SETTINGS_FOLDER / f"{name}.json").read_text())
    return settings
