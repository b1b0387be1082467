"""Parameters of a model of which some experts, heads and some of the vocabulary are left out."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor

from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.verify.inputs.parameters import Parameters
from dsa_compile.weights.canonical import canonical_parameters
from dsa_compile.weights.materialize import write_expr
from dsa_compile.weights.plan import WeightEntry
from dsa_compile.weights.windows import Window, bounded


class SampledParameters:
    """Some rows of a model's parameters, as those of a smaller model.

    Args:
        source: of the whole model.
        whole: its geometry.
        spec: of the smaller model, which has fewer experts and heads and a smaller vocabulary. Its
            heads take the first rows or columns of what is theirs.
        layers: numbers of the layers.
        experts: numbers of the experts that are kept, in the whole model.
        tokens: ids of the tokens that are kept, likewise.
    """

    def __init__(
        self,
        source: Parameters,
        whole: ModelSpec,
        spec: ModelSpec,
        layers: Collection[int],
        experts: Sequence[int],
        tokens: Sequence[int],
    ) -> None:
        self._source = source
        theirs = canonical_parameters(whole, sorted(layers))
        self._parameters = canonical_parameters(spec, sorted(layers))
        # rows, of what has fewer; of what heads have the first are kept
        self._kept: dict[str, Sequence[int]] = {}
        for name, parameter in self._parameters.items():
            if parameter.shape != theirs[name].shape and ".self_attn." not in name:
                self._kept[name] = experts if ".mlp." in name else tokens
                assert len(self._kept[name]) == parameter.shape[0], name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        return self._parameters[name].shape

    def read_into(self, name: str, out: Tensor, window: Window = ()) -> None:
        """See :class:`~dsa_compile.weights.materialize.TensorReader`."""
        for place, theirs in self._runs(name, bounded(window, self.shape(name))):
            self._source.read_into(name, out[place], theirs)

    def read_quantized(
        self,
        name: str,
        stacked: int,
        values: Tensor | None,
        scales: Tensor | None,
        window: Window = (),
    ) -> None:
        """See :class:`~dsa_compile.weights.materialize.TensorReader`."""
        for out, is_values in ((values, True), (scales, False)):
            if out is None:
                continue
            for place, theirs in self._runs(name, bounded(window, out.shape)):
                mine = out[place]
                pair = (mine, None) if is_values else (None, mine)
                self._source.read_quantized(name, stacked, pair[0], pair[1], theirs)

    def fill(
        self, stem: str, key: str, entry: WeightEntry, variables: Mapping[str, str], out: Tensor
    ) -> None:
        """See :class:`~dsa_compile.weights.materialize.WeightSource`."""
        write_expr(entry.expr, variables, self, out)

    def _runs(self, name: str, window: Window) -> Iterator[tuple[slice, Window]]:
        """Parts of a window along its rows, and the windows of the whole parameter that go there:
        rows that lie together there are read together."""
        if name not in self._kept:
            yield slice(None), window
            return
        rows, *others = window
        kept = self._kept[name][rows]
        start = 0
        for end in range(1, len(kept) + 1):
            if end == len(kept) or kept[end] != kept[end - 1] + 1:
                theirs = slice(kept[start], kept[end - 1] + 1)
                yield slice(start, end), (theirs, *others)
                start = end
