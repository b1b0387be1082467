"""Faults of the ops' implementations."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="angles-in-the-models-dtype",
        about="RoPE's angles are products in the model's dtype",
        file="dsa_compile/ops/rope.py",
        old="angles = positions.unsqueeze(-1).float() * inv_freq\n",
        new="angles = (positions.unsqueeze(-1).to(dtype) * inv_freq.to(dtype)).float()\n",
        kind="kernel",
        culprit="rope_tables",
        recipe="bf16",
    ),
    Fault(
        id="absent-rows-weigh",
        about="rows that a token does not have take part in its softmax, as zeros",
        file="dsa_compile/ops/attention_fp8.py",
        old='        scores.masked_fill_(absent.unsqueeze(1), float("-inf"))\n',
        new="",
        kind="kernel",
        culprit="paged_latent_attention_fp8",
        recipe="fp8",
    ),
)
