"""Decode steps cut into parts of equally many rows, for all of them to take the same kernels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsa_compile.runtime.engine_options import DETERMINISTIC_ROWS
from dsa_compile.runtime.execution.idle_rows import IDLE

_CUT = ("input_ids", "positions", "slot_mapping", "context_lens", "block_tables")


@dataclass(frozen=True)
class PartShape:
    """The form of all parts.

    Args:
        tokens: most of a part.
        rows: of a part, those behind its tokens padded.
        columns: width of a part's block table.
    """

    tokens: int
    rows: int
    columns: int

    @classmethod
    def on(cls, device: torch.device, columns: int) -> "PartShape":
        """The form in which a token's results are the same bits in any step.

        On a GPU the shape of a product chooses its kernel, and a row is computed alike at any
        place. On a CPU it may depend on the place, so every token has the first one; the row of
        padding behind it is there for steps on a CPU to be padded as well.
        """
        tokens = DETERMINISTIC_ROWS if device.type == "cuda" else 1
        return cls(tokens, max(tokens, 2), columns)


def parts_of(
    values: Mapping[str, Tensor], shape: PartShape
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Cut a step whose requests have one token each.

    A part writes its cache rows before those behind it read them.

    Yields:
        The values of a part, which gives the logits of all its rows, and how many are of the step.
    """
    device, total = values["input_ids"].device, len(values["input_ids"])
    starts = torch.arange(shape.rows + 1, dtype=torch.int32, device=device)
    every = torch.arange(shape.rows, device=device)
    for start in range(0, total, shape.tokens):
        part = {"cu_seqlens": starts, "logit_rows": every}
        count = min(shape.tokens, total - start)
        for name in _CUT:
            tensor = values[name][start : start + count]
            behind: tuple[int, ...] = (0, shape.rows - count)
            if tensor.dim() == 2:
                behind = (0, shape.columns - tensor.shape[1], *behind)
            part[name] = pad(tensor, behind, value=IDLE[name]) if any(behind) else tensor
        yield part, count


def run_in_parts(
    run: Callable[[dict[str, Tensor]], object],
    values: Mapping[str, Tensor],
    keys: Sequence[str],
    shape: PartShape,
) -> dict[str, Tensor]:
    """Run a step part by part.

    Args:
        run: adds its results to the values of a part.
        values: of the step, by name.
        keys: of the results that are wanted, a row a token.
        shape: of the parts.

    Returns:
        The results, a row for each token of the step.
    """
    made: dict[str, list[Tensor]] = {key: [] for key in keys}
    for part, count in parts_of(values, shape):
        run(part)
        for key, parts in made.items():
            parts.append(part[key][:count])
    return {key: torch.cat(parts) for key, parts in made.items()}
