"""Stop strings of chats: they end the text that users see, and nothing else ends for them."""

import itertools
import json
from pathlib import Path

import pytest

from dsa_compile.chat import Answer, ContentDelta, Finished, collect
from dsa_compile.runtime.requests.answer_reader import AnswerReader
from dsa_compile.runtime.requests.outputs import Completion
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from tests.chat.catalog import TOOLS, new_parser
from tests.runtime.test_outputs import EOS, Pieces, cut_at_first_stop

CORPUS = [
    json.loads(line)
    for file in sorted((Path(__file__).parents[1] / "chat" / "corpus").glob("*.jsonl"))
    for line in file.read_text(encoding="utf-8").split("\n")
    if line
]
STOPS = (["\n"], ["a"], [" ", "o"], ["<"], ["</think>"], ["ll", "l"])


def parser_of(record):
    return new_parser(record["family"], record["thinking"], record.get("tools", TOOLS))


def read(record, stops, size, include=False) -> tuple[Answer, str, bool]:
    """The answer, the text shown, and whether it was stopped."""
    reader = AnswerReader(parser_of(record), stops, include)
    shown = ""
    for at in range(0, len(record["text"]), size):
        text, stopped = reader.push(record["text"][at : at + size])
        shown += text
        if stopped:
            break
    else:
        shown += reader.finish()
    assert sum(isinstance(event, Finished) for event in reader.events) == 1
    return collect(reader.events), shown, reader.found is not None


def expected(record, stops, include) -> tuple[Answer, bool]:
    """The definition: each run of text between calls is cut at its first stop string."""
    parser = parser_of(record)
    events = [*parser.feed(record["text"]), *parser.finish()]
    kept = []
    for is_text, run in itertools.groupby(events, lambda event: isinstance(event, ContentDelta)):
        run = list(run)
        if is_text:
            text = "".join(event.text for event in run)
            cut = cut_at_first_stop(text, stops, include)
            if cut is not None:
                return collect([*kept, ContentDelta(cut)]), True
        kept += run
    return collect(kept), False


@pytest.mark.parametrize("stops", STOPS, ids=map(str, STOPS))
@pytest.mark.parametrize("record", CORPUS, ids=lambda r: f"{r['family']}: {r['name']}"[:60])
def test_stops_end_the_text_alone(record, stops) -> None:
    for include in (False, True):
        wanted, cut = expected(record, stops, include)
        for size in (1, 3, 1000):
            answer, shown, stopped = read(record, stops, size, include)
            assert (answer, stopped) == (wanted, cut)
            assert record["text"].startswith(shown)
            assert cut or shown == record["text"]
            if record["kind"] in ("malformed", "truncated"):
                continue
            again = parser_of(record).parse(shown)
            assert (again.reasoning, again.tool_calls) == (wanted.reasoning, wanted.tool_calls)
            assert again.content.strip() == wanted.content.strip()


def complete(pieces, stop, thinking=True, **options) -> Completion:
    parser = new_parser("deepseek_v32", thinking)
    params = SamplingParams(stop=stop, max_tokens=len(pieces) + 1, **options)
    completion = Completion(params, [EOS], Pieces(pieces), parser)
    for token in [*range(1, len(pieces) + 1), EOS]:
        if completion.append(token):
            break
    return completion


def test_a_stop_string_in_reasoning_and_then_in_the_answer() -> None:
    pieces = ["So", " END", " of", "</think>", "It ", "E", "ND", "s"]
    completion = complete(pieces, "END")
    assert completion.finish_reason == "stop"
    assert collect(completion.events()).message() == {
        "role": "assistant", "content": "It ", "reasoning_content": "So END of",
    }  # fmt: skip
    assert completion.text == "So END of</think>It "
    assert completion.reasoning_tokens == 3


def test_a_stop_string_that_is_certain_with_the_last_token_only() -> None:
    """The line breaks might have belonged to calls."""
    pieces = ["Hi", "\n", "\n"]
    for tokens in (3, 4):
        parser = new_parser("deepseek_v32", False)
        params = SamplingParams(stop="\n\n", max_tokens=tokens)
        completion = Completion(params, [EOS], Pieces(pieces), parser)
        for token in [1, 2, 3, EOS][:tokens]:
            completion.append(token)
        assert (completion.finish_reason, completion.text) == ("stop", "Hi")


def test_min_tokens_holds_for_text_of_chats() -> None:
    completion = complete(["a", "b", "a", "b"], "b", thinking=False, min_tokens=2)
    assert (completion.text, completion.finish_reason) == ("aba", "stop")
