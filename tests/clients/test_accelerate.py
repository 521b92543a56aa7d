"""`accelerate launch` with the YAML files that `accelerate config` writes."""

import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from clients.devices import DEVICES
from support import run_command

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(700)]
CLI = [sys.executable, "-c", "from shardwise.cli import main; main()"]
SCRIPT = Path(__file__).parent / "accelerate_script.py"


def run(folder, stage, port, device):
    section = {
        "zero_stage": stage,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
    }
    top = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "no"}
    count = 2 if device == "cpu" else 1  # Accelerate gives every rank a GPU of its own
    top |= {"num_machines": 1, "machine_rank": 0, "num_processes": count, "use_cpu": device == "cpu"}
    top |= {"deepspeed_config": section}
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(top))
    launch = ["accelerate", "launch", "--config_file", folder / "config.yaml", "--main_process_port", str(port)]
    shown = run_command([*CLI, "run", "--as-deepspeed", "--force", "--", *launch, SCRIPT, folder], timeout=300).stdout
    return next(line for line in shown.splitlines() if line.startswith("FOUND"))


@pytest.mark.parametrize("device", DEVICES)
def test_every_stage_prints_the_same_losses_and_saves_plain_weights(tmp_path, device):
    lines = [run(tmp_path / str(stage), stage, 29700 + stage, device) for stage in (2, 3)]
    assert lines[0].startswith(f"FOUND {2 if device == 'cpu' else 1} Sequential True [")
    assert lines[1] == lines[0]
    two, three = (load_file(tmp_path / str(stage) / "model" / "model.safetensors") for stage in (2, 3))
    assert set(two) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(two[name].equal(three[name]) for name in two)
