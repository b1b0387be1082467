"""``generation_config.json`` of a model: end tokens, and how its makers sample from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa_compile.common.options import faults, option
from dsa_compile.errors import ConfigError, shown

FILE = "generation_config.json"
_MEND = "mend the model's file"
# Its fields that have a meaning here, and ours.
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class CommonSampling:
    """Sampling options of which the makers of a model may choose most; values are not checked."""

    max_tokens: int = option(
        16, "most tokens to generate", least=1,
        like=("max_new_tokens", "max_completion_tokens", "max_length"),
    )  # fmt: skip
    min_tokens: int = option(
        0, "tokens to generate before anything but {max_tokens} may end the request; end tokens "
        "and stop ids cannot be sampled, and stop strings do not count, until then", least=0,
        like=("min_new_tokens",),
    )  # fmt: skip
    temperature: float = option(
        1.0, "randomness: the logits are divided by it; 0 (below 1e-5) takes the likeliest token",
        least=0, like=("do_sample",),
    )  # fmt: skip
    top_k: int = option(
        0, "keep so many of the likeliest tokens; 0 or -1 keeps all", least=-1, most=2**31 - 1
    )
    top_p: float = option(
        1.0, "keep the likeliest tokens whose probabilities, after min-p and top-k and "
        "renormalised, first reach this sum", least=0, most=1, above=True,
    )  # fmt: skip
    min_p: float = option(
        0.0, "keep tokens at least this fraction as likely as the likeliest", least=0, most=1
    )
    seed: int | None = option(
        None, "the same seed, prompt and logits give the same tokens whatever else is in the batch",
        unset="a fresh one", least=-(2**63), most=2**63 - 1, like=("random_seed",),
    )  # fmt: skip
    repetition_penalty: float = option(
        1.0, "logits of tokens in the prompt or the output are divided by it where positive and "
        "multiplied where negative (Keskar et al. 2019); 1 is off", least=0, above=True,
    )  # fmt: skip


def read_generation_config(data: bytes, where: str) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The end tokens and the sampling options that a model's makers chose.

    ``do_sample: false`` is temperature 0, ``max_new_tokens`` is ``max_tokens``; fields that
    sampling here does not know (``num_beams``, …) and those that are null are passed over.

    Args:
        data: content of the file.
        where: its path, for errors.

    Raises:
        ConfigError: it is no JSON object, or fields have values that sampling cannot take.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); {_MEND}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: should hold a JSON object; {_MEND}")
    given = _given(content)
    theirs = {ours: name for name, ours in _FIELDS.items()}
    wrong = [
        f"{theirs[name]} must be {wanted}; got {shown(value)}"
        for name, wanted, value in faults(CommonSampling(**given))
    ]
    eos = content.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and token >= 0 for token in ids):
        wrong.append(f"eos_token_id={eos!r:.80} must name token ids")
    if wrong:
        raise ConfigError(f"{where}: {'; '.join(wrong)}; {_MEND}")
    return tuple(ids), given


def _given(content: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        ours: content[theirs] for theirs, ours in _FIELDS.items() if content.get(theirs) is not None
    }
    if content.get("do_sample") is False:
        for name in ("top_k", "top_p", "min_p"):
            found.pop(name, None)
        found["temperature"] = 0.0
    return found
