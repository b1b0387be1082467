"""Tables of what ``dsa-bench kernels -o FILE`` kept: Markdown lines."""

import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from dsa_compile.measure.case import is_ours

Data = dict[str, Any]
Case = dict[str, Any]

HIGHLIGHTS: tuple[tuple[str, str, str], ...] = (
    ("top-k 2,048 of 64 × 9,295", "top-k", "64×9,295"),
    ("top-k 2,048 of 1 × 131,072", "top-k", "1×131,072"),
    ("top-k 2,048 of 64 × 131,072", "top-k", "64×131,072"),
    ("top-k 2,048 of 2,048 × 65,536", "top-k", "2,048×65,536"),
    *(
        (f"indexer scores, prefill, {shape}", "index logits prefill", shape)
        for shape in ("2,048 × 65,536", "4,096 × 131,072")
    ),
    ("indexer scores and top-k, 2,048 × 65,536", "index top-k", "2,048 × 65,536"),
    *(
        (f"indexer scores, decode, {shape}", "index logits decode", shape)
        for shape in (
            "1 × 8,192", "1 × 131,072", "32 × 8,192", "64 × 8,192", "64 × 65,536", "128 × 8,192",
        )
    ),
    *(
        (f"sparse MLA decode, tokens: {n}", "sparse MLA decode, fp8 rows", f"{n}x128 heads")
        for n in (1, 16, 64, 96, 256)
    ),
    *(
        (f"sparse MLA decode to heads, tokens: {n}", "sparse MLA decode to heads, fp8 rows", f"{n}")
        for n in (1, 16, 64)
    ),
    *(
        (f"sparse MLA prefill, {n} heads", "mla prefill", f"{n} heads over 8,192")
        for n in ("1,024 × 128", "4,096 × 128")
    ),
    *(
        (f"a layer's six FP8 projections, tokens: {n}", "linear_fp8", f"{n}×[!d]*")
        for n in ("1", "16", "64", "256", "4,096")
    ),
    *(
        (f"FP8 experts, whole op, tokens: {n}", "experts_fp8", f"{n} tokens")
        for n in ("1", "16", "128", "1,024", "8,192")
    ),
    ("router, tokens: 1", "router", "1 tokens"),
    ("add + RMSNorm + FP8 quantisation, 4,096 tokens", "add_rms_norm_quantize", "4,096×7,168"),
    ("RMSNorm + FP8 quantisation, 4,096 tokens", "rms_norm_quantize", "4,096×7,168"),
)  # fmt: skip
"""Label, op and shapes of the rows of :func:`highlights`; several shapes are added up."""


def run(data: Data) -> list[str]:
    """A sentence a machine: versions, the ceilings of its first run, the commands of all."""
    machines: list[list[Data]] = []
    for head in data["runs"]:
        if machines and machines[-1][0]["machine"] == head["machine"]:
            machines[-1].append(head)
        else:
            machines.append([head])
    lines = [textwrap.wrap(_sentence(runs), 105, break_on_hyphens=False) for runs in machines]
    return list(chain.from_iterable(lines))


def _sentence(runs: Sequence[Data]) -> str:
    head = runs[0]
    machine = dict(head["machine"])
    parts = [machine.pop("gpu"), machine.pop("date")]
    parts += [f"{name} {value}" for name, value in machine.items()]
    if ceilings := head.get("ceilings"):
        parts.append(f"memory {ceilings['bytes_per_us'] / 1e6:.2f} TB/s")
        parts += [f"{k} {v / 1e6:,.0f} TFLOP/s" for k, v in ceilings["flops_per_us"].items()]
    if rate := head.get("bytes_per_ms"):
        parts.append(f"memory {rate / 1e9:.2f} TB/s")
    commands = [f"`{run['command']}`" for run in runs if run.get("command")]
    return "; ".join([", ".join(parts), ", ".join(commands)] if commands else parts) + "."


