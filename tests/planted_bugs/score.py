"""Score ``verify`` and ``bisect`` on planted faults, as a user would call them.

    python -m tests.planted_bugs.score [--out score.json] [ID …]

Each fault has a process of its own, which plants it, compiles with it and runs both commands on the
artifact. Where the compiler refuses and does not name the culprit, both are run on what it writes
with the ``--stop-after`` that it advises.

``--first 40`` takes so many by chance, kinds and recipes in proportion, ``--kind`` those of a kind.
What ``--out`` has already is not scored again; remove the file after a change. ``--workers`` scores
several at once. Exit status: 1 if a promise is broken.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.planted_bugs.faults import CAUSES, KINDS, Fault, catalogue, stratified
from tests.planted_bugs.models import compile_options, model_dir
from tests.planted_bugs.promises import broken, summary

SECONDS = 900  # after which a process counts as one that hangs
COMMANDS = {
    "verify": ["verify", "--json"],
    "bisect": ["bisect", "--against", "reference", "--json"],
}
_ADVISED = re.compile(r"--stop-after (\w+)")
_OPTIONS = {"enable_prefix_caching": "prefix reuse", "max_num_batched_tokens": "chunked prefill",
            "draft": "drafting"}  # fmt: skip


@dataclass
class Score:
    """Score of one command on one fault.

    Attributes:
        named: whether the right pass or place is among what it names.
        site: whether the right site is; None where no single one is known.
        layers: whether the right layers are, and no others; None where they are not known.
        innocents: what else it accuses.
        text: what it says.
        trials: programs tried; 0 for ``verify``.
        count: rewrites among which these trials searched.
        seconds: of the command.
    """

    named: bool = False
    site: bool | None = None
    layers: bool | None = None
    innocents: list[str] = field(default_factory=list)
    text: str = ""
    trials: int = 0
    count: int = 0
    seconds: float = 0.0


def score_verify(fault: Fault, report: dict[str, Any], sites: Collection[int]) -> Score:
    """Judge ``verify --json``.

    Args:
        fault: that was planted.
        report: what the command said.
        sites: those that are wrong, as far as it is known.
    """
    wrong = [site for site in report["sites"] if site["problem"]]
    problems = {d["name"]: d["problem"] for d in report["passes"] if d["problem"]}
    problems |= {h["pass_name"]: h["problem"] for h in report["hazards"]}
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
    right |= kernels.keys() if fault.where == "kernel" else set()  # as bisect's cause is
    return Score(
        bool(right) is not fault.control,
        site=min(sites) in numbers if sites else None,
        innocents=accused if fault.control else [name for name in accused if name not in right],
        text=text[:300],
    )


def _names(fault: Fault, name: str, text: str, wrong: list[dict[str, Any]]) -> bool:
    if fault.where in ("pass", "stream"):
        return name == fault.culprit
    if fault.where == "program":  # a helper of all passes: any of them shows it
        return True
    values = [value for site in wrong if site["pass_name"] == name for value in site["values"]]
    return any(fault.culprit in place for place in (name, text, *values))


def score_bisect(fault: Fault, found: dict[str, Any], sites: Collection[int]) -> Score:
    """Judge ``bisect --json``; arguments as of :func:`score_verify`."""
    searched = {"trials": found["trials"], "count": found["count"]}
    if found["cause"] == "none":
        return Score(fault.control, text="nothing wrong found", **searched)
    text = f"{found['cause']} {found['name']}: {found['problem']}"
    rewrite = found["rewrite"] or {}
    name = rewrite.get("pass_name") or found["name"]
    named = not fault.control and found["cause"] in CAUSES[fault.where]
    if fault.where in ("pass", "stream"):
        named = named and name == fault.culprit
    elif fault.where == "runtime" and fault.hidden_by:
        named = named and name == _OPTIONS.get(fault.hidden_by.partition("=")[0], name)
    elif fault.where in ("weight", "kernel") and found["cause"] in ("pass site", "export"):
        named = named and fault.culprit in text
    layers = tuple(dict.fromkeys(finding["layer"] for finding in found["findings"]))
    return Score(
        named,
        site=named and rewrite.get("number") == min(sites) if sites else None,
        layers=set(layers) == set(fault.layers) if fault.layers else None,
        innocents=[] if named else [name],
        text=f"{text[:300]} [layers {', '.join(map(str, layers))}]",
        **searched,
    )


def seek(fault: Fault, work: Path, commands: Sequence[str] = tuple(COMMANDS)) -> dict[str, Any]:
    """Plant a fault in this process, for good, compile with it, and judge commands.

    Args:
        fault: which.
        work: has the model already, and takes the artifact.
        commands: keys of :data:`COMMANDS`.

    Returns:
        For each command that ran its score as a mapping; ``refused`` with what is said where the
        compiler refuses, and ``refusal_names`` with whether that names the culprit.
    """
    from dsa_compile.cli.inspect import command
    from dsa_compile.cli.inspect import model as inspect_model
    from dsa_compile.lowering.compile_model import compile_model

    planting = fault.plant_here()
    path = work / "artifact"
    result: dict[str, Any] = {}

    def compiled(**options: Any) -> str:
        """Compile; what is said where that is refused."""
        given = compile_options(fault.options) | options
        target, recipe = fault.target, fault.recipe
        try:
            compile_model(
                model_dir(fault.model, work),
                path,
                force=True,
                target=target,
                recipe=recipe,
                **given,
            )
        except Exception as error:  # what is no UserError, a user sees with its traceback
            return "; ".join((str(error) or type(error).__name__, *getattr(error, "__notes__", ())))
        return ""

    if refused := compiled():  # nobody goes on where the one to blame is named
        said = refused.partition("--stop-after")[0]
        names = not fault.control and bool(re.search(rf"\b{re.escape(fault.culprit)}\b", said))
        result |= {"refused": refused, "refusal_names": names}
        advised = _ADVISED.search(refused)
        if advised is None or names or compiled(stop_after=advised[1]):
            return result
    opened: list[Any] = []
    whole = inspect_model.open_recompiled

    def once(args: argparse.Namespace, *beside: Any) -> Any:
        if not opened:
            opened.append(whole(args, *beside))
        return opened[0]

    inspect_model.open_recompiled = once
    sites = {fault.site} if fault.site is not None else planting.sites
    for name in commands:
        out, err = io.StringIO(), io.StringIO()
        args = [*COMMANDS[name], *(["--out", str(work / "trials")] if name == "bisect" else [])]
        began = time.process_time()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = command.main([str(path), *args])
            except Exception as error:  # a traceback is what a user would see
                status = 3
                err.write(f"traceback: {type(error).__name__}: {error}")
        judge = score_verify if name == "verify" else score_bisect
        score = Score(text=err.getvalue().strip()[-300:])
        if status < 2:
            score = judge(fault, json.loads(out.getvalue()), sites)
        score.seconds = round(time.process_time() - began, 1)
        result[name] = vars(score)
    return result


def score(fault: Fault, work: Path, commands: Sequence[str] = tuple(COMMANDS)) -> dict[str, Any]:
    """:func:`seek` in a forked process, which has what this one has exported already."""
    return _result(*_start(fault, work, commands))


def _start(fault: Fault, work: Path, commands: Sequence[str]) -> tuple[Any, Path]:
    from dsa_compile.facts.config import CompileConfig
    from dsa_compile.frontend import build
    from dsa_compile.lowering.compile_model import compile_model  # noqa: F401  # once for all processes

    model = model_dir(fault.model, work)
    if not fault.exports:
        options = {"recipe": fault.recipe, "target": fault.target}
        build.build_program(model, CompileConfig(**options, **compile_options(fault.options)))
    place = Path(tempfile.mkdtemp(dir=work))
    (place / fault.model).symlink_to(model.resolve())
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run, args=(fault, place, commands))
    process.start()
    return process, place


def _run(fault: Fault, place: Path, commands: Sequence[str]) -> None:
    from tests.exports import forget_exports

    if fault.exports:
        forget_exports()
    try:
        found = seek(fault, place, commands)
    except BaseException:
        found = {"failed": traceback.format_exc()}
    found["seconds"] = round(time.process_time(), 1)
    (place / "found.json").write_text(json.dumps(found), encoding="utf-8")


def _result(process: Any, place: Path) -> dict[str, Any]:
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    file = place / "found.json"
    if not file.exists():
        return {"failed": f"the process ended with status {process.exitcode}"}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def score_all(
    faults: Sequence[Fault], work: Path, workers: int = 1
) -> Iterator[tuple[Fault, dict[str, Any]]]:
    """Faults with their scores, in order; so many are scored at once."""
    running: list[tuple[Fault, Any]] = []
    for fault in faults:
        running.append((fault, _start(fault, work, tuple(COMMANDS))))
        if len(running) == workers:
            first, started = running.pop(0)
            yield first, _result(*started)
    for first, started in running:
        yield first, _result(*started)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("ids", nargs="*", help="faults to score; all if none is named")
    parser.add_argument("--kind", choices=KINDS, help="those of a kind")
    parser.add_argument("--first", type=int, help="so many of them, by chance")
    parser.add_argument("--seed", type=int, default=0, help="of the chance")
    parser.add_argument("--out", type=Path, help="JSON file of scores, read and added to")
    parser.add_argument("--work", type=Path, help="folder for models and artifacts")
    parser.add_argument("--workers", type=int, default=1, help="faults scored at once")
    args = parser.parse_args(argv)
    from tests.exports import keep_exports

    keep_exports()
    import torch

    torch.set_num_threads(1)
    work = args.work or Path(tempfile.mkdtemp(prefix="planted_faults_"))
    work.mkdir(parents=True, exist_ok=True)
    chosen = [f for f in catalogue().values() if f.kind == (args.kind or f.kind)]
    chosen = [f for f in chosen if not args.ids or f.id in args.ids]
    scores: dict[str, dict[str, Any]] = {}
    if args.out is not None and args.out.exists():
        scores = json.loads(args.out.read_text(encoding="utf-8"))
    chosen = [f for f in stratified(chosen, args.seed)[: args.first] if f.id not in scores]
    chosen.sort(key=lambda f: (f.model, f.recipe, f.options))  # those of one export together
    for fault, found in score_all(chosen, work, args.workers):
        scores[fault.id] = {"kind": fault.kind, "where": fault.where, "control": fault.control,
                            **found}  # fmt: skip
        print(line_of(fault, found), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    for line in summary(scores):
        print(line)
    unkept = list(broken(scores))
    for line in unkept:
        print(f"not as promised: {line}")
    return 1 if unkept else 0


def line_of(fault: Fault, found: dict[str, Any]) -> str:
    """What a score says, in a line."""
    parts = []
    if "failed" in found:
        parts.append(found["failed"].strip().splitlines()[-1])
    if "refused" in found:
        names = "names it" if found["refusal_names"] else "does not name it"
        parts.append(f"refused, {names}: {found['refused'][:90]}")
    for name in (name for name in COMMANDS if name in found):
        s = found[name]
        marks = [{True: "right", False: "WRONG"}[s["named"]]]
        marks += [f"another {what}" for what in ("site", "layers") if s[what] is False]
        marks += [f"+{len(s['innocents'])}"] if s["innocents"] else []
        parts.append(f"{name} {' '.join(marks)} {s['seconds']:.0f} s")
    if "bisect" in found:
        parts.append(found["bisect"]["text"][:90])
    return f"{fault.kind:9}{fault.id:40}{fault.culprit:28} {', '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
