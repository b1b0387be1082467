"""What is taken although no file of the model says it: lines for the user of a compilation."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from dsa_compile.artifact.tokenizer_files import generation_end_tokens, tokenizer_end_token
from dsa_compile.common.regular_files import read_regular
from dsa_compile.errors import shown
from dsa_compile.facts.model_spec import READ_FIELDS
from dsa_compile.frontend.architectures import architecture_of, load_config
from dsa_compile.frontend.config_json import read_config_json
from dsa_compile.frontend.model_checks import text_part

_READ = {*READ_FIELDS, "final_logit_softcapping"}
_OTHER_NAMES = {"n_routed_experts": {"num_experts", "num_local_experts"}}


def config_notes(model_dir: Path) -> tuple[str, ...]:
    """Notes on what the files of a model leave open, for a configuration that is taken."""
    raw = text_part(read_config_json(model_dir))
    taken = dict(_defaults(raw))
    notes = []
    if taken:
        listed = ", ".join(f"{name}={shown(value)}" for name, value in taken.items())
        notes.append(f"not in config.json, so as transformers' class has it: {listed}")
    if raw.get("eos_token_id") is None and not generation_end_tokens(model_dir):
        token = tokenizer_end_token(partial(_content, model_dir))
        alone = "answers end at stop tokens, stop strings or max_tokens alone"
        notes.append(
            "no end token: neither config.json nor generation_config.json has an eos_token_id, so "
            + (alone if token is None else f"{token} is taken, eos_token of tokenizer_config.json")
        )
    return tuple(notes)


def _defaults(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields on which results depend and that the configuration does not name, RoPE's last."""
    made = load_config(raw).to_dict()
    for field in fields(architecture_of(raw).config):
        named = raw.keys() & {field.name, *_OTHER_NAMES.get(field.name, ())}
        if field.name in _READ and not named:
            yield field.name, made[field.name]
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {}), **raw}
    for name, value in made["rope_parameters"].items():
        if name not in rope and name != "rope_type":  # its absence says that nothing is scaled
            yield name, value


def _content(model_dir: Path, name: str) -> bytes | None:
    try:
        return read_regular(model_dir / name)
    except OSError:
        return None
