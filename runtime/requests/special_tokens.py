"""Special tokens that a text prompt gets: one rule for engines, ``dsa-eval`` and ``dsa-generate``.

The post-processor in ``tokenizer.json`` decides, as in ``transformers`` from version 5 on and in
what builds on it: ``add_bos_token`` in ``tokenizer_config.json`` changes nothing there. DeepSeek
publishes one that adds nothing, so a completion begins without a beginning-of-sequence token; a
conversation has that token from its chat format, and is encoded without adding any.
"""

from typing import Any


def leading_ids(tokenizer: Any) -> list[int]:
    """The ids that ``tokenizer.encode`` puts before a text: beginning-of-sequence, or nothing."""
    plain: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode("a").ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []
