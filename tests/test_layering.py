"""The order of dependencies: who may import whom, and what a server must start without."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "dsa_compile"

# A module belongs to the first area whose name starts its own; an area imports itself and those
# listed. Lower areas come first, and a module may have an area of its own.
FOUNDATION = ("errors", "layout", "regular_files", "torchrun", "version")
AREAS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "layout": ("errors",),
    "regular_files": (),
    "torchrun": ("errors",),
    "version": (),
    "names": FOUNDATION,
    "keyword_names": (*FOUNDATION, "names"),
    "gpus": FOUNDATION,
    "hub": FOUNDATION,
    "notebook": (),
    "compile_result": ("notebook",),
    "ops": FOUNDATION,
    "kernels": (*FOUNDATION, "ops"),
    "bench": (*FOUNDATION, "ops", "kernels"),
    # load of servers, without torch
    "bench.serve": (*FOUNDATION, "names"),
    "config_values": FOUNDATION,
    "block_quantization": (*FOUNDATION, "config_values"),
    "model_spec": (*FOUNDATION, "config_values", "block_quantization"),
    "config": (*FOUNDATION, "gpus", "names"),
    "weights": (*FOUNDATION, "model_spec"),
    # what a server reads: graphs as JSON, and nothing of how they came to be
    "ir.plan": (),
    "ir.region": (),
    "ir.naming": ("ir.region",),
    "ir.kernel_ops": ("ops",),
    "ir.execution": (*FOUNDATION, "ops", "ir.region"),
    "ir.dims": (),
    "ir.match": (),
    "ir.tensor_info": ("ir.dims",),
    "ir.dtype_names": (),
    "ir.keywords": (),
    "ir.site": (),
    "ir.argument_json": ("errors", "ir.dtype_names"),
    "ir.graph_json": (
        *FOUNDATION, "ir.argument_json", "ir.kernel_ops", "ir.keywords", "ir.region",
        "ir.tensor_info",
    ),
    "overlap.streams": ("ops",),
    "overlap.storage": ("ops",),
    "overlap.hazard": (),
    "overlap.hazards_streams": (
        "ops", "ir.region", "overlap.hazard", "overlap.storage", "overlap.streams",
    ),
    "overlap.hazards_calls": (
        "ops", "ir.region", "overlap.hazard", "overlap.storage", "overlap.streams",
    ),
    "overlap.hazards": (
        "ops", "ir.region", "overlap.hazard", "overlap.hazards_streams", "overlap.hazards_calls",
    ),
    "ir.printer": (
        "ops", "ir.graph_json", "ir.keywords", "ir.region", "ir.tensor_info", "overlap.storage",
        "overlap.streams",
    ),
    "overlap": (*FOUNDATION, "ops", "ir.region", "ir.tensor_info"),
    "ir": (*FOUNDATION, "notebook", "ops", "model_spec", "config", "weights", "overlap.hazards"),
    "artifact": (
        *FOUNDATION, "model_spec", "config", "weights", "ir.dtype_names", "ir.graph_json",
        "ir.execution", "ir.naming", "ir.plan", "ir.printer", "ir.region", "ir.tensor_info",
        "overlap.hazards",
    ),
    # text of conversations, for a process without torch
    "chat": FOUNDATION,
    # what dsa-inspect shows: records as data, read without torch
    "inspecting": (
        *FOUNDATION, "notebook", "model_spec", "config", "artifact", "ir.plan", "ir.site",
    ),
    "inspecting.onnx": (*FOUNDATION, "ops", "model_spec", "weights", "ir.plan", "inspecting"),
    # which kernels steps launch: for artifacts to ship, and for servers to make ready
    "launches": ("ops", "kernels", "artifact", "ir.region", "ir.tensor_info"),
    "frontend.model_checks": (*FOUNDATION, "config"),
    "frontend": (
        *FOUNDATION, "names", "ops", "config_values", "model_spec", "config", "weights", "ir",
        "frontend.model_checks",
    ),
    "passes": (
        *FOUNDATION, "names", "ops", "kernels", "model_spec", "config", "weights", "ir", "overlap",
    ),
    "lowering": (
        *FOUNDATION, "names", "ops", "kernels", "model_spec", "config", "weights", "ir",
        "artifact", "launches", "passes",
    ),
    # what is checked before torch is imported
    "request": (
        *FOUNDATION, "names", "hub", "config", "artifact", "frontend", "kernels", "passes",
    ),
    "runtime": (
        *FOUNDATION, "names", "keyword_names", "ops", "kernels", "model_spec", "weights",
        "artifact", "launches", "chat", "ir.execution", "ir.graph_json", "ir.plan", "ir.region",
        "overlap.streams",
    ),
    # what both processes of a server use: without torch
    "runtime.requests": ("errors", "names", "keyword_names", "chat"),
    "runtime.scheduling.limits": ("errors",),
    "testing": ("model_spec", "weights"),
    "testing.hash_runner": ("runtime",),
    "evaluation.selections": (),
    "evaluation": (
        *FOUNDATION, "names", "ops", "model_spec", "config", "weights", "artifact", "frontend",
        "runtime", "ir.execution", "ir.match", "ir.plan", "ir.region",
    ),
    "compilation": (
        *FOUNDATION, "config", "weights", "ir", "artifact", "frontend", "passes", "lowering",
        "compile_result", "request",
    ),
    "compiling": (
        *FOUNDATION, "keyword_names", "gpus", "config", "compile_result", "request", "compilation",
    ),
    "bench.step": (
        *FOUNDATION, "ops", "bench", "model_spec", "config", "weights", "ir", "overlap", "artifact",
        "frontend", "passes", "lowering", "runtime",
    ),
    "bench.node": (*FOUNDATION, "ops", "bench", "artifact", "inspecting", "runtime"),
    # what finds a wrong rewrite: compiles again, and runs what comes of it
    "debugging": (
        *FOUNDATION, "ops", "kernels", "model_spec", "config", "weights", "ir", "overlap",
        "artifact", "frontend", "passes", "lowering", "runtime", "evaluation",
    ),
    "server": (
        *FOUNDATION, "chat", "artifact", "runtime.requests", "runtime.scheduling.limits",
    ),
    # the other process of a server
    "server.grammar_worker": ("errors", "runtime", "server"),
    "server.engine_loop": ("errors", "runtime", "server"),
    "server.engine_process": ("errors", "runtime", "server"),
    "cli": (
        *FOUNDATION, "names", "gpus", "model_spec", "config", "ir", "artifact", "passes",
        "frontend.model_checks", "request", "compile_result", "compiling", "runtime", "evaluation",
        "lowering", "kernels", "bench", "inspecting", "debugging", "server",
    ),
    "__init__": ("compile_result", "compiling", "config", "errors", "version"),
}  # fmt: skip
BARE = {"passes", "lowering", "runtime"}


def sources() -> dict[str, Path]:
    """Module name without the package → file; the folders beside the package are part of it."""
    found: dict[str, Path] = {}
    for folder, prefix in ((ROOT / PACKAGE, ""), *((ROOT / name, name) for name in sorted(BARE))):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((*([prefix] if prefix else []), *parts))
            found.setdefault(name.removesuffix(".__init__"), path)
    return found


MODULES = sources()


def area_of(module: str) -> str:
    fitting = [area for area in AREAS if module == area or module.startswith(area + ".")]
    assert fitting, f"{module} belongs to no area: add it to the table"
    return max(fitting, key=len)


def imports(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports but those for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in hidden:
            yield node


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if base == PACKAGE:  # ``from dsa_compile import ops``: the names are modules
        return [f"{base}.{alias.name}" for alias in node.names]
    return [base]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    area = area_of(module)
    for node in imports(MODULES[module]):
        for name in imported(node):
            if not name.startswith(PACKAGE + "."):
                continue
            target = area_of(name.removeprefix(PACKAGE + "."))
            fits = any(target == to or target.startswith(to + ".") for to in (area, *AREAS[area]))
            assert fits, f"line {node.lineno}: {area} may not import {target}"


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_absolute(module: str) -> None:
    for node in imports(MODULES[module]):
        assert not getattr(node, "level", 0), f"line {node.lineno}: relative import"
        for name in imported(node):
            assert name.partition(".")[0] not in BARE, f"line {node.lineno}: import {name}"


def test_the_table_has_no_cycle() -> None:
    """Every area is imported by later ones only."""
    order = list(AREAS)
    for area, allowed in AREAS.items():
        for target in allowed:
            inner = area.startswith(target + ".")
            assert inner or order.index(target) < order.index(area), f"{area} → {target}"


def modules_after(statement: str) -> set[str]:
    """Names in ``sys.modules`` of a fresh interpreter after a statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_server_starts_without_the_compiler() -> None:
    torch_alone = modules_after("import torch")
    loaded = modules_after("import dsa_compile.runtime") - torch_alone
    forbidden = ("transformers", "torch.export", "torch._export", *(
        f"{PACKAGE}.{name}" for name in ("passes", "lowering", "frontend", "compiling", "cli")
    ))  # fmt: skip
    found = [name for name in loaded if name.startswith(forbidden)]
    assert not found, sorted(found)
    assert f"{PACKAGE}.runtime" in loaded
    assert not loaded & BARE


def test_conversations_need_no_torch() -> None:
    loaded = modules_after("import dsa_compile.chat")
    found = [
        name for name in loaded if name.partition(".")[0] in ("torch", "transformers", "numpy")
    ]
    assert not found, sorted(found)


def test_http_process_needs_no_torch() -> None:
    loaded = modules_after("import dsa_compile.server.serve, dsa_compile.cli.serve")
    found = [name for name in loaded if name.partition(".")[0] in ("torch", "transformers")]
    assert not found, sorted(found)
    assert "dsa_compile.server.app" in loaded


def test_load_of_a_server_needs_no_torch() -> None:
    pytest.importorskip("aiohttp")
    loaded = modules_after("import dsa_compile.measure.serve.run, dsa_compile.cli.bench")
    found = [name for name in loaded if name.partition(".")[0] in ("torch", "transformers")]
    assert not found, sorted(found)


@pytest.mark.slow
def test_the_compiler_is_loaded_under_one_name() -> None:
    loaded = modules_after("import dsa_compile.lowering.stages, dsa_compile.cli.compile")
    assert {f"{PACKAGE}.passes", f"{PACKAGE}.lowering"} <= loaded
    assert not loaded & BARE
