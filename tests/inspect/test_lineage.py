"""Lineage: what each node of a rewrite stands for."""

from dsa_compile.inspect.diff import Hunk
from dsa_compile.inspect.lineage import lineage
from dsa_compile.inspect.pairing import pair_stages
from tests.inspect.drawn import drawn


def told(before: str, after: str) -> dict[str, tuple[str, ...]]:
    graphs = drawn("g", before), drawn("g", after)
    removed = {n.name for n in graphs[0].calls} - {n.name for n in graphs[1].calls}
    made = {n.name for n in graphs[1].calls} - {n.name for n in graphs[0].calls}
    pairing = pair_stages(*graphs, removed, made)
    hunk = Hunk("g", "", (1,), pairing.removed, pairing.made, pairing.changes)
    return lineage(hunk, pairing)


def test_many_become_one() -> None:
    assert told(
        "x\n p = aten.pow.Tensor(x, 2)\n m = aten.mean.dim(p)\n n = aten.mul.Tensor(x, m)\n"
        "return n",
        "x\n norm = dsa.rms_norm.default(x)\n return norm",
    ) == {"norm": ("p", "m", "n")}


def test_an_op_in_the_name_of_another() -> None:
    """The quantisation is new; the product is the product."""
    assert told(
        "x\n w: weight proj.weight\n y = dsa.linear.default(x, w)\n return y",
        "x\n v: weight proj.weight_e4m3\n q = dsa.quantize_blocks.default(x)\n"
        "z = dsa.linear_fp8.default(q, v)\n return z",
    ) == {"q": (), "z": ("y",)}


def test_three_become_one_and_a_split() -> None:
    found = told(
        "x\n v: weight a.weight\n w: weight b.weight\n a = dsa.linear.default(x, v)\n"
        "b = dsa.linear.default(x, w)\n y = aten.add.Tensor(a, b)\n return y",
        "x\n u: weight a_b.weight\n l = dsa.linear.default(x, u)\n s = aten.split.Tensor(l)\n"
        "p = operator.getitem(s, 0)\n q = operator.getitem(s, 1)\n y = aten.add.Tensor(p, q)\n"
        "return y",
    )
    assert found == {"l": ("a", "b"), "s": (), "p": ("a",), "q": ("b",)}


def test_each_by_what_it_depends_on() -> None:
    """Keys from keys, queries from queries, though one rewrite made both."""
    found = told(
        "q\n k\n a = aten.neg.default(q)\n b = aten.abs.default(k)\n"
        "y = aten.mm.default(a, b)\n return y",
        "q\n k\n r = dsa.query.default(q)\n s = dsa.key.default(k)\n"
        "z = dsa.scores.default(r, s)\n return z",
    )
    assert found == {"r": ("a",), "s": ("b",), "z": ("y",)}
