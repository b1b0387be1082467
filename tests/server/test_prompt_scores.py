"""Log-probabilities of prompts over HTTP, as evaluations use them, against the reference model."""

from collections.abc import Callable
from operator import itemgetter

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from dsa_compile.runtime import Engine
from tests.server.serving import Server, events
from tests.trained import trained_model

TEXT = "import os\nimport sys\n\ndef main(argv=None):\n    parser = "
Score = Callable[[list[int]], list[float]]


@pytest.fixture(scope="module")
def score() -> Score:
    """Log-probabilities of the tokens of a prompt but the first, by the reference model."""
    model = AutoModelForCausalLM.from_pretrained(trained_model(), dtype=torch.float32).eval()

    def of(prompt: list[int]) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
        found = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])
        values: list[float] = found[:, 0].tolist()
        return values

    return of


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echoed_prompt(
    client: openai.OpenAI, engine: Engine, score: Score, max_tokens: int
) -> None:
    prompt = engine.tokenizer.encode(TEXT).ids
    options = {"model": "tiny", "prompt": TEXT, "max_tokens": max_tokens, "temperature": 0}
    for _ in range(2):  # with the prompt in the prefix cache, the second time
        answer = client.completions.create(**options, echo=True, logprobs=2)
    (choice,) = answer.choices
    found = choice.logprobs
    count = len(prompt)
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == max_tokens
    assert answer.usage.prompt_tokens == count
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:count] == pytest.approx(score(prompt), abs=2e-4)
    assert len(found.token_logprobs) == len(found.tokens) == count + max_tokens
    assert choice.text.startswith(TEXT)
    assert len(choice.text) > len(TEXT) if max_tokens else choice.text == TEXT
    assert found.tokens[0] == "<｜begin▁of▁sentence｜>"  # which the text leaves out
    assert found.text_offset[:2] == [0, 0]
    for token, at in zip(found.tokens[1:], found.text_offset[1:], strict=True):
        assert choice.text[at : at + len(token)] == token
    for own, token, top in zip(
        found.token_logprobs[1:], found.tokens[1:], found.top_logprobs[1:], strict=True
    ):
        assert top[token] == own
        assert max(top.values()) >= own
        assert len(top) in (1, 2, 3)

    chunks = client.completions.create(**options, echo=True, logprobs=2, stream=True)
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.text for part in parts) == choice.text
    described = [part.logprobs for part in parts if part.logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for one in described for each in getattr(one, name)] == getattr(found, name)


def test_log_likelihoods_of_an_evaluation(
    client: openai.OpenAI, engine: Engine, score: Score
) -> None:
    """The request that lm-eval's ``local-completions`` sends, and how it reads the answer."""
    pairs = [("import os\n", "import sys"), ("def main(", "argv=None):"), ("x", " = 1")]
    contexts = [engine.tokenizer.encode(context).ids for context, _ in pairs]
    prompts = [
        c + engine.tokenizer.encode(t).ids for c, (_, t) in zip(contexts, pairs, strict=True)
    ]
    answer = client.completions.create(
        model="tiny", prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    ).model_dump()
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, context, prompt in zip(choices, contexts, prompts, strict=True):
        behind = slice(len(context), -1)
        logprobs = choice["logprobs"]
        total = sum(logprobs["token_logprobs"][behind])
        assert total == pytest.approx(sum(score(prompt)[len(context) - 1 :]), abs=1e-3)
        tokens, tops = logprobs["tokens"][behind], logprobs["top_logprobs"][behind]
        for token, top in zip(tokens, tops, strict=True):
            assert max(top.items(), key=itemgetter(1))[0] in (token, *top)


def test_without_echo_the_field_of_vllm(server: Server, score: Score, engine: Engine) -> None:
    prompt = engine.tokenizer.encode(TEXT).ids
    options = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 1}
    body = server.post("/v1/completions", prompt=prompt, **options).json()
    first, *others = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [
        each[str(token)]["logprob"] for each, token in zip(others, prompt[1:], strict=True)
    ] == (pytest.approx(score(prompt), abs=2e-4))
    for each in others:
        assert min(value["rank"] for value in each.values()) == 1
        assert len(each) <= 2
    messages = [{"role": "user", "content": "hi"}]
    chat = server.post("/v1/chat/completions", messages=messages, **options).json()
    asked = server.post("/tokenize", messages=messages).json()["tokens"]
    assert [list(each)[-1] for each in chat["prompt_logprobs"][1:]] == [str(t) for t in asked[1:]]
    plain = server.post("/v1/completions", prompt=prompt, max_tokens=2).json()
    assert "prompt_logprobs" not in plain["choices"][0]


def test_nothing_but_the_prompt(server: Server) -> None:
    answer = server.post("/v1/completions", prompt=["a", "b"], max_tokens=0, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == [""] * 4
    assert answer["usage"]["completion_tokens"] == 0
    echoed = server.post("/v1/completions", prompt="a", max_tokens=0, echo=True, stream=True)
    *parts, _ = events(echoed.body)
    assert "".join(part["choices"][0]["text"] for part in parts) == "a"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "echo and logprobs"),
        ({"prompt_logprobs": 1000}, "[0, 20]"),
        ({"prompt_logprobs": -1}, "[0, 20]"),
    ],
)
def test_refusals(server: Server, body: dict, words: str) -> None:
    answer = server.post("/v1/completions", prompt="a", **body)
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["param"] == "prompt_logprobs"
    assert words in error["message"]
