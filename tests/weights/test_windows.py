"""Parts of parameters: what is read of them is what is needed, from the files that hold it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.weights.materialize import write_expr
from dsa_compile.weights.plan import (
    Concat,
    Constant,
    Load,
    Narrow,
    QuantizedValues,
    Reshape,
    Transpose,
    infer_shape,
)
from dsa_compile.weights.safetensors_file import SafetensorsFile
from dsa_compile.weights.windows import sizes, through_reshape
from examples.small_models.models import save_hf

LAYER = "model.layers.1."
KV_B = LAYER + "self_attn.kv_b_proj.weight"
KV_A = LAYER + "self_attn.kv_a_proj_with_mqa.weight"
GATE_UP = LAYER + "mlp.experts.gate_up_proj"
NORM = LAYER + "input_layernorm.weight"
LAYOUTS = ["hub_dir", "hf_dir", "fused_dir"]


class Counted:
    """A reader over one tensor in memory that counts the elements read."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.read = 0

    def shape(self, name):
        return tuple(self.tensor.shape)

    def read_into(self, name, out, window=()):
        self.read += self.tensor[window].numel()
        out.copy_(self.tensor[window])


@pytest.fixture
def traffic(monkeypatch):
    """Bytes read of each file, by name."""
    found = {}
    whole = SafetensorsFile._read

    def read(self, name, targets, dtype):
        targets = list(targets)
        found[self.path.name] = found.get(self.path.name, 0) + sum(len(t) for _, t in targets)
        whole(self, name, targets, dtype)

    monkeypatch.setattr(SafetensorsFile, "_read", read)
    return found


def evaluated(expr, reader, dtype=torch.float32):
    out = torch.full(infer_shape(expr, {}, reader.shape), 77.0, dtype=dtype)
    write_expr(expr, {}, reader, out)
    return out


@st.composite
def reshapes(draw):
    """A shape, the same with some dimensions split, and a window of that."""
    target = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    source = []
    for size in target:
        if source and draw(st.booleans()):
            source[-1] *= size
        else:
            source.append(size)
    starts = [draw(st.integers(0, size - 1)) for size in target]
    stops = [draw(st.integers(a + 1, size)) for a, size in zip(starts, target, strict=True)]
    return source, target, tuple(map(slice, starts, stops))


@settings(max_examples=200, deadline=None, database=None)
@given(reshapes())
def test_a_window_goes_through_a_reshape_that_splits(drawn):
    source, target, window = drawn
    whole = torch.arange(math.prod(source)).view(source)
    pieces = list(through_reshape(source, target, window))
    out = torch.full(sizes(window), -1)
    for place, inner in pieces:
        out[place] = whole[inner].reshape(out[place].shape)
    assert torch.equal(out, whole.view(target)[window])
    assert sum(whole[inner].numel() for _, inner in pieces) == out.numel()


@settings(max_examples=100, deadline=None, database=None)
@given(reshapes())
def test_a_reshape_that_joins_is_read_whole_or_not_cut(drawn):
    target, source, _ = drawn  # the other way round
    window = (slice(0, 1), *(slice(0, size) for size in target[1:]))
    whole = torch.arange(math.prod(source)).view(source)
    pieces = through_reshape(source, target, window)
    if pieces is not None:
        got = torch.cat([whole[inner].flatten() for _, inner in pieces])
        assert torch.equal(got, whole.view(target)[window].flatten())


A = Load("a")
CUTS = [
    (Narrow(0, 1, 3, A), 12),
    (Narrow(1, 1, 2, A), 12),
    (Narrow(1, 1, 2, Narrow(0, 2, 3, A)), 6),
    (Narrow(0, 1, 2, Transpose(0, 1, A)), 12),
    (Narrow(1, 1, 2, Reshape((2, 3, 4), A)), 16),
    (Transpose(1, 2, Narrow(1, 1, 2, Reshape((2, 3, 4), A))), 16),
    (Narrow(0, 4, 4, Concat(0, (A, A))), 16),  # the end of one part, the beginning of the other
    (Narrow(0, 6, 2, Concat(0, (A, A))), 8),
    (Narrow(1, 1, 1, Concat(0, (A, Constant("float32", (1, 4), (1, 2, 3, 4))))), 6),
    (Narrow(0, 0, 3, Reshape((3, 8), A)), 24),
    (Narrow(0, 1, 1, Reshape((3, 8), A)), 24),  # parts that are no windows: read whole
]


