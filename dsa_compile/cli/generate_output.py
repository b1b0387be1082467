"""Output of ``dsa-generate``: text for a person, or JSON lines for a program."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsa_compile.runtime import EngineOptions, RequestOutput
    from dsa_compile.runtime.scheduling.stats import SchedulerStats

Prompt = str | list[int]

# A model may emit any character, and a terminal obeys some of them.
_CONTROL_CHARACTERS = {
    code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}
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
        marks: fields for every object, such as those of :func:`marks_of`.
    """

    def __init__(self, prompts: list[Prompt], marks: Mapping[str, Any] | None = None) -> None:
        self._prompts = prompts
        self._marks = marks or {}

    def show(self, index: int, output: "RequestOutput") -> None:
        """Print prompt ``index``'s output if it is finished."""
        if not output.finished:
            return
        record: dict[str, Any] = {"index": index}
        prompt = self._prompts[index]
        if isinstance(prompt, str):
            record["prompt"] = prompt
        record.update(output.to_dict())
        record.update(self._marks)
        del record["request_id"]
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


def marks_of(options: "EngineOptions") -> dict[str, Any]:
    """Marks, for JSON objects, of options that make outputs or times not those of the model."""
    marks: dict[str, Any] = {}
    if options.force_accept is not None:
        marks["acceptance_forced"] = options.force_accept
    if options.collectives == "replay":
        marks["projected"] = True
    return marks


def projected_line(options: "EngineOptions") -> str:
    """Line for a person that one rank stood for all; empty if that is not so."""
    if options.collectives != "replay":
        return ""
    return (
        f"projected: rank {options.rank} ran without the others, its collectives replayed; "
        "what was generated means nothing"
    )


def drafts_line(stats: "SchedulerStats") -> str:
    """Line on drafts, as ``drafts: 2.31 tokens a step; right 77 %, 54 %``; empty without drafts.

    The shares are of those drafted at each depth.
    """
    if not stats.drafted:
        return ""
    shares = (
        f"{100 * right / drafted:.0f} %"
        for right, drafted in zip(stats.accepted, stats.drafted, strict=True)
    )
    forced = "" if stats.force_accept is None else " (acceptance forced)"
    kept = "kept" if forced else "right"
    return f"drafts: {stats.accepted_length:.2f} tokens a step{forced}; {kept} {', '.join(shares)}"


def _shown(content: Prompt) -> str:
    """Text fit for a terminal, or ids separated by blanks."""
    if isinstance(content, str):
        return content.translate(_CONTROL_CHARACTERS)
    return " ".join(map(str, content))


def counted(number: int, noun: str) -> str:
    """The number and its noun, as in 1 token, 2 tokens."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
