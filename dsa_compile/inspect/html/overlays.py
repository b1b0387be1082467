"""Measurements of a program to lay over the report: errors and times."""

from pathlib import Path
from typing import Any

from dsa_compile.errors import UserError
from dsa_compile.inspect.measured import VERIFY_REMEDY, Case, bench_cases, verify_report
from dsa_compile.inspect.store import Store
from dsa_compile.inspect.times import Attribution, attribute_case


def numerics(file: Path) -> dict[str, Any]:
    """The errors of rewrites, from the report of ``verify``.

    Returns:
        ``passes``: error, problem and suspect of each; ``sites``: of each pass, by number, the
        worst over layers and inputs; ``hazards``, ``emission`` and ``kernels``: lines to read.

    Raises:
        UserError: the file cannot be read, or is no such report.
    """
    report = verify_report(file)
    data = report.data
    try:
        sites: dict[str, dict[str, Any]] = {}
        for (name, number), row in report.sites.items():
            sites.setdefault(name, {})[str(number)] = {key: row[key] for key in _SITE}
        return {
            "ok": data["ok"],
            "tokens": data["tokens"],
            "passes": {name: {k: row[k] for k in _PASS} for name, row in report.passes.items()},
            "sites": sites,
            "hazards": [f"{one['pass_name']}: {one['problem']}" for one in data["hazards"]],
            "emission": data["emission"],
            "kernels": [
                f"{one['op']} by {one['provider']}: {one['problem']}"
                for one in data.get("kernels", ())  # earlier reports have none
                if one["problem"]
            ],
        }
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{file}: not the report of verify; {VERIFY_REMEDY}") from None


_PASS = ("error", "problem", "suspect", "runs")
_SITE = (
    "error", "max_abs", "tolerance", "bitwise", "problem", "layer", "inputs", "values", "overlap",
)  # fmt: skip


def times(store: Store, file: Path) -> list[dict[str, Any]]:
    """Time of a layer by call and pass, from ``dsa-bench step --by-op --ablate -o FILE``.

    Returns:
        For each case with times by op: ``case``, ``layer_us``, ``region``, ``calls`` (microseconds
        by the name of a call in the finished graph), ``passes`` (microseconds of the calls that a
        pass made) and ``saved`` (how many a layer takes more without a pass).

    Raises:
        UserError: the file cannot be read, is no such report, or is of another program.
    """
    cases = [case for case in bench_cases(file) if case.ops]
    if not cases:
        raise UserError(f"{file}: no case has times by op; make it with dsa-bench step --by-op")
    return [_case(case, attribute_case(store, case)) for case in cases]


def _case(case: Case, found: Attribution) -> dict[str, Any]:
    return {
        "case": case.label,
        "layer_us": case.layer_us,
        "region": found.regions[0],
        "calls": {call.node: call.us for call in found.calls},
        "passes": {row.pass_name: row.us for row in found.by_pass()},
        "saved": dict(case.saved_us),
    }