@pytest.mark.parametrize(("expr", "elements"), CUTS)
@pytest.mark.parametrize("strided", [False, True])
def test_only_what_is_needed_is_read(expr, elements, strided):
    reader = Counted(torch.randn(6, 4))
    out = evaluated(expr, reader)
    if strided:
        reader.read = 0
        wide = torch.full((*out.shape, 2), 77.0)
        write_expr(expr, {}, reader, wide[..., 0])
        assert torch.equal(wide[..., 0], out)
        assert (wide[..., 1] == 77).all()
    assert reader.read == elements
    assert torch.equal(out, straight(expr, reader.tensor))


def straight(expr, tensor):
    """The value of an expression from its parts made whole."""
    match expr:
        case Load():
            return tensor
        case Narrow():
            return straight(expr.of, tensor).narrow(expr.dim, expr.start, expr.length)
        case Transpose():
            return straight(expr.of, tensor).transpose(expr.dim0, expr.dim1)
        case Reshape():
            return straight(expr.of, tensor).reshape(expr.shape)
        case Concat():
            return torch.cat([straight(part, tensor) for part in expr.parts], expr.dim)
    return torch.tensor(expr.values).view(expr.shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "window"),
    [
        (KV_A, (slice(3, 140), slice(0, 200))),  # in the middle of blocks
        (KV_A, (slice(127, 129), slice(130, 199))),
        (KV_A, (slice(512, 576), slice(0, 7))),
        (GATE_UP, (slice(2, 4), slice(0, 128), slice(0, 200))),
        (GATE_UP, (slice(7, 8), slice(60, 70), slice(5, 6))),  # of gate and of up
        (NORM, (slice(11, 50),)),
    ],
)
def test_a_window_of_a_parameter(layout, dtype, name, window, request, open_checkpoint):
    checkpoint = open_checkpoint(request.getfixturevalue(layout))
    whole = torch.empty(checkpoint.shape(name), dtype=dtype)
    checkpoint.read_into(name, whole)
    out = torch.full(sizes(window), 77, dtype=dtype)
    checkpoint.read_into(name, out, window)
    assert torch.equal(out, whole[window])
    strided = torch.full((*out.shape, 2), 77, dtype=dtype)
    checkpoint.read_into(name, strided[..., 0], window)
    assert torch.equal(strided[..., 0], out)


def test_heads_of_a_projection_are_read_alone(hf_dir, open_checkpoint, traffic):
    """As absorption cuts them, half of each head's rows."""
    checkpoint = open_checkpoint(hf_dir)
    expr = Narrow(1, 16, 16, Reshape((8, 32, 512), Load(KV_B)))
    evaluated(expr, checkpoint)
    assert sum(traffic.values()) == 4 * 8 * 16 * 512
    assert set(traffic) == {checkpoint._homes[KV_B].path.name}


def test_blocks_are_read_with_the_scales_of_their_rows(hub_dir, open_checkpoint, traffic):
    checkpoint = open_checkpoint(hub_dir)
    evaluated(Narrow(0, 120, 16, Load(KV_A)), checkpoint)
    assert sum(traffic.values()) == 16 * 200 + 4 * 2 * 2  # rows of two blocks


def test_files_of_other_experts_are_not_read(model, tmp_path, open_checkpoint, traffic):
    save_hf(model, tmp_path, max_shard_size="200KB")
    checkpoint = open_checkpoint(tmp_path)
    homes = {key: home.path.name for key, home in checkpoint._homes.items()}
    keys = [f"{LAYER}mlp.experts.{e}.{p}_proj.weight" for e in range(8) for p in ("gate", "up")]
    assert len({homes[key] for key in keys}) > 1, "else this shows nothing"
    evaluated(Narrow(0, 3, 1, Load(GATE_UP)), checkpoint)
    assert set(traffic) == {homes[key] for key in keys[6:8]}
    assert sum(traffic.values()) == 4 * 128 * 200


def test_a_part_of_quantised_values(hub_dir, open_checkpoint):
    checkpoint = open_checkpoint(hub_dir)
    whole = evaluated(QuantizedValues(Load(KV_A)), checkpoint, torch.float8_e4m3fn)
    cut = evaluated(Narrow(0, 128, 64, QuantizedValues(Load(KV_A))), checkpoint, whole.dtype)
    assert torch.equal(cut.float(), whole[128:192].float())
