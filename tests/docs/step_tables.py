"""Tables of what ``dsa-bench step -o FILE`` kept: Markdown lines."""

import re
from typing import Any

from dsa_compile.cli.common import numbers
from dsa_compile.measure.step.cases import Case, Decode, Prefill
from dsa_compile.measure.step.published import VLLM, goal, vllm
from tests.docs.kernel_tables import table

Data = dict[str, Any]

_DECODE = re.compile(r"decode (\d+) × (\S+)")
_PREFILL = re.compile(r"prefill (\S+)")
_CHUNK = re.compile(r"chunk (?P<chunk>\S+) at (?P<context>\S+?)(?P<eager>, no graph)?")


def steps(data: Data) -> list[str]:
    """A row a decode step or prefill: milliseconds of a layer, its floor, another engine's."""
    heads = [
        "", "ms", "floor", "of floor", VLLM, "goal", "launches", "experts hit", "step ms",
        "gaps µs", "host ms",
    ]  # fmt: skip
    published = slice(4, 6)
    rows = []
    for row in data["rows"]:
        case = _case(row["case"])
        if case is None:
            continue
        other, aim = vllm(case), goal(case)
        floor, layer = row["floor"], row["layer"]
        reached = "" if aim is None or layer > aim else " ✓"
        cells = [row["case"], _number(layer, 3), _number(floor, 3)]
        cells.append("–" if floor is None else f"{floor / layer:.0%}")
        cells += [_number(other, 3), "–" if aim is None else f"{aim:g}{reached}"]
        cells += [_number(row["launches"], 0), _number(row["experts_hit"], 0)]
        # Gaps of steps without graphs were the profiler's, which older files have.
        gaps = None if _PREFILL.fullmatch(row["case"]) else row["gaps_us"]
        cells += [_number(row["step"], 3), _number(gaps, 1), _number(row["host"], 3)]
        rows.append(cells)
    if not all(run.get("published", True) for run in data["runs"]):
        for cells in (heads, *rows):
            del cells[published]
    return table(heads, rows)


def ops(data: Data, cases: str) -> list[str]:
    """Microseconds that each op adds to a layer, largest first.

    Args:
        data: as read.
        cases: labels, separated by ``;``; those that were not timed are left out.
    """
    by_label = {row["case"]: row["ops"] for row in data["rows"]}
    chosen = [label for label in map(str.strip, cases.split(";")) if label in by_label]
    if not chosen:
        raise ValueError(f"none of {cases} was kept")
    found = [by_label[label] for label in chosen]
    most = {name: max(of.get(name, {"us": 0})["us"] for of in found) for of in found for name in of}
    rows = []
    for name in sorted(most, key=lambda name: -most[name]):
        cells = [f"{of[name]['us']:,.1f}" if name in of else "" for of in found]
        rows.append([f"`{name}`", *cells])
    rows.append(["sum", *(f"{sum(each['us'] for each in of.values()):,.1f}" for of in found)])
    return table(["µs", *chosen], rows)


def ablation(data: Data) -> list[str]:
    """Time that a layer takes longer without a pass, or why it was not timed."""
    whole = {row["case"]: row["layer"] for row in data["rows"]}
    cases = [case for case in whole if any(case in each["layers"] for each in data["ablation"])]
    rows = [["–", *(f"{whole[case]:.4f} ms" for case in cases)]]
    for entry in data["ablation"]:
        name = ", ".join(f"`{one}`" for one in entry["name"].split("+"))
        layers = entry["layers"]
        changes = [f"{layers[c] / whole[c] - 1:+.1%}" if c in layers else "–" for c in cases]
        rows.append([name, *changes] if layers else [f"{name}: {entry['problem']}", *changes])
    return table(["without", *cases], rows)


def mixed(data: Data) -> list[str]:
    """Steps that decode and take a prompt's chunk, against the two apart."""
    times = {row["case"]: row["step"] for row in data["rows"]}
    rows = []
    for label, together in times.items():
        batch, plus, chunk = label.partition(" + ")
        decode = f"decode {batch}"
        parts = _CHUNK.fullmatch(chunk) if plus else None
        if parts is None or decode not in times or chunk not in times:
            continue
        graph = "no graph" if parts["eager"] else "CUDA graph"
        name = f"chunk of {parts['chunk']} at {parts['context']}, {graph}"
        cells = [f"{value:.2f}" for value in (times[decode], times[chunk], together)]
        ratio = together / (times[decode] + times[chunk])
        rows.append([f"{decode}, {name}", *cells, f"{ratio:.2f}"])
    if not rows:
        raise ValueError("no mixed step was kept together with its parts")
    return table(["step, ms", "decode", "chunk", "together", "together ÷ sum"], rows)


def _case(label: str) -> Case | None:
    if found := _DECODE.fullmatch(label):
        return Decode(int(found[1]), numbers(found[2])[0])
    if found := _PREFILL.fullmatch(label):
        return Prefill(numbers(found[1])[0], 8192)
    return None


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