def cases(
    data: Data, op: str, shape: str = "*", tflops: str = "", copies: str = "", head: str = ""
) -> list[str]:
    """A row a case: every provider's time, ours first, beside the limit.

    Args:
        data: as read.
        op: which; ``*`` and ``?`` stand for anything, and ``|`` is between several.
        shape: which, in the same way.
        tflops: ``yes`` for a column of our operations a second.
        copies: ``yes`` for columns of a copy of as many bytes (suite ``copies``).
        head: of the first column.
    """
    some = _chosen(data, op, shape)
    providers = _providers(some)
    peers = any(not is_ours(name) for name in providers)
    heads = [head, *(f"`{name}`" for name in providers), *["best peer ÷ ours"] * peers]
    heads += ["limit", "of limit"]
    heads += ["TFLOP/s"] * bool(tflops) + ["a copy", "of a copy"] * bool(copies)
    several = len({case["op"] for case in some}) > 1
    rows = []
    for case in some:
        times = _times(case)
        own, peer = _ours(case), _peer(case)
        best = min(times.values(), default=None)
        row = [f"{case['op']}, {case['shape']}" if several else case["shape"]]
        row += [_bold(_told(case, name), times.get(name) == best) for name in providers]
        row += [_ratio(peer, own)] * peers + [us(case.get("limit_us")), _share(case, own)]
        if tflops:
            row.append(f"{case['flops'] / own / 1e6:,.0f}" if own and case["flops"] else "–")
        if copies:
            copied = _copy_us(data, case)
            row += [us(copied), f"{copied / own:.0%}" if copied and own else "–"]
        rows.append(row)
    return table(heads, rows)


def grid(data: Data, op: str, columns: str, peer: str, shape: str = "*") -> list[str]:
    """Our best time / a peer's for shapes such as ``64×q_b``: a row a name, and the sums.

    Args:
        data: as read.
        op: which.
        columns: what stands before the first ``×``, such as ``"1 16 4,096"``.
        peer: provider.
        shape: of the names behind it.
    """
    found: dict[str, dict[str, Case]] = {}
    for case in _chosen(data, op, "*"):
        column, _, name = case["shape"].partition("×")
        if _matches(name, shape):
            found.setdefault(name, {})[column] = case
    rows = []
    sums: dict[str, tuple[float, float]] = {}
    for name, by_column in found.items():
        cells = [name]
        for column in columns.split():
            case = by_column.get(column, {"us": {}})
            own, other = _ours(case), _times(case).get(peer)
            cells.append(f"{us(own)} / {us(other)}")
            both = sums.get(column, (0.0, 0.0))
            sums[column] = (both[0] + (own or math.nan), both[1] + (other or math.nan))
        rows.append(cells)
    shown = [f"**{_finite(own)} / {_finite(other)}**" for own, other in sums.values()]
    rows.append(["**sum**", *shown])
    return table([f"ours / `{peer}`", *columns.split()], rows)


def beside(data: Data, op: str) -> list[str]:
    """Ops beside one another: a row a shape, a column an op's provider; bold is an op's best."""
    some = _chosen(data, op, "*")
    columns = [
        (name, provider)
        for name in dict.fromkeys(case["op"] for case in some)
        for provider in _providers([case for case in some if case["op"] == name])
    ]
    rows = []
    for shape in dict.fromkeys(case["shape"] for case in some):
        of_op = {case["op"]: case for case in some if case["shape"] == shape}
        row = [shape]
        for name, provider in columns:
            times = _times(of_op.get(name, {"us": {}}))
            best = provider in times and times[provider] == min(times.values())
            row.append(_bold(us(times.get(provider)), best))
        rows.append(row)
    return table(["", *(f"{name}: `{provider}`" for name, provider in columns)], rows)


