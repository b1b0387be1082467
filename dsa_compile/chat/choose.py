"""The chat format of an artifact or model directory, chosen by the files it has."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsa_compile.chat.deepseek_v32 import DeepSeekV32Format
from dsa_compile.chat.formats import ChatFormat
from dsa_compile.chat.template import MAX_TEMPLATE, ChatTemplate
from dsa_compile.chat.template_format import TemplateFormat
from dsa_compile.common.regular_files import read_regular
from dsa_compile.errors import ArtifactError

_BUILT_IN = {"deepseek_v32": DeepSeekV32Format}


def chat_format(files: Path, model_type: str) -> ChatFormat | None:
    """The format of a model's conversations.

    A template that the model ships comes first (DeepSeek-V3.2-Exp has one, of another format than
    DeepSeek-V3.2's); without one the model type decides.

    Args:
        files: the directory of ``tokenizer_config.json`` and ``chat_template.jinja``: the model's,
            or ``tokenizer/`` of an artifact.
        model_type: of ``config.json``.

    Returns:
        The format; None if the model has none, such as a base model.

    Raises:
        ArtifactError: a file is malformed; names it.
    """
    config_file = files / "tokenizer_config.json"
    config = _read_config(config_file)
    templates = _templates(files / "chat_template.jinja", config_file, config)
    if not templates:
        built_in = _BUILT_IN.get(model_type)
        return built_in() if built_in is not None else None
    default = templates.get("default") or next(iter(templates.values()))
    return TemplateFormat(default, templates.get("tool_use"), _special_tokens(config))


def _read_config(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(read_regular(file).decode())
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ArtifactError(f"{file}: should hold a JSON object")
    return config


def _templates(file: Path, config_file: Path, config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Templates by name; the file's, like the only one of a configuration, is the default."""
    if file.is_file():
        with file.open("rb") as stream:
            data = stream.read(4 * MAX_TEMPLATE + 1)  # UTF-8 takes up to four bytes a character
        try:
            return {"default": ChatTemplate(data.decode("utf-8"), str(file))}
        except UnicodeDecodeError:
            raise ArtifactError(f"{file}: not UTF-8 text of a template's length") from None
    where = f"{config_file}: chat_template"
    match config.get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": ChatTemplate(source, where)}
        case list(named):
            return dict(_named(each, where) for each in named)
    raise ArtifactError(f"{where} should be a template, or a list of named ones")


def _named(entry: Any, where: str) -> tuple[str, ChatTemplate]:
    match entry:
        case {"name": str(name), "template": str(source)}:
            return name, ChatTemplate(source, f"{where}[{name!r:.80}]")
    raise ArtifactError(f"{where}: each template of a list has a name and a template")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like; a configuration gives a text, or an object with one."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
