"""What another engine takes for the same layer, and what we aim at.

vLLM 0.25.1 on one H200, one MoE layer of the released geometry: random FP8 weights, (4 layers - 2
layers) / 2, GPU time of the CUDA graph's replay, median of 64; the better of its default (bf16
cache, FA3 sparse, Triton experts) and its deep_gemm experts. Milliseconds, by batch and context for
decode, by prompt for prefill at batch 1 in chunks of 8,192.
"""

from dsa_compile.bench.step.cases import Case, Decode

_VLLM_DECODE = {
    (1, 1024): 0.247,
    (1, 8192): 0.258,
    (1, 65536): 0.284,
    (16, 1024): 1.231,
    (16, 8192): 1.241,
    (64, 1024): 2.484,
    (64, 8192): 2.541,
    (128, 1024): 3.345,
    (128, 8192): 3.410,
}
_VLLM_PREFILL = {2048: 7.4, 8192: 23.7, 32768: 105.4, 65536: 237.4}
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


def vllm(case: Case) -> float | None:
    """Its milliseconds per MoE layer, or None if they were not measured."""
    if isinstance(case, Decode):
        return _VLLM_DECODE.get((case.batch, case.context))
    return _VLLM_PREFILL.get(case.tokens)


def goal(case: Case) -> float | None:
    """Our aim, or None."""
    if isinstance(case, Decode):
        return _GOAL_DECODE.get((case.batch, case.context))
    return _GOAL_PREFILL.get(case.tokens)
