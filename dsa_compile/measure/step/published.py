"""Times of another engine for the same layer, when and where, and our goals.

Times are those of one MoE layer of the released geometry: random FP8 weights, (4 layers - 2
layers) / 2, GPU time of the CUDA graph's replay, median of 64; the better of vLLM's default (bf16
cache, FA3 sparse, Triton experts) and its deep_gemm experts; the lower end of a range. They are
milliseconds, by batch and context for decode, by prompt for prefill at batch 1 in chunks of 8,192.
A figure of another day and machine is no comparison: the tables say which it is, and make no ratio
of it.
"""

from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.measure.step.cases import Case, Decode, Mixed
from dsa_compile.measure.step.released import CONFIG

VLLM = "vLLM 0.25.1, one H200, 2026-11-22"
_SIZES = (
    "hidden_size", "num_attention_heads", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim", "index_n_heads",
    "index_topk",
)  # fmt: skip
_VLLM_DECODE = {
    (1, 1024): 0.251,
    (1, 8192): 0.261,
    (1, 65536): 0.263,
    (16, 1024): 1.20,
    (16, 8192): 1.199,
    (64, 1024): 2.420,
    (64, 8192): 2.449,
    (128, 1024): 3.075,
    (128, 8192): 3.19,
}
_VLLM_PREFILL = {2048: 6.5, 8192: 20.8, 32768: 99.5, 65536: 226.0}
_GOAL_DECODE = {
    (1, 1024): 0.185,
    (1, 8192): 0.190,
    (1, 65536): 0.200,
    (16, 1024): 1.17,
    (16, 8192): 1.18,
    (64, 1024): 2.45,
    (64, 8192): 2.48,
    (128, 1024): 2.95,
    (128, 8192): 3.00,
}
_GOAL_PREFILL = {2048: 6.5, 8192: 19.0, 32768: 85.0, 65536: 190.0}


def of_this_layer(spec: ModelSpec, kind: str, recipe: str, gpu: str) -> bool:
    """Whether these figures are of such a layer, with experts, as DeepSeek-V3.2 is released, and
    of such a GPU, named as by CUDA."""
    sizes = all(getattr(spec, name) == CONFIG[name] for name in _SIZES)
    return sizes and kind == "moe" and recipe == "fp8" and "H200" in gpu


def vllm(case: Case) -> float | None:
    """Milliseconds that vLLM takes for an MoE layer, or None if they were not measured."""
    if isinstance(case, Decode):
        return _VLLM_DECODE.get((case.batch, case.context))
    return None if isinstance(case, Mixed) else _VLLM_PREFILL.get(case.tokens)


def goal(case: Case) -> float | None:
    """Milliseconds aimed at, or None."""
    if isinstance(case, Decode):
        return _GOAL_DECODE.get((case.batch, case.context))
    return None if isinstance(case, Mixed) else _GOAL_PREFILL.get(case.tokens)
