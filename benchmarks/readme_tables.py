"""Write the measured tables of a Markdown file from the newest result of each case.

    python benchmarks/readme_tables.py README.md

replaces what stands between `<!-- table:compare CASE -->` and `<!-- /table -->`; CASE is a name from bench.py, and
cpu-gpt-26m where it is left out. `<!-- table:single -->`, `stages`, `overlap`, `offload`, `offload zero3`, `trainer`
and `inference` are what gpu.py measured. With --check nothing is written, and the exit code says whether the file is
current.
"""

import json
import re
import sys
from pathlib import Path

from shardwise.compare import Comparison, Run
from shardwise.compare.report import title
from shardwise.compare.result import data_bytes, ratio, verdicts

RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"(<!-- table:(?P<kind>\w+) ?(?P<case>[\w.-]*) -->\n).*?(<!-- /table -->)", re.DOTALL)
DEFAULT_CASE = "cpu-gpt-26m"


def main() -> None:
    path = Path(sys.argv[1])
    before = path.read_text()
    after = current(before, path.resolve().parent)
    if "--check" in sys.argv:
        sys.exit(before != after)
    path.write_text(after)


def current(text: str, folder: Path) -> str:
    """The text of a page in `folder`, with its tables anew."""
    up = "" if folder == RESULTS.parent.parent.resolve() else "../"
    tables = BLOCK.sub(lambda match: match[1] + table(match["kind"], match["case"]) + match[4], text)
    return re.sub(r"\]\((?:\.\./)*benchmarks/results/", f"]({up}benchmarks/results/", tables)


def table(kind: str, case: str) -> str:
    if kind == "compare":
        return render(newest(case or DEFAULT_CASE))
    if kind == "offload":
        return offload(f"gpu-offload-{case}" if case else "gpu-offload")
    return {"single": single, "stages": stages, "overlap": overlap, "trainer": trainer, "inference": inference}[kind]()


