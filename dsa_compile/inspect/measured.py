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
from dsa_compile.inspect.store import Store, unknown

VERIFY = "verify.json"
VERIFY_REMEDY = "dsa-inspect ARTIFACT verify writes it"


@dataclass(frozen=True)
class Verified:
    """Report of ``verify``, its rows as they stand in the file: what is not finite is None.

    Attributes:
        data: all of it.
        passes: by name.
        sites: by pass and number of the rewrite; of several layers, the one where it did worst.
    """

    data: Mapping[str, Any]
    passes: Mapping[str, Mapping[str, Any]]
    sites: Mapping[tuple[str, int], Mapping[str, Any]]


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


def verified(store: Store, given: Path | None) -> Verified | None:
    """The report of ``verify`` that the user names, or the one in the artifact, if it is there.

    Raises:
        UserError: no such file, or not one that ``verify`` wrote.
    """
    path = store.path / VERIFY
    return verify_report(given or path) if given is not None or path.is_file() else None


def verify_report(path: Path) -> Verified:
    """The report in a file.

    Raises:
        UserError: no such file, or not one that ``verify`` wrote.
    """
    data = read_json(path, VERIFY_REMEDY)
    try:
        passes = {str(row["name"]): row for row in data["passes"]}
        sites: dict[tuple[str, int], Mapping[str, Any]] = {}
        for row in data["sites"]:
            key = str(row["pass_name"]), int(row["number"])
            if key not in sites or _badness(row) > _badness(sites[key]):
                sites[key] = row
        for row in (*passes.values(), *sites.values()):
            _badness(row)
        return Verified(data, passes, sites)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{path}: not the report of verify; {VERIFY_REMEDY}") from None


def _badness(row: Mapping[str, Any]) -> tuple[bool, float]:
    return bool(row["problem"]), math.inf if row["error"] is None else float(row["error"])


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
