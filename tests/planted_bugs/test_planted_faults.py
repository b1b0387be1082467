"""Every fault can be planted; those that a fixed seed draws are found by the tools.

``make test-faults`` scores all of them (:mod:`tests.planted_bugs.score`).
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_compile.frontend import build
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.execution import BoundCall
from dsa_compile.lowering import stages
from dsa_compile.ops import REFERENCE
from dsa_compile.ops.moe import router
from dsa_compile.ops.norm import rms_norm
from dsa_compile.ops.selection import best_first
from dsa_compile.verify import recompiled_artifact
from tests.exports import keep_exports
from tests.planted_bugs.catalogue.out_of_date import OUT_OF_DATE
from tests.planted_bugs.faults import CAUSES, KINDS, ROOT, Fault, catalogue, drawn, stratified
from tests.planted_bugs.models import MODELS
from tests.planted_bugs.planting import planted, wrap
from tests.planted_bugs.promises import broken, summary
from tests.planted_bugs.score import line_of

FAULTS = list(catalogue().values())
SEED, COUNT = 8492, 12
# Bisect scores no prompts on lanes, which tests/parallel/test_rank_group.py does.
MISSED = ("own-lane-last",)
_SCORE = """
import json, sys
from pathlib import Path
import torch
from tests.exports import keep_exports
from tests.planted_bugs.faults import fault_named
from tests.planted_bugs.score import score
keep_exports()
torch.set_num_threads(1)  # a forked process would wait for other threads, which it lacks
print(json.dumps(score(fault_named(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])))
"""
_ORDER = drawn([fault for fault in FAULTS if not fault.control], COUNT + len(MISSED), SEED)
DRAWN = [fault for fault in _ORDER if fault.id not in MISSED][:COUNT]


def test_all_modules_have_the_export_that_faults_are_planted_in() -> None:
    keep_exports()
    assert recompiled_artifact.build_program is stages.build_program is build.build_program


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_can_be_planted_and_taken_out(kind: str) -> None:
    functions = Editor.call, Editor.take, BoundCall.__init__, router, best_first
    before = [function.__code__ for function in functions]
    for fault in (fault for fault in FAULTS if fault.kind == kind):
        with planted(fault.plant):
            pass
    assert [function.__code__ for function in functions] == before
    assert torch.Tensor.topk is torch.Tensor.__base__.topk  # type: ignore[union-attr]


def test_a_function_is_another_for_all_who_have_it() -> None:
    op = REFERENCE[torch.ops.dsa.rms_norm.default]
    x = torch.ones(1, 4)
    right = rms_norm(x, x[0], eps=1e-6)
    double = wrap("ops.norm.rms_norm", lambda whole, *args, **named: 2 * whole(*args, **named))
    with planted(double):
        with planted(double):
            assert torch.equal(rms_norm(x, weight=x[0], eps=1e-6), 4 * right)
        assert torch.equal(op(x, x[0], 1e-6), 2 * right)
    assert torch.equal(op(x, x[0], 1e-6), right)
    with pytest.raises(AttributeError), planted(wrap("ops.norm.no_norm", lambda whole: 0)):
        pass


def test_the_catalogue_is_whole() -> None:
    for fault in FAULTS:
        assert fault.where in CAUSES
        assert fault.model in MODELS
        assert fault.control == fault.id.startswith("control-"), fault.id
    assert OUT_OF_DATE.keys().isdisjoint(catalogue())
    assert {f.recipe for f in FAULTS} == {"fp32", "bf16", "fp8", "fp8-kv-tensor"}


def test_every_beginning_of_the_order_is_a_sample() -> None:
    order = stratified(FAULTS, 1)
    assert sorted(f.id for f in order) == sorted(f.id for f in FAULTS)
    groups = {(f.kind, f.recipe) for f in FAULTS}
    for group in groups:
        half = sum((f.kind, f.recipe) == group for f in order[: len(order) // 2])
        assert abs(half - sum((f.kind, f.recipe) == group for f in FAULTS) / 2) <= 1, group


def test_the_draw_has_every_kind() -> None:
    assert len({fault.id for fault in DRAWN}) == COUNT
    assert {fault.kind for fault in DRAWN} == set(KINDS)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("fault", DRAWN, ids=lambda fault: fault.id)
def test_a_drawn_fault_is_found(fault: Fault, models: Path) -> None:
    name = "bisect" if fault.where == "runtime" else "verify"  # which serves no requests
    # In an interpreter of its own, so that no state of other tests decides what is found.
    ran = subprocess.run(
        [sys.executable, "-c", _SCORE, fault.id, str(models), name],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert "failed" not in found, found
    if found.get("refusal_names"):
        return
    judged = found[name]
    assert judged["named"], line_of(fault, found)
    if fault.where != "kernel":  # a wrong op may be seen at a second place where it is used
        assert judged["innocents"] == [], judged
    assert judged["site"] in (None, True), judged


@pytest.mark.slow
def test_a_command_and_what_it_starts_have_the_fault(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, torch\n"
        "from dsa_compile.ops.quantize import saturate\n"
        "print(saturate(torch.tensor(400.0)).item(), flush=True)\n"
        "if __name__ == '__main__' and len(sys.argv) < 2:\n"
        "    subprocess.run([sys.executable, __file__, 'again'], check=True)\n"
    )
    command = [sys.executable, "-m", "tests.planted_bugs.run", "saturates-at-240", "--"]
    done = subprocess.run(
        [*command, "python", str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "240.0\n240.0\n", done.stderr


def test_scores_that_break_a_promise_are_told() -> None:
    right = {"named": True, "site": True, "innocents": [], "trials": 10, "count": 156}
    fault = {"where": "pass", "control": False, "verify": right, "bisect": right}
    scores: dict[str, dict[str, Any]] = {f"fault-{n}": fault for n in range(20)}
    scores["control"] = fault | {"control": True}
    scores["runtime"] = fault | {"where": "runtime", "verify": right | {"named": False}}
    scores["refused"] = {"where": "pass", "control": False, "refused": "", "refusal_names": True}
    assert list(broken(scores)) == []
    wrong = right | {"named": False, "site": None, "trials": 20}
    scores |= {
        "missed": fault | {"bisect": wrong},
        "missed-too": fault | {"bisect": wrong},
        "control": fault | {"control": True, "verify": right | {"innocents": ["swiglu"]}},
        "hung": {"where": "pass", "control": False, "failed": "still running"},
    }
    assert list(broken(scores)) == [
        "verify: accuses the control control",
        "bisect: right place 21 of 23, promised 95%",
        "bisect: 20 trials for missed",
        "bisect: 20 trials for missed-too",
        "hung: still running",
    ]
    assert list(summary(scores))[1] == (
        "bisect: right place 21 of 23, right site 21 of 21, 0 accuse innocents; 20 trials at most, "
        "22 of 24 within 2 log2(rewrites) + 4"
    )
