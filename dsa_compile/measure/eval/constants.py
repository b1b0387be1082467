"""Constants of a model that its configuration implies and a compiled graph states."""

from dataclasses import dataclass

from torch import Tensor, fx
from torch._ops import OpOverload

from dsa_compile.errors import UserError
from dsa_compile.ir.match import argument, calls
from dsa_compile.ir.region import Region
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.ops import ROPE_TABLES, Family, Form, ops_of


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
        region, node = _first_call(loaded, ROPE_TABLES)
        _, inv_freq, scaling, _ = node.args
        assert isinstance(inv_freq, fx.Node)
        assert isinstance(scaling, float)
        (call,) = (call for call in loaded.manifest.calls if call.kind == region.kind)
        return cls(loaded.weights[call.name][inv_freq.meta["key"]].cpu(), scaling)


def attention_scale(loaded: LoadedArtifact) -> float:
    """The factor on the dot products of attention, the same in all layers.

    Raises:
        UserError: the graphs hold no attention of the ``dsa`` ops.
    """
    _, node = _first_call(loaded, *ops_of(Family.ATTENTION, Form.FLAT))
    scale = argument(node, "scale")
    assert isinstance(scale, float)
    return scale


def _first_call(loaded: LoadedArtifact, *ops: OpOverload) -> tuple[Region, fx.Node]:
    for region in loaded.regions.values():
        for node in calls(region.graph, *ops):
            return region, node
    wanted = " or ".join(map(str, ops))
    raise UserError(
        f"{loaded.name}: its graphs hold no {wanted}, whose constants the reference takes; "
        "compile without --disable"
    )
