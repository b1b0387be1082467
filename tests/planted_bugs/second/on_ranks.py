"""A program on all of its ranks, each a thread of this process that meets the others."""

import threading
from pathlib import Path
from typing import Any

TIMEOUT = 60


class _Meeting:
    """A :class:`~dsa_compile.ops.collectives.Communicator` of one rank."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self._rank, self._barrier, self._table = rank, barrier, table

    def peer_memory(self, axis: str) -> None:
        """None: threads have none in common."""

    def gather(self, x: Any, axis: str, ranks: int) -> Any:
        """All operands ``[ranks, …]``, in the order of ranks."""
        import torch

        assert ranks == len(self._table), (axis, ranks)
        self._table[self._rank] = x
        self._barrier.wait(TIMEOUT)
        found = torch.stack(self._table)
        self._barrier.wait(TIMEOUT)
        return found

    def gather_many(self, xs: Any, axis: str, ranks: int) -> Any:
        """All operands of each."""
        return [self.gather(x, axis, ranks) for x in xs]

    def all_reduce(self, x: Any, axis: str, ranks: int) -> Any:
        """Sum of the ranks' operands."""
        from dsa_compile.ops.collectives import sum_of_ranks

        return sum_of_ranks(self.gather(x, axis, ranks))

    def reduce_scatter(self, x: Any, axis: str, ranks: int) -> Any:
        """This rank's rows of the sum."""
        return self.all_reduce(x, axis, ranks).chunk(ranks)[self._rank]


def logits_on_ranks(program: Any, model_dir: Path) -> dict[str, Any]:
    """Logits of each rank for each variant, by their names.

    Args:
        program: at the KERNEL level, of several ranks in one lane.
        model_dir: for the weights.
    """
    from dsa_compile.ir.plan import MODEL
    from dsa_compile.weights.checkpoint import Checkpoint

    layers = [call.index for call in program.plans[MODEL].layers]
    ranks = program.config.layout.tp
    found: dict[str, Any] = {}
    failed: list[BaseException] = []
    for variant in program.variants:
        barrier, table = threading.Barrier(ranks), [None] * ranks

        def run(rank: int, variant: str = variant, b: Any = barrier, t: Any = table) -> None:
            try:
                source = Checkpoint.open(model_dir, program.spec, layers)
                values = _run_rank(program, variant, source, rank, _Meeting(rank, b, t))
                found[f"{variant} rank {rank}"] = values["logits"].float()
            except BaseException as error:
                failed.append(error)
                b.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
    return found


def _run_rank(program: Any, variant: str, source: Any, rank: int, meeting: _Meeting) -> Any:
    import torch

    from dsa_compile.ir.execution import compile_region
    from dsa_compile.ir.plan import MODEL
    from dsa_compile.ops.collectives import communicating
    from dsa_compile.weights.ranks import plan_at_rank
    from tests.planted_bugs.second.overlapped import step_of
    from tests.weights.loading import load_layer

    plan = plan_at_rank(program.weights, program.config.layout.numbers(rank))
    lengths = (19, 9) if variant == "long" else (12, 9)
    values = step_of(program.spec.vocab_size, lengths)
    with torch.inference_mode(), communicating(meeting):
        for call in program.plans[MODEL].calls:
            region = program.region(call.kind, variant)
            weights = load_layer(plan, call.kind, call.vars, source)
            given = []
            for node in region.inputs():
                role, key, fake = node.meta["role"], node.meta["key"], node.meta["val"]
                if role == "cache":
                    given.append(torch.zeros((8, *map(int, fake.shape[1:])), dtype=fake.dtype))
                else:
                    given.append(weights[key] if role == "weight" else values[key])
            results = compile_region(region)(*given)
            values |= dict(zip(region.outputs, results, strict=True))
    return values
