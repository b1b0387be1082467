"""Cut the embedding along its width: each rank looks up some columns, and all get them all.

Before::                                        After, on each of n ranks::

    x = dsa.embedding(ids, table)   # [T, H]        part = dsa.embedding(ids, table')   # [T, H/n]
                                                    x = dsa.all_gather(part, "tp", n)

The cut is by columns and not by rows of the vocabulary, as every rank then has something of every
token, and what travels is no sum: the bits stay as they are.
"""

import torch

from dsa_compile.facts.layout import EMBEDDING
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Node
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Place, Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.sharding import Cut, all_gather, compute_part
from dsa_compile.passes.shared import in_place

dsa = torch.ops.dsa


class ShardEmbedding(RegionPass):
    """The embedding's columns over ranks, and an all-gather behind the look-up."""

    requires = ("recognize_embedding", "flatten_tokens")
    cuts = EMBEDDING

    def expects(self, program: Program, region: Region) -> int | None:
        """The embedding of the prologue."""
        return in_place(program, region, Place.PROLOGUE)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Cut every look-up."""
        for m in edit.matches(Call(dsa.embedding.default, ANY, Node("table"))):
            part = compute_part(edit, program, [Cut(m["table"], 1)], m)
            if part is not None:
                all_gather(edit, program, m.root, part)
