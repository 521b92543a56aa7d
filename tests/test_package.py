"""The package as a stranger meets it: cheap to import, examples that run, nothing of our machines in it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import CommandFailed, run_command

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md")))]
OPTIONAL = (
    "transformers",
    "accelerate",
    "peft",
    "lightning",
    "ray",
    "matplotlib",
    "typer",
    "rich",
    "hjson",
    "deepspeed",
)
EXAMPLE_LIMIT_S = 100
# The folders that people and machines keep checkouts in; spelt so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:wor[k]|roo[t]|hom[e]|User[s])/\w")

IMPORT = f"""
import sys, time
import torch
before = set(sys.modules)
started = time.process_time()
import shardwise
print(time.process_time() - started, torch.cuda.is_initialized())
print(*[name for name in {OPTIONAL!r} if name in set(sys.modules) - before])
"""


def test_import_is_cheap_and_brings_in_nothing_optional():
    times_s = []
    for _ in range(5):  # CPU time, and the best of several: the machine may be busy
        first, optional = run_command([sys.executable, "-c", IMPORT], timeout=30).stdout.split("\n")[:2]
        time_s, cuda = first.split()
        assert cuda == "False"
        assert optional == ""
        times_s.append(float(time_s))
        if times_s[-1] < 0.2:
            return
    pytest.fail(f"import shardwise takes {min(times_s):.2f} s beyond import torch; 0.2 s are allowed")


@pytest.mark.timeout(10 * EXAMPLE_LIMIT_S)
@pytest.mark.parametrize("page", PAGES)
def test_examples_run_as_written(page, tmp_path):
    for number, code in enumerate(python_blocks((ROOT / page).read_text())):
        run_example(code, tmp_path / f"{number}.py")


DOCTESTS = """
import doctest, importlib, sys
import torch.distributed as dist
failed = 0
for name in sys.argv[1:]:
    failed += doctest.testmod(importlib.import_module(name)).failed
    if dist.is_initialized():  # by the example of an engine
        dist.destroy_process_group()
sys.exit(failed > 0)
"""


def test_examples_in_docstrings_run(tmp_path):
    source = ROOT / "src"
    paths = [path for path in sorted(source.rglob("*.py")) if ">>> " in path.read_text()]
    names = [".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    assert len(names) > 60
    (tmp_path / "run.py").write_text(DOCTESTS)
    run_command([sys.executable, tmp_path / "run.py", *names], cwd=tmp_path, timeout=EXAMPLE_LIMIT_S, forked=True)


@pytest.mark.parametrize("page", ["README.md", "docs/measured.md"])
def test_measured_tables_are_those_of_the_newest_results(page):
    run_command([sys.executable, ROOT / "benchmarks/readme_tables.py", ROOT / page, "--check"], timeout=60, forked=True)


def python_blocks(markdown: str) -> list[str]:
    """The blocks fenced as `python`. Each must run on its own; code that is only shown is fenced as `py`."""
    fences = re.finditer(r"^( *)```python *\n(.*?)^\1``` *$", markdown, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{fence[1]}", "", fence[2], flags=re.MULTILINE) for fence in fences]


def run_example(code: str, path: Path) -> None:
    """From a file of its own, in an empty folder, as its reader would."""
    path.write_text(code)
    try:
        run_command([sys.executable, path.name], cwd=path.parent, timeout=EXAMPLE_LIMIT_S, forked=True)
    except CommandFailed as failure:
        pytest.fail(f"{failure}\n--- the example:\n{code}", pytrace=False)


def test_blocks_are_found_and_a_broken_one_fails(tmp_path):
    page = "text\n```python\nx = 1\n```\n- item\n  ```python\n  1 / 0\n  ```\n```py\nshown only\n```\n```\nplain\n```\n"
    good, bad = python_blocks(page)
    assert good == "x = 1\n"
    run_example(good, tmp_path / "good.py")
    with pytest.raises(pytest.fail.Exception, match="ZeroDivisionError"):
        run_example(bad, tmp_path / "bad.py")
    for path in [ROOT / page for page in PAGES]:
        assert len(python_blocks(path.read_text())) == path.read_text().count("```python"), path


def test_no_machine_paths_in_tracked_files():
    try:
        names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    found = []
    for path in [ROOT / name for name in names if name]:
        if path.is_file():
            text = path.read_text(errors="replace")
            found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    assert not found
    for bad in ("cd " + "/wor" + "k/main", '"/hom' + 'e/me"'):
        assert MACHINE_PATH.search(bad)
    assert not MACHINE_PATH.search("https://example.org/hom" + "e/page")
