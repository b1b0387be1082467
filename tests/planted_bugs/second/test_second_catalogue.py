"""The second catalogue fits the package as it is, and a sample of it is proven."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.planted_bugs.sampled import WHOLE
from tests.planted_bugs.second.fault import KINDS, ROOT, Fault
from tests.planted_bugs.second.models import MODELS
from tests.planted_bugs.second.promises import broken, summary
from tests.planted_bugs.second.prove import HERE, catalogue
from tests.planted_bugs.second.score import score, stratified

FAULTS = catalogue()
PROOFS = json.loads((HERE / "proofs.json").read_text(encoding="utf-8"))
SCORED = ("short-moe-writes-no-index-keys", "layers-share-caches")
"""Proven faults that are scored here; ``tests.planted_bugs.second.score`` scores all."""
SAMPLE = ("router-scaled-twice", "short-at-one-more", "control-multiply")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_fits_its_file(fault: Fault) -> None:
    text = fault.planted((ROOT / fault.file).read_text(encoding="utf-8"))
    compile(text, fault.file, "exec")
    assert fault.kind in KINDS
    assert fault.model in MODELS


def test_proofs_are_of_faults() -> None:
    assert PROOFS.keys() <= {fault.id for fault in FAULTS}
    for fault in (fault for fault in FAULTS if fault.id in PROOFS):
        outcome = PROOFS[fault.id]["outcome"]
        assert (outcome == "harmless") is fault.control, (fault.id, outcome)


def test_every_recipe_and_kind_has_faults() -> None:
    faults = [fault for fault in FAULTS if not fault.control]
    assert Counter(fault.kind for fault in faults).keys() == set(KINDS)
    assert {f.recipe for f in faults} == {"fp32", "bf16", "fp8", "fp8-kv-tensor"}


def test_every_beginning_of_the_order_is_a_sample() -> None:
    order = stratified(FAULTS, 1)
    assert sorted(f.id for f in order) == sorted(f.id for f in FAULTS)
    half = Counter((f.kind, f.recipe) for f in order[: len(order) // 2])
    for group, count in Counter((f.kind, f.recipe) for f in FAULTS).items():
        assert abs(half[group] - count / 2) <= 1, group


@pytest.mark.slow
def test_a_sample_is_proven_anew(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.planted_bugs.second.prove", "--work", str(tmp_path)]
    done = subprocess.run(
        [*command, *SAMPLE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scored")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORED if WHOLE else SCORED[:1])
def test_verify_and_bisect_name_a_sample(name: str, work: Path) -> None:
    (fault,) = (fault for fault in FAULTS if fault.id == name)
    found = score(fault, work)
    for command in ("verify", "bisect"):
        assert found[command]["named"], found
        assert found[command]["innocents"] == [], found


def test_scores_that_break_a_promise_are_told() -> None:
    right = {"named": True, "site": True, "innocents": [], "trials": 10, "count": 156}
    fault = {"kind": "pass", "control": False, "verify": right, "bisect": right}
    scores: dict[str, dict[str, Any]] = {f"fault-{n}": fault for n in range(20)}
    scores["control"] = fault | {"control": True}
    scores["runtime"] = fault | {"kind": "runtime", "verify": right | {"named": False}}
    scores["refused"] = {"kind": "ir", "control": False, "refused": "no", "refusal_names": True}
    assert list(broken(scores)) == []
    wrong = right | {"named": False, "site": None, "trials": 20}
    blamed = right | {"innocents": ["swiglu"]}
    scores |= {
        "missed": fault | {"bisect": wrong},
        "missed-too": fault | {"bisect": wrong},
        "control": fault | {"control": True, "verify": blamed},
    }
    assert list(broken(scores)) == [
        "verify: accuses the control control",
        "bisect: right place 21 of 23, promised 95%",
        "bisect: 20 trials for missed",
        "bisect: 20 trials for missed-too",
    ]
    assert list(summary(scores))[1] == (
        "bisect: right place 21 of 23, right site 21 of 21, 0 accuse innocents; 20 trials at most, "
        "22 of 24 within 2 log2(rewrites) + 4"
    )
