"""Wrong input is refused before torch is imported, whatever the command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = {"model_type": "deepseek_v32", "num_hidden_layers": 4}
CODE = """\
import importlib, json, sys
main = importlib.import_module(sys.argv[1]).main
for argv in json.loads(sys.argv[2]):
    assert main(argv) == 2, argv
    print("--", file=sys.stderr)
heavy = {"torch", "transformers", "triton"} & set(sys.modules)
assert not heavy, heavy
"""


def refusals(module: str, commands: list[list[str]], cwd: Path) -> list[str]:
    """The line that each command is refused with, all in one process without torch."""
    argv = [sys.executable, "-c", CODE, f"dsa_compile.cli.{module}", json.dumps(commands)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    lines = done.stderr.split("--\n")[:-1]
    assert all(line.count("\n") == 1 for line in lines), lines
    return lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, one of another type, one that none could sample from, and what is no model."""
    llama = {**MODEL, "model_type": "llama"}
    for name, config in (("model", MODEL), ("llama", llama), ("hot", MODEL)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    sampling = {"temperature": -1, "top_p": 7, "top_k": None, "max_new_tokens": "9\n"}
    (tmp_path / "hot/generation_config.json").write_text(json.dumps(sampling))
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    return tmp_path


COMPILE = [
    ("nowhere -o a", "nowhere: no such directory; give a Hugging Face model directory, or owner"),
    ("model/nowhere -o a", "model/nowhere: no such directory"),
    ("empty -o a", "empty/config.json: missing; is this a Hugging Face model directory?"),
    ("llama -o a", "model_type='llama' is not supported; dsa-compile takes 'deepseek_v32'"),
    ("hot -o a", "hot/generation_config.json: max_new_tokens must be an integer >= 1; got '9\\n'"),
    ("hot -o a", "; temperature must be a number finite and >= 0; got -1; top_p must be"),
    ("model -o taken", "taken: exists already; use --force"),
    ("model -o taken --force", "taken: holds files but no artifact"),
    ("model -o no/where", "no is not a directory; create it first"),
    ("model -o a --recipe pf8", "unknown recipe 'pf8'; did you mean 'fp8'?"),
    ("model -o a --target gpu", "unknown target 'gpu'; choose one of auto (the GPU here), cpu"),
    ("model/config.json -o a", "model/config.json: is a file; give the model's directory, model"),
    ("model -o a --stop-after nothing", "dsa-compile --list-passes prints them all"),
    ("model -o a --layers 3-1", "--layers 3-1: the model has layers 0-3"),
    ("model -o a --weights packed", "unknown weights 'packed'; did you mean 'pack'?"),
    ("model -o a --block-size 48", "unknown block size 48; choose one of 16, 32, 64"),
    ("model -o a --block-size x", "argument --block-size: 'x' is not a number such as 4096"),
    ("model -o a --layers 2-4", "--layers 2-4: the model has layers 0-3"),
    ("model -o a --layers x", "'x' is not a range such as 0-3"),
    ("model -o a --kv-scale 2", "recipe fp32 takes no kv scale; fp8-kv-tensor does"),
    ("model -o a --disable absorb", "unknown pass 'absorb'; did you mean 'absorb_mla'?"),
    (
        "model -o a --disable fuse_add_norm_across_layers --recipe fp8",
        "fuse_norm_quantize_across_layers needs it; --disable fuse_add_norm_across_layers+ leaves",
    ),
    (
        "model -o a --disable flatten_tokens+",
        "cannot disable 'flatten_tokens+': insert_paged_caches is among those that need",
    ),
    ("model -o a --stop-after spilt_short_long", "did you mean 'split_short_long'?"),
    ("model -o a --stop-after overlap_streams", "recipe fp32 for target cpu does not run it"),
    ("model -o a --option overlap_stream.streams=3", "did you mean 'overlap_streams'?"),
    ("model -o a --option overlap_streams.stream=3", "did you mean 'streams'?"),
    ("model -o a --option overlap_streams.streams=x", "should be a whole number"),
    ("model -o a --option absorb_mla.x=1", "unknown option 'x'; it has none"),
    ("model -o a --option streams", "option 'streams' should be PASS.NAME=VALUE"),
    ("model -o a --kernel router", "--kernel router: should be OP=PROVIDER"),
    ("model -o a --kernel router=tritn", "unknown provider 'tritn'; did you mean 'triton'?"),
    ("model -o a --profile nowhere.json", "nowhere.json: no such profile"),
    ("model -o a --revision main", "model: --revision main is for models of the Hub"),
    ("model -o a --recipee fp8", "unrecognized arguments: --recipee fp8; did you mean --recipe?"),
    ("model -o a --k x=y", "ambiguous option: --k could match"),
    ("model a", "unrecognized arguments: a; see dsa-compile --help"),
    ("-o a", "MODEL is missing"),
]


def test_a_compilation_that_cannot_be(folder: Path) -> None:
    lines = refusals("compile", [command.split() for command, _ in COMPILE], folder)
    for line, (command, says) in zip(lines, COMPILE, strict=True):
        assert line.startswith("dsa-compile: error: "), command
        assert says in line, (command, line)
    assert not (folder / "a").exists()


OTHERS = {
    "inspect.command": [
        ("nowhere", "nowhere: no such directory"),
        ("nowhere dif x", "unknown command 'dif': did you mean diff?"),
        ("nowhere diff", "the following arguments are required: PASS"),
        ("nowhere diff x --layr 3", "unrecognized arguments: --layr 3; did you mean --layer?"),
        ("dif nowhere x", "unknown command 'nowhere'"),
        ("nowhere onnx -o x --variant log", "unknown value 'log': did you mean long?"),
    ],
    "bench": [
        ("kernel", "unknown command 'kernel': did you mean kernels?"),
        ("kernels --providr x", "did you mean --provider?"),
        ("step --recipe pf8", "unknown recipe 'pf8'; did you mean 'fp8'?"),
        ("step --target sm90a", "unknown target 'sm90a'; choose one of auto"),
        ("step --disable absorb", "unknown pass 'absorb'; did you mean 'absorb_mla'?"),
        ("step --ablate absorb", "unknown pass 'absorb'; did you mean 'absorb_mla'?"),
        ("step --layers x", "'x' is not a range such as 0-3"),
        ("step --batch x", "'x' is not a list of numbers"),
    ],
    "eval": [
        ("nowhere", "nowhere: no such directory"),
        ("nowhere --control al", "unknown control 'al'; did you mean 'all'?"),
        ("nowhere --only perplexty", "unknown measure 'perplexty'; did you mean 'perplexity'?"),
        ("nowhere --distances x", "'x' is not a number such as 4096"),
        ("nowhere --json results.json", "did you mean -o results.json?"),
        ("nowhere --only perp", "unknown measure 'perp'; did you mean 'perplexity'?"),
        ("nowhere --quite", "did you mean --quiet?"),
    ],
    "generate": [
        ("nowhere", "one of the arguments"),
        ("nowhere --prompt x --promt y", "did you mean --prompt?"),
    ],
}


@pytest.mark.parametrize("module", OTHERS)
def test_what_the_other_commands_refuse(folder: Path, module: str) -> None:
    cases = OTHERS[module]
    lines = refusals(module, [command.split() for command, _ in cases], folder)
    for line, (command, says) in zip(lines, cases, strict=True):
        assert says in line, (command, line)


@pytest.mark.parametrize("module", ["compile", *OTHERS])
def test_help_and_version_need_no_torch(module: str) -> None:
    code = (
        f"import sys; from dsa_compile.cli.{module} import main\n"
        "for option in ('--help', '--version'):\n"
        "    try: main([option])\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    lines = done.stdout.splitlines()
    assert lines[-1].split()[0].startswith("dsa-")
    assert lines[-1].split()[1][0].isdigit()
    if module != "generate":
        assert [line for line in lines if len(line) > 80] == []
