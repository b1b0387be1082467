"""Texts that a grammar admits, found by walking through it at random."""

import json
import random
from typing import Any

import pytest

TEXTS = [
    *(chr(byte) for byte in range(0x20, 0x7F)),
    *(
        "\n",
        "\n\n",
        "é",
        "｜DSML｜",
        "<think>",
        "</think>",
        "function_calls>",
        "invoke",
        "parameter",
    ),
    *("</", "arg_key>", "arg_value>", "tool_call>", "true", "false", " string=", " name="),
]


class Walker:
    """Walks through formats of xgrammar's structural tags over a small vocabulary."""

    def __init__(self) -> None:
        self._xgrammar = pytest.importorskip("xgrammar")
        vocabulary = [*TEXTS, ""]
        self._end = len(TEXTS)
        info = self._xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[self._end])
        self._compiler = self._xgrammar.GrammarCompiler(info, max_threads=1)

    def text(self, tag: dict[str, Any], seed: int, most: int = 4000) -> str | None:
        """One text that the format admits; None if it has not ended after ``most`` tokens."""
        numbers = random.Random(seed)
        whole = json.dumps({"type": "structural_tag", "format": tag})
        matcher = self._xgrammar.GrammarMatcher(self._compiler.compile_structural_tag(whole))
        mask = self._xgrammar.allocate_token_bitmask(1, self._end + 1)
        found: list[str] = []
        for _ in range(most):
            matcher.fill_next_token_bitmask(mask)
            words = mask[0].tolist()
            allowed = [i for i in range(self._end + 1) if words[i // 32] >> i % 32 & 1]
            # Texts would hardly ever end: prefer what may be the beginning of an end.
            ends = [i for i in allowed if i == self._end or TEXTS[i][0] in '<}]"/']
            token = numbers.choice(ends if ends and numbers.random() < 0.5 else allowed)
            assert matcher.accept_token(token)
            if token == self._end:
                return "".join(found)
            found.append(TEXTS[token])
        return None

    def admits(self, tag: dict[str, Any], text: str) -> bool:
        """Whether a text is one of the format's."""
        whole = json.dumps({"type": "structural_tag", "format": tag})
        compiled = self._compiler.compile_structural_tag(whole)
        matcher = self._xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_terminated()
