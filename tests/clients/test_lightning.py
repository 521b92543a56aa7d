"""Lightning's own DeepSpeedStrategy, unmodified, on two ranks: training, validation, checkpoints."""

import pytest

from clients import lightning_runs
from support import run_ranks

pytest.importorskip("lightning")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


def test_stages_2_and_3_train_alike_and_resume(tmp_path):
    options = {"fresh": True, "init": False, "torchrun": True, "timeout": 250}
    runs = run_ranks(lightning_runs.run_all, 2, str(tmp_path), **options)[0]
    assert len(runs[2]["losses"]) == 8
    assert runs[3] == runs[2]
    assert runs[3]["straight"] == runs[3]["losses"] + runs[3]["resumed"]
