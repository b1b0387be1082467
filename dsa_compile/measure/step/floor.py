"""The traffic with device memory that a layer cannot avoid."""

import math

from dsa_compile.ir.plan import LONG, SHORT
from dsa_compile.ir.region import Role
from dsa_compile.measure.step.cases import Decode
from dsa_compile.measure.step.model import Compiled

_ROUTED = "mlp.experts."  # what the keys of stacked experts begin with


def decode_bytes(compiled: Compiled, kind: str, case: Decode, experts_hit: float) -> float:
    """Bytes that one layer reads in a decode step.

    Every weight of the region once, of the stacked experts those that are hit; the index keys of
    every context, unless the step is short, and the latent rows attended to.

    Args:
        compiled: for the region's inputs and the formats of the caches.
        kind: of the layer.
        case: the step.
        experts_hit: distinct experts that its tokens take.
    """
    topk = compiled.manifest.model.spec.index_topk
    short = case.context <= topk and SHORT in compiled.manifest.variants
    name = f"{kind}.{SHORT if short else LONG}"
    region = compiled.regions[name if name in compiled.regions else kind]
    total = 0.0
    for node in region.inputs_of(Role.WEIGHT):
        value = node.meta["val"]
        nbytes = math.prod(value.shape) * value.dtype.itemsize
        routed = node.meta["key"].startswith(_ROUTED)
        total += nbytes * experts_hit / value.shape[0] if routed else nbytes
    rows = {"latent_cache": min(case.context, topk), "index_cache": 0 if short else case.context}
    for node in region.inputs_of(Role.CACHE):
        value = node.meta["val"]
        width = int(value.shape[-1]) * value.dtype.itemsize
        total += case.batch * rows.get(node.meta["key"], 0) * width
    return total
