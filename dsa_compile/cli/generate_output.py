"""How ``dsa-generate`` shows what was generated: for a person, or as JSON lines for a program."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsa_compile.runtime import RequestOutput

Prompt = str | list[int]

# A model may emit any character, and a terminal obeys some of them.
_CONTROL_CHARACTERS = {
    code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}
# Of an output, in JSON.
_FIELDS = (
    "prompt_token_ids",
    "token_ids",
    "text",
    "finish_reason",
    "logprobs",
    "error",
    "cached_tokens",
)
_ENDINGS = {
    "stop": "the model or a stop option ended it",
    "length": "reached --max-tokens",
    "abort": "aborted",
    "error": "failed",
}


class JsonPrinter:
    """One JSON object a line for each finished output: what :class:`RequestOutput` has.

    Args:
        prompts: the prompts as given; texts are repeated in the objects.
    """

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts

    def show(self, index: int, output: "RequestOutput") -> None:
        """Print prompt ``index``'s output if it is finished."""
        if not output.finished:
            return
        record: dict[str, Any] = {"index": index}
        prompt = self._prompts[index]
        if isinstance(prompt, str):
            record["prompt"] = prompt
        record.update({name: getattr(output, name) for name in _FIELDS})
        if output.logprobs is not None:
            record["logprobs"] = [asdict(entry) for entry in output.logprobs]
        print(json.dumps(record, ensure_ascii=False), flush=True)


class TextPrinter:
    """Outputs for a person to read; ids for a prompt given as ids or a model without tokenizer.

    Args:
        prompts: the prompts as given.
        stream: print what there is of an unfinished output.
    """

    def __init__(self, prompts: list[Prompt], stream: bool) -> None:
        self._prompts = prompts
        self._stream = stream
        self._begun = -1
        self._printed = 0

    def show(self, index: int, output: "RequestOutput") -> None:
        """Print what is new of prompt ``index``'s output; all of one before any of the next."""
        if not output.finished and not self._stream:
            return
        # Who gives ids wants ids back.
        ids = output.new_text is None or not isinstance(self._prompts[index], str)
        if self._begun != index:
            self._begun, self._printed = index, 0
            print(f"[{index + 1}/{len(self._prompts)}] prompt: {_shown(self._prompts[index])}")
            print("output token ids: " if ids else "output: ", end="")
        # Text and ids only ever grow, so what was printed is never taken back.
        shown = _shown(output.token_ids if ids else output.text or "")
        print(shown[self._printed :], end="", flush=True)
        self._printed = len(shown)
        if output.finish_reason is not None:
            print()
            if ids and output.text:
                print(f"text: {_shown(output.text)}")
            ending = _ENDINGS[output.finish_reason]
            print(f"({counted(output.num_tokens, 'token')}; {ending})")
            for entry in output.logprobs or ():
                top = ", ".join(f"{token}: {value:.3f}" for token, value in entry.top)
                print(
                    f"  token {entry.token_id}: logprob {entry.logprob:.3f}, rank {entry.rank}"
                    + (f"; likeliest {top}" if top else "")
                )
            print()


def _shown(content: Prompt) -> str:
    """Text fit for a terminal, or ids separated by blanks."""
    if isinstance(content, str):
        return content.translate(_CONTROL_CHARACTERS)
    return " ".join(map(str, content))


def counted(number: int, noun: str) -> str:
    """The number and its noun, as in 1 token, 2 tokens."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
