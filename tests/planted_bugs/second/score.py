"""Score ``verify`` and ``bisect`` on a catalogue of faults, as a user would call them.

    python -m tests.planted_bugs.second.score [--faults FOLDER] [--out score.json] [ID …]

Each fault that is proven is planted in a copy of the package; a process of its own compiles with
it and runs both commands on the artifact. Faults without a proof do not count. Where the compiler
refuses and does not name the culprit, both are run on what it writes with the ``--stop-after`` that
it advises.

The order is random, by ``--seed``, but keeps kinds and recipes in proportion, so that every
beginning of it is a fair sample: ``--first 40`` stops there. What ``--out`` has already is not
scored again; remove the file after a change. ``--workers`` scores several at once, each in a folder
of its own. Exit status: 1 if a promise is broken.
"""

import argparse
import contextlib
import io
import json
import os
import queue
import random
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.planted_bugs.second.fault import ROOT, Fault, compile_options
from tests.planted_bugs.second.models import model_dir
from tests.planted_bugs.second.promises import broken, summary
from tests.planted_bugs.second.prove import HERE, catalogue

SECONDS = 900  # after which a process counts as one that hangs
_ADVISED = re.compile(r"--stop-after (\w+)")
_OPTIONS = {"enable_prefix_cache": "prefix reuse", "max_batched_tokens": "chunked prefill",
            "draft": "drafting"}  # fmt: skip
_CAUSES = {"pass": ("pass site", "pass"), "stream": ("pass site", "pass", "runtime"),
           "ir": ("pass site", "pass", "export", "artifact"),
           "weight": ("weight", "export", "pass site"), "kernel": ("kernel", "pass site"),
           "runtime": ("runtime option", "runtime")}  # fmt: skip
"""Causes that lead to a kind of fault: a wrong op is seen first where a pass inserts it, a constant
that is made wrongly where the export has it."""


@dataclass
class Score:
    """Score of one command on one fault.

    Attributes:
        named: whether the right pass or place is among what it names.
        site: whether the right site is; None where the fault has no single one.
        innocents: what else it accuses.
        text: what it says.
        trials: programs tried; 0 for ``verify``.
        count: rewrites among which these trials searched.
        seconds: of the command.
    """

    named: bool = False
    site: bool | None = None
    innocents: list[str] = field(default_factory=list)
    text: str = ""
    trials: int = 0
    count: int = 0
    seconds: float = 0.0


def score_verify(fault: Fault, report: dict[str, Any]) -> Score:
    """Judge ``verify --json``."""
    wrong = [site for site in report["sites"] if site["problem"]]
    problems = {d["name"]: d["problem"] for d in report["passes"] if d["problem"]}
    hazards = {h["pass_name"]: h["problem"] for h in report["hazards"]}
    problems |= hazards
    problems |= {site["pass_name"]: site["problem"] for site in wrong}
    kernels = {f"kernel {k['op']} by {k['provider']}": k["problem"]
               for k in report["kernels"] if k["problem"]}  # fmt: skip
    problems |= kernels
    text = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    accused = [*problems, *report["emission"], *report["weights"]]
    numbers = {s["number"] for s in wrong if s["pass_name"] == fault.culprit}
    numbers |= {h["number"] for h in report["hazards"]}
    numbers |= {d["suspect"] for d in report["passes"] if d["name"] == fault.culprit}
    right = {name for name in accused if _names(fault, name, problems.get(name, name), wrong)}
    right |= kernels.keys() if fault.kind == "kernel" else set()  # as bisect's cause is
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
        nothing = "nothing wrong found"
        return Score(fault.control, None, [], nothing, found["trials"], found["count"])
    text = f"{found['cause']} {found['name']}: {found['problem']}"
    rewrite = found["rewrite"] or {}
    name = rewrite.get("pass_name") or found["name"]
    named = found["cause"] in _CAUSES[fault.kind]
    if fault.kind in ("pass", "stream"):
        named = named and name == fault.culprit
    elif fault.kind == "runtime" and fault.hidden_by:
        named = named and name == _OPTIONS.get(fault.hidden_by.partition("=")[0], name)
    elif fault.kind in ("weight", "kernel") and found["cause"] in ("pass site", "export"):
        named = named and fault.culprit in text
    site = None if fault.site is None else named and rewrite.get("number") == fault.site
    innocents = [] if named and not fault.control else [name]
    named = named and not fault.control
    return Score(named, site, innocents, text[:300], found["trials"], found["count"])


