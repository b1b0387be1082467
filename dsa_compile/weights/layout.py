"""Stored layout of a canonical parameter: one tensor, or one matrix an expert."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from dsa_compile.weights.windows import Window, sizes

SCALE_SUFFIX = "_scale_inv"
# What checkpoints call parts of names that transformers calls otherwise, a table for each family.
_ALSO_CALLED: tuple[dict[str, str], ...] = (
    {  # A.X-K2
        "layernorm.mlp.fc1.": "layernorm.W_down.",
        "layernorm.mlp.fc2.": "layernorm.W_up.",
        ".q_gate_proj.": ".q_b_proj.",
    },
    {  # Mistral-Large-4; the longer of two names that begin alike comes first
        "model.embed_tokens.": "tok_embeddings.",
        "model.rotary_emb.": "lerope.",
        "model.layers.": "layers.",
        "model.norm.": "norm.",
        "lm_head.": "output.",
        ".self_attn.": ".attention.",
        ".q_proj.": ".wq.",
        ".kv_a_proj_with_mqa.": ".wkv_a_with_mqa.",
        ".kv_b_proj.": ".wkv_b.",
        ".o_proj.": ".wo.",
        ".input_layernorm.": ".attention_norm.",
        ".post_attention_layernorm.": ".ffn_norm.",
        ".kv_a_layernorm.": ".kv_a_norm.",
        ".softmax_scaling.scale": ".ssmax_scaling.s",
        ".softmax_scaling.bias": ".ssmax_scaling.b",
        ".mlp.gate.": ".gate.",
        ".mlp.experts.": ".experts.",
        ".mlp.shared_experts.": ".shared_experts.",
        ".mlp.": ".feed_forward.",
        ".gate_proj.": ".w1.",
        ".down_proj.": ".w2.",
        ".up_proj.": ".w3.",
    },
)


@dataclass(frozen=True)
class Part:
    """One stored tensor of a parameter, and where it goes.

    Args:
        key: its name in the checkpoint.
        shape: the shape it must have.
        expert: index into the parameter's first dimension, or None for the whole parameter.
        row: first row within the expert's matrix.
        common_scales: the name of the block scales of the whole parameter, where it has some, as
            transformers saves experts that it has quantised itself; empty where the part has its
            own.
        scaled: the parameter's shape, if it has.
    """

    key: str
    shape: tuple[int, ...]
    expert: int | None = None
    row: int = 0
    common_scales: str = ""
    scaled: tuple[int, ...] = ()

    @property
    def scale_key(self) -> str:
        """The name of its block scales, if it is quantised."""
        return self.common_scales or self.key + SCALE_SUFFIX

    def scale_grid(self, block: tuple[int, int]) -> tuple[int, ...]:
        """The shape of the stored scales, for blocks of so many rows and columns."""
        *outer, rows, columns = self.scaled or self.shape
        return (*outer, -(-rows // block[0]), -(-columns // block[1]))

    def first_scales(self, block: tuple[int, int]) -> int:
        """The row of the stored scales, counted through all experts, that its own begin at."""
        if not self.scaled:
            return 0
        return (self.expert or 0) * self.scale_grid(block)[1] + self.row // block[0]


@dataclass(frozen=True)
class Matrix:
    """A matrix of a stored tensor that has FP8 blocks of its own, and where it goes.

    Args:
        first: its first element in the stored tensor.
        height: rows.
        width: columns.
        expert: index into the parameter's first dimension, or None for the only matrix.
        number: of the matrices stacked in the parameter, which one.
    """

    first: int
    height: int
    width: int
    expert: int | None
    number: int

    def shown(self, window: Window, block: int = 1) -> tuple[Window, Window] | None:
        """The part of a window of the parameter that is of this matrix; None if nothing is.

        Args:
            window: of the parameter, or of its scales.
            block: rows and columns for which the parameter has one entry: 1, or those of a block.

        Returns:
            The place in the window, and the rows and columns of the matrix that go there.
        """
        height = -(-self.height // block)
        *outer, rows, columns = window
        place: Window = ()
        if self.expert is not None:
            (experts,) = outer
            if not experts.start <= self.expert < experts.stop:
                return None
            at = self.expert - experts.start
            place = (slice(at, at + 1),)
        above = self.number * height
        first, last = max(rows.start, above), min(rows.stop, above + height)
        if first >= last:
            return None
        place += (slice(first - rows.start, last - rows.start), slice(0, sizes((columns,))[0]))
        tall = slice((first - above) * block, min((last - above) * block, self.height))
        wide = slice(columns.start * block, min(columns.stop * block, self.width))
        return place, (tall, wide)


def matrices(part: Part, stacked: int) -> Iterator[Matrix]:
    """The matrices of a stored tensor.

    Args:
        part: the tensor.
        stacked: how many lie one above the other in the parameter; a part that is one expert's
            projection is one of them.
    """
    *_, rows, width = part.shape
    if part.expert is not None:
        yield Matrix(0, rows, width, part.expert, part.row // rows)
        return
    height = rows // stacked
    experts = range(part.shape[0]) if len(part.shape) == 3 else (None,)
    for expert in experts:
        for number in range(stacked):
            first = ((expert or 0) * rows + number * height) * width
            yield Matrix(first, height, width, expert, number)


def stored_parts(name: str, shape: tuple[int, ...], present: Container[str]) -> tuple[Part, ...]:
    """List the stored tensors that make up parameter ``name``.

    Fused experts are stored as such only if ``present`` has their name; both ``save_pretrained``
    and the published checkpoints store one matrix an expert and projection. Some checkpoints have
    other names for some, which ``save_pretrained`` writes too.
    """
    if ".mlp.experts." not in name or name in present:
        return (Part(_stored_name(name, present), shape),)
    return tuple(_expert_parts(name, shape, present))


def _stored_name(name: str, present: Container[str]) -> str:
    """``name``, or what checkpoints call it if they have that instead."""
    if name in present:
        return name
    for table in _ALSO_CALLED:
        other = name
        for ours, theirs in table.items():
            other = other.replace(ours, theirs)
        if other in present:
            return other
    return name


def _expert_parts(name: str, shape: tuple[int, ...], present: Container[str]) -> Iterator[Part]:
    prefix, _, leaf = name.rpartition(".")
    experts, rows, columns = shape
    projections = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
    height = rows // len(projections)
    common = _stored_name(name + SCALE_SUFFIX, present)
    scales = (common, shape) if common in present else ()
    for expert in range(experts):
        for number, projection in enumerate(projections):
            key = _stored_name(f"{prefix}.{expert}.{projection}.weight", present)
            yield Part(key, (height, columns), expert, number * height, *scales)
