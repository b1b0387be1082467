"""Constants of a model that its configuration implies and a compiled graph states."""

from dataclasses import dataclass

from torch import Tensor, fx

from dsa_compile.errors import UserError
from dsa_compile.ir.match import calls
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.ops import ROPE_TABLES


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies: fp32 ``inv_freq`` [D/2] in radians a position, on the CPU; factor on cos
    and sin."""

    inv_freq: Tensor
    scaling: float

    @classmethod
    def of(cls, loaded: LoadedArtifact) -> "Rope":
        """Constants of RoPE as an artifact has them.

        Raises:
            UserError: its graphs do not make the tables with ``dsa::rope_tables``.
        """
        found = ((r, n) for r in loaded.regions.values() for n in calls(r.graph, ROPE_TABLES))
        region, node = next(found, (None, None))
        if region is None or node is None:
            raise UserError(
                f"{loaded.name}: its graphs hold no {ROPE_TABLES}, whose constants the reference "
                "takes; compile without --disable"
            )
        _, inv_freq, scaling, _ = node.args
        assert isinstance(inv_freq, fx.Node)
        assert isinstance(scaling, float)
        (call,) = (call for call in loaded.manifest.calls if call.kind == region.kind)
        return cls(loaded.weights[call.name][inv_freq.meta["key"]].cpu(), scaling)
