"""How `import deepspeed` becomes shardwise: by a command, by a variable, by an import; and when it is too late."""

import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from shardwise import __version__
from shardwise.compat import activation
from shardwise.errors import CompatibilityError
from support import run_command

CLI = [sys.executable, "-c", "from shardwise.cli import main; main()"]
# As clients look for it, which takes no time: `import deepspeed` would import torch. The line is one write: torchrun's
# ranks are unbuffered and share an output.
WHO = (
    "from importlib.util import find_spec; from importlib.metadata import version; found = find_spec('deepspeed'); "
    "name, ours = version('deepspeed') if found else 'absent', bool(found) and 'compat' in found.origin; "
    r"print(f'{name} {ours}\n', end='', flush=True)"
)
NAME = f"0.16.3+shardwise.{__version__}"
IMPORT = """
import sys, time, torch
started = time.process_time()
import deepspeed
print(time.process_time() - started, torch.cuda.is_initialized(), "shardwise.engine.engine" in sys.modules)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "who.py").write_text(WHO)
    return tmp_path / "who.py"


def test_a_command_and_all_that_it_starts_find_it(script):
    child = f"import subprocess, sys; subprocess.run([sys.executable, {str(script)!r}], check=True)"
    shown = run_command([*CLI, "run", "--as-deepspeed", "--", "python", "-c", child]).stdout
    assert shown.split() == [NAME, "True"]


@pytest.mark.clients
def test_a_script_on_several_ranks_and_the_launcher(script):
    shown = run_command([*CLI, "run", "--as-deepspeed", "-n", "2", script]).stdout
    assert shown.split() == [NAME, "True"] * 2
    told = r"print(f'{sys.argv[1:]} {size}\n', end='', flush=True)"
    script.write_text(f"import os, sys; size = os.environ['WORLD_SIZE']; {told}")
    shown = run_command([*CLI, "run", "--as-deepspeed", "--", "deepspeed", "--num_gpus", "2", script, "--x"]).stdout
    assert sorted(shown.splitlines()) == ["['--local_rank=0', '--x'] 2", "['--local_rank=1', '--x'] 2"]


def test_without_it_there_is_no_deepspeed():
    assert run_command([sys.executable, "-c", WHO]).stdout.split() == ["absent", "False"]


def test_an_import_puts_it_in_place_for_clients_and_too_late_is_an_error(tmp_path):
    found = "import shardwise.as_deepspeed; " + WHO
    assert run_command([sys.executable, "-c", found]).stdout.split() == [NAME, "True"]
    (tmp_path / "accelerate.py").write_text("")
    late = [sys.executable, "-c", "import accelerate; import shardwise.as_deepspeed"]
    error = run_command(late, cwd=tmp_path, check=False).stderr
    assert "accelerate was imported before shardwise.as_deepspeed" in error
    assert "the first import of the script" in error


def test_the_variable_works_where_it_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(activation, "_startup_file", lambda: tmp_path / "shardwise-as-deepspeed.pth")
    assert "SHARDWISE_AS_DEEPSPEED=1" in activation.install()
    assert str(tmp_path) in activation.status()
    python = [sys.executable, "-c", f"import site; site.addsitedir({str(tmp_path)!r}); {WHO}"]
    assert run_command(python, env={"SHARDWISE_AS_DEEPSPEED": "1"}).stdout.split() == [NAME, "True"]
    assert run_command(python).stdout.split() == ["absent", "False"]
    assert "removed" in activation.remove()
    assert "there is no" in activation.remove()
    assert "not installed" in activation.status()


def test_an_installed_deepspeed_is_hidden_only_when_asked(monkeypatch, tmp_path):
    (tmp_path / "deepspeed-9.9.dist-info").mkdir()
    (tmp_path / "deepspeed-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert activation.installed_deepspeed() == "9.9"
    with pytest.raises(CompatibilityError, match=r"DeepSpeed 9.9 is installed and would be hidden: pass --force"):
        activation.check_may_go_first(False, "pass --force")
    activation.check_may_go_first(True, "pass --force")
    startup = [
        sys.executable,
        "-c",
        "import sys; from shardwise.compat import activation; activation.start_up(); "
        "print('compat/path' in str(sys.path))",
    ]
    path = {"PYTHONPATH": f"{tmp_path}:{':'.join(p for p in sys.path if p)}", "SHARDWISE_AS_DEEPSPEED": "1"}
    refused = run_command(startup, env=path)
    assert refused.stdout.strip() == "False"
    assert "DeepSpeed 9.9 is installed and is used" in refused.stderr
    assert run_command(startup, env={**path, "SHARDWISE_AS_DEEPSPEED": "force"}).stdout.strip() == "True"


def test_it_imports_quickly_and_never_touches_cuda():
    times_s = []
    for _ in range(5):
        shown = run_command([sys.executable, "-c", IMPORT], env=activation.environment({"PATH": ""})).stdout.split()
        assert shown[1:] == ["False", "False"]
        times_s.append(float(shown[0]))
        if times_s[-1] < 0.2:
            return
    pytest.fail(f"import deepspeed takes {min(times_s):.2f} s beyond import torch; 0.2 s are allowed")


def test_the_metadata_has_the_version_of_the_package():
    (folder,) = activation.FOLDER.glob("deepspeed-*.dist-info")
    assert Distribution.at(folder).version == NAME


def test_the_launcher_is_executable_and_the_folder_is_in_the_wheel(tmp_path):
    assert (activation.FOLDER / "bin" / "deepspeed").stat().st_mode & 0o111
    listed = subprocess.check_output(["git", "ls-files", "src/shardwise/compat/path"], cwd=Path(__file__).parents[2])
    assert b"dist-info/METADATA" in listed
