"""Every op refuses operands of a wrong rank, size or dtype, and says which."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dsa_compile import ops
from dsa_compile.ops.library import SIGNATURES
from dsa_compile.ops.operand_types import DTYPES as DECLARED
from dsa_compile.ops.operand_types import dtypes_of
from dsa_compile.ops.signature import OperandError, Signature
from tests.ops.sample_calls import CASES
from tests.ops.wrong_calls import DTYPES, WRONG, tensor

dsa = torch.ops.dsa
SAMPLES: dict[str, dict[str, Any]] = {}
for case in CASES:
    names = SIGNATURES[getattr(dsa, case.name).default].arguments
    SAMPLES.setdefault(case.name, dict(zip(names, case.args, strict=False)))
CALLS = [(op, operand, text) for op, wrong in WRONG.items() for operand, text in wrong]


def on_meta(op: str) -> dict[str, Any]:
    values = SAMPLES[op].items()
    return {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in values}


def refusal(op: str, arguments: dict[str, Any], changed: str) -> OperandError | None:
    """The error of a call, which concerns the operand that was changed; None if it is taken."""
    try:
        getattr(dsa, op).default(**arguments)
    except OperandError as error:
        found = error
    else:
        return None
    text = str(found)
    assert found.op == f"dsa::{op}"
    assert changed in (found.operand, *found.others) or changed in text, text
    assert text == f"{found.op} takes {found.operand} as {found.expected}, not {found.got}"
    return found


def test_every_op_declares_all_of_its_tensors():
    untyped = {op for op in ops.REFERENCE if op not in SIGNATURES}
    # lists: of what its program takes, and of any rows
    assert untyped == {ops.POINTWISE, ops.ALL_GATHER_MANY}
    for op, signature in SIGNATURES.items():
        tensors = [a.name for a in op._schema.arguments if "Tensor" in str(a.type)]
        assert [name for name in signature.arguments if name in signature.operands] == tensors
        assert len(signature.results) == len(op._schema.returns)
    assert {op._schema.name.removeprefix("dsa::") for op in SIGNATURES} == set(WRONG)


@pytest.mark.parametrize("op", SIGNATURES, ids=str)
def test_names_of_sizes_are_no_misprints(op):
    """A size that ties nothing to anything is one that the op may have of any number."""
    signature = SIGNATURES[op]
    results = {n for t in signature.results for s in t.sizes for n in s.names}
    results |= {type_.leading for type_ in signature.results}
    alone = {n for n, count in uses(signature, signature.operands).items() if count == 1}
    # keys listed, pages and their size, blocks of a table, rows of the vocabulary, experts placed
    assert alone - results - signature.arguments.keys() <= {"K", "P", "bs", "M", "V", "E"}


def uses(signature: Signature, given: Iterable[str]) -> dict[str, int]:
    """Number of times that each name of a size stands in the types of the given operands."""
    counts: dict[str, int] = {}
    for name in given:
        type_ = signature.operands.get(name)
        names = [name for size in type_.sizes for name in size.names] if type_ else []
        for each in (*names, *([type_.leading] if type_ and type_.leading else [])):
            counts[each] = counts.get(each, 0) + 1
    return counts


@pytest.mark.parametrize(("op", "operand", "text"), CALLS, ids=lambda part: str(part))
def test_a_wrong_operand_is_refused(op, operand, text):
    arguments = on_meta(op)
    assert refusal(op, arguments, operand) is None
    assert isinstance(arguments[operand], torch.Tensor)
    found = refusal(op, {**arguments, operand: tensor(text)}, operand)
    assert found is not None


@pytest.mark.parametrize("op", WRONG)
def test_every_operand_has_a_wrong_one(op):
    given = {n for n, v in SAMPLES[op].items() if isinstance(v, torch.Tensor)}
    assert len({operand for operand, _ in WRONG[op]}) >= min(len(given), 2)


@pytest.mark.parametrize("op", WRONG)
def test_no_operand_takes_another_dtype(op):
    signature = SIGNATURES[getattr(dsa, op).default]
    arguments = on_meta(op)
    for name, type_ in signature.operands.items():
        if name not in arguments:
            continue
        allowed = dtypes_of(type_.dtypes, arguments)
        refers = any(name in other.dtypes for other in signature.operands.values())
        for dtype in {*DTYPES.values(), torch.bool} - {arguments[name].dtype}:
            changed = {**arguments, name: arguments[name].to(dtype)}
            if dtype not in allowed or refers:
                assert refusal(op, changed, name), (name, dtype)
            else:
                assert refusal(op, changed, name) is None, (name, dtype)


@pytest.mark.parametrize("op", WRONG)
def test_no_operand_takes_another_size_or_rank(op):
    signature = SIGNATURES[getattr(dsa, op).default]
    arguments, counts = on_meta(op), uses(signature, SAMPLES[op])
    for name, type_ in signature.operands.items():
        if name not in arguments:
            continue
        old = arguments[name]
        at = old.ndim - len(type_.sizes)
        tied = [counts[type_.leading] > 1] * at if type_.leading else []
        tied += [any(counts[n] > 1 for n in s.names) or not s.alone for s in type_.sizes]
        for dim, is_tied in enumerate(tied):
            shape = list(old.shape)
            shape[dim] = 2 * shape[dim] + 1
            if is_tied:
                assert refusal(op, {**arguments, name: old.new_empty(shape)}, name), (name, shape)
        if not type_.leading or counts[type_.leading] > 1:
            assert refusal(op, {**arguments, name: old.unsqueeze(0)}, name), name
        if not type_.leading:
            fewer = old.new_empty(old.shape[1:])
            assert refusal(op, {**arguments, name: fewer}, name), name


@pytest.mark.parametrize(
    ("op", "changed"),
    [
        ("router", {"n_group": 5}),
        ("router", {"topk_group": 4}),
        ("router", {"top_k": 9}),
        ("router", {"slot_mapping": tensor("i64 5")}),
        ("router", {"slot_mapping": tensor("i32 6")}),
        ("index_topk", {"topk": 0}),
        ("dense_slots", {"width": 0}),
        ("attention_inputs_fp8", {"latent_scale": tensor("f32 1")}),  # its rows are others then
    ],
    ids=str,
)
def test_arguments_that_cannot_be_are_refused(op, changed):
    assert refusal(op, {**on_meta(op), **changed}, next(iter(changed))) is not None


def test_the_message_names_op_operand_expected_and_got():
    with pytest.raises(OperandError) as error:
        dsa.rms_norm(tensor("f32 2 96"), tensor("f32 64"), 1e-6)
    assert str(error.value) == (
        "dsa::rms_norm takes weight as floating[D] with D = 96 as in x, not float32[64]"
    )
    with pytest.raises(OperandError) as error:
        dsa.paged_latent_attention(
            tensor("bf16 6 3 5"), tensor("bf16 6 3 2"), tensor("f16 4 4 7"), tensor("i32 6 3"), 1.0
        )
    assert str(error.value) == (
        "dsa::paged_latent_attention takes cache as bfloat16[P, bs, R + dr] with dtype as in "
        "q_latent, R = 5 as in q_latent, dr = 2 as in q_pe, not float16[4, 4, 7]"
    )
    with pytest.raises(OperandError, match=re.escape("sizes with W % 2 == 0, not W = 63")):
        dsa.swiglu_packed(tensor("f32 2 63"))


def test_sizes_that_depend_on_data_are_neither_compared_nor_guarded():
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows = env.create_unbacked_symint()
        x, residual = torch.empty(rows, 8), torch.empty(5, 8)
        before = str(env.deferred_runtime_asserts)
        normed, _ = dsa.add_rms_norm(x, residual, torch.empty(8), 1e-6)
        with pytest.raises(OperandError):
            dsa.add_rms_norm(x, residual, torch.empty(7), 1e-6)
    assert str(normed.shape[0]) == str(rows)
    assert not env.guards
    assert str(env.deferred_runtime_asserts) == before


def test_declared_dtypes_are_torchs():
    assert all(isinstance(d, torch.dtype) for dtypes in DECLARED.values() for d in dtypes)
