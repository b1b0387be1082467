"""Prove faults: each is refused, or it changes what the engine computes, by so much.

    python -m tests.planted_bugs.second.prove [--faults FOLDER] [--out proofs.json] [ID …]

One process at a time compiles with the fault in a copy of the package and serves requests
(:mod:`tests.planted_bugs.second.serving`), or runs the streams of regions
(:mod:`tests.planted_bugs.second.overlapped`). What it computed is compared with what the package
as it is computed in the same way. Neither ``verify`` nor ``bisect`` is asked.

Whatever differs is caused by the fault: the same machine runs the same steps. How much it matters
is told by the recipe's own error, that of the right program in this recipe against fp32.
"""

import argparse
import importlib.util
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.planted_bugs.second.comparing import OWN_ERROR, compare, judge
from tests.planted_bugs.second.fault import ROOT, Fault, compile_options, swap_functions
from tests.planted_bugs.second.models import model_dir

HERE = Path(__file__).parent
SECONDS = 240  # after which a fault counts as one that hangs
BLOCK = 16
Options = tuple[tuple[str, Any], ...]


def catalogue(folder: Path = HERE) -> tuple[Fault, ...]:
    """Every fault of a folder, in the order of its files."""
    found: list[Fault] = []
    for path in sorted(folder.glob("faults_*.py")):
        spec = importlib.util.spec_from_file_location(f"_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.FAULTS
    assert len({fault.id for fault in found}) == len(found), "an id is there twice"
    return tuple(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: exit status 1 if a fault is harmless or a control is not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("ids", nargs="*", help="faults to prove; all if none is named")
    parser.add_argument("--faults", type=Path, default=HERE, help="folder of faults_*.py")
    parser.add_argument("--out", type=Path, help="JSON file to add the proofs to")
    parser.add_argument("--work", type=Path, default=Path("/tmp/second_catalogue"))
    args = parser.parse_args(argv)
    known = catalogue(args.faults)
    faults = [f for f in known if not args.ids or any(f.id.startswith(i) for i in args.ids)]
    args.work.mkdir(parents=True, exist_ok=True)
    import torch  # once for all processes
    import transformers.models.deepseek_v32.modeling_deepseek_v32  # noqa: F401

    torch.set_num_threads(1)
    bad = 0
    group = lambda fault: (fault.model, fault.recipe, fault.target, fault.options)  # noqa: E731
    for key, members in itertools.groupby(sorted(faults, key=group), group):
        for fault, proof in prove_group(*key, list(members), args.work, args.out):
            wrong = (proof["outcome"] == "harmless") is not fault.control
            bad += wrong
            print(f"{'!!' if wrong else '  '} {fault.id:44} {json.dumps(proof)}", flush=True)
    return int(bad > 0)


def _note(out: Path | None, fault: Fault, proof: dict[str, Any]) -> dict[str, Any]:
    """Add a proof to the file of proofs."""
    if out is not None:
        kept = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        kept[fault.id] = proof
        out.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return proof


def prove_group(
    model: str,
    recipe: str,
    target: str,
    options: Options,
    faults: list[Fault],
    work: Path,
    out: Path | None,
) -> list[tuple[Fault, dict[str, Any]]]:
    """Proofs of faults that share a right program."""
    kernels = [
        (fault, _note(out, fault, _prove_kernel(fault, work))) for fault in faults if fault.provider
    ]
    faults = [fault for fault in faults if not fault.provider]
    if not faults:
        return kernels
    told = in_child(
        *(_prove_here, work, model, recipe, target, options, faults, work, out),
        seconds=SECONDS * 99,
    )
    if "error" in told:
        raise RuntimeError(told["error"])
    right, noise, proofs = told["right"], told["noise"], told["proofs"]
    for fault in faults:
        if fault.id not in proofs:
            proofs[fault.id] = _note(out, fault, _prove(fault, work, right, noise, None))
    return [*kernels, *((fault, proofs[fault.id]) for fault in faults)]


def _prove_kernel(fault: Fault, work: Path) -> dict[str, Any]:
    """Run a Triton kernel under the interpreter, beside the reference."""
    folder = fault.plant(work / "planted")
    variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    module = "tests.planted_bugs.second.kernels_interpreted"
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, fault.culprit],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"outcome": "refused", "stage": "kernel", "message": done.stderr.strip()[-160:]}
    error = float(done.stdout)
    return {"outcome": "harmful" if error > 1e-3 else "harmless", "error": error}


def _prove_here(
    model: str,
    recipe: str,
    target: str,
    options: Options,
    faults: list[Fault],
    work: Path,
    out: Path | None,
) -> dict[str, Any]:
    """Prove what can be proven with the right export, which takes most of the time."""
    exported = None
    name = artifact_name(model, recipe, options)
    made = work / f"right-{name}-{target}.pickle"
    compiled = made.exists() or (target == "cpu" and (work / name).exists())
    if not compiled or any(fault.needs_compilation and can_be_here(fault) for fault in faults):
        exported = export(model, recipe, target, options, work)
    if not made.exists():
        given = model, recipe, target, options, work, name, exported, not compiled
        found = in_child(_observe, work, *given)
        if "error" in found or "refused" in found:
            raise RuntimeError(found.get("traceback") or found["error"])
        if compare(found, found)["error"] > 0:  # of streams: the right ones are not in order
            raise RuntimeError(f"{model} {recipe} {target}: the right program has a race")
        made.write_bytes(pickle.dumps(found))
    right, noise = pickle.loads(made.read_bytes()), OWN_ERROR[recipe]
    proofs = {}
    for fault in faults:
        if fault.needs_compilation and can_be_here(fault):
            proofs[fault.id] = _note(out, fault, _prove(fault, work, right, noise, exported))
    return {"right": right, "noise": noise, "proofs": proofs}


