"""Model that ``dsa-inspect ARTIFACT onnx`` writes: a step's calls at a stage, and their weights."""

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import TensorProto

from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.inspect.onnx.body import DTYPES
from dsa_compile.inspect.onnx.export import Step
from dsa_compile.inspect.store import Store, unknown
from dsa_compile.ir.graph import Graph, Node
from dsa_compile.ir.plan import MODEL, region_name
from dsa_compile.weights.canonical import canonical_parameters, template_of
from dsa_compile.weights.checkpoint import Checkpoint
from dsa_compile.weights.materialize import materialize
from dsa_compile.weights.plan import Load, WeightEntry, WeightPlan
from dsa_compile.weights.ranks import entry_at_rank, every_rank
from dsa_compile.weights.safetensors_file import tensor_bytes

ALIGNMENT = 4096  # of values in the data file: readers map it into memory


def whole_step(
    store: Store, graphs: Mapping[str, Graph], variant: str, plan: str = MODEL
) -> list[Step]:
    """Steps of all calls of a plan.

    Args:
        store: has the plans.
        graphs: of one stage.
        variant: ``long``, ``short`` or ``prompt``, where regions are split.
        plan: name of it.

    Raises:
        UserError: the artifact has no such plan.
    """
    plans = store.manifest.plans
    if plan not in plans:
        raise UserError(unknown("plan", plan, list(plans)))

    def region(kind: str) -> Graph:
        return graphs[region_name(graphs, kind, variant)]

    return [
        Step(region(c.kind), c.name if c.layer is None else f"layers.{c.layer}", c.vars)
        for c in plans[plan].calls
    ]


def one_region(store: Store, graphs: Mapping[str, Graph], name: str, layer: int | None) -> Step:
    """A single call, of a region by its name or of one layer in the model.

    Raises:
        UserError: there is no such region at this stage.
    """
    if name not in graphs:
        raise UserError(unknown("region", name, list(graphs)))
    kind = name.partition(".")[0]
    calls = [call for call in store.manifest.calls if call.kind == kind]
    call = next(call for call in calls if layer in (None, call.layer))
    return Step(graphs[name], name if call.layer is None else f"layers.{call.layer}", call.vars)


def open_weights(store: Store, model_dir: Path | None) -> Checkpoint:
    """The checkpoint that an artifact was compiled from.

    Raises:
        UserError: the artifact does not say where it is, or it is another model's.
    """
    manifest = store.manifest
    folder = model_dir or (Path(manifest.weights.model_dir) if manifest.weights.model_dir else None)
    if folder is None:
        raise UserError(
            f"{store.path}: does not say where its checkpoint is; name it with --model-dir"
        )
    return Checkpoint.open(folder, manifest.model.spec, manifest.stored_layers)


class Weights:
    """The weights of a stage, made from the checkpoint.

    The artifact has the plan of the finished program. A weight of an earlier stage is in it too, or
    is a parameter of the model as it stands; those that one pass made and a later one took apart
    cannot be had.

    Args:
        store: of the artifact.
        checkpoint: of its model.
        rank: whose weights, where ranks have parts of them.
    """

    def __init__(self, store: Store, checkpoint: Checkpoint, rank: int = 0) -> None:
        assert store.manifest.weights.plan is not None
        self._plan = WeightPlan.from_json(store.read_json(store.manifest.weights.plan))
        self._checkpoint = checkpoint
        self._rank = rank
        manifest = store.manifest
        self._parameters = canonical_parameters(manifest.model.spec, manifest.stored_layers)

    def attach(self, model: onnx.ModelProto, steps: list[Step], data: Path) -> None:
        """Turn the model's weight inputs into values, which are written to ``data``.

        Raises:
            UserError: a weight that cannot be had, or a file that cannot be written.
        """
        found = {
            step.name(node): (step, node, self._entry(step, node))
            for step in steps
            for node in step.region.inputs
            if node.role == "weight"
        }
        try:
            with data.open("wb") as file:
                for name, (step, node, entry) in found.items():
                    made = materialize(entry, step.variables, self._checkpoint)
                    content = tensor_bytes(made)
                    file.write(bytes(-file.tell() % ALIGNMENT))
                    place = (data.name, file.tell(), len(content))
                    file.write(content)
                    model.graph.initializer.append(_external(name, node, *place))
        except OSError as error:
            raise ArtifactError(f"{data}: cannot be written ({error.strerror})") from None
        kept = [value for value in model.graph.input if value.name not in found]
        del model.graph.input[:]
        model.graph.input.extend(kept)

    def _entry(self, step: Step, node: Node) -> WeightEntry:
        dtype, shape = node.val["dtype"], tuple(node.val["shape"])
        planned = self._plan.entries(step.region.kind).get(node.key)
        if planned is not None and (planned.dtype, planned.shape) == (dtype, shape):
            places = every_rank(planned.expr)
            return entry_at_rank(planned, places[self._rank % len(places)])  # one where it is whole
        entry = WeightEntry(dtype, shape, Load(template_of(node.key)))
        [parameter] = entry.sources(step.variables)
        known = self._parameters.get(parameter)
        if known is None or known.shape != shape:
            raise UserError(
                f"weight {node.key} of region {step.region.name} exists only between two passes, "
                "so it has no recorded values; choose another stage, or leave out --weights"
            )
        return entry


def _external(name: str, node: Node, file: str, offset: int, length: int) -> TensorProto:
    tensor = TensorProto(
        name=name,
        data_type=DTYPES[node.val["dtype"]],
        dims=node.val["shape"],
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (("location", file), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
