"""One region in one step, every op by its reference and by the kernels that may take its calls."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.ir.execution import Recorder, reference
from dsa_compile.ir.region import Region, Role
from dsa_compile.kernels.registry import load
from dsa_compile.ops import REFERENCE
from dsa_compile.runtime.execution.executor import Kernels
from dsa_compile.verify.checks.kernel_call import OpCall, providers
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.execution.stages import result_nodes
from dsa_compile.verify.inputs.prompt import Chunk

BY_REFERENCE = "reference"
"""The provider that stands for an op's reference, on whatever device."""

Begins = Callable[[str, str, str], None]
"""Called with op, provider and call before each is run."""


class Judgement(NamedTuple):
    """One provider at one call: its error as a multiple of what is allowed, and what is wrong."""

    op: str
    provider: str
    node: str
    ratio: float
    problem: str


class ByOp:
    """One region in one step.

    Args:
        region: of a finished program.
        kernels: by op, as the artifact binds them.
        target: that they were bound for.
        chunk: the step.
        spec: of the model.
        begins: called before an op is run.
        skipped: ops and providers that are left out.

    Attributes:
        found: of every provider at every call, as far as it has run.
    """

    def __init__(
        self,
        region: Region,
        kernels: Kernels,
        target: str,
        chunk: Chunk,
        spec: ModelSpec,
        begins: Begins,
        skipped: Collection[tuple[str, str]],
    ) -> None:
        self.found: list[Judgement] = []
        self._region, self._kernels, self._target = region, kernels, target
        self._chunk, self._spec = chunk, spec
        self._begins, self._skipped = begins, skipped

    def run(self, tables: Mapping[Role, Mapping[str, Any]]) -> dict[str, Tensor]:
        """Results of the region by the references, by name."""
        recorder = Recorder.of(self._region, self._function)
        given = {n.name: tables[n.meta["role"]][n.meta["key"]] for n in self._region.inputs()}
        made = recorder(given)
        return {name: made[node.name] for name, node in result_nodes(self._region).items()}

    def _function(self, node: fx.Node) -> Callable[..., Any] | None:
        function = reference(node)
        if function is None or node.target not in REFERENCE:
            return function

        def checked(*args: Any, **kwargs: Any) -> Any:
            assert not kwargs
            return self._check(OpCall(node, args, self._chunk, self._spec))

        return checked

    def _check(self, call: OpCall) -> Any:
        op = str(call.node.target)
        self._begins(op, BY_REFERENCE, call.node.name)
        theirs = call.reference()
        for provider in providers(self._kernels.get(op, ()), self._chunk.size):
            if (op, provider) in self._skipped:
                continue
            self._begins(op, provider, call.node.name)
            try:
                function = load(op.split(".")[1], provider, self._target)
                assert function is not None
                problem, ratio = call.judge(theirs, call.kernel(function))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a kernel raises
                problem, ratio = f"does not run: {in_a_line(error)}", torch.inf
            self.found.append(Judgement(op, provider, call.node.name, ratio, problem))
        call.keep(theirs[0])
        results = theirs[1]
        schema = call.node.target._schema.returns  # type: ignore[union-attr]
        if len(schema) == 1 and str(schema[0].type) != "List[Tensor]":
            return results[0]
        return results or None