def can_be_here(fault: Fault) -> bool:
    """Whether a fault can be brought into this process, which has exported the model."""
    if "/frontend/" in fault.file:
        return False
    module = sys.modules.get(fault.module)  # nothing of the package before the export
    return module is None or in_child(_swaps, Path("/tmp"), fault) is True


def _swaps(fault: Fault) -> bool:
    file = ROOT / fault.file
    text = fault.planted(file.read_text(encoding="utf-8"))
    return swap_functions(file, str(sys.modules[fault.module].__file__), text)


def _prove(
    fault: Fault, work: Path, right: dict[str, Any], noise: float, exported: Any
) -> dict[str, Any]:
    began = time.perf_counter()
    proof = judge(right, in_child(observe_fault, work, fault, work, exported, right, noise), noise)
    proof["seconds"] = round(time.perf_counter() - began, 1)
    print(fault.id, proof["outcome"], proof["seconds"], file=sys.stderr, flush=True)
    return proof


def observe_fault(
    fault: Fault, work: Path, exported: Any, right: dict[str, Any], noise: float
) -> dict[str, Any]:
    """Results of the package with the fault in it; runs in a process of its own."""
    folder = fault.plant(work / "planted")
    if exported is None:
        assert "dsa_compile" not in sys.modules
        sys.path.insert(0, str(folder))
    elif fault.module in sys.modules:
        assert _swaps(fault)
    else:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "dsa_compile" and hasattr(module, "__path__"):
                module.__path__ = [str(folder.joinpath(*name.split(".")))]
    name = artifact_name(fault.model, fault.recipe, fault.options)
    name = "planted-artifact" if fault.needs_compilation else name
    made = (fault.model, fault.recipe, fault.target, fault.options, work, name, exported)

    def wrong(found: dict[str, Any]) -> bool:
        told = compare(right, found)
        return told["error"] > noise or bool(told["tokens"])

    return _observe(*made, fault.needs_compilation, wrong, fault.kind != "runtime")


def artifact_name(model: str, recipe: str, options: Options) -> str:
    """Name of the folder of the right artifact."""
    return "-".join((model, recipe, *(f"{name}{value}" for name, value in options)))


def export(model: str, recipe: str, target: str, options: Options, work: Path) -> Any:
    """The program before any pass; imports no pass."""
    from dsa_compile.facts.config import CompileConfig
    from dsa_compile.frontend.build import build_program

    config = CompileConfig(recipe=recipe, target=target, **compile_options(options))
    return build_program(model_dir(model, work), config)


def _observe(
    model: str,
    recipe: str,
    target: str,
    options: Options,
    work: Path,
    name: str,
    exported: Any,
    compiles: bool,
    enough: Callable[[dict[str, Any]], bool] = lambda found: False,
    stops: bool = False,
) -> dict[str, Any]:
    """Compile and serve.

    ``enough`` tells from what the steps gave whether there is no need to generate, and with
    ``stops`` from what was generated whether there is no need for more.
    """
    found: dict[str, Any] = {"stage": "compile"}
    source = model_dir(model, work)
    try:
        ranks = any(option in ("tp", "ep") for option, _ in options)
        if target != "cpu" or ranks:
            program = exported or export(model, recipe, target, options, work)
            from dsa_compile.passes.added import assemble
            from dsa_compile.passes.manager import run_pipeline

            _, pipeline = assemble(program.config, ())
            run_pipeline(program, lambda record: None, pipeline)
            if ranks:
                from tests.planted_bugs.second.on_ranks import logits_on_ranks

                found["stage"] = "steps"
                found["steps"] = logits_on_ranks(program, source)
                return found
            from tests.planted_bugs.second.overlapped import results_of_regions

            found["stage"] = "streams"
            found["streams"] = results_of_regions(program, source)
            return found
        if compiles:
            import dsa_compile.lowering.stages as compilation
            from dsa_compile.lowering.compile_model import compile_model

            if exported is not None:
                compilation.build_program = lambda *_: exported
            compile_model(
                source,
                work / name,
                force=True,
                target=target,
                recipe=recipe,
                **compile_options(options),
            )
        from tests.planted_bugs.second.serving import drafted, generated, logits_of_steps

        if dict(options).get("draft"):
            found["stage"] = "generation"
            found["steps"], found["generated"] = drafted(work / name)
            return found
        found["stage"] = "steps"
        found["steps"] = logits_of_steps(work / name)
        if enough(found):
            return found
        found["stage"] = "generation"
        found["generated"] = generated(
            work / name, lambda made: stops and enough({"generated": made})
        )
    except Exception as error:
        found["refused"] = f"{type(error).__name__}: {error}"
        found["traceback"] = traceback.format_exc()
    return found


def in_child(task: Callable[..., Any], work: Path, *args: Any, seconds: int = SECONDS) -> Any:
    """Result of ``task`` in a process of its own, or ``{"error": why there is none}``."""
    result = work / f"result-{os.getpid()}.pickle"
    result.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            result.write_bytes(pickle.dumps(task(*args)))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    until = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"error": f"still running after {seconds} s"}
        time.sleep(0.02)
    if not result.exists():
        return {"error": f"the process ended with status {status}"}
    found = pickle.loads(result.read_bytes())
    result.unlink()
    return found


if __name__ == "__main__":
    sys.exit(main())
