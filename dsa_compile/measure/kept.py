"""Files of figures that tables of the pages are made from: whole, and a row a line."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsa_compile.measure.machine import command, machine
from dsa_compile.measure.run import Row
from dsa_compile.measure.timing import Ceilings


def provenance() -> dict[str, Any]:
    """Machine with versions, and the command of this process."""
    return {"machine": machine(), "command": command()}


def kernels(rows: Sequence[Row], ceilings: Ceilings) -> dict[str, Any]:
    """Figures of all that suites measured.

    Each case has the op, the shape, the family of values if it has one, least bytes and operations,
    ``limit_us`` that the machine's ceilings allow for them, and by provider ``us`` (None: found
    right, not timed), ``of_limit``, ``wrong`` (what the check said) and ``unavailable``.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.shape, row.family), []).append(row)
    return {
        **provenance(),
        "ceilings": rounded(asdict(ceilings)),
        "cases": [_case(some) for some in groups.values()],
    }


def _case(rows: Sequence[Row]) -> dict[str, Any]:
    measured = [row for row in rows if row.ran]
    first = measured[0] if measured else rows[0]
    found: dict[str, Any] = {"op": first.op, "shape": first.shape}
    if first.family:
        found["family"] = first.family
    if measured:
        limits = {"bytes": first.bytes, "flops": first.flops, "limit_us": first.limit_us}
        found |= {name: rounded(value) for name, value in limits.items()}
    right = [row for row in measured if row.problem is None]
    found["us"] = {row.provider: rounded(row.us) for row in right}
    shares = {row.provider: round(row.limit_us / row.us, 3) for row in right if row.us}
    wrong = {row.provider: row.problem for row in measured if row.problem}
    unavailable = {row.provider: row.problem for row in rows if not row.ran}
    parts = {"of_limit": shares, "wrong": wrong, "unavailable": unavailable}
    return found | {name: part for name, part in parts.items() if part}


def rounded(value: Any) -> Any:
    """A structure whose floats have five significant digits, fewer than two runs share."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if not isinstance(value, float):
        return value
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) >= 1e5 else short


def to_text(data: dict[str, Any]) -> str:
    """JSON with a line for each entry of the outer object, and for each entry of its lists."""
    parts = []
    for key, value in data.items():
        shown = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value:
            lines = ",\n".join(f"  {json.dumps(each, ensure_ascii=False)}" for each in value)
            shown = f"[\n{lines}\n ]"
        parts.append(f" {json.dumps(key)}: {shown}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write(path: Path, data: dict[str, Any]) -> None:
    """Write :func:`to_text`, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(to_text(data), encoding="utf-8")
    partial.replace(path)
