"""Special tokens of a prompt: as published, as in the example, and as transformers adds them."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from dsa_compile.artifact.reader import Artifact
from dsa_compile.chat import chat_format
from dsa_compile.measure.eval.texts import cut_windows
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.requests.chat_prompt import encode_chat
from dsa_compile.runtime.requests.prompts import load_tokenizer
from dsa_compile.runtime.requests.special_tokens import leading_ids
from tests.artifact.building import build, save_model
from tests.runtime.hash_runner import HashRunner
from tests.trained import trained_model

BOS = 0
TEXT = "import os"
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
# Fields of tokenizer_config.json, and whether tokenizer.json itself adds the token.
LAYOUTS = {
    "published": ({"add_bos_token": False, "add_eos_token": False}, False),
    "example": ({}, True),
    "configured": ({"add_bos_token": True}, False),
    "overruled": ({"add_bos_token": False}, True),
    "nothing said": ({}, False),
}
WITH_BOS = {"example", "overruled"}


def saved(folder: Path, fields: dict, adds: bool) -> tuple[Path, Artifact]:
    """A model directory with the example's tokenizer in another layout, and its artifact."""
    model = save_model(folder / "model")
    tokenizer = Tokenizer.from_file(str(trained_model() / "tokenizer.json"))
    if not adds:  # as DeepSeek publishes it
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((trained_model() / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "LlamaTokenizerFast"} | fields  # the class is DeepSeek's
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    build(folder / "artifact", model)
    return model, Artifact.open(folder / "artifact")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_begins_as_transformers_begins_it(tmp_path, layout):
    model, artifact = saved(tmp_path, *LAYOUTS[layout])
    tokenizer = load_tokenizer(artifact)
    ids = tokenizer.encode(TEXT).ids
    # its first alone: before 5.18, transformers splits words of LlamaTokenizerFast by Llama's rules
    assert ids[:1] == AutoTokenizer.from_pretrained(model)(TEXT).input_ids[:1]
    assert (ids[0] == BOS) == (layout in WITH_BOS)
    # dsa-eval
    lead = [BOS] if layout in WITH_BOS else []
    assert leading_ids(tokenizer) == lead
    (window,) = cut_windows(TEXT, tokenizer, 64, leading_ids(tokenizer))
    assert window.ids == ids
    # an engine
    engine = Engine(HashRunner(64, 4, tokenizer.get_vocab_size()), None, tokenizer)
    assert engine.generate([TEXT], ONE_TOKEN)[0].prompt_token_ids == ids
    # a conversation has the token from its format, in every layout
    form = chat_format(artifact.path / "tokenizer", "deepseek_v32")
    prompt = encode_chat(form, tokenizer, [{"role": "user", "content": TEXT}])
    assert prompt.token_ids[0] == BOS
    assert prompt.token_ids.count(BOS) == 1


def test_the_ids_before_a_text_are_not_those_behind_it():
    tokenizer = Tokenizer.from_file(str(trained_model() / "tokenizer.json"))
    names = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜end▁of▁sentence｜>"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[names[0], names[1], "$A", names[2]],
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in names],
    )
    assert leading_ids(tokenizer) == [0, 3]
