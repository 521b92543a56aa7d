"""docs/errors.md, from the raise statements and warnings in src (`make errors-page`)."""

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardwise import errors
from shardwise.agreement import judge
from shardwise.agreement.posts import FAILED, Post, RankState, digest

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
CALLS = {"say": "HabitWarning", "warn": "ConfigWarning", "error": "ConfigError"}
"""Methods that raise or warn with one of their arguments."""
WARNS = re.compile(r"notices\.say$|\.warn$")
OTHERS = {
    "WorkloadError": "ConfigError",
    "ModuleNotFoundError": "CompatibilityError",
    "TypeError": "ValueError",
    "KeyError": "ValueError",
}
"""Classes whose messages are listed with those of another."""
SECTIONS = {
    "ConfigError": "A configuration, a model or an option does not work",
    "DisagreementError": "Ranks do not go on together",
    "GradientError": "Gradients are used where the engine holds them",
    "ModelChangedError": "The model was changed under its engine",
    "CheckpointError": "A checkpoint cannot be written or read",
    "DiskError": "Files and the disk tier",
    "MemoryError": "Memory",
    "CompatibilityError": "DeepSpeed's API",
    "RuntimeError": "Something is done at the wrong moment",
    "FloatingPointError": "Numbers",
    "ValueError": "An argument or a value is not allowed",
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
    for kind, call in calls(ast.parse(path.read_text())):
        found = [text for arg in call.args if (text := template(arg)) and len(text.split()) > 2]
        if found:
            yield kind, found[-1]


def verdicts() -> Iterator[Message]:
    """What the agreement of ranks says: its own functions on an example of each case."""
    first, second = digest("gather blocks.0"), digest("gather blocks.1")
    one, two = {"gather": (0, [first])}, {"gather": (0, [first, second])}
    waits, lost = (
        Post(state, ("gather", 1), two, waits_for="gather blocks.1") for state in (RankState.WAITS, RankState.LOST)
    )
    behind, left = Post(RankState.RUNS, None, one), Post(RankState.GONE, None, one, "its process ended")
    failed = Post(RankState.GONE, None, one, f"{FAILED} KeyError")
    other = Post(RankState.WAITS, ("gather", 1), {"gather": (1, [digest("gather head")])}, waits_for="gather head")
    examples = [
        judge.judge([waits, other]),
        judge.judge([waits, left]),
        judge.judge([waits, failed]),
        judge.died([lost, behind], {1: ""}),
        judge.died([lost, lost], {}),
        judge.frozen([waits, behind], {1: ""}, 30),
        judge.late([waits, behind], [], 600),
        judge.without_store(1, "gather blocks.1", "process 1234 on the first host", "does not answer", ""),
    ]
    for example in examples:
        text = example if isinstance(example, str) else example.text
        first, *_, advice = text.split("\n")
        cause = re.sub(r"gather blocks.1|process 1234 on the first host|\d+(?= s\b)|(?<=rank )\d", GAP, first)
        yield Message("DisagreementError", re.sub(r" \(operation.*|:$", "", cause), advice)


def section_of(kind: str) -> str | None:
    """The section of a class: its own, or that of the first of its bases that has one."""
    known = {**vars(builtins), **vars(errors)}.get(OTHERS.get(kind, kind))
    bases = inspect.getmro(known) if inspect.isclass(known) else ()
    return next((base.__name__ for base in bases if base.__name__ in SECTIONS), None)


def split(kind: str, text: str) -> Message:
    """Messages say what was found, then what to do."""
    text = re.sub(r"\s+", " ", text.replace(f":\n{GAP}{GAP}\n", ": ")).strip()
    is_about_a_value = text.startswith(("--", GAP + ":"))  # "--disk …: what was found; what to do"
    marks = ("; ", ": ") if is_about_a_value else (": ", "; ")
    cause, _, remedy = text.partition(next((mark for mark in marks if mark in text), "\0"))
    return Message(kind, cause, remedy)


def messages() -> list[Message]:
    found = [split(kind, text) for path in sorted(SRC.rglob("*.py")) for kind, text in texts(path)]
    found += verdicts()
    return [one for one in dict.fromkeys(found) if section_of(one.kind) and not INTERNAL.search(one.cause)]


def general(section: str) -> list[str]:
    """What a class stands for, and what to do in general: its docstring."""
    return [*inspect.cleandoc(vars(errors)[section].__doc__).split("\n"), ""] if section in vars(errors) else []


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def table(section: str, found: list[Message]) -> list[str]:
    rows = sorted((one for one in found if section_of(one.kind) == section), key=lambda one: one.cause.lower())
    head = [f"## {SECTIONS[section]}: `{section}`", "", *general(section)]
    shown = [f"| {cell(one.first_words)} | {cell(one.cause)} | {cell(one.remedy) or 'see above'} |" for one in rows]
    return [*head, "| it begins with | what was found | what to do |", "|---|---|---|", *shown, ""]


def current(page: str) -> str:
    """The page with all sections generated anew."""
    found = messages()
    return page.partition(MARK)[0] + MARK + "\n" + "\n".join(line for name in SECTIONS for line in table(name, found))


def write() -> None:
    PAGE.write_text(current(PAGE.read_text()))
