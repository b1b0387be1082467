"""Faults of earlier catalogues that are planted no longer, and why."""

_TRITON = (
    "no tool runs a Triton kernel without a GPU, so none was ever asked to find it; tests/kernels "
    "compares every kernel with its reference under Triton's interpreter"
)
_SAMPLING = (
    "bisect holds an option against none, and no longer the arithmetic of sampling, which "
    "tests/verify/test_sampling_check.py holds to its meaning"
)
OUT_OF_DATE = {
    "triton-slots-of-the-neighbour": _TRITON,
    "triton-rows-without-gaps": _TRITON,
    "triton-row-0-never-written": _TRITON,
    "triton-ue8m0-rounded-down": _TRITON,
    "triton-layer-norm-counts-the-rest": _TRITON,
    "triton-mean-over-the-block": _TRITON,
    "control-triton-table-halves": _TRITON,
    "control-one-gather-of-a-type": "what is gathered is one message from the start",
    "control-experts-numbered-by-remainder": "another text for the same numbers",
    "control-scale-in-two-steps": "another text for the same operation",
    "preempted-keeps-its-place": "no request was ever answered otherwise with it",
    "right-behind-a-wrong-draft": "is accepted-behind-a-wrong-draft",
    "deeper-drafts-a-row-ahead": "is deeper-drafts-one-too-far",
    "windows-from-the-first-head": "is heads-of-the-first-rank, of another layout",
    "shared-expert-summed-twice": "is shared-expert-in-the-sum-already, in bf16",
    "values-absorbed-with-the-keys-rows": "is absorb-values-from-row-0, in fp32",
    "latent-rows-rotated-in-the-other-layout": "is latent-key-in-halves-in-dense",
    "memory-given-back-early": "is nothing-held",
    "presence-of-the-prompt": _SAMPLING,
    "logprobs-of-the-penalised": _SAMPLING,
    "repetition-rewards-negative": _SAMPLING,
    "frequency-as-presence": _SAMPLING,
    "repetition-forgets-the-prompt": _SAMPLING,
    "temperature-multiplied": _SAMPLING,
    "nucleus-off-by-one": _SAMPLING,
    "short-graphs-write-no-index-keys": "is short-moe-writes-no-index-keys, in fp32",
}
