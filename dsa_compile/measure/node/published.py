"""Figures that others have published for DeepSeek-V3.2 on a node, with its hardware.

Figures of other machines, days and loads are no comparison: tables name them, and make no ratio.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One published figure.

    Attributes:
        system: who was measured, or promised.
        hardware: of the node.
        load: concurrency, prompt and new tokens, as far as they were named.
        tpot_ms: time between tokens, or None.
        tokens_per_user: output tokens a second of a request, or None.
        tokens_per_gpu: output tokens a second of a GPU, or None.
    """

    system: str
    hardware: str
    load: str
    tpot_ms: float | None = None
    tokens_per_user: float | None = None
    tokens_per_gpu: float | None = None


PUBLISHED = (
    Published("vLLM, no drafts", "8 x H200", "batch 1", 12.4, 80.8),
    Published("SGLang CI, TP8, MTP-3: above", "8 x H200", "batch 1", None, 180.0),
    Published("SGLang CI, DP8, MTP-3: above", "8 x H200", "batch 1", None, 90.0),
    Published("TensorRT-LLM, NVFP4, MTP-3", "4 x B200", "batch 1, 8K/1K", 3.23),
    Published("TensorRT-LLM, DP8 EP8, MTP-1", "8 x B200", "256, 8K/1K", 98.5, None, 1077.0),
)
