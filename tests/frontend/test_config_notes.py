"""What no file of a model says is not taken silently."""

import json
from typing import Any

import pytest
from transformers import AXK2Config

from dsa_compile.artifact.tokenizer_files import tokenizer_end_token
from dsa_compile.facts.model_spec import READ_FIELDS
from dsa_compile.frontend.build import load_spec
from dsa_compile.frontend.config_notes import config_notes
from dsa_compile.lowering.compile_model import compile_model
from examples.small_models.models import (
    hub_config,
    tiny_axk2_config,
    tiny_config,
    tiny_glm_config,
)

NO_END = "no end token: neither config.json nor generation_config.json has an eos_token_id"
MAKERS = (tiny_config, tiny_glm_config, tiny_axk2_config)


def write(directory, config: dict[str, Any], **generation: Any) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    if generation:
        (directory / "generation_config.json").write_text(json.dumps(generation))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("given", [{}, {"eos_token_id": None, "bos_token_id": None}])
def test_only_tokens_that_a_file_names_count(make, given, tmp_path):
    config = make().to_dict()
    del config["eos_token_id"], config["bos_token_id"]
    write(tmp_path, config | given)
    spec = load_spec(tmp_path)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((), None)
    assert any(note.startswith(NO_END) for note in config_notes(tmp_path))
    write(tmp_path, config | given, eos_token_id=[3, 4])
    assert config_notes(tmp_path) == ()
    write(tmp_path, config | {"eos_token_id": 5, "bos_token_id": 0})
    assert (load_spec(tmp_path).eos_token_ids, load_spec(tmp_path).bos_token_id) == ((5,), 0)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("style", [lambda config: config.to_dict(), hub_config])
def test_nothing_to_say_of_a_whole_configuration(make, style, tmp_path):
    write(tmp_path, style(make()))
    assert config_notes(tmp_path) == ()


@pytest.mark.parametrize("name", sorted(set(READ_FIELDS) - {"num_nextn_predict_layers"}))
def test_a_default_of_the_class_is_named(name, tmp_path):
    config = AXK2Config(num_hidden_layers=2).to_dict()
    value = config.pop(name)
    if name == "num_hidden_layers":
        config.pop("layer_types"), config.pop("mlp_layer_types")
        value = AXK2Config.num_hidden_layers
    write(tmp_path, config)
    (note,) = config_notes(tmp_path)
    assert note == f"not in config.json, so as transformers' class has it: {name}={value}"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": None}, "rope_theta=10000.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings=4096"),
        ({"rope_theta": 5e4}, None),
    ],
)
def test_defaults_of_rope_are_named(changes, named, tmp_path):
    config = tiny_config().to_dict()
    del config["rope_parameters"]
    write(tmp_path, config | changes)
    notes = config_notes(tmp_path)
    assert (named is None and notes == ()) or named in notes[0]


@pytest.mark.slow
def test_the_notes_are_those_of_a_compilation(tmp_path):
    config = tiny_config(1).to_dict()
    del config["eos_token_id"]
    write(tmp_path, config)
    made = compile_model(
        tmp_path, tmp_path / "out", weights="none", stop_after="recognize_rms_norm"
    )
    assert any(note.startswith(NO_END) for note in made.notes)
    assert made.manifest.model.spec.eos_token_ids == ()


EOS = {"id": 7, "content": "</s>"}


@pytest.mark.parametrize(
    ("config", "added", "token"),
    [
        ({"eos_token": "</s>"}, [EOS, {"id": 8, "content": "<s>"}], 7),
        ({"eos_token": {"content": "</s>"}}, [EOS, EOS], 7),
        ({"eos_token": "</s>"}, None, None),
        ({"eos_token": "</s>"}, [{**EOS, "id": "7"}], None),
        ({"eos_token": "</s>"}, [{**EOS, "id": [7]}], None),
        ([], [EOS], None),
        ({"eos_token": "</s>"}, [EOS, {**EOS, "id": 8}], None),
        ({"eos_token": "</s>"}, [{**EOS, "id": -7}, 3], None),
        ({"eos_token": "</t>"}, [EOS], None),
        ({"eos_token": None}, [EOS, {"id": 3}], None),
        ({"eos_token": 3}, {"id": 3}, None),
        ({}, [EOS], None),
    ],
)
def test_an_end_token_that_the_tokenizer_alone_names(config, added, token, tmp_path):
    given = tiny_config().to_dict()
    del given["eos_token_id"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    write(tmp_path, given)
    taken = tokenizer_end_token(lambda name: (tmp_path / name).read_bytes())
    assert taken == token
    (note,) = (each for each in config_notes(tmp_path) if each.startswith(NO_END))
    assert (f"{token} is taken, eos_token of tokenizer_config.json" in note) is (token is not None)
    write(tmp_path, given, eos_token_id=3)
    assert config_notes(tmp_path) == ()