def run_commands(fault: Fault, work: Path) -> dict[str, Any]:
    """Compile and run both commands, in a process that has the fault in its package."""
    from dsa_compile.cli.inspect import command
    from dsa_compile.cli.inspect import model as inspect_model
    from dsa_compile.lowering.compile_model import compile_model

    path = work / "scored"
    result: dict[str, Any] = {}

    def compiled(**options: Any) -> str:
        """Compile; what is said where that is refused."""
        try:
            compile_model(
                model_dir(fault.model, work),
                path,
                force=True,
                target=fault.target,
                recipe=fault.recipe,
                **compile_options(fault.options),
                **options,
            )
        except Exception as error:  # what is no UserError, a user sees with its traceback
            return "; ".join((str(error) or type(error).__name__, *getattr(error, "__notes__", ())))
        return ""

    if refused := compiled():  # nobody goes on where the one to blame is named
        result["refused"] = refused
        advised = _ADVISED.search(refused)
        if advised is None or _refusal_names(fault, refused) or compiled(stop_after=advised[1]):
            return result
    opened: list[Any] = []
    whole = inspect_model.open_recompiled

    def once(args: argparse.Namespace, *beside: Any) -> Any:
        if not opened:
            opened.append(whole(args, *beside))
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


def _refusal_names(fault: Fault, refused: str) -> bool:
    said = refused.partition("--stop-after")[0]
    return not fault.control and bool(re.search(rf"\b{re.escape(fault.culprit)}\b", said))


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
    judged: dict[str, Any] = {"refused": result["refused"]} if "refused" in result else {}
    if "verify" not in result:
        return judged
    for name, judge in (("verify", score_verify), ("bisect", score_bisect)):
        found = result[name]["said"]
        broken = name == "verify" and "error" in found
        made = Score(text=str(found["error"])[:300]) if broken else judge(fault, found)
        made.seconds = result[name]["seconds"]
        judged[name] = vars(made)
    return judged


def stratified(faults: Sequence[Fault], seed: int) -> list[Fault]:
    """Faults in a random order, of which every beginning has kinds and recipes in proportion."""
    chance, groups = random.Random(seed), defaultdict(list)
    for fault in faults:
        groups[fault.kind, fault.recipe].append(fault)
    placed = []
    for _, group in sorted(groups.items()):
        chance.shuffle(group)
        placed += [((i + chance.random()) / len(group), f) for i, f in enumerate(group)]
    return [fault for _, fault in sorted(placed, key=lambda entry: entry[0])]


def score_all(
    faults: Sequence[Fault], work: Path, folder: Path, workers: int
) -> Iterator[tuple[Fault, dict[str, Any]]]:
    """Faults with their scores, as they are done.

    Args:
        faults: which.
        work: keeps models, copies of the package and artifacts, for each worker its own.
        folder: whose catalogue has the faults.
        workers: how many are scored at once.
    """
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(workers):
        place = work / str(number) if workers > 1 else work
        place.mkdir(parents=True, exist_ok=True)
        free.put(place)

    def run(fault: Fault) -> dict[str, Any]:
        place = free.get()
        try:
            return score(fault, place, folder)
        finally:
            free.put(place)

    with ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(run, fault): fault for fault in faults}
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("ids", nargs="*", help="faults to score; all proven ones if none is named")
    parser.add_argument("--faults", type=Path, default=HERE, help="folder with faults and proofs")
    parser.add_argument("--first", type=int, help="score so many of them")
    parser.add_argument("--seed", type=int, default=0, help="of their order")
    parser.add_argument("--out", type=Path, help="JSON file of scores, read and added to")
    parser.add_argument("--work", type=Path, default=Path("/tmp/second_catalogue_scores"))
    parser.add_argument("--workers", type=int, default=1, help="faults scored at once")
    args = parser.parse_args(argv)
    proofs = json.loads((args.faults / "proofs.json").read_text(encoding="utf-8"))
    proven = [f for f in catalogue(args.faults) if f.id in proofs and not f.provider]
    faults = [f for f in proven if not args.ids or any(f.id.startswith(i) for i in args.ids)]
    scores: dict[str, dict[str, Any]] = {}
    if args.out is not None and args.out.exists():
        scores = json.loads(args.out.read_text(encoding="utf-8"))
    order = [f for f in stratified(faults, args.seed)[: args.first] if f.id not in scores]
    for fault, found in score_all(order, args.work, args.faults, args.workers):
        scores[fault.id] = {"kind": fault.kind, "control": fault.control, **found}
        if "refused" in found:
            scores[fault.id]["refusal_names"] = _refusal_names(fault, found["refused"])
        print(_line(fault, found), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    for line in summary(scores):
        print(line)
    unkept = list(broken(scores))
    for line in unkept:
        print(f"not as promised: {line}")
    return 1 if unkept else 0


def _line(fault: Fault, found: dict[str, Any]) -> str:
    head = f"{fault.kind:8}{fault.id:36}{fault.culprit:28}"
    parts = []
    if "refused" in found:
        named = "names it" if _refusal_names(fault, found["refused"]) else "does not name it"
        parts = [f"refused, {named}"]
        if "verify" not in found:
            return f"{head} {parts[0]}: {found['refused'][:90]}"
    for name in ("verify", "bisect"):
        s = found[name]
        mark = {True: "right", False: "WRONG"}[s["named"]]
        extra = f" +{len(s['innocents'])}" if s["innocents"] else ""
        parts.append(f"{name} {mark}{extra} {s['seconds']:.0f} s")
    return f"{head} {', '.join(parts)}: {found['bisect']['text'][:90]}"


if __name__ == "__main__":
    sys.exit(main())
