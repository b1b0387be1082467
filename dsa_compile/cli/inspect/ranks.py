"""``dsa-inspect ARTIFACT ranks``: what ranks exchange in a step, and what each of them holds."""

import argparse
from dataclasses import asdict
from typing import Any

from dsa_compile.cli.inspect.output import console, print_json, table
from dsa_compile.facts.gpus import GPU_MEMORY
from dsa_compile.inspect.ranks import Held, exchanges, held
from dsa_compile.inspect.store import Store
from dsa_compile.ir.plan import MODEL

GIB = 1 << 30
_SHARE = 0.9  # what an engine takes of a GPU where nothing else is said
# Steps of 2,048 tokens, CUDA graphs and the context took 8.1 GiB on an H200.
_BESIDE = 8.1 * GIB


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "ranks",
        help="what ranks exchange in a step, and what each of them holds",
        description="For every kind of region its collectives: operand and bytes that a rank "
        "sends, for each token of a step (each row of logits in the head), and the bytes of a "
        "rank's weights; then what a rank holds, and for how many tokens GPUs have room beside it. "
        "Nothing is measured.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the exchanges."""
    store = Store.open(args.artifact)
    layout, holds = store.manifest.compile.layout, held(store)
    plans = {name: exchanges(store, name) for name in store.manifest.plans}
    steps = {
        name: {
            "messages": sum(each.calls * len(each.messages) for each in found),
            "sent_bytes": sum(each.calls * each.sent for each in found),
        }
        for name, found in plans.items()
    }
    room = _room(store, holds)
    if args.json:
        print_json(
            {
                "layout": asdict(layout),
                "regions": [asdict(each) for each in plans[MODEL]],
                **steps[MODEL],
                "drafts": {name: step for name, step in steps.items() if name != MODEL},
                "weight_bytes": holds.weights,
                "cache_bytes_per_token": holds.token,
                "tokens": room,
            }
        )
        return 0
    out = console()
    out.print(f"layout: {layout}")
    out.print()
    shown = table(
        "region", "calls", "collective", "module", "bytes a row", "sent a row", "weights",
        right=("calls", "bytes a row", "sent a row", "weights"),
    )  # fmt: skip
    for name, found in plans.items():
        for each in found:
            region = f"{each.region} {each.layers}".strip()
            region += "" if name == MODEL else f" ({name})"
            weights = f"{each.weight_bytes:,}"
            shown.add_row(region, str(each.calls), "", "", "", "", weights)
            for m in each.messages:
                what = f"{m.op} {m.axis} {m.ranks}"
                module = m.path.rpartition(".")[2]
                cells = (f"{m.row_bytes:,}", f"{m.sent:,.0f}")
                shown.add_row("", "", what, f"{module} [{m.rows}]", *cells, "")
    out.print(shown)
    out.print()
    for name, step in steps.items():
        what = "a step" if name == MODEL else f"a step of {name}"
        out.print(
            f"{what}: {step['messages']} messages; for a token whose logits are wanted each rank "
            f"sends {step['sent_bytes']:,.0f} bytes"
        )
    out.print(
        f"a rank: {holds.weights:,} bytes of weights ({holds.weights / GIB:.1f} GiB), each counted "
        f"once; {holds.token:,} bytes of cache a token"
    )
    for gpu, tokens in room.items():
        fits = f"room for {tokens:,} tokens of all requests" if tokens else "too small"
        where = " in each lane" if layout.dp > 1 and tokens else ""
        out.print(f"{gpu}: {fits}{where}")
    return 0


def _room(store: Store, holds: Held) -> dict[str, int]:
    """Tokens that the caches hold on each GPU that the target is for."""
    target, size = store.manifest.target, store.manifest.block_size
    return {
        f"{name}, {memory:g} GiB": holds.tokens(_SHARE * memory * GIB - _BESIDE, size)
        for name, memory in GPU_MEMORY.get(target, {}).items()
    }
