"""docs/errors.md, from the raise statements and warnings in src (`make errors-page`)."""

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shardwise import errors

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "errors.md"
SRC = ROOT / "src" / "shardwise"
MARK = "<!-- generated: make errors-page -->\n"
GAP = "…"
FIRST_WORDS = 9
INTERNAL = re.compile(
    r"cannot begin inside a|are … and cannot be …|a layout needs|an item of|is outside a world|has no attribute"
)
"""Broken invariants of ours: no user can cause or mend them."""
WRAPPED = {"judge.py": "DisagreementError"}
"""Modules that write the text of an error that another one raises."""
CALLS = {"say": "HabitWarning", "warn": "ConfigWarning", "error": "ConfigError"}
"""Methods that raise or warn with one of their arguments."""
WARNS = re.compile(r"notices\.say$|\.warn$")
SECTIONS = {
    "ConfigError": "A configuration, a model or an option does not work",
    "DisagreementError": "Ranks do not go on together",
    "CheckpointError": "A checkpoint cannot be written or read",
    "DiskError": "The disk tier",
    "MemoryError": "Memory",
    "RuntimeError": "Something is done at the wrong moment",
    "ConfigWarning": "Warnings about a configuration",
    "HabitWarning": "Warnings about habits from other libraries",
}


class Message(NamedTuple):
    kind: str
    cause: str
    remedy: str

    @property
    def first_words(self) -> str:
        words = self.cause.split()
        return " ".join(words[:FIRST_WORDS]) + (" " + GAP if len(words) > FIRST_WORDS else "")


def template(node: ast.AST | None) -> str | None:
    """A message as written, with a gap where a value is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [template(node.left), template(node.right)]
        return "".join(part or GAP for part in parts) if any(parts) else None
    return None


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """What raises or warns, by the name of its class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            yield CALLS.get(name, name), node.exc
        elif isinstance(node, ast.Call) and WARNS.search(name := ast.unparse(node.func)):
            yield CALLS[name.rpartition(".")[2]], node


def texts(path: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse(path.read_text())
    if path.name in WRAPPED:
        found = [template(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        yield from ((WRAPPED[path.name], text) for text in found if text and len(text.split()) > 4)
    for kind, call in calls(tree):
        found = [text for arg in call.args if (text := template(arg)) and len(text.split()) > 2]
        if found:
            yield kind, found[-1]


def classes() -> dict[str, Any]:
    """Every class of error or warning that a section could be about, by name."""
    ours = {
        name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, BaseException)
    }
    return {**vars(builtins), **ours, "WorkloadError": errors.ConfigError}


def section_of(kind: str) -> str | None:
    """The section of a class: its own, or that of the first of its bases that has one."""
    known = classes().get(kind)
    bases = inspect.getmro(known) if inspect.isclass(known) else ()
    return next((base.__name__ for base in bases if base.__name__ in SECTIONS), None)


def split(kind: str, text: str) -> Message:
    """Messages say what was found, then what to do."""
    text = re.sub(r"\s+", " ", text).strip()
    is_about_a_value = text.startswith(("--", GAP + ":"))  # "--disk …: what was found; what to do"
    marks = ("; ", ": ") if is_about_a_value else (": ", "; ")
    cause, _, remedy = text.partition(next((mark for mark in marks if mark in text), "\0"))
    return Message(kind, cause, remedy)


def messages() -> list[Message]:
    found = [split(kind, text) for path in sorted(SRC.rglob("*.py")) for kind, text in texts(path)]
    return [one for one in dict.fromkeys(found) if section_of(one.kind) and not INTERNAL.search(one.cause)]


def general(section: str) -> tuple[str, str]:
    """What a class stands for and what to do in general: the paragraphs of its docstring."""
    about, _, remedy = (inspect.getdoc(classes()[section]) or "").partition("\n\n")
    return re.sub(r"\s+", " ", about), re.sub(r"\s+", " ", remedy)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def table(section: str) -> list[str]:
    rows = sorted((one for one in messages() if section_of(one.kind) == section), key=lambda one: one.cause.lower())
    head = [f"## {SECTIONS[section]}: `{section}`", ""]
    if hasattr(errors, section):
        about, remedy = general(section)
        head += [f"{about} {remedy}".strip(), ""]
    shown = [f"| {cell(one.first_words)} | {cell(one.cause)} | {cell(one.remedy) or 'see above'} |" for one in rows]
    return [*head, "| it begins with | what was found | what to do |", "|---|---|---|", *shown, ""]


def current(page: str) -> str:
    """The page with all sections generated anew."""
    return page.partition(MARK)[0] + MARK + "\n" + "\n".join(line for name in SECTIONS for line in table(name))


def write() -> None:
    PAGE.write_text(current(PAGE.read_text()))
