"""Each dsa op with a body in standard ops: ONNX Runtime against the reference, op by op."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
from onnx import helper

from dsa_compile import ops
from dsa_compile.inspect.onnx.bodies import DOMAIN, OPSET, bodies, needed
from dsa_compile.inspect.onnx.body import DTYPES
from dsa_compile.inspect.onnx.schemas import VERSION, schema, signatures

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def chosen(batch: int, length: int, topk: int) -> Tensor:
    """Positions up to each row's own, each once, then -1."""
    rows = torch.full((batch, length, topk), -1, dtype=torch.int32)
    for b in range(batch):
        for t in range(1, length):  # the first row chooses nothing
            pick = torch.randperm(t + 1, generator=GENERATOR)[:topk]
            rows[b, t, : len(pick)] = pick.int()
    return rows


def tables(*shape: int) -> tuple[Tensor, Tensor]:
    angles = normal(*shape[:-1], shape[-1] // 2)
    return torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)


def routing(tokens: int, experts: int, top_k: int) -> Tensor:
    scores = torch.rand(tokens, experts, generator=GENERATOR)
    return scores.topk(top_k).indices


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "embedding": lambda: (torch.tensor([[3, 0], [5, 5]]), normal(7, 4)),
    "linear": lambda: (normal(2, 3, 8), normal(5, 8)),
    "swiglu": lambda: (normal(2, 3, 8), normal(2, 3, 8)),
    "swiglu_packed": lambda: (normal(3, 16),),
    "rms_norm": lambda: (normal(2, 3, 8), normal(8), 0.25),
    "add_rms_norm": lambda: (normal(3, 8), normal(3, 8), normal(8), 0.25),
    "layer_norm": lambda: (normal(2, 3, 8), normal(8), normal(8), 0.25),
    "rope_tables": lambda: (torch.tensor([[0, 1, 70]]), torch.rand(4), 1.5, torch.float32),
    "rope_interleaved": lambda: (normal(2, 3, 5, 8), *tables(2, 3, 8)),
    "rope_half": lambda: (normal(3, 5, 8), *tables(3, 8)),
    "index_head_weights": lambda: (normal(3, 8), normal(4, 8), 0.5),
    "index_topk": lambda: (normal(2, 9, 4, 8), normal(2, 9, 8), normal(2, 9, 4), 5, 0.3),
    "index_topk/wider than the sequence": lambda: (
        normal(3, 2, 8), normal(3, 8), normal(3, 2), 7, 0.3,
    ),
    "sparse_attention": lambda: (
        normal(2, 9, 4, 8), normal(2, 9, 4, 8), normal(2, 9, 4, 6), chosen(2, 9, 5), 0.3,
    ),
    "latent_attention": lambda: (
        normal(2, 9, 4, 8), normal(2, 9, 4, 2), normal(2, 9, 8), normal(2, 9, 2),
        chosen(2, 9, 5), 0.3,
    ),
    "absorb_query": lambda: (normal(2, 3, 4, 5), normal(4, 5, 6)),
    "expand_output": lambda: (normal(3, 4, 6), normal(4, 5, 6)),
    "router": lambda: (
        normal(6, 8), normal(12, 8), normal(12), 4, 2, 3, True, 2.5, 0, None, False, False,
    ),
    "router/zero for other groups": lambda: (
        normal(6, 8), normal(12, 8), normal(12) - 1, 4, 2, 3, True, 2.5, 0, None, True, False,
    ),
    "router/one group, plain, shared": lambda: (
        normal(6, 8), normal(12, 8), normal(12), 1, 1, 3, False, 1.0, 2, None, False, False,
    ),
    "router/softmax without a bias": lambda: (
        normal(6, 8), normal(12, 8), None, 1, 1, 3, True, 2.5, 1, None, False, True,
    ),
    "experts": lambda: (
        normal(6, 8), torch.rand(6, 3), routing(6, 5, 3), normal(5, 8, 8), normal(5, 8, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_body_computes_what_the_reference_does(case: str) -> None:
    op = case.partition("/")[0]
    args = CASES[case]()
    expected = ops.REFERENCE[getattr(torch.ops.dsa, op).default](*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = run(op, args, len(expected))
    if op == "router":  # the order of the routed experts means nothing
        expected, found = by_expert(*expected), by_expert(*found)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_every_body_has_a_case() -> None:
    helpers = {"selection_mask"}
    assert bodies().keys() == {case.partition("/")[0] for case in CASES} | helpers


def test_bodies_have_the_inputs_and_attributes_of_their_ops() -> None:
    for name, body in bodies().items():
        if name in signatures():
            known = schema(DOMAIN, name)
            named = [parameter.name for parameter in known.inputs]
            assert list(body.input) == named[: len(body.input)], name
            assert set(body.attribute) == known.attributes.keys(), name


def by_expert(weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    order = indices.argsort(-1)
    return weights.gather(1, order), indices.gather(1, order)


def run(op: str, args: tuple[Any, ...], results: int) -> list[Tensor]:
    """One call, through a model of its own."""
    signature = signatures()[op]
    names = [argument.name for argument in signature.overload._schema.arguments]
    bound = dict(zip(names, args, strict=False))
    tensors = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
    numbers = {name: number(value) for name, value in bound.items() if name not in tensors}
    outputs = [f"result_{index}" for index in range(results)]
    node = helper.make_node(op, list(tensors), outputs, domain=DOMAIN, **numbers)
    inputs = [
        helper.make_tensor_value_info(name, DTYPES[str(value.dtype)[6:]], value.shape)
        for name, value in tensors.items()
    ]
    declared = [onnx.ValueInfoProto(name=name) for name in outputs]
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(
        helper.make_graph([node], op, inputs, declared),
        functions=needed([node]),
        opset_imports=opsets,
        ir_version=10,
    )
    session = onnxruntime.InferenceSession(model.SerializeToString())
    fed = {name: np.ascontiguousarray(value.numpy()) for name, value in tensors.items()}
    return [torch.from_numpy(array) for array in session.run(None, fed)]


def number(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return DTYPES[str(value)[6:]]
    return int(value) if isinstance(value, bool) else value
