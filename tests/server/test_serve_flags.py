"""Flags of ``dsa-serve`` and its YAML file."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsa_compile.artifact.manifest import open_manifest
from dsa_compile.cli import serve
from dsa_compile.cli.flags import given_options
from dsa_compile.cli.serve import main
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.server import protocol
from dsa_compile.server.serve import engine_arguments
from dsa_compile.server.settings import Settings
from tests.docs.blocks import blocks
from tests.docs.commands import ROOT
from tests.server.serving import serving


def _arguments(argv: list[str]) -> dict[str, Any]:
    given = vars(serve._arguments(argv))
    return {n: v for n, v in given.items() if v is not None and n != "config"}


def test_a_file_of_flags(tmp_path: Path) -> None:
    """The one that the page on serving shows; the command line wins."""
    (shown,) = [block for block in blocks(ROOT, "docs/serving.md") if block.language == "yaml"]
    file = tmp_path / "serve.yaml"
    file.write_text(shown.text)
    expected = {
        "artifact": "artifact/",
        "port": 9000,
        "served_model_name": ["deepseek-v3.2", "default"],
        "max_num_seqs": 64,
    }
    assert _arguments(["--config", str(file)]) == expected
    given = _arguments(["other", "--config", str(file), "--max-num-seqs", "3"])
    assert given == {**expected, "artifact": "other", "max_num_seqs": 3}


def test_switches_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("enable_prefix_caching: false\ndeterministic: true\nenforce-eager: false\n")
    found = _arguments(["a", "--config", str(file)])
    assert found == {
        "artifact": "a", "enable_prefix_caching": False, "deterministic": True,
        "enforce_eager": False,
    }  # fmt: skip


def test_an_empty_value_in_a_file_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("api-key:\nport: 1\n")
    assert _arguments(["a", "--config", str(file)]) == {"artifact": "a", "port": 1}


def test_numbers_of_tokens() -> None:
    for text, count in (
        ("4096", 4096),
        ("4K", 4096),
        ("4k", 4000),
        ("1.5M", 3 << 19),
        ("2m", 2000000),
    ):
        assert _arguments(["a", "--max-model-len", text])["max_model_len"] == count


def test_names_of_vllm() -> None:
    """A command line of vllm serve, of what both have."""
    flags = [
        "a", "--host", "0.0.0.0", "--port", "1", "--served-model-name", "x", "y",
        "--max-model-len", "8K", "--max-num-batched-tokens", "2k", "--max-num-seqs", "8",
        "--gpu-memory-utilization", "0.8", "--num-gpu-blocks-override", "64",
        "--no-enable-prefix-caching", "--enforce-eager", "--async-scheduling", "--load-format",
        "dummy", "--max-logprobs", "5", "--uvicorn-log-level", "warning", "--api-key", "k",
        "--allowed-origins", "https://a.example", "--otlp-traces-endpoint", "http://c/v1/traces",
    ]  # fmt: skip
    given = _arguments(flags)
    assert given["max_model_len"] == 8192
    assert given["max_num_batched_tokens"] == 2000
    assert given["log_level"] == "warning"
    assert (given["enable_prefix_caching"], given["enforce_eager"]) == (False, True)


def test_former_flags_mean_the_same_and_are_not_suggested(capsys) -> None:
    given = _arguments(["a", "--num-blocks", "3", "--max-batched-tokens", "2", "--no-cuda-graphs"])
    assert (given["num_gpu_blocks_override"], given["max_num_batched_tokens"]) == (3, 2)
    assert given["enforce_eager"] is True
    assert _arguments(["a", "--no-overlap"])["async_scheduling"] is False
    assert main(["a", "--max-batchd-tokens", "2"]) == 2
    assert "did you mean --max-num-batched-tokens?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a", "should map names"),
        ("a: [", "cannot read"),
        ("no-such-flag: 1", "unrecognized arguments"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, words: str, capsys) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert main(["a", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "MODEL is needed"),
        (["a", "--max-model-len", "4Q"], "'4Q' is not a number"),
        (["a", "--max-model-len", "K"], "'K' is not a number"),
        (["a", "--max-num-sequences", "4"], "did you mean --max-num-seqs?"),
        (["a", "--port", "70000"], "--port must be an integer in [0, 65535]; got 70000"),
        (["a", "--max-request-bytes", "0"], "--max-request-bytes must be an integer >= 1"),
        (
            ["a", "--request-timeout", "0"],
            "--request-timeout must be a number of seconds in (0, 1000000]",
        ),
        (
            ["a", "--request-read-timeout", "nan"],
            "--request-read-timeout must be a number of seconds",
        ),
        (
            ["a", "--request-read-timeout", "0"],
            "--request-read-timeout must be a number of seconds in (0",
        ),
        (["a", "--timeout-graceful-shutdown", "-1"], "--timeout-graceful-shutdown must be"),
        (["a", "--timeout-graceful-shutdown", "nan"], "--timeout-graceful-shutdown must be"),
        (["--config", "/dev/zero"], "cannot read --config /dev/zero: not a regular file"),
        (["a", "--api-key", ""], "--api-key must not be empty"),
    ],
)
def test_flags_that_are_refused(flags: list[str], words: str, capsys) -> None:
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert words in error


@pytest.mark.parametrize("host", ["a" * 300, "a..b", "nul\0"])
def test_hosts_that_no_name_is(artifact: Path, host: str, capsys) -> None:
    assert main([str(artifact), "--host", host]) == 2
    assert "cannot listen on" in capsys.readouterr().err


def test_a_tokenizer_that_is_no_file(artifact: Path, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        file = copy / "tokenizer" / "tokenizer.json"
        file.unlink()
        make(file)
        assert main([str(copy)]) == 2
        assert "not a" in capsys.readouterr().err


@pytest.mark.slow
def test_a_digest_admits_one_artifact(artifact: Path, capsys) -> None:
    """Any other is refused before anything listens; the one named may run its machine code."""
    assert main([str(artifact), "--digest", "0" * 64]) == 2
    digest = open_manifest(artifact).digest
    assert f"its digest is {digest}, and {'0' * 64} was wanted" in capsys.readouterr().err
    assert main([str(artifact), "--digest", "3f0c"]) == 2
    assert "64 hexadecimal digits" in capsys.readouterr().err
    with serving(artifact, "--digest", digest) as server:
        assert server.request("GET", "/version").json()["artifact"] == digest


def test_machine_code_is_run_only_if_allowed_or_pinned() -> None:
    settings = Settings(Path("a"))
    assert engine_arguments(settings, "d") == {"digest": "d", "shipped_kernels": False}
    pinned = replace(settings, engine={"digest": "d"})
    assert engine_arguments(pinned, "d") == {"digest": "d", "shipped_kernels": True}
    refused = replace(pinned, engine={"digest": "d", "shipped_kernels": False})
    assert engine_arguments(refused, "d") == {"digest": "d", "shipped_kernels": False}


def test_sizes_of_graphs_reach_the_engine_process() -> None:
    """As they went over a pipe, where tuples become lists."""
    given = given_options(EngineOptions, serve._arguments(["a", "--mixed-graph-tokens", "8,16"]))
    sent = msgspec.json.encode(protocol.EngineOptions("a", "", given))
    received = msgspec.json.decode(sent, type=protocol.EngineOptions)
    assert EngineOptions(**received.engine).mixed_graph_tokens == (8, 16)


def test_keys_are_not_printed() -> None:
    assert "secret" not in repr(Settings(Path("a"), api_key=("secret",)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs must be an integer >= 1; got 0"),
        (["--rank-timeout", "nan"], "--rank-timeout must be a number of seconds in (0, 1000000]"),
        (["--draft", "none", "--num-speculative-tokens", "2"], "contradicts --draft='none'"),
    ],
    ids=str,
)
def test_the_engines_options_are_refused_by_their_flags(flags, said, tmp_path, capsys) -> None:
    """Before anything is started or read."""
    assert main([str(tmp_path / "absent"), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dsa-serve: error: ")
    assert said in error
