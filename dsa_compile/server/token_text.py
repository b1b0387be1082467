"""Log-probabilities as the API writes them: with the text and the bytes of each token."""

import codecs
from collections.abc import Sequence
from typing import Any

from dsa_compile.runtime.requests.logprobs import TokenLogprobs

_LOWEST = -9999.0  # for an infinite one, which JSON cannot say


def chat_logprobs(tokenizer: Any, entries: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """The ``logprobs`` of a chat's choice."""
    content = [
        {
            **_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_token(tokenizer, *pair) for pair in entry.top[:top]],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Any, entries: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """The ``prompt_logprobs`` of vLLM's API: by token id, and None for the first token."""

    def described(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": text}

    return [
        None,
        *(
            {
                str(token): described(token, value, rank)
                for rank, (token, value) in enumerate(e.top, 1)
            }
            | {str(e.token_id): described(e.token_id, e.logprob, e.rank)}
            for e in entries
        ),
    ]


class CompletionLogprobs:
    """The ``logprobs`` of a completion's choice, piece by piece.

    Part of a character has the name ``bytes:\\xe6``, as with OpenAI's first models. A character
    begins where its first byte does.

    Args:
        tokenizer: of the model.
        top: alternatives of each token.
        offset: characters before the first token generated, of an echoed prompt.
    """

    def __init__(self, tokenizer: Any, top: int, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = offset
        self._characters = _new_decoder()

    def of_prompt(
        self, prompt: Sequence[int], entries: Sequence[TokenLogprobs], skip_special_tokens: bool
    ) -> dict[str, Any]:
        """The object for an echoed prompt, whose first token has no log-probability.

        Args:
            prompt: token ids.
            entries: one a token but the first.
            skip_special_tokens: whether the text was echoed without them.
        """
        offsets, at, characters = [], 0, _new_decoder()
        for token in prompt:
            offsets.append(at)
            if self._tokenizer is not None:
                text = self._tokenizer.decode([token], skip_special_tokens=skip_special_tokens)
                at += len(characters.decode(_bytes(self._tokenizer, token, text)))
        tops = [None, *map(self._alternatives, entries)] if self._top else None
        return {
            "tokens": [self._name(token) for token in prompt],
            "token_logprobs": [None, *(max(entry.logprob, _LOWEST) for entry in entries)],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def add(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The object for more tokens."""
        names, offsets = [], []
        for entry in entries:
            text = token_text(self._tokenizer, entry.token_id)
            offsets.append(self._offset)
            whole = self._characters.decode(_bytes(self._tokenizer, entry.token_id, text))
            self._offset += len(whole)
            names.append(self._name(entry.token_id, text))
        return {
            "tokens": names,
            "token_logprobs": [max(entry.logprob, _LOWEST) for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries] if self._top else None,
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest and the chosen one; of tokens with one text, the likeliest counts."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top[: self._top], (entry.token_id, entry.logprob)):
            found.setdefault(self._name(token), max(logprob, _LOWEST))
        return found

    def _name(self, token: int, text: str | None = None) -> str:
        text = token_text(self._tokenizer, token) if text is None else text
        if "\ufffd" not in text:
            return text
        own = _bytes(self._tokenizer, token, text)
        return text if own == text.encode() else "bytes:" + "".join(f"\\x{b:02x}" for b in own)


def token_text(tokenizer: Any, token: int) -> str:
    """A token's own text; bytes that are no character by themselves are U+FFFD."""
    if tokenizer is None:
        return f"token_id:{token}"
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text


def _token(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token)
    bytes_ = list(_bytes(tokenizer, token, text))
    return {"token": text, "logprob": max(logprob, _LOWEST), "bytes": bytes_}


def _bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """The token's bytes; those of part of a character are read from its name in the vocabulary."""
    if "\ufffd" not in text or tokenizer is None:
        return text.encode()
    name: str = tokenizer.id_to_token(token)
    if len(name) == 6 and name.startswith("<0x"):  # byte fallback: <0xE2>
        return bytes.fromhex(name[3:5])
    if all(char in _BYTE_OF for char in name):
        return bytes(_BYTE_OF[char] for char in name)
    return text.encode()


def _new_decoder() -> codecs.IncrementalDecoder:
    """A decoder that gives a character with its last byte."""
    return codecs.getincrementaldecoder("utf-8")("replace")


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte, as GPT-2's byte-level BPE spells bytes in its vocabulary."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {
        **{chr(byte): byte for byte in shown},
        **{chr(256 + n): byte for n, byte in enumerate(others)},
    }


_BYTE_OF = _byte_level_alphabet()
