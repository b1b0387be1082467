"""What was measured about a program, to lay over the report: errors and times."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsa_compile.errors import UserError

VERIFY = "verify.json"  # where ``dsa-inspect ARTIFACT verify`` leaves its report, in the artifact


def numerics(file: Path) -> dict[str, Any]:
    """The errors of rewrites, from the report of ``verify``.

    Returns:
        ``passes``: error, problem and suspect of each; ``sites``: of each pass, by number, the
        worst over layers and inputs; ``hazards`` and ``emission``: lines to read.

    Raises:
        UserError: the file cannot be read, or is no such report.
    """
    data = _read(file, "dsa-inspect ARTIFACT verify")
    try:
        sites: dict[str, dict[str, Any]] = {}
        for site in data["sites"]:
            by_number = sites.setdefault(site["pass_name"], {})
            worst = by_number.get(str(site["number"]))
            if worst is None or _rank(site) > _rank(worst):
                by_number[str(site["number"])] = {key: site[key] for key in _SITE}
        return {
            "ok": data["ok"],
            "tokens": data["tokens"],
            "passes": {one["name"]: {key: one[key] for key in _PASS} for one in data["passes"]},
            "sites": sites,
            "hazards": [f"{one['pass_name']}: {one['problem']}" for one in data["hazards"]],
            "emission": data["emission"],
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: no report of verify ({error!r:.60}); make it anew") from None


_PASS = ("error", "problem", "suspect", "runs")
_SITE = (
    "error", "max_abs", "tolerance", "bitwise", "problem", "layer", "inputs", "values", "overlap",
)  # fmt: skip


def _rank(site: Mapping[str, Any]) -> tuple[bool, float]:
    return bool(site["problem"]), float(site["error"] or 0.0)


def times(file: Path) -> dict[str, Any]:
    """The time of ops, and what passes save, from ``dsa-bench step --by-op --ablate --json``.

    Returns:
        ``cases``: name, ms a layer, and microseconds a layer by label (``moe: linear_fp8 path``);
        ``saved``: of each pass, by case, the part of a layer's time that it saves.

    Raises:
        UserError: the file cannot be read, or is no such report.
    """
    data = _read(file, "dsa-bench step --by-op --json")
    try:
        rows = data["rows"]
        layer = {row["case"]: row["layer"] for row in rows}
        return {
            "machine": data["machine"],
            "cases": [
                {
                    "case": row["case"],
                    "layer": row["layer"],
                    "ops": {label: share["us"] for label, share in row["ops"].items()},
                }
                for row in rows
            ],
            "saved": {
                one["name"]: {case: ms / layer[case] - 1 for case, ms in one["layers"].items()}
                for one in data["ablation"]
            },
        }
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"{file}: no report of dsa-bench step ({error!r:.60})") from None


def _read(file: Path, maker: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); {maker} writes it") from None
    except ValueError as error:
        raise UserError(f"{file}: is not JSON ({error}); {maker} writes it") from None
