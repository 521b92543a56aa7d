"""DeepSpeed's checkpoint calls over shardwise's checkpoints: folders by tag, a file `latest`, a client state."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
OPTIMIZER_STATE_DICT, BASE_OPTIMIZER_STATE = "optimizer_state_dict", "base_optimizer_state"
FP32_FLAT_GROUPS, SINGLE_PARTITION_OF_FP32_GROUPS = "fp32_flat_groups", "single_partition_of_fp32_groups"
ZERO_STAGE, PARAM_SHAPES, BUFFER_NAMES, DS_VERSION = "zero_stage", "param_shapes", "buffer_names", "ds_version"
_LATEST = "latest"
# Existing checkpoint folders have this script: it imports this module by this name.
_SCRIPT = '''"""Merge the checkpoint in a folder into one file of fp32 weights: python zero_to_fp32.py FOLDER OUT"""

from shardwise.compat.checkpoints import zero_to_fp32

zero_to_fp32()
'''


def save(
    engine: Engine, folder: str, tag: str, client_state: dict[str, Any] | None, save_latest: bool, frozen: bool
) -> None:
    if not engine.is_at_rest:
        logging.getLogger("DeepSpeed").warning("a checkpoint between the micro-batches of a step: it has no gradients")
    saved = engine.save(folder, tag, state=dict(client_state or {}), frozen=frozen, midway=True)
    if engine.comm.everyone.rank == 0:
        # A checkpoint that replaced one of the same tag has a number after it. Clients look for the tag alone.
        if saved.name != tag:
            Path(str(saved)).rename(Path(folder) / tag)
        if save_latest:
            (Path(folder) / _LATEST).write_text(tag)
        (Path(folder) / "zero_to_fp32.py").write_text(_SCRIPT)
    torch.distributed.barrier()


def agreed_tag(tag: str, validation: str | None) -> str:
    """Rank 0's tag. A collective.

    Where ranks give different ones, that is an error, a warning or nothing, by `checkpoint.tag_validation`.
    """
    tags: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(tags, tag)
    mode = (validation or "warn").lower()
    if len(set(tags)) > 1 and mode != "ignore":
        sentence = f"ranks save a checkpoint under different tags, {tags}: pass the same tag on all ranks"
        if mode == "fail":
            raise AssertionError(sentence)
        logging.getLogger("DeepSpeed").warning("%s; here, the first is taken", sentence)
    return str(tags[0])


def load(engine: Engine, folder: str, tag: Any, with_schedule: bool) -> tuple[str | None, dict[str, Any] | None]:
    found = _find(folder, tag)
    if found is None:
        return None, None
    schedule = engine.lr_scheduler
    if not with_schedule:
        engine.lr_scheduler = None
    try:
        state = engine.load(*_place(folder, found))
    finally:
        engine.lr_scheduler = schedule
    return str(Path(folder) / found), state or {}


def load_weights(
    engine: Engine, folder: str, tag: Any, strict: bool, keeps_counters: bool, with_schedule: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Load the weights; the optimizer's state stays as it is, and with `keeps_counters` all else, too."""
    found = _find(folder, tag)
    if found is None:
        return None, None
    content = _read(folder, found)
    engine.load_state_dict(content.weights, strict=strict)
    if not keeps_counters:
        engine.set_progress(content.training)
        if with_schedule and engine.lr_scheduler is not None and content.training["lr_scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(content.training["lr_scheduler"])
    return str(Path(folder) / found), content.client_state


def _place(folder: str, tag: str) -> tuple[Path, str]:
    """Where a checkpoint is looked for: the folder of this name, or the checkpoint of this name in `folder`."""
    from shardwise.checkpoint.folder import LATEST

    own = Path(folder) / tag
    return (own, LATEST) if (own / "manifest.json").is_file() else (Path(folder), tag)


def _find(folder: str, tag: Any) -> str | None:
    """The tag to load; None, with a warning, if none is given and no file says which is the latest."""
    latest = Path(folder) / _LATEST
    if tag is None and not latest.is_file():
        logging.getLogger("DeepSpeed").warning(
            "there is no file %s: pass a tag to load_checkpoint, or nothing is loaded", latest
        )
        return None
    found = str(tag) if tag is not None else latest.read_text().strip()
    if any((Path(folder) / found).glob("*_model_states.pt")):
        raise CheckpointError(
            f"{Path(folder) / found} was written by DeepSpeed: convert it with `shardwise import-deepspeed "
            f"{folder} OUT`, and load that"
        )
    return found


class Content(NamedTuple):
    """What a checkpoint holds besides the optimizer's state; weights in the precision that was updated."""

    weights: dict[str, torch.Tensor]
    frozen: set[str]
    training: dict[str, Any]
    client_state: dict[str, Any]


def _read(folder: str, tag: str | None) -> Content:
    from shardwise.checkpoint.files import CheckpointReader
    from shardwise.checkpoint.folder import LATEST, candidates
    from shardwise.checkpoint.manifest import read_manifest
    from shardwise.checkpoint.plain import from_plain
    from shardwise.optim.states import PARAM

    path = candidates(*_place(folder, tag or LATEST), fallback=False)[0]
    manifest = read_manifest(path)
    with CheckpointReader(path, manifest) as reader:
        weights = {
            name: reader.whole(key)
            for prefix in (f"{PARAM}/", "buffer/")
            for key in manifest.tensors
            if (name := key.removeprefix(prefix)) != key
        }
        aliases = {alias: name for name, info in manifest.params.items() for alias in info.aliases}
        weights |= {alias: weights[name] for alias, name in aliases.items() if name in weights}
        frozen = {name for name, info in manifest.params.items() if info.group is None}
        frozen |= {alias for alias, name in aliases.items() if name in frozen}
        training = from_plain(manifest.training, reader.whole)
        return Content(weights, frozen, training, from_plain(manifest.state, reader.whole) or {})


def consolidated(
    model: nn.Module, keep: bool, exclude_frozen: bool, though_frozen: Iterable[nn.Parameter] = ()
) -> dict[str, torch.Tensor] | None:
    """The model's state_dict with whole values, on the CPU, where `keep`; None elsewhere. A collective.

    With `exclude_frozen`, frozen parameters are left out, but for those in `though_frozen`.
    """
    from shardwise.engine.access import gathered

    kept: dict[str, torch.Tensor] = {}
    copies: dict[int, torch.Tensor] = {}
    kept_frozen = {id(param) for param in though_frozen}
    for name, param in model.named_parameters(remove_duplicate=False):
        if exclude_frozen and not param.requires_grad and id(param) not in kept_frozen:
            continue
        with gathered(param):
            if keep and id(param) not in copies:
                copies[id(param)] = param.detach().to("cpu", copy=True)
        if keep:
            kept[name] = copies[id(param)]
    if not keep:
        return None
    from shardwise.checkpoint.checkpointable import persistent_buffers

    for name, buffer in persistent_buffers(model, all_names=True).items():
        if id(buffer) not in copies:
            copies[id(buffer)] = buffer.detach().to("cpu", copy=True)
        kept[name] = copies[id(buffer)]
    return kept


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu", copies: dict[Any, torch.Tensor] | None = None) -> Any:
    """The same containers with every tensor copied to `device`, none sharing storage with the original.

    Tensors that show the same values, as tied weights do, are one copy: clients save them once.
    """
    from shardwise.unit.saved_tensors import storage_of

    copies = {} if copies is None else copies
    if isinstance(item, torch.Tensor):
        storage = storage_of(item)
        place = (storage, item.storage_offset(), item.shape, item.stride(), item.dtype) if storage else id(item)
        if place not in copies:
            copies[place] = item.detach().to(device, copy=True)
        return copies[place]
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device, copies)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device, copies) for value in item)
    return item


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """The fp32 weights of a checkpoint, whole. Needs no GPU and no process group."""
    if tag is None and (Path(checkpoint_dir) / _LATEST).is_file():
        tag = (Path(checkpoint_dir) / _LATEST).read_text().strip()
    content = _read(checkpoint_dir, tag)
    left_out = content.frozen if exclude_frozen_parameters else ()
    weights = {name: value for name, value in content.weights.items() if name not in left_out}
    return {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str | None = None,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights of a checkpoint into one file, of any size: in a folder, or of a name with an ending.

    In a folder it is `pytorch_model.bin`, with `safe_serialization` `model.safetensors`.
    """
    target = Path(output_dir)
    if not target.suffix:
        target.mkdir(parents=True, exist_ok=True)
        target = target / ("model.safetensors" if safe_serialization else "pytorch_model.bin")
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    if not safe_serialization:
        torch.save(weights, target)
        return
    from safetensors.torch import save_file

    apart = {name: value.clone() for name, value in weights.items()}  # tied weights share storage
    save_file(apart, target, metadata={"format": "pt"})


def zero_to_fp32() -> None:
    """`python zero_to_fp32.py FOLDER OUT`, with the arguments of DeepSpeed's script."""
    parser = argparse.ArgumentParser(
        "zero_to_fp32", description="Write the fp32 weights of a checkpoint into one file."
    )
    parser.add_argument("checkpoint_dir", help="The folder that holds the checkpoint.")
    parser.add_argument("output_dir", help="A folder, or a file with an ending.")
    parser.add_argument("--max_shard_size", help="No effect: one file is written.")
    parser.add_argument("--safe_serialization", action="store_true", help="Write safetensors.")
    parser.add_argument("-t", "--tag", help="Which checkpoint (default: the latest).")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    del options["debug"]
    convert_zero_checkpoint_to_fp32_state_dict(**options)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Load the fp32 weights of a checkpoint into a plain model."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model.cpu()


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """A file with a checkpoint's client state for `torch.load`, written into a temporary folder."""
    folder = Path(checkpoint_dir)
    if not (folder / "manifest.json").is_file():
        raise CheckpointError(f"{checkpoint_dir} holds no manifest.json: name the folder of one checkpoint")
    return _written("mp_rank_00_model_states.pt", _read(str(folder.parent), folder.name).client_state)


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """A file that tells a client the stage, written into a temporary folder; `get_model_state_file` ignores it.

    Of a checkpoint that DeepSpeed wrote, its own files, in the order of the ranks.
    """
    if found := glob(os.path.join(checkpoint_dir, "*_optim_states.pt")):
        return sorted(found, key=lambda path: [int(number) for number in re.findall(r"\d+", os.path.basename(path))])
    return [_written("zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": {"zero_stage": 3}})]


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """A file with a checkpoint's weights as `module` for `torch.load`, written into a temporary folder."""
    folder = Path(base_folder)
    content = _read(str(folder.parent), folder.name)
    return _written(f"mp_rank_{mp_rank_str}_model_states.pt", {"module": content.weights, **content.client_state})


def _written(name: str, content: Any) -> str:
    """The path of a file of torch's that lasts as long as the process: checkpoints hold none."""
    folder = tempfile.mkdtemp(prefix="shardwise-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.save(content, path := os.path.join(folder, name))
    return path


def main(args: Any = None) -> None:
    """`ds_to_universal`: every checkpoint loads on any number of ranks, so this one is copied, by links if possible."""
    args = args or parse_arguments()
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
