"""Tokenizer files of a model directory, which an artifact takes along: read, and looked at first.

A model directory may come from a stranger, and the artifact may be given to others: no file from
elsewhere on this machine may get into it. A link is followed where it stays in the model directory,
or leads into a ``blobs`` folder, of which the snapshots of a Hugging Face hub cache are made.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from dsa_compile.common.regular_files import read_regular
from dsa_compile.errors import ConfigError
from dsa_compile.facts.generation_config import FILE, read_generation_config

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    FILE,
)
"""Files of the model directory that a server needs besides config and weights."""


def read_tokenizer_file(model_dir: Path, name: str) -> bytes:
    """The content of one of :data:`TOKENIZER_FILES`.

    Raises:
        ConfigError: not a regular file, a link that leads elsewhere, not a JSON object, or a
            template that is not UTF-8.
    """
    path = model_dir / name
    try:
        resolved = path.resolve(strict=True)
        inside = resolved.is_relative_to(model_dir.resolve())
        if not inside and not _in_hub_cache(model_dir, resolved):
            raise ConfigError(
                f"{path}: a link to {resolved}, outside the model directory; put a copy there"
            )
        data = read_regular(resolved)
    except (OSError, RuntimeError) as error:  # a loop of links is the latter
        reason = error.strerror if isinstance(error, OSError) else "a loop of links"
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    try:
        text = data.decode("utf-8")
        if name.endswith(".json") and not isinstance(json.loads(text), dict):
            raise ConfigError(f"{path}: should hold a JSON object; download the model again")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    return data


def generation_end_tokens(model_dir: Path) -> tuple[int, ...]:
    """End tokens in ``generation_config.json``, of which all that is read is checked.

    Raises:
        ConfigError: see :func:`read_tokenizer_file` and :func:`read_generation_config`.
    """
    path = model_dir / FILE
    if not os.path.lexists(path):
        return ()
    return read_generation_config(read_tokenizer_file(model_dir, FILE), str(path))[0]


def tokenizer_end_token(read: Callable[[str], bytes | None]) -> int | None:
    """The id of ``eos_token`` in ``tokenizer_config.json``, for a model that names no end token.

    Args:
        read: gives the content of one of :data:`TOKENIZER_FILES`, None where there is none.

    Returns:
        None if there is no such token, or it has not one id.
    """
    try:
        token = json.loads(read("tokenizer_config.json") or b"{}")["eos_token"]
        added = json.loads(read("tokenizer.json") or b"{}")["added_tokens"]
        text = token["content"] if isinstance(token, dict) else token
        (found,) = {each["id"] for each in added if each["content"] == text}
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return found if type(found) is int and found >= 0 else None


def _in_hub_cache(model_dir: Path, resolved: Path) -> bool:
    """Whether a file is a blob of the cache that the directory is a snapshot of.

    The layout is ``models--…/blobs/<hash>`` and ``models--…/snapshots/<revision>/``.
    """
    snapshots = model_dir.resolve().parent
    return snapshots.name == "snapshots" and resolved.parent == snapshots.parent / "blobs"