def single() -> str:
    """Tokens/s of GPTs on one GPU, as shares of the best plain recipe of the same run."""
    files = [newest("gpu-single"), newest("gpu-7b"), newest("gpu-compile")]
    lines = [
        f"{gpu_caption(files)}:",
        "",
        "| GPT, tokens a step | best plain torch | zero0 | zero1 | zero2 | zero3 | peak |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for command, rows in (run for path in files for run in runs(path)):
        size, batch = re.search(r"--size (\S+) --batch (\d+)", command).groups()
        plain = max(row["tokens_per_s"] for row in rows.values() if row["row"].startswith("plain"))
        shares = [f"{rows[f'zero{stage}']['tokens_per_s'] / plain:.3f}" for stage in range(4)]
        peaks = " / ".join(f"{rows[name]['peak_gib']:.1f}" for name in ("plain_bf16", "zero1", "zero3"))
        label = f"{size.replace('b', ' B')}, {batch} x 2048" + (", compiled" if "--compile" in command else "")
        cells = [label, f"{plain}/s", *shares, f"{peaks} GiB"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def stages() -> str:
    """Peak and step of two ranks that share one GPU."""
    path = newest("gpu-stages")
    lines = [f"{gpu_caption([path])}:", "", "| | peak MiB | reserved MiB | step s |", "|---|---|---|---|"]
    for _, rows in runs(path):
        for row in rows.values():
            peak, reserved = (f"{row[key]:.0f}" if row[key] else "not measured" for key in ("peak_mib", "reserved_mib"))
            lines.append(f"| {row['row']}, {row['precision']} | {peak} | {reserved} | {row['step_s']:.2f} |")
    return "\n".join([*lines, ""])


def overlap() -> str:
    """How much of the communication of eight ranks lies under computation."""
    path = newest("gpu-overlap")
    rows = [row for run in json.loads(path.read_text())["runs"] for row in run["rows"]]
    lines = [f"{gpu_caption([path])}:", "", "| | step ms | without delays | communication ms | hidden |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        times = [f"{row[key]:.0f}" for key in ("step_ms", "step_ms_without_delays", "communication_ms")]
        lines.append(f"| {' | '.join([row['preset'], *times, format(row['hidden_share'], '.1%')])} |")
    return "\n".join([*lines, ""])


def offload(case: str) -> str:
    """Tokens/s, device peak and host memory of training off the device, beside DeepSpeed with its CPU optimizer."""
    path = newest(case)
    rows = {name: row for _, rows in runs(path) for name, row in rows.items()}
    name, peer = next((name, row["tokens_per_s"]) for name, row in rows.items() if name.startswith("deepspeed"))
    lines = [f"{gpu_caption([path])}:", "", f"| | tokens/s | × {name} | device peak GiB | host GiB |"]
    lines.append("|---|---|---|---|---|")
    for name, row in rows.items():
        cells = [row["tokens_per_s"], f"{row['tokens_per_s'] / peer:.2f}", row["peak_gib"], row["rss_gib"]]
        lines.append(f"| {name} | {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join([*lines, ""])


def trainer() -> str:
    """Transformers' Trainer on one GPU, with each way to train that it offers."""
    path = newest("gpu-trainer")
    rows = {name: row for _, rows in runs(path) for name, row in rows.items()}
    lines = [
        f"{gpu_caption([path])}:",
        "",
        "| | tokens/s | × plain | peak GiB | reserved GiB |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        share = f"{row['tokens_per_s'] / rows['plain']['tokens_per_s']:.2f}"
        lines.append(f"| {name} | {row['tokens_per_s']} | {share} | {row['peak_gib']} | {row['reserved_gib']} |")
    return "\n".join([*lines, ""])


def inference() -> str:
    """Seconds for each pass of a model whose weights do not rest on the GPU."""
    path = newest("gpu-inference")
    rows = {name: row for _, rows in runs(path) for name, row in rows.items()}
    lines = [f"{gpu_caption([path])}; pinned memory is copied at {rows['copy']['gbs']} GB/s:", ""]
    lines += ["| | batch | s a pass | fetched GB | GB/s | peak GiB (foreseen) |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        if name != "copy":
            fetched = [str(row.get(key, "")) for key in ("fetched_gb_a_pass", "fetched_gbs")]
            peak = f"{row['peak_gib']}" + (f" ({row['foreseen_gib']})" if "foreseen_gib" in row else "")
            lines.append(f"| {' | '.join([name, str(row['batch']), str(row['pass_s']), *fetched, peak])} |")
    return "\n".join([*lines, ""])


def runs(path: Path) -> list[tuple[str, dict[str, dict]]]:
    """The command of each run in a result of gpu.py, and its rows by name."""
    return [(run["command"], {row["row"]: row for row in run["rows"]}) for run in json.loads(path.read_text())["runs"]]


def gpu_caption(paths: list[Path]) -> str:
    results = [json.loads(path.read_text()) for path in paths]
    made = results[0]
    # A run that was measured again on its own has a commit of its own.
    commits = dict.fromkeys(commit for result in results for commit in (result["commit"], *own_commits(result)))
    links = ", ".join(f"[{path.name}](benchmarks/results/{path.name})" for path in paths)
    hardware = made["hardware"]["cuda:0"].split(",")[0]
    word = "commit" if len(commits) == 1 else "commits"
    return f"{made['date']}, {word} {', '.join(commits)}, torch {made['versions']['torch']}, one {hardware} ({links})"


def own_commits(result: dict) -> list[str]:
    return [run["commit"] for run in result["runs"] if "commit" in run]


def newest(case: str) -> Path:
    found = sorted(RESULTS.glob(f"????-??-??-{case}.json"))
    if not found:
        sys.exit(f"there is no result of {case}: python benchmarks/bench.py {case}")
    return found[-1]


def render(path: Path) -> str:
    """A caption, the table and the verdicts."""
    comparison = Comparison.load(path)
    reference = comparison.reference
    head = f"| | peak MB | saved | step ms (95 %) | × {reference.name} | sent MB | / formula |"
    lines = [head, "|---|---|---|---|---|---|---|", *(row(run, comparison) for run in comparison.runs)]
    judged = "; ".join(verdict.text for verdict in verdicts(comparison))
    return "\n".join([caption(comparison, path), "", *lines, "", f"{judged}.", ""])


def row(run: Run, comparison: Comparison) -> str:
    if run.error is not None or run.step_s is None or run.peak is None:
        return f"| {run.name} | failed: {run.error} | | | | | |"
    saved, reference = run.saved(comparison.runs[0]), comparison.reference
    middle, (low, high) = ratio(run.step_s_rounds, reference.step_s_rounds)
    first, last = (value * 1e3 for value in run.step_s_spread or [0.0, 0.0])
    cells = [
        run.name + (" (wrong)" if run.wrong else ""),
        f"{run.peak / 1e6:.0f}",
        "" if run is comparison.runs[0] or saved is None else f"{saved:.0%}",
        f"{run.step_s * 1e3:.0f} ({first:.0f}–{last:.0f})",
        "1" if run is reference else f"{middle:.2f} ({low:.2f}–{high:.2f})",
        f"{run.wire_bytes_per_step['total'] / 1e6:.1f}",
        f"{data_bytes(run) / expected:.2f}" if (expected := run.expected_wire_bytes_per_step) else "",
    ]
    return f"| {' | '.join(cells)} |"


def caption(comparison: Comparison, path: Path) -> str:
    made, versions = comparison.made, comparison.versions
    hardware = ", ".join(str(value) for key, value in made["hardware"].items() if key == "cpu" or "cuda" in key)
    cores = made["hardware"]["cores"]
    return (
        f"{title(comparison)}; {made['date']}, commit {made['commit']}, torch {versions['torch']}, {hardware}, {cores} "
        f"cores ([{path.name}](benchmarks/results/{path.name}))"
    )


if __name__ == "__main__":
    main()
