"""`deepspeed.checkpoint.ds_to_universal`: every checkpoint loads at any world size, so this one is copied."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError


def main(args: Any) -> None:
    """Copy the checkpoint in `args.input_folder` to `args.output_folder`, by links where the file system has them."""
    source, target = Path(args.input_folder), Path(args.output_folder)
    if not (source / "manifest.json").is_file():
        raise CheckpointError(f"{source} holds no manifest.json: name the folder of one checkpoint")
    shutil.copytree(source, target, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("ds_to_universal", description="Copy a checkpoint to another folder.")
    parser.add_argument("--input_folder", required=True)
    parser.add_argument("--output_folder", required=True)
    return parser.parse_known_args()[0]
