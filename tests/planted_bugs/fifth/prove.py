"""Prove faults of sharded programs: each is refused, or changes what an engine answers.

    python -m tests.planted_bugs.fifth.prove [ID …]

A process compiles with the fault in a copy of the package and serves requests with it, on all ranks
of the layout: five prompts at once, one alone, the same prompts for the log-probabilities of their
tokens, and two requests one after the other, the first of them drawn. The package as it is serves
the same. Neither ``verify`` nor ``bisect`` is asked.

The error is the mean difference of a prompt token's log-probability, in fp32 also the share of
greedy tokens that differ. It is compared with the recipe's own error: that of the right sharded
program against one rank in fp32; in fp32 a thousandth.
"""

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from tests.planted_bugs.second.fault import ROOT, Fault, compile_options, copy_package
from tests.planted_bugs.second.models import model_dir

HERE = Path(__file__).parent
FP32_ERROR = 1e-3
SECONDS = 180
LENGTHS = (3, 40, 9, 70, 17)
Answers = dict[str, Any]


def catalogue() -> tuple[Fault, ...]:
    """Every fault of this folder."""
    from tests.planted_bugs.fifth import faults_ops, faults_passes, faults_runtime, faults_weights

    modules = (faults_passes, faults_weights, faults_ops, faults_runtime)
    found = tuple(fault for module in modules for fault in module.FAULTS)
    assert len({fault.id for fault in found}) == len(found), "an id is there twice"
    return found


def serve(fault: Fault, work: Path) -> Answers:
    """Compile and serve in this process, by whichever package it imports."""
    import dsa_compile
    from dsa_compile.errors import UserError
    from dsa_compile.runtime import Engine, SamplingParams

    artifact = work / "artifact"
    options = compile_options(fault.options)
    try:
        model = model_dir(fault.model, work.parent)
        dsa_compile.compile(model, artifact, recipe=fault.recipe, force=True, **options)
    except (UserError, AssertionError, ValueError, RuntimeError) as error:
        return {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    draw = random.Random(7)
    prompts = [[draw.randrange(3, 500) for _ in range(length)] for length in LENGTHS]
    greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    scored = replace(greedy, max_tokens=1, prompt_logprobs=0)
    drawn = replace(greedy, temperature=1.0, seed=5)
    given = {"num_blocks": 48, "max_running": 4, "max_batched_tokens": 64, "skip_tokenizer": True}
    found: Answers = {}
    with Engine.load(artifact, async_scheduling=bool(fault.hidden_by), **given) as engine:  # type: ignore[arg-type]
        found["tokens"] = [list(o.token_ids) for o in engine.generate(prompts, greedy)]
        found["tokens"] += [list(o.token_ids) for o in engine.generate(prompts[2:3], greedy)]
        for params in (drawn, greedy):
            found["tokens"] += [list(o.token_ids) for o in engine.generate(prompts[1:2], params)]
        outputs = engine.generate(prompts[:4], scored)
        found["logprobs"] = [e.logprob for o in outputs for e in o.prompt_logprobs or []]
    return found


def run(fault: Fault, package: Path, work: Path) -> Answers:
    """Answers of a process with that package."""
    work.mkdir(parents=True, exist_ok=True)
    asked, answered = work / "asked", work / "answered"
    asked.write_bytes(pickle.dumps(fault))
    answered.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": f"{package}:{ROOT}"}
    command = [sys.executable, "-m", "tests.planted_bugs.fifth.prove", "--serve", str(work)]
    try:
        done = subprocess.run(
            command, cwd=package, env=environment, timeout=SECONDS, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return {"fails": f"no answer in {SECONDS} s"}
    if answered.exists():
        found: Answers = pickle.loads(answered.read_bytes())
        return found
    return {"fails": (done.stderr.strip().splitlines() or ["no words"])[-1][:300]}


def logprob_error(right: Answers, found: Answers) -> float:
    """The mean difference of a prompt token's log-probability; one that is no number counts 10."""
    pairs = zip(right["logprobs"], found["logprobs"], strict=True)
    differences = [abs(a - b) for a, b in pairs]
    return sum(d if d < 10 else 10.0 for d in differences) / len(differences)


def token_error(right: Answers, found: Answers) -> float:
    """The share of tokens that differ."""
    before, after = (list(chain.from_iterable(each["tokens"])) for each in (right, found))
    return sum(a != b for a, b in zip(before, after, strict=True)) / len(before)


class Prover:
    """Keeps what the right package answers.

    Args:
        work: a folder for models, artifacts and copies of the package.
    """

    def __init__(self, work: Path) -> None:
        self._work = work
        self._right: dict[object, Answers] = {}
        copy_package(work / "right")

    def right(self, fault: Fault) -> Answers:
        """Answers of the package as it is to the requests that a fault is proven by."""
        key = (fault.model, fault.recipe, fault.options, bool(fault.hidden_by))
        if key not in self._right:
            found = run(fault, self._work / "right", self._work / "serving")
            assert "tokens" in found, (fault.id, found)
            self._right[key] = found
        return self._right[key]

    def prove(self, fault: Fault) -> dict[str, Any]:
        """The proof of a fault, for a JSON file."""
        right = self.right(fault)
        found = run(fault, fault.plant(self._work / "planted"), self._work / "serving")
        by = "requests served on all ranks"
        for outcome in ("refused", "fails"):
            if outcome in found:
                return {"by": by, "outcome": outcome, "why": found[outcome]}
        own = FP32_ERROR
        if fault.recipe != "fp32":
            whole = replace(fault, recipe="fp32", options=(), hidden_by="")
            own = logprob_error(self.right(whole), right)
        logprobs, tokens = logprob_error(right, found), token_error(right, found)
        error = max(logprobs, tokens) if fault.recipe == "fp32" else logprobs
        return {
            "by": by,
            "error": round(error, 6),
            "logprobs": round(logprobs, 6),
            "outcome": "harmful" if error > own else "harmless",
            "own_error": round(own, 6),
            "tokens": round(tokens, 6),
        }


def main() -> int:
    """Command line: exit status 1 if a fault is harmless or a control is not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("ids", nargs="*", help="faults to prove; all if none is named")
    parser.add_argument("--work", type=Path, default=Path("/tmp/fifth_catalogue"))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        fault = pickle.loads((args.serve / "asked").read_bytes())
        (args.serve / "answered").write_bytes(pickle.dumps(serve(fault, args.serve)))
        return 0
    args.work.mkdir(parents=True, exist_ok=True)
    prover, out, wrong = Prover(args.work), HERE / "proofs.json", 0
    for fault in catalogue():
        if args.ids and fault.id not in args.ids:
            continue
        proof = prover.prove(fault)
        wrong += (proof["outcome"] == "harmless") != fault.control
        print(f"{fault.id}: {'control, ' * fault.control}{proof}", flush=True)
        proofs = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        proofs[fault.id] = proof
        text = json.dumps(proofs, indent=1, sort_keys=True, ensure_ascii=False)
        out.write_text(text + "\n", encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
