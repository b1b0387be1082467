"""``dsa-inspect ARTIFACT onnx``: the program after a pass as an ONNX model."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_compile.cli.inspect.output import print_json
from dsa_compile.errors import UserError
from dsa_compile.inspect.store import Store
from dsa_compile.ir.plan import MODEL, VARIANTS, region_name

if TYPE_CHECKING:
    from dsa_compile.inspect.onnx.export import Step

_DESCRIPTION = """\
Write the program as it was after a pass, for Netron or for any runtime of ONNX.

The main graph is a step with one node a layer; each region is a function, which Netron opens. From
recognize_sparse_attention to flatten_tokens all is made of standard ops, and ONNX Runtime can run
it. Later stages have ops of the domain dsa, earlier ones some of the domain aten; the schemas of
both are added to onnx by dsa_compile.inspect.onnx.schemas.register.

Of an artifact of several ranks it is the graph of one of them: all run the same. Collectives are
ops of the domain dsa, with the axis and the number of ranks.
"""


def register(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "onnx",
        help="export the program after a pass as an ONNX model",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--after", metavar="PASS", help="name or number; 0 is the export (default: the last pass)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--region", metavar="NAME", help="only this region: moe, or moe.long")
    which.add_argument("--layer", type=int, metavar="N", help="only this layer of the model")
    which.add_argument(
        "--plan", metavar="NAME", help="calls of this plan: draft, deeper_draft (default: model)"
    )
    parser.add_argument("--variant", choices=VARIANTS, default="long", help="of split regions")
    parser.add_argument(
        "--weights", action="store_true", help="with values, in FILE.data; else they are inputs"
    )
    parser.add_argument(
        "--rank", type=int, metavar="N", help="of several, whose weights (default: 0)"
    )
    parser.add_argument(
        "--model-dir", type=Path, metavar="DIR", help="the checkpoint, if it was moved"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the model."""
    try:
        import onnx
    except ImportError:
        raise UserError("onnx is not installed: pip install onnx") from None
    from dsa_compile.inspect.onnx.export import export
    from dsa_compile.inspect.onnx.model import Weights, open_weights

    store = Store.open(args.artifact)
    stage = store.stages[-1] if args.after is None else store.stage(args.after)
    steps = _steps(store, stage.graphs, args)
    rank = _rank(store, args)
    weights = Weights(store, open_weights(store, args.model_dir), rank) if args.weights else None
    model = export(steps, f"{store.path.name} after {stage.name}")
    out: Path = args.output
    if not out.parent.is_dir():
        raise UserError(f"{out}: {out.parent} is not a directory; create it first")
    if weights is not None:
        weights.attach(model, steps, out.with_name(out.name + ".data"))
    try:
        onnx.save(model, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    _report(model, out, stage.name, args)
    layout = store.manifest.compile.layout
    if layout.world > 1 and not args.json:
        whose = f", with the weights of rank {rank}" if args.weights else ""
        print(f"the graph of one rank of {layout}{whose}")
    return 0


def _rank(store: Store, args: argparse.Namespace) -> int:
    """The rank whose weights are written."""
    world = store.manifest.compile.layout.world
    if args.rank is not None and not args.weights:
        raise UserError("--rank goes with --weights: the graphs of all ranks are the same")
    rank: int = args.rank or 0
    if not 0 <= rank < world:
        raise UserError(f"--rank {rank}: the artifact has ranks 0 to {world - 1}")
    return rank


def _steps(store: Store, graphs: Any, args: argparse.Namespace) -> "list[Step]":
    from dsa_compile.inspect.onnx.model import one_region, whole_step

    if args.region is not None:
        return [one_region(store, graphs, args.region, None)]
    if args.layer is None:
        return whole_step(store, graphs, args.variant, args.plan or MODEL)
    kind = store.layer(args.layer).kind
    return [one_region(store, graphs, region_name(graphs, kind, args.variant), args.layer)]


def _report(model: Any, out: Path, stage: str, args: argparse.Namespace) -> None:
    made = {function.name for function in model.functions}
    calls = {n.op_type for f in model.functions for n in f.node if n.domain not in ("", f.domain)}
    custom = sorted({n for n in calls if n not in made})
    if args.json:
        print_json({"file": str(out), "after": stage, "custom_ops": custom,
                    "bytes": out.stat().st_size})  # fmt: skip
        return
    print(f"{out}: {stage}, {len(model.graph.node)} nodes, {len(model.functions)} functions")
    if custom:
        print(f"ops without a standard form: {', '.join(custom)}")
