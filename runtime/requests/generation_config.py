"""``generation_config.json`` of a model: end tokens, and how its makers sample from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsa_compile.errors import ArtifactError, RequestError
from dsa_compile.runtime.requests.sampling_params import SamplingParams

FILE = "generation_config.json"
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
class GenerationConfig:
    """Defaults from a model's ``generation_config.json``.

    Attributes:
        eos_token_ids: end tokens, which a request ends with beside those of ``config.json``.
        params: the sampling parameters of a request that brings none. ``do_sample: false`` is
            temperature 0, ``max_new_tokens`` is ``max_tokens``; fields that sampling here does not
            know (``num_beams``, …) and those that are null are passed over.
    """

    eos_token_ids: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)

    @classmethod
    def parse(cls, data: bytes | None, where: str) -> "GenerationConfig":
        """Read the file.

        Args:
            data: its content; None if the model has no such file.
            where: its path, for errors.

        Raises:
            ArtifactError: it is no JSON object, or a field has a value that sampling cannot take.
        """
        if data is None:
            return cls()
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{where}: not valid JSON ({error}); {_MEND}") from None
        if not isinstance(content, dict):
            raise ArtifactError(f"{where}: should hold a JSON object; {_MEND}")
        try:
            params = SamplingParams(**_params(content))
        except RequestError as error:
            raise ArtifactError(f"{where}: {error}; {_MEND}") from None
        return cls(_eos_ids(content, where), params)


_MEND = "mend the model's file and recompile"


def _params(content: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        ours: content[theirs] for theirs, ours in _FIELDS.items() if content.get(theirs) is not None
    }
    if content.get("do_sample") is False:
        for name in ("top_k", "top_p", "min_p"):
            found.pop(name, None)
        found["temperature"] = 0.0
    return found


def _eos_ids(content: Mapping[str, Any], where: str) -> tuple[int, ...]:
    eos = content.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ArtifactError(f"{where}: eos_token_id={eos!r:.80} must name token ids; {_MEND}")
    return tuple(ids)
