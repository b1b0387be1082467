"""Measurements of other commands, if their files are there: errors, and times of steps.

``dsa-inspect ARTIFACT verify`` leaves ``verify.json`` in the artifact. ``dsa-bench step -o FILE``
writes times of ops and what a layer takes without a pass, ``--profile`` times of single calls; they
are files of the user's, for a machine with a GPU need not be the one that reads them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_compile.common.regular_files import read_regular
from dsa_compile.common.strict_json import load_json
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.inspect.store import unknown

VERIFY = "verify.json"
VERIFY_REMEDY = "dsa-inspect ARTIFACT verify writes it"


@dataclass(frozen=True)
class PassError:
    """Result of ``verify`` for a pass.

    Attributes:
        error: of its rewrites, the largest; None if it is not finite.
        problem: what is wrong; empty if nothing is.
    """

    error: float | None
    problem: str


@dataclass(frozen=True)
class SiteError:
    """Result of ``verify`` for a rewrite, in the layer where it did worst.

    Attributes:
        error: norm of the worst row's difference over the norm of the row; None if not finite.
        layer: number of the layer, or ``embed`` or ``head``.
        problem: what is wrong; empty if nothing is.
    """

    error: float | None
    layer: int | str
    problem: str


@dataclass(frozen=True)
class Share:
    """Share of an op in a layer's time: microseconds, launches (None if not known), kernels."""

    us: float
    launches: float | None = None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One step that ``dsa-bench step`` timed.

    Attributes:
        label: such as ``decode 32 × 8K``.
        kind: of the layers timed; empty in older files.
        layer_us: of one layer.
        ops: by op and module, what it adds to a layer.
        saved_us: by pass, how much longer a layer takes without it; by several joined by plus
            signs, without all of them.
        failed: by pass, why the layer without it was not timed.
    """

    label: str
    kind: str
    layer_us: float
    ops: Mapping[str, Share]
    saved_us: Mapping[str, float]
    failed: Mapping[str, str]


def pass_errors(path: Path) -> dict[str, PassError]:
    """Results of ``verify`` by pass.

    Raises:
        UserError: no such file, or not one that ``verify`` wrote.
    """
    data = read_json(path, VERIFY_REMEDY)
    try:
        return {
            str(done["name"]): PassError(_error(done["error"]), str(done["problem"]))
            for done in data["passes"]
        }
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: not the report of verify; make it again") from None


def _error(value: Any) -> float | None:
    return None if value is None else float(value)


def site_errors(path: Path) -> dict[tuple[str, int], SiteError]:
    """Results of ``verify`` by pass and number of the rewrite; of several layers, the worst.

    Raises:
        UserError: no such file, or not one that ``verify`` wrote.
    """
    data = read_json(path, VERIFY_REMEDY)
    found: dict[tuple[str, int], SiteError] = {}
    try:
        for site in data["sites"]:
            key = str(site["pass_name"]), int(site["number"])
            each = SiteError(_error(site["error"]), site["layer"], str(site["problem"]))
            if key not in found or _badness(each) > _badness(found[key]):
                found[key] = each
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: not the report of verify; make it again") from None
    return found


def _badness(each: SiteError) -> tuple[bool, float]:
    return bool(each.problem), math.inf if each.error is None else float(each.error)


def bench_cases(path: Path) -> list[Case]:
    """The cases of a file that ``dsa-bench step -o FILE`` wrote.

    Raises:
        UserError: no such file, or not of that kind.
    """
    remedy = "make one with dsa-bench step --by-op -o FILE"
    data = read_json(path, remedy)
    try:
        return [_case(row, data["ablation"]) for row in data["rows"]]
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UserError(f"{path}: not times of steps; {remedy}") from None


def choose_case(cases: list[Case], label: str | None, path: Path) -> Case:
    """The case of that label, or the first with times by op.

    Raises:
        UserError: there is none; names those that there are.
    """
    if label is not None:
        for case in cases:
            if case.label == label:
                return case
        raise UserError(f"{path}: {unknown('case', label, [case.label for case in cases])}")
    if not cases:
        raise UserError(f"{path}: no case was timed")
    return next((case for case in cases if case.ops), cases[0])


def profile_calls(path: Path) -> tuple[int, Mapping[str, float]]:
    """Times of calls from ``dsa-bench step --profile``.

    Returns:
        The context of the step that was measured, in tokens; microseconds by call.

    Raises:
        UserError: no such file, or not of that kind.
    """
    remedy = "make one with dsa-bench step --profile FILE"
    data = read_json(path, remedy)
    try:
        return int(data["context"]), {str(k): float(v) for k, v in data["calls"].items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UserError(f"{path}: not a profile of calls; {remedy}") from None


def _case(row: Mapping[str, Any], ablation: list[Mapping[str, Any]]) -> Case:
    label, layer = str(row["case"]), 1e3 * float(row["layer"])
    without = {str(each["name"]): each for each in ablation}
    return Case(
        label,
        str(row.get("kind", "")),
        layer,
        {
            str(op): Share(float(share["us"]), float(share["launches"]), tuple(share["names"]))
            for op, share in row["ops"].items()
        },
        {
            name: 1e3 * float(each["layers"][label]) - layer
            for name, each in without.items()
            if label in each["layers"]
        },
        {name: str(each["problem"]) for name, each in without.items() if each["problem"]},
    )


def read_json(path: Path, remedy: str) -> Any:
    """The content of a file of measurements.

    Args:
        path: the file.
        remedy: how to make one, to say.

    Raises:
        UserError: it cannot be read, or is not JSON.
    """
    try:
        return load_json(read_regular(path), str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except ArtifactError as error:
        detail = str(error).removeprefix(f"{path}: ")
        raise UserError(f"{path}: not JSON of measurements ({detail}); {remedy}") from None
