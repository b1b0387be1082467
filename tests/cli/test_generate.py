import io
import json
import logging
import re
import subprocess
import sys

import pytest

from dsa_compile.cli.generate import main
from dsa_compile.facts.config import CompileConfig
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from tests.cli.stub_engine import Letters

CLOSING = r"{} tokens for {} in \d+\.\d\d s: \d+\.\d tok/s\n"


def test_token_ids(engine, capsys):
    assert main(["art", "--prompt-ids", "1 2 3", "7,8", "--max-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    want = (
        "[1/2] prompt: 1 2 3\noutput token ids: 4 5 6\n(3 tokens; reached --max-tokens)\n\n"
        "[2/2] prompt: 7 8\noutput token ids: 9 10 11\n(3 tokens; reached --max-tokens)\n\n"
    )
    assert out.startswith(want)
    assert re.fullmatch(CLOSING.format(6, "2 prompts"), out.removeprefix(want))
    assert engine.loaded == ("art", {})


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_text_printed_at_once_or_as_it_comes_reads_the_same(engine_with_text, capsys, stream):
    command = ["art", "--prompt", "abc", "k", "--stop", "gh", "--max-tokens", "6", *stream]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "[1/2] prompt: abc\noutput: def\n(5 tokens; the model or a stop option ended it)\n\n"
        "[2/2] prompt: k\noutput: lmnopq\n(6 tokens; reached --max-tokens)\n\n11 tokens for"
    )


def test_stream_prints_before_the_end(engine_with_text, capsys, monkeypatch):
    seen = []
    step = engine_with_text.step

    def observed(self):
        seen.append(capsys.readouterr().out)
        return step(self)

    monkeypatch.setattr(engine_with_text, "step", observed)
    main(["art", "--prompt", "a", "--max-tokens", "4", "--stream"])
    assert seen == ["", "[1/1] prompt: a\noutput: b", "c", "d"]


def test_ids_come_back_for_ids_with_the_text_beside_them(engine_with_text, capsys):
    main(["art", "--prompt-ids", "1 2", "--max-tokens", "2"])
    assert "output token ids: 3 4\ntext: de\n(2 tokens;" in capsys.readouterr().out


def test_control_characters_do_not_reach_the_terminal(engine_with_text, capsys, monkeypatch):
    monkeypatch.setattr(Letters, "decode", lambda *_, **__: "a\x1b[2J\r\n\tb\x9b")
    main(["art", "--prompt", "a", "--max-tokens", "1"])
    assert "output: a\ufffd[2J\ufffd\n\tb\ufffd\n" in capsys.readouterr().out


def test_json(engine_with_text, capsys):
    assert main(["art", "--prompt", "abc", "z", "--json", "--logprobs", "1"]) == 0
    out, err = capsys.readouterr()
    first, second = (json.loads(line) for line in out.splitlines())
    assert first == {
        "index": 0,
        "prompt": "abc",
        "prompt_token_ids": [0, 1, 2],
        "token_ids": list(range(3, 19)),
        "text": "defghijklmnopqrs",
        "finish_reason": "length",
        "logprobs": [
            {"token_id": t, "logprob": -0.5, "rank": 1, "top": [[t, -0.5]]} for t in range(3, 19)
        ],
        "error": None,
        "cached_tokens": 0,
    }
    assert second["index"] == 1
    assert re.fullmatch(CLOSING.format(32, "2 prompts"), err)


def test_logprobs_are_listed(engine, capsys):
    main(["art", "--prompt-ids", "1", "--max-tokens", "1", "--logprobs", "1"])
    assert "  token 2: logprob -0.500, rank 1; likeliest 2: -0.500\n" in capsys.readouterr().out


def test_a_byte_order_mark_is_no_part_of_a_prompt(engine_with_text, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    outputs = []
    for start in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(start + b"a b\n")
        command = ["art", "--prompt-file", str(file), "--max-tokens", "1", "--json"]
        assert main(command) == 0
        outputs.append(json.loads(capsys.readouterr().out)["prompt_token_ids"])
    assert outputs[0] == outputs[1]


def test_prompt_file(engine_with_text, capsys, tmp_path):
    file = tmp_path / "prompts"
    file.write_text("ab\n\n  \nc\n")
    assert main(["art", "--prompt-file", str(file), "--max-tokens", "1"]) == 0
    assert re.findall(r"prompt: (.*)", capsys.readouterr().out) == ["ab", "c"]


def test_prompts_of_many_lines_stand_between_separators(engine_with_text, capsys, tmp_path):
    file = tmp_path / "prompts"
    file.write_text("ab\n\ncd\n---\nef\n---\n\n---\n")
    command = ["art", "--prompt-file", str(file), "--separator=---", "--max-tokens", "1", "--json"]
    assert main(command) == 0
    records = map(json.loads, capsys.readouterr().out.splitlines())
    assert [record["prompt"] for record in records] == ["ab\n\ncd", "ef"]


@pytest.mark.parametrize(
    ("flags", "prompts"),
    [(["--prompt", "a", "-"], ["a", "b\ncd"]), (["--prompt-file", "-"], ["b", "cd"])],
)
def test_a_dash_reads_standard_input(engine_with_text, capsys, monkeypatch, flags, prompts):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"b\ncd"), "utf-8"))
    assert main(["art", *flags, "--max-tokens", "1", "--json"]) == 0
    records = map(json.loads, capsys.readouterr().out.splitlines())
    assert [record["prompt"] for record in records] == prompts


