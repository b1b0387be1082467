"""Defaults of requests that are in ``generation_config.json`` of a model."""

from dataclasses import dataclass, field

from dsa_compile.errors import ArtifactError, ConfigError
from dsa_compile.facts.generation_config import read_generation_config
from dsa_compile.runtime.requests.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerationConfig:
    """Defaults from a model's ``generation_config.json``.

    Attributes:
        eos_token_ids: end tokens, which a request ends with beside those of ``config.json``.
        params: the sampling parameters of a request that brings none.
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
            ArtifactError: it is no JSON object, or fields have values that sampling cannot take.
        """
        if data is None:
            return cls()
        try:
            eos_token_ids, given = read_generation_config(data, where)
        except ConfigError as error:
            raise ArtifactError(f"{error} and recompile") from None
        return cls(eos_token_ids, SamplingParams(**given))
