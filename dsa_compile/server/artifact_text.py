"""The text side of an artifact: its tokenizer, chat format and generation defaults, without torch.

Files are compared with the hashes of the manifest, whose digest the engine process loads by, so
both processes serve the same artifact.
"""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_compile.artifact.manifest import Manifest, open_manifest
from dsa_compile.artifact.paths import resolve_inside
from dsa_compile.chat import ChatFormat, chat_format
from dsa_compile.common.regular_files import read_regular
from dsa_compile.errors import ArtifactError
from dsa_compile.facts.generation_config import FILE
from dsa_compile.runtime.requests.generation_config import GenerationConfig
from dsa_compile.runtime.requests.prompts import load_tokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArtifactText:
    """Text side of an artifact, which the HTTP process needs.

    Attributes:
        digest: of the manifest.
        tokenizer: a ``tokenizers.Tokenizer``, or None.
        chat: how the model writes conversations, or None for a base model.
        no_chat: why there is no ``chat``.
        defaults: what the model's makers sample with.
    """

    digest: str
    tokenizer: Any
    chat: ChatFormat | None
    defaults: GenerationConfig
    no_chat: str = "the model ships no chat template, and none is built in for its type"


def load_artifact_text(path: Path, digest: str | None = None) -> ArtifactText:
    """Read an artifact's manifest and the files of its tokenizer.

    Args:
        path: the directory.
        digest: take the artifact with this digest and no other.

    Raises:
        ArtifactError: no artifact, one of another digest, or one of the files is not the one
            compiled.
        UserError: ``digest`` is none.
    """
    files = _TokenizerFiles(path, open_manifest(path, digest))
    tokenizer = load_tokenizer(files)
    chat = None
    if tokenizer is not None:
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            files.tokenizer_bytes(name)  # compared with its hash before it is used
        chat = chat_format(path / "tokenizer", files.manifest.model.spec.model_type)
    no_chat = ArtifactText.no_chat if tokenizer is not None else "the model has no tokenizer"
    missing = [t for t in chat.special_tokens if tokenizer.token_to_id(t) is None] if chat else []
    if chat is not None and missing:
        no_chat = f"the tokenizer does not know {missing[0]!r} of the chat format ({chat.name})"
        chat = None
    if chat is None:
        _LOG.warning("no chats: %s", no_chat)
    config = files.tokenizer_bytes(FILE)
    defaults = GenerationConfig.parse(config, str(path / "tokenizer" / FILE))
    return ArtifactText(files.manifest.digest, tokenizer, chat, defaults, no_chat)


@dataclass(frozen=True)
class _TokenizerFiles:
    path: Path
    manifest: Manifest

    def tokenizer_bytes(self, name: str) -> bytes | None:
        """A file of the tokenizer, if the artifact lists it."""
        listed = f"tokenizer/{name}"
        records = {record.path: record for record in self.manifest.files}
        if listed not in records:
            return None
        file = resolve_inside(self.path, listed)
        if file is None:
            problem = "missing, or not a file inside the artifact; recompile"
            raise ArtifactError(f"{self.path / listed}: {problem}")
        try:
            data = read_regular(file, records[listed].size)
        except OSError as error:
            problem = f"cannot be read ({error.strerror}); recompile"
            raise ArtifactError(f"{self.path / listed}: {problem}") from None
        if hashlib.sha256(data).hexdigest() != records[listed].sha256:
            raise ArtifactError(f"{self.path / listed}: not the content that was compiled")
        return data
