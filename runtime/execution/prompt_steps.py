"""Steps of whole prompts that attend by heads: from how many tokens on, and up to which context."""

from dsa_compile.facts.model_spec import ModelSpec

# At 128 tokens its kernels take two thirds of the time of those of absorbed attention. Of fewer
# tokens attention is a small part of a step, which waits for the host as it is.
LEAST_PROMPT_TOKENS = 128

# Products that Triton's kernel of attention by heads does in the time in which that of absorbed
# attention does one. On an H200 both take 8.0 ms for 8,192 tokens. The kernel in CUDA C++ would pay
# up to some 11,000 tokens, which no step has unless `max_num_batched_tokens` is raised.
_RATE = 0.6
_ABSORBED_HEADS = 64  # that absorbed attention computes at least, on Hopper


def longest_prompt(spec: ModelSpec, heads: int) -> int:
    """The longest prompt whose masked attention by heads takes no longer than absorbed attention
    to the keys that it selects: 8,355 tokens for DeepSeek-V3.2 with all its heads.

    By heads, a token multiplies all keys before it, on average half of the prompt, and absorbed
    ``index_topk`` of them, which are wider.
    """
    absorbed = 2 * spec.kv_lora_rank + spec.qk_rope_head_dim
    by_heads = spec.qk_nope_head_dim + spec.qk_rope_head_dim + spec.v_head_dim
    padded = max(heads, _ABSORBED_HEADS) / heads
    return int(2 * spec.index_topk * absorbed / by_heads * padded * _RATE)
