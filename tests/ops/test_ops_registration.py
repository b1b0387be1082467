"""Every op's schema, fake and registration, on inputs the other tests do not share."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dsa_compile import ops
from tests.ops.sample_calls import CASES

SCHEMAS = """
rms_norm(Tensor x, Tensor weight, float eps) -> Tensor
layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor
rope_interleaved(Tensor x, Tensor cos, Tensor sin) -> Tensor
rope_half(Tensor x, Tensor cos, Tensor sin) -> Tensor
rope_tables(Tensor positions, Tensor inv_freq, float scaling, ScalarType dtype) -> (Tensor cos, Tensor sin)
scale_by_position(Tensor x, Tensor positions, Tensor scale, Tensor bias) -> Tensor
linear(Tensor x, Tensor weight) -> Tensor
embedding(Tensor ids, Tensor weight) -> Tensor
swiglu(Tensor gate, Tensor up) -> Tensor
router(Tensor x, Tensor weight, Tensor? bias, int n_group, int topk_group, int top_k, bool normalize, float scale, int shared_experts=0, Tensor? slot_mapping=None, bool zero_dropped=False, bool softmax=False) -> (Tensor weights, Tensor indices)
experts(Tensor x, Tensor weights, Tensor indices, Tensor gate_up, Tensor down) -> Tensor
index_topk(Tensor q, Tensor k, Tensor weights, int topk, float scale) -> Tensor
sparse_attention(Tensor q, Tensor k, Tensor v, Tensor indices, float scale) -> Tensor
all_reduce(Tensor x, str axis, int ranks) -> Tensor
all_gather(Tensor x, str axis, int ranks) -> Tensor
all_gather_many(Tensor[] xs, str axis, int ranks) -> Tensor[]
reduce_scatter(Tensor x, str axis, int ranks) -> Tensor
all_reduce_add_rms_norm_quantize(Tensor x, str axis, int ranks, Tensor residual, Tensor weight, float eps, bool ue8m0) -> (Tensor normed, Tensor q, Tensor scale, Tensor residual_out)
place_experts(Tensor indices, Tensor places) -> Tensor
absorb_query(Tensor q_nope, Tensor w_uk) -> Tensor
expand_output(Tensor o_latent, Tensor w_uv) -> Tensor
latent_attention(Tensor q_latent, Tensor q_pe, Tensor ckv, Tensor k_pe, Tensor indices, float scale) -> Tensor
add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor normed, Tensor residual_out)
swiglu_packed(Tensor gate_up) -> Tensor
write_latent_cache(Tensor ckv, Tensor k_pe, Tensor(a!) cache, Tensor slot_mapping) -> ()
write_index_cache(Tensor k, Tensor(a!) cache, Tensor slot_mapping) -> ()
paged_index_topk(Tensor q, Tensor weights, Tensor cache, Tensor block_tables, Tensor cu_seqlens, Tensor context_lens, int topk, float scale) -> Tensor
paged_index_topk_fp8(Tensor q, Tensor weights, Tensor cache, Tensor block_tables, Tensor cu_seqlens, Tensor context_lens, int topk) -> Tensor
dense_slots(Tensor block_tables, Tensor cu_seqlens, Tensor context_lens, Tensor positions, int block_size, int width) -> Tensor
paged_latent_attention(Tensor q_latent, Tensor q_pe, Tensor cache, Tensor slots, float scale) -> Tensor
paged_latent_attention_fp8(Tensor q_latent, Tensor q_pe, Tensor cache, Tensor slots, float scale) -> Tensor
paged_latent_attention_fp8_tensor(Tensor q_latent, Tensor q_pe, Tensor cache, Tensor slots, float scale, Tensor cache_scale) -> Tensor
paged_latent_attention_fp8_expand(Tensor q_latent, Tensor q_pe, Tensor cache, Tensor slots, float scale, Tensor w_uv, bool ue8m0) -> (Tensor q, Tensor out_scale)
paged_latent_attention_fp8_tensor_expand(Tensor q_latent, Tensor q_pe, Tensor cache, Tensor slots, float scale, Tensor cache_scale, Tensor w_uv, bool ue8m0) -> (Tensor q, Tensor out_scale)
paged_prompt_attention(Tensor q_nope, Tensor q_pe, Tensor cache, Tensor slot_mapping, Tensor positions, Tensor w_uk, Tensor w_uv, float scale, Tensor? selected_slots=None) -> Tensor
paged_prompt_attention_fp8(Tensor q_nope, Tensor q_pe, Tensor cache, Tensor slot_mapping, Tensor positions, Tensor w_uk, Tensor w_uv, float scale, Tensor? selected_slots=None) -> Tensor
paged_prompt_attention_fp8_tensor(Tensor q_nope, Tensor q_pe, Tensor cache, Tensor slot_mapping, Tensor positions, Tensor w_uk, Tensor w_uv, float scale, Tensor cache_scale, Tensor? selected_slots=None) -> Tensor
pointwise(Tensor[] inputs, str program) -> Tensor[]
quantize_blocks(Tensor x, bool ue8m0) -> (Tensor q, Tensor scale)
rms_norm_quantize(Tensor x, Tensor weight, float eps, bool ue8m0) -> (Tensor q, Tensor scale)
rms_norm_quantize_keep(Tensor x, Tensor weight, float eps, bool ue8m0) -> (Tensor normed, Tensor q, Tensor scale)
add_rms_norm_quantize(Tensor x, Tensor residual, Tensor weight, float eps, bool ue8m0) -> (Tensor normed, Tensor q, Tensor scale, Tensor residual_out)
swiglu_packed_quantize(Tensor gate_up, bool ue8m0) -> (Tensor q, Tensor scale)
norm_rope_write_latent_cache_fp8(Tensor kv, Tensor weight, float eps, Tensor cos, Tensor sin, bool interleaved, bool ue8m0, Tensor(a!) cache, Tensor slot_mapping) -> ()
norm_rope_write_latent_cache_fp8_tensor(Tensor kv, Tensor weight, float eps, Tensor cos, Tensor sin, bool interleaved, Tensor scale, Tensor(a!) cache, Tensor slot_mapping) -> ()
write_index_key_fp8(Tensor k, Tensor weight, Tensor bias, float eps, Tensor cos, Tensor sin, bool interleaved, Tensor(a!) cache, Tensor slot_mapping) -> ()
index_query_quantize(Tensor q, Tensor weights, Tensor cos, Tensor sin, bool interleaved, float scale) -> (Tensor q8, Tensor weights_out)
attention_inputs_fp8(Tensor merged, Tensor q_weight, float q_eps, Tensor k_weight, Tensor k_bias, float k_eps, Tensor kv_weight, float kv_eps, Tensor cos, Tensor sin, bool interleaved, bool index_interleaved, bool ue8m0, Tensor(a!) latent_cache, Tensor(b!) index_cache, Tensor slot_mapping, Tensor? latent_scale=None) -> (Tensor q, Tensor scale)
absorb_rope_query(Tensor q, Tensor w_uk, Tensor cos, Tensor sin) -> (Tensor q_latent, Tensor q_pe)
expand_output_quantize(Tensor o_latent, Tensor w_uv, bool ue8m0) -> (Tensor q, Tensor scale)
index_head_weights(Tensor x, Tensor weight, float scale) -> Tensor
experts_fp8(Tensor x, Tensor x_scale, Tensor weights, Tensor indices, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale) -> Tensor
linear_fp8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale) -> Tensor
"""  # noqa: E501


HOST_PLANNED = {
    "attention_inputs_fp8",
    "experts_fp8",
    "index_topk",
    "latent_attention",
    "norm_rope_write_latent_cache_fp8",
    "norm_rope_write_latent_cache_fp8_tensor",
    "paged_index_topk",
    "paged_index_topk_fp8",
    "paged_latent_attention",
    "write_index_cache",
    "write_index_key_fp8",
    "write_latent_cache",
}


CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


IDS = [f"{case.name}-{i}" for i, case in enumerate(CASES)]


def test_the_schemas_are_the_agreed_ones():
    agreed = {line.split("(")[0]: f"dsa::{line}" for line in SCHEMAS.strip().splitlines()}
    registered = {op._schema.name.removeprefix("dsa::"): str(op._schema) for op in ops.REFERENCE}
    assert registered == agreed
    own = {"pointwise", "all_gather_many"}  # take lists of tensors; have files of their own
    assert {case.name for case in CASES} | own == set(agreed)


def test_references_take_the_names_of_the_schema():
    for op, function in ops.REFERENCE.items():
        names = [argument.name for argument in op._schema.arguments]
        code = function.__code__
        assert list(code.co_varnames[: code.co_argcount]) == names, op


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_schema_and_fake_hold(case):
    op = getattr(torch.ops.dsa, case.name).default
    e4m3 = any(a.dtype is torch.float8_e4m3fn for a in case.args if isinstance(a, torch.Tensor))
    # torch's check of the schema compares inputs before and after by arithmetic that e4m3 lacks
    checks = CHECKS[1:] if e4m3 else CHECKS
    torch.library.opcheck(op, case.args, test_utils=checks)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_results_are_fresh_and_contiguous(case):
    results = ops.REFERENCE[getattr(torch.ops.dsa, case.name).default](*case.args)
    for result in results if isinstance(results, tuple) else (results,):
        if result is not None:
            assert result.is_contiguous()
            storages = [a.untyped_storage() for a in case.args if isinstance(a, torch.Tensor)]
            assert all(result.untyped_storage().data_ptr() != s.data_ptr() for s in storages)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_fakes_guard_on_no_size(case):
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)

    def symbolic(tensor):
        context = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (tensor.dim() - 1)
        )
        return mode.from_tensor(tensor.contiguous(), symbolic_context=context)

    args = [symbolic(a) if isinstance(a, torch.Tensor) else a for a in case.args]
    before = len(env.guards)
    with mode:
        results = getattr(torch.ops.dsa, case.name)(*args)
    assert len(env.guards) == before
    expected = ops.REFERENCE[getattr(torch.ops.dsa, case.name).default](*case.args)
    if expected is None:
        return
    pairs = zip(
        results if isinstance(results, tuple) else (results,),
        expected if isinstance(expected, tuple) else (expected,),
        strict=True,
    )
    for got, want in pairs:
        assert isinstance(got.shape[0], torch.SymInt)
        assert got.dtype is want.dtype
        assert tuple(got.shape[1:]) == tuple(want.shape[1:])


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_references_for_any_device_read_nothing_on_the_host(case):
    """On the meta device a read of a tensor's contents raises, as it would stall an accelerator."""
    op = getattr(torch.ops.dsa, case.name).default
    if not torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), torch._C.DispatchKey.CompositeExplicitAutograd
    ):
        assert case.name in HOST_PLANNED
        return
    assert case.name not in HOST_PLANNED
    ops.REFERENCE[op](*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in case.args))
