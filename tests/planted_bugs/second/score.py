"""Score ``verify`` and ``bisect`` on a catalogue of faults, as a user would call them.

    python -m tests.planted_bugs.second.score [--faults FOLDER] [--out score.json] [ID …]

Each fault that is proven is planted in a copy of the package; a process of its own compiles with
it and runs both commands on the artifact. Faults without a proof do not count.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.planted_bugs.second.fault import ROOT, Fault, compile_options
from tests.planted_bugs.second.models import model_dir
from tests.planted_bugs.second.prove import HERE, catalogue

SECONDS = 900  # after which a process counts as one that hangs
_OPTIONS = {"enable_prefix_cache": "prefix reuse", "max_batched_tokens": "chunked prefill",
            "draft": "drafting"}  # fmt: skip
_CAUSES = {"pass": ("pass site", "pass"), "stream": ("pass site", "pass", "runtime"),
           "ir": ("pass site", "pass", "export"), "weight": ("weight", "pass site"),
           "kernel": ("kernel", "pass site"), "runtime": ("runtime option", "runtime")}  # fmt: skip
"""Causes that lead to a kind of fault: a wrong op is seen first where a pass inserts it."""


@dataclass
class Score:
    """How one command did on one fault.

    Attributes:
        named: whether the right pass or place is among what it names.
        site: whether the right site is; None where the fault has no single one.
        innocents: what else it accuses.
        text: what it says.
        trials: programs tried; 0 for ``verify``.
        seconds: of the command.
    """

    named: bool = False
    site: bool | None = None
    innocents: list[str] = field(default_factory=list)
    text: str = ""
    trials: int = 0
    seconds: float = 0.0


def score_verify(fault: Fault, report: dict[str, Any]) -> Score:
    """Judge ``verify --json``."""
    wrong = [site for site in report["sites"] if site["problem"]]
    problems = {d["name"]: d["problem"] for d in report["passes"] if d["problem"]}
    hazards = {h["pass_name"]: h["problem"] for h in report["hazards"]}
    problems |= hazards
    problems |= {site["pass_name"]: site["problem"] for site in wrong}
    text = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    accused = [*problems, *report["emission"]]
    numbers = {s["number"] for s in wrong if s["pass_name"] == fault.culprit}
    numbers |= {h["number"] for h in report["hazards"]}
    numbers |= {d["suspect"] for d in report["passes"] if d["name"] == fault.culprit}
    right = {name for name in accused if _names(fault, name, problems.get(name, name), wrong)}
    return Score(
        bool(right) is not fault.control,
        None if fault.site is None else fault.site in numbers,
        accused if fault.control else [name for name in accused if name not in right],
        text[:300],
    )


def _names(fault: Fault, name: str, text: str, wrong: list[dict[str, Any]]) -> bool:
    if fault.kind in ("pass", "stream"):
        return name == fault.culprit
    if fault.kind == "ir":  # a helper of all passes: any of them shows it
        return True
    values = [value for site in wrong if site["pass_name"] == name for value in site["values"]]
    return any(fault.culprit in place for place in (name, text, *values))


def score_bisect(fault: Fault, found: dict[str, Any]) -> Score:
    """Judge ``bisect --json``; without a result, its refusal."""
    if "error" in found:
        return Score(text=str(found["error"])[:300])
    if found["cause"] == "none":
        return Score(fault.control, text="nothing wrong found", trials=found["trials"])
    text = f"{found['cause']} {found['name']}: {found['problem']}"
    rewrite = found["rewrite"] or {}
    name = rewrite.get("pass_name") or found["name"]
    named = found["cause"] in _CAUSES[fault.kind]
    if fault.kind in ("pass", "stream"):
        named = named and name == fault.culprit
    elif fault.kind == "runtime" and fault.hidden_by:
        named = named and name == _OPTIONS.get(fault.hidden_by.partition("=")[0], name)
    elif fault.kind in ("weight", "kernel") and found["cause"] == "pass site":
        named = fault.culprit in text
    site = None if fault.site is None else named and rewrite.get("number") == fault.site
    innocents = [] if named and not fault.control else [name]
    return Score(named and not fault.control, site, innocents, text[:300], found["trials"])


def run_commands(fault: Fault, work: Path) -> dict[str, Any]:
    """Compile and run both commands, in a process that has the fault in its package."""
    from dsa_compile.cli.inspect import command
    from dsa_compile.cli.inspect import model as inspect_model
    from dsa_compile.compiling import compile_model
    from dsa_compile.errors import UserError

    path, result = work / "scored", {}
    try:
        compile_model(
            model_dir(fault.model, work),
            path,
            force=True,
            target=fault.target,
            recipe=fault.recipe,
            **compile_options(fault.options),
        )
    except (UserError, AssertionError) as error:
        return {"refused": str(error)[:300]}
    opened: list[Any] = []
    whole = inspect_model.open_recompiled

    def once(args: argparse.Namespace) -> Any:
        if not opened:
            opened.append(whole(args))
        return opened[0]

    inspect_model.open_recompiled = once
    trials = work / "trials"
    (trials / "bisect.json").unlink(missing_ok=True)
    calls = {
        "verify": ["verify", "--json"],
        "bisect": ["bisect", "--against", "reference", "--json", "--out", str(trials)],
    }
    for name, args in calls.items():
        out, err = io.StringIO(), io.StringIO()
        began = time.perf_counter()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = command.main([str(path), *args])
            except Exception as error:  # a traceback is what a user would see
                status = 3
                err.write(f"traceback: {type(error).__name__}: {error}")
        seconds = round(time.perf_counter() - began, 1)
        said = json.loads(out.getvalue()) if status < 2 else {"error": err.getvalue().strip()}
        result[name] = {"seconds": seconds, "said": said}
    return result


def score(fault: Fault, work: Path, faults: Path = HERE) -> dict[str, Any]:
    """Plant a fault, run the commands in a process of its own, and judge them.

    Args:
        fault: which.
        work: keeps models, a copy of the package and artifacts for the faults that follow.
        faults: the folder whose catalogue has the fault.
    """
    folder = fault.plant(work / "planted")
    code = (
        "import json, sys; from pathlib import Path; "
        "from tests.planted_bugs.second import score as s, prove as p; "
        "work, faults, name = map(Path, sys.argv[1:]); "
        "fault = next(f for f in p.catalogue(faults) if f.id == str(name)); "
        "(work / 'said.json').write_text(json.dumps(s.run_commands(fault, work)))"
    )
    said = work / "said.json"
    said.unlink(missing_ok=True)
    args = [sys.executable, "-P", "-c", code, str(work), str(faults.resolve()), fault.id]
    variables = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    log = work / "process.txt"
    with log.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(args, env=variables, stdout=file, stderr=file, check=False, timeout=SECONDS)
    if not said.exists():
        lines = log.read_text(encoding="utf-8").strip().splitlines() or ["still running"]
        return {"refused": lines[-1][:300]}
    result: dict[str, Any] = json.loads(said.read_text(encoding="utf-8"))
    if "refused" in result:
        return result
    judged = {}
    for name, judge in (("verify", score_verify), ("bisect", score_bisect)):
        found = result[name]["said"]
        broken = name == "verify" and "error" in found
        made = Score(text=str(found["error"])[:300]) if broken else judge(fault, found)
        made.seconds = result[name]["seconds"]
        judged[name] = vars(made)
    return judged


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("ids", nargs="*", help="faults to score; all proven ones if none is named")
    parser.add_argument("--faults", type=Path, default=HERE, help="folder with faults and proofs")
    parser.add_argument("--out", type=Path, help="JSON file to add the scores to")
    parser.add_argument("--work", type=Path, default=Path("/tmp/second_catalogue_scores"))
    args = parser.parse_args(argv)
    proofs = json.loads((args.faults / "proofs.json").read_text(encoding="utf-8"))
    proven = [f for f in catalogue(args.faults) if f.id in proofs and not f.provider]
    faults = [f for f in proven if not args.ids or any(f.id.startswith(i) for i in args.ids)]
    args.work.mkdir(parents=True, exist_ok=True)
    scores: dict[str, dict[str, Any]] = {}
    for fault in faults:
        found = score(fault, args.work, args.faults)
        scores[fault.id] = {"kind": fault.kind, "control": fault.control, **found}
        print(_line(fault, found), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    for name in ("verify", "bisect"):
        seen = [s[name] for s in scores.values() if name in s and not s["control"]]
        sited = [s for s in seen if s["site"] is not None]
        refused = sum("refused" in s for s in scores.values())
        print(f"{name}: right place {sum(s['named'] for s in seen)} of {len(seen)}, right site "
              f"{sum(bool(s['site']) for s in sited)} of {len(sited)}, "
              f"{sum(bool(s[name]['innocents']) for s in scores.values() if name in s)} accuse "
              f"innocents; {refused} refused")  # fmt: skip
    return 0


def _line(fault: Fault, found: dict[str, Any]) -> str:
    head = f"{fault.kind:8}{fault.id:36}{fault.culprit:28}"
    if "refused" in found:
        named = "names it" if fault.culprit in found["refused"] else "does not name it"
        return f"{head} refused, {named}: {found['refused'][:90]}"
    parts = []
    for name in ("verify", "bisect"):
        s = found[name]
        mark = {True: "right", False: "WRONG"}[s["named"]]
        extra = f" +{len(s['innocents'])}" if s["innocents"] else ""
        parts.append(f"{name} {mark}{extra} {s['seconds']:.0f} s")
    return f"{head} {', '.join(parts)}: {found['bisect']['text'][:90]}"


if __name__ == "__main__":
    sys.exit(main())