@pytest.mark.parametrize(("terminal", "flag", "streams"), [
    (True, [], True), (False, [], False), (True, ["--no-stream"], False),
    (False, ["--stream"], True), (True, ["--json"], False),
])  # fmt: skip
def test_a_terminal_is_streamed_to(engine_with_text, capsys, monkeypatch, terminal, flag, streams):
    seen = []
    step = engine_with_text.step

    def observed(self):
        seen.append(capsys.readouterr().out)
        return step(self)

    monkeypatch.setattr(engine_with_text, "step", observed)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    main(["art", "--prompt", "a", "--max-tokens", "3", *flag])
    assert any(seen) == streams


@pytest.mark.parametrize(("flag", "shown"), [([], True), (["--no-verbose"], False)])
def test_loading_is_shown_in_a_terminal(engine, capsys, monkeypatch, flag, shown):
    load = engine.load.__func__

    def logging_load(cls, path, options):
        logging.getLogger("dsa_compile.runtime.loading").info("weights: 1.00 GiB (0.1 s)")
        return load(cls, path, options)

    engine.load = classmethod(logging_load)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["art", "--prompt-ids", "1", *flag]) == 0
    assert ("weights: 1.00 GiB" in capsys.readouterr().err) == shown


def test_what_no_option_says_is_as_the_model_wants_it(engine):
    engine.default_params = SamplingParams(temperature=0.6, top_p=0.95)
    assert main(["art", "--prompt-ids", "1", "--top-p", "0.5"]) == 0
    assert engine.params == SamplingParams(temperature=0.6, top_p=0.5)


def test_options_reach_the_engine(engine):
    command = (
        "art --prompt-ids 1 --max-tokens 5 --min-tokens 1 --temperature 0.5 --top-k 4 --top-p 0.9 "
        "--min-p 0.1 --seed 7 --repetition-penalty 1.1 --presence-penalty 0.2 "
        "--frequency-penalty 0.3 --stop-token-ids 8 9 --logprobs 2 --ignore-eos "
        "--num-gpu-blocks-override 12 --max-num-batched-tokens 64 --model-dir weights "
        "--deterministic --no-async-scheduling --enforce-eager --generation-config none "
        "--debug-launches --gpu-memory-utilization 0.5 --max-num-seqs 2 "
        f"--digest {'7' * 64} --mixed-graph-tokens 512,64"
    )
    assert main(command.split()) == 0
    assert engine.params == SamplingParams(
        max_tokens=5,
        min_tokens=1,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        stop_token_ids=(8, 9),
        logprobs=2,
        ignore_eos=True,
    )
    options = {
        "num_gpu_blocks_override": 12,
        "max_num_batched_tokens": 64,
        "model_dir": "weights",
        "deterministic": True,
        "async_scheduling": False,
        "enforce_eager": True,
        "max_num_seqs": 2,
        "mixed_graph_tokens": (512, 64),
        "gpu_memory_utilization": 0.5,
        "generation_config": "none",
        "debug_launches": True,
        "digest": "7" * 64,
    }
    assert engine.loaded == ("art", options)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {}),
        (["--shipped-kernels"], {"shipped_kernels": True}),
        (["--no-shipped-kernels"], {"shipped_kernels": False}),
    ],
)
def test_machine_code_is_allowed_or_forbidden(engine, flags, options):
    assert main(["art", "--prompt-ids", "1", *flags]) == 0
    assert engine.loaded == ("art", options)


def test_verbose_says_what_loading_does(engine, capsys):
    load = engine.load.__func__

    def logging_load(cls, path, options):
        logging.getLogger("dsa_compile.runtime.loading").info("weights: 1.00 GiB (0.1 s)")
        return load(cls, path, options)

    engine.load = classmethod(logging_load)
    assert main(["art", "--prompt-ids", "1", "--verbose"]) == 0
    assert capsys.readouterr().err == "weights: 1.00 GiB (0.1 s)\n"
    assert main(["art", "--prompt-ids", "1"]) == 0
    assert capsys.readouterr().err == ""


def test_a_failed_request_is_reported_and_the_others_are_printed(engine, capsys):
    engine.fails = ("prompt 1",)
    assert main(["art", "--prompt-ids", "1", "5", "--max-tokens", "2"]) == 1
    out, err = capsys.readouterr()
    assert "(1 token; failed)" in out
    assert "output token ids: 6 7\n" in out
    assert err == "dsa-generate: error: request 'prompt 1': logits hold NaN\n"


def test_help_states_the_defaults_that_hold(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    stated = dict(re.findall(r"--([a-z-]+) [XN] (?:(?!--).)*?\(default: ([\d.]+)[;)]", text))
    params = vars(SamplingParams()) | vars(CompileConfig())
    options = vars(EngineOptions())
    assert {"temperature", "top-k", "max-tokens"} < stated.keys()
    for name, value in stated.items():
        assert float(value) == (params | options)[name.replace("-", "_")], name


def test_an_interrupt_is_one_line(engine, capsys, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "step", interrupted)
    assert main(["art", "--prompt-ids", "1"]) == 130
    assert capsys.readouterr().err == "dsa-generate: error: interrupted\n"


def test_generating_needs_no_transformers_and_help_no_torch():
    code = (
        "import sys, dsa_compile.cli.generate; assert 'torch' not in sys.modules\n"
        "import dsa_compile.runtime; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
