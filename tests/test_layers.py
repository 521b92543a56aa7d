"""The architecture as `pyproject.toml` states it: what may import what, what packages export, what class names mean."""

import ast
import graphlib
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardwise"
LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["shardwise"]["layers"]
FACES = {"__init__", "__main__"}  # the public namespace, which loads everything lazily, and `python -m shardwise`
PACKAGES = [layer for layer in LAYERS if (SOURCE / layer.replace(".", "/")).is_dir()]


def module_name(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def imports_of(name):
    """The modules that one imports, wherever in it: at the top, for types only, or inside a function."""
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shardwise":
            for alias in node.names:
                full = f"{node.module}.{alias.name}".removeprefix("shardwise.")
                yield full if full in MODULES else node.module.removeprefix("shardwise.")
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("shardwise.") for a in node.names if a.name.startswith("shardwise."))


def layer(name):
    """The innermost package or module around one that has a place in the order."""
    outer = name
    while outer not in LAYERS and "." in outer:
        outer = outer.rpartition(".")[0]
    return outer


def test_every_module_has_a_layer():
    assert {layer(name) for name in MODULES} - FACES == set(LAYERS)


@pytest.mark.parametrize("name", sorted(set(MODULES) - FACES))
def test_a_module_imports_only_from_layers_before_its_own(name):
    allowed = LAYERS[: LAYERS.index(layer(name)) + 1]
    assert [other for other in imports_of(name) if layer(other) not in allowed] == []


def test_no_import_is_part_of_a_cycle():
    graph = {name: {other for other in imports_of(name) if other != name} for name in MODULES if name not in FACES}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_a_package_exports_at_most_six_names():
    counts = {name: len(exports(name)) for name in PACKAGES}
    assert {name: count for name, count in counts.items() if count > 6} == {}


def exports(name):
    for node in MODULES[name].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def test_no_class_name_is_defined_twice():
    names = Counter(node.name for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_the_readme_names_every_package_and_a_package_those_inside_it(name):
    outer, _, own = name.rpartition(".")
    if outer:
        assert f"\n{own}/ " in ast.get_docstring(MODULES[outer])
    else:
        assert f"| `{name}/`" in (ROOT / "README.md").read_text()


def test_the_standalone_part_of_compat_needs_no_engine():
    allowed = {*LAYERS[: LAYERS.index("config") + 1], "compat.standalone"}
    names = [name for name in MODULES if layer(name) == "compat.standalone"]
    assert {layer(other) for name in names for other in imports_of(name)} <= allowed


@pytest.mark.parametrize("name", ["observe.storage", "observe.wire"])
def test_the_observers_import_nothing_of_what_they_judge(name):
    assert list(imports_of(name)) == []


def test_the_architecture_page_names_files_that_exist():
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert [name for name in named if not ((SOURCE / name).is_file() or (ROOT / name).is_file())] == []
