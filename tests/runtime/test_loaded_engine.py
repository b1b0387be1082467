"""An engine over the trained example: its files are read, conversations and streams work."""

import json
import logging
import shutil
import weakref
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer

import dsa_compile
from dsa_compile.chat import ContentDelta, Finished
from dsa_compile.chat.deepseek_v32 import DeepSeekV32Format
from dsa_compile.errors import ArtifactError, ChatError, RequestError
from dsa_compile.runtime import Engine, SamplingParams
from tests.artifact.building import forge
from tests.runtime.hash_runner import HashRunner
from tests.trained import trained_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
QUESTION = [{"role": "user", "content": "import os\nimport"}]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    out = tmp_path_factory.mktemp("loaded") / "artifact"
    dsa_compile.compile(trained_model(), out, weights="pack")
    return out


@pytest.fixture(scope="module")
def engine(artifact):
    with Engine.load(artifact, num_gpu_blocks_override=64) as engine:
        yield engine


def test_what_the_model_ships_is_what_requests_get(artifact, engine):
    assert engine.default_params == SamplingParams(temperature=0.0)  # "do_sample": false
    assert engine.eos_token_ids == (1,)
    prompts = ["import os", "def main("]
    greedy = engine.generate(prompts, SamplingParams(temperature=0.0))
    assert [o.token_ids for o in engine.generate(prompts)] == [o.token_ids for o in greedy]
    assert repr(engine).startswith(f"<Engine {artifact} (target cpu, recipe fp32, on cpu): 0 of 64")


def test_a_conversation(engine):
    prompt = engine.chat_prompt(QUESTION)
    assert (
        prompt.text == "<｜begin▁of▁sentence｜><｜User｜>import os\nimport<｜Assistant｜></think>"
    )
    assert prompt.token_ids[:2] == [0, 3]
    answer = engine.chat(QUESTION, GREEDY)
    (plain,) = engine.generate([prompt.token_ids], GREEDY)
    assert answer.output.token_ids == plain.token_ids
    assert answer.content == answer.output.text
    assert (answer.reasoning, answer.tool_calls) == ("", ())
    assert answer.finish_reason == plain.finish_reason
    assert answer.message == {"role": "assistant", "content": answer.content}
    events = list(prompt.events(engine.stream(prompt, GREEDY)))
    assert events.pop() == Finished(called=False)
    assert all(isinstance(event, ContentDelta) for event in events)
    assert "".join(event.text for event in events) == answer.content


def test_the_effort_of_a_conversation():
    tokenizer = Tokenizer.from_file(str(trained_model() / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("｜DSML｜", special=True)])
    runner = HashRunner(64, 4, tokenizer.get_vocab_size())
    engine = Engine(runner, tokenizer=tokenizer, chat_format=DeepSeekV32Format)
    for effort, end in ((None, "</think>"), ("none", "</think>"), ("high", "<think>")):
        assert engine.chat_prompt(QUESTION, effort=effort).text.endswith(end)
    answer = engine.chat(QUESTION, GREEDY, effort="high")
    assert answer.reasoning == answer.output.text
    with pytest.raises(ChatError, match="effort: must be one of none, minimal, low"):
        engine.chat(QUESTION, GREEDY, effort="little")


def test_stop_strings_end_the_text_of_a_conversation_and_not_its_reasoning(engine):
    answer = engine.chat(QUESTION, GREEDY)
    stop = answer.content[2:4]
    params = replace(GREEDY, stop=stop)
    stopped = engine.chat(QUESTION, params)
    assert (stopped.content, stopped.finish_reason) == (answer.content.partition(stop)[0], "stop")
    prompt = engine.chat_prompt(QUESTION)
    prompt = replace(prompt, text=prompt.text.replace("</think>", "<think>"))
    (reasoning,) = engine.generate([prompt], params)
    assert reasoning.token_ids == answer.output.token_ids


def test_a_stream_gives_the_text_of_generate(engine):
    (whole,) = engine.generate(["import os"], GREEDY)
    outputs = list(engine.stream("import os", GREEDY))
    assert "".join(output.new_text for output in outputs) == whole.text
    assert len(outputs) == 8


def test_a_conversation_that_cannot_be_encoded(engine):
    with pytest.raises(ChatError, match=r"messages: the list is empty"):
        engine.chat([])


def test_without_a_tokenizer_there_are_no_texts(artifact):
    with Engine.load(artifact, num_gpu_blocks_override=8, skip_tokenizer_init=True) as engine:
        assert engine.tokenizer is None
        assert engine.generate([[0, 5]], GREEDY)[0].text is None
        with pytest.raises(RequestError, match="a conversation needs a tokenizer"):
            engine.chat(QUESTION)


def test_closing_frees_what_was_loaded(artifact):
    engine = Engine.load(artifact, num_gpu_blocks_override=8)
    gone = weakref.ref(engine._runner)
    engine.generate(["a"], GREEDY)
    engine.close()
    assert gone() is None


def test_generation_defaults_that_were_edited_are_refused(artifact, tmp_path):
    shutil.copytree(artifact, tmp_path / "edited")
    file = "tokenizer/generation_config.json"
    (tmp_path / "edited" / file).write_text('{"temperature": 9}')
    with pytest.raises(ArtifactError, match=rf"{file}: "):
        Engine.load(tmp_path / "edited")
    forge(tmp_path / "edited", file, json.dumps({"temperature": -1}).encode())
    with pytest.raises(ArtifactError, match=rf"{file}: temperature must be"):
        Engine.load(tmp_path / "edited")


@pytest.mark.slow
def test_an_end_token_that_the_tokenizer_alone_names_ends_answers(tmp_path):
    model = shutil.copytree(trained_model(), tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        content = json.loads((model / name).read_text())
        content.pop("eos_token_id", None)
        (model / name).write_text(json.dumps(content))
    named = json.loads((model / "tokenizer_config.json").read_text())["eos_token"]
    made = dsa_compile.compile(model, tmp_path / "artifact")
    assert any("1 is taken, eos_token of tokenizer_config.json" in note for note in made.notes)
    with Engine.load(tmp_path / "artifact", num_gpu_blocks_override=8) as engine:
        assert engine.tokenizer.token_to_id(named) == 1
        assert engine.eos_token_ids == (1,)


def test_a_chat_template_that_changed_since_is_not_used(artifact, tmp_path):
    shutil.copytree(artifact, tmp_path / "copy")
    with Engine.load(tmp_path / "copy", num_gpu_blocks_override=8) as engine:
        (tmp_path / "copy" / "tokenizer" / "tokenizer_config.json").write_text("{}")
        with pytest.raises(ArtifactError, match=r"tokenizer_config.json: not the content"):
            engine.chat(QUESTION)


def test_loading_logs_its_phases(artifact, caplog):
    caplog.set_level(logging.INFO, "dsa_compile.runtime")
    Engine.load(artifact, num_gpu_blocks_override=8).close()
    assert any(record.message.startswith("weights: ") for record in caplog.records)