def families(data: Data, op: str, usual: str) -> list[str]:
    """The usual family of values and the slowest one of each shape, beside the best right peer.

    Args:
        data: as read.
        op: which.
        usual: name of the family that others are compared with.
    """
    some = _chosen(data, op, "*")
    heads = ["", usual, "best right peer", "median of families", "worst family", f"÷ {usual}"]
    rows = []
    for shape in sorted({case["shape"] for case in some}, key=_sizes):
        by_family = {case["family"]: case for case in some if case["shape"] == shape}
        times = {name: own for name, case in by_family.items() if (own := _ours(case))}
        if not times:
            rows.append([shape, *["–"] * 9])
            continue
        worst = max(times, key=lambda name: times[name])
        normal = times.get(usual)
        row = [shape, us(normal), _named_peer(by_family.get(usual, {"us": {}}))]
        row += [us(statistics.median(times.values())), us(times[worst])]
        row += [_ratio(times[worst], normal), worst, _named_peer(by_family[worst])]
        wrong = sum(any(map(is_ours, case.get("wrong", ()))) for case in by_family.values())
        row.append(f"{len(times)}" + (f", {wrong} wrong" if wrong else ""))
        peers = {name: _peer(by_family[name]) for name in times}
        faster = sum(1 for name, peer in peers.items() if peer and peer < times[name])
        rows.append([*row, str(faster)])
    return table([*heads, "which", "best right peer", "families right", "a peer is faster"], rows)


def _sizes(shape: str) -> list[int]:
    """Numbers of a shape, by which tables are sorted: a run may be divided over several files."""
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", shape)]


def highlights(data: Data) -> list[str]:
    """The rows of :data:`HIGHLIGHTS` that were measured: ours, the best peer, the quotient."""
    rows = []
    for label, op, shape in HIGHLIGHTS:
        some = [c for c in data["cases"] if c["op"] == op and _matches(c["shape"], shape)]
        own, peer = _sum(map(_ours, some)), _sum(map(_peer, some))
        if own is None:
            continue
        name = min(_peers(some[0]).items(), key=lambda item: item[1])[0] if peer else ""
        beaten = f"{us(peer)} (`{name}`)" if peer and len(some) == 1 else us(peer)
        limit = _sum(case.get("limit_us") for case in some)
        share = f"{limit / own:.0%}" if limit else "–"
        rows.append([label, us(own), beaten, _ratio(peer, own), share])
    return table(["", "ours", "best peer", "peer ÷ ours", "of limit"], rows)


def us(value: float | None) -> str:
    """Microseconds; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 999.95 else f"{value:.1f}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown lines; all columns but the first are right-aligned."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _matches(text: str, pattern: str) -> bool:
    return any(fnmatchcase(text, each) for each in pattern.split("|"))


def _chosen(data: Data, op: str, shape: str) -> list[Case]:
    found = [c for c in data["cases"] if _matches(c["op"], op) and _matches(c["shape"], shape)]
    if not found:
        raise ValueError(f"no case of op={op!r} shape={shape!r} was kept")
    return found


def _times(case: Case) -> dict[str, float]:
    return {name: value for name, value in case["us"].items() if value is not None}


def _providers(some: Sequence[Case]) -> list[str]:
    names = dict.fromkeys(name for case in some for name in _times(case))
    return sorted(names, key=lambda name: not is_ours(name))


def _ours(case: Case) -> float | None:
    return min((v for name, v in _times(case).items() if is_ours(name)), default=None)


def _peers(case: Case) -> dict[str, float]:
    return {name: v for name, v in _times(case).items() if not is_ours(name)}


def _peer(case: Case) -> float | None:
    return min(_peers(case).values(), default=None)


def _named_peer(case: Case) -> str:
    name, value = min(_peers(case).items(), key=lambda item: item[1], default=("", None))
    return f"{us(value)} (`{name}`)" if name else "–"


def _told(case: Case, provider: str) -> str:
    return "wrong" if provider in case.get("wrong", ()) else us(_times(case).get(provider))


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold and text[0].isdigit() else text


def _ratio(large: float | None, small: float | None) -> str:
    return f"{large / small:.2f}" if large and small else "–"


def _share(case: Case, own: float | None) -> str:
    return f"{case['limit_us'] / own:.0%}" if own else "–"


def _copy_us(data: Data, case: Case) -> float | None:
    tokens, _, rest = case["shape"].partition("×")
    names = (f"{case['op']} {rest}, {tokens}", f"{case['op']}, {tokens}")
    for other in data["cases"]:
        if other["op"] == "copy of the same bytes" and other["shape"] in names:
            return min(_times(other).values(), default=None)
    return None


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return sum(v for v in known if v is not None) if known and None not in known else None


def _finite(value: float) -> str:
    return "–" if math.isnan(value) else us(value)
