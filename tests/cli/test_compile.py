import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.cli import generate
from dsa_compile.cli.compile import build_parser, main
from dsa_compile.cli.progress import Display
from dsa_compile.errors import ArtifactError
from dsa_compile.facts.config import BLOCK_SIZES, TARGETS, WEIGHT_MODES, CompileConfig
from dsa_compile.facts.formats import RECIPES
from dsa_compile.facts.layout import Layout
from dsa_compile.lowering import compile_model as compiling
from dsa_compile.passes.manager import pass_names
from examples.small_models.models import save_byte_tokenizer, save_hub, tiny_config, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub's layout, with a multi-token-prediction layer to be set aside."""
    path = tmp_path_factory.mktemp("models") / "a model"
    save_hub(tiny_model(tiny_config(2, first_k_dense_replace=1, n_routed_experts=8)), path)
    save_byte_tokenizer(path)
    return path


def run(*argv: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([str(argument) for argument in argv])
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def shown(model: Path) -> tuple[Path, str, str]:
    """An artifact compiled by the command, and what the command printed on either stream."""
    out = model.parent / "an artifact"
    status, printed, progress = run(model, "-o", out)
    assert status == 0
    return out, printed, progress


@pytest.fixture(scope="module")
def compiled(shown: tuple[Path, str, str]) -> tuple[Path, str]:
    """The artifact, and standard output."""
    return shown[:2]


def test_phases_are_progress_and_passes_are_results(shown):
    out, printed, progress = shown
    lines = progress.splitlines()
    assert len(lines) == 5
    phases = [
        "loading torch and transformers",
        "reading config and checkpoint headers",
        "exporting the reference model",
        "running passes",
        "writing the artifact",
    ]
    for line, phase in zip(lines, phases, strict=False):
        assert re.fullmatch(re.escape(phase) + r" +\d+\.\d s.*", line)
    run_passes = pass_names(config=CompileConfig())
    assert lines[3].endswith(f"{len(run_passes)} run, last: {run_passes[-1]}")
    assert lines[4].endswith("MB of weights")
    table = printed[printed.index("rewrites") : printed.index("time:")]
    rows = [words for line in table.splitlines() if set(words := line.split()) & set(pass_names())]
    manifest = json.loads((out / "manifest.json").read_text())
    assert [row[0] for row in rows] == [summary["name"] for summary in manifest["passes"]]
    for row, summary in zip(rows, manifest["passes"], strict=True):
        assert row[1] == str(summary["rewrites"])
        assert row[-3:-1] == [str(summary["nodes_before"]), str(summary["nodes_after"])]


def test_the_summary_says_what_was_left_out_and_where_things_are(compiled):
    out, printed = compiled
    assert re.search(
        r"time: +\d+\.\d s in all: imports .* read .* export .* passes .* emit ", printed
    )
    assert re.search(r"note: +MTP layer 2: \d+ tensors skipped", printed)
    assert f"artifact: {out}\n" in printed
    for name in ("graphs", "passes"):
        assert re.search(rf"^{name}: +{re.escape(str(out / name))} ", printed, re.MULTILINE)
    assert all(len(line) <= 100 for line in printed.splitlines() if str(out) not in line)


def test_data_instead_of_text(model, tmp_path):
    out = tmp_path / "out"
    status, printed, _ = run(model, "-o", out, "--json", "--weights", "none", "--layers", "0")
    assert status == 0
    data = json.loads(printed)
    manifest = json.loads((out / "manifest.json").read_text())
    assert (data["artifact"], data["digest"]) == (str(out), manifest["digest"])
    assert [made["name"] for made in data["passes"]] == [p["name"] for p in manifest["passes"]]
    phases = ["all", "imports", "read", "export", "passes", "emit"]
    assert list(data["seconds"]) == phases
    assert data["seconds"]["all"] >= sum(data["seconds"][name] for name in phases[1:]) - 0.01
    assert data["notes"] == ["target cpu: no CUDA GPU is visible here"]
    described = build_parser().format_help()
    assert [name for name in data if f'"{name}"' not in described] == []


def test_a_pass_with_those_that_need_it(model, tmp_path):
    status, printed, _ = run(
        model, "-o", tmp_path / "out", "--weights", "none", "--disable", "merge_projections+"
    )
    assert status == 0
    note = "without merge_projections, and so without pack_swiglu, merge_shared_expert\n"
    assert note in printed
    left_out = {"merge_projections", "pack_swiglu", "merge_shared_expert"}
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert left_out.isdisjoint(summary["name"] for summary in manifest["passes"])
    assert set(manifest["compile"]["disable"]) == left_out


def test_the_command_it_proposes_runs(compiled, capsys):
    _, printed = compiled
    [command] = re.findall(r"^next: +(.*)$", printed, re.MULTILINE)
    program, *argv = shlex.split(command)
    assert program == "dsa-generate"
    assert generate.main(argv) == 0
    assert "[1/1] prompt: Hello" in capsys.readouterr().out
    assert generate.main([argv[0], "--prompt", "hello", "--max-tokens", "2"]) == 0
    assert "[1/1] prompt: hello\noutput: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--weights", "none", "--layers", "0"], "without weights, the artifact cannot run"),
        (
            ["--stop-after", "strip_noise", "--layers", "0"],
            "stopped early, the artifact cannot run",
        ),
    ],
)
def test_an_artifact_to_read_is_called_that(model, tmp_path, options, why):
    status, printed, _ = run(model, "-o", tmp_path / "out", *options)
    assert status == 0
    assert f"next:     read the graphs; {why}\n" in printed
    assert "dsa-generate" not in printed
    assert (tmp_path / "out/passes/01_strip_noise/changes.diff").stat().st_size > 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options that reached the compiler, which refuses everything here."""
    seen: dict[str, Any] = {}

    def refuse(model: str, out: Path, config: CompileConfig, **options: Any) -> None:
        seen.update(options, model=model, out=out, options=config)
        options["progress"].phase("imports")
        options["progress"].phase("read")
        raise ArtifactError("no\n  room")

    monkeypatch.setattr(compiling, "compile_model", refuse)
    return seen


def test_options_reach_the_compiler(asked):
    run("m", "-o", "a")
    assert asked["options"] == CompileConfig()
    assert {n: asked[n] for n in ("force", "revision", "model", "out")} == {
        "force": False, "revision": None, "model": "m", "out": "a"
    }  # fmt: skip
    command = (
        "m -o a --target cpu --recipe bf16 --weights pack --layers 2-5 --block-size 16 --force "
        "--disable fuse_add_norm,pack_swiglu --disable absorb_mla --stop-after token_major "
        "--pass-options overlap_streams.streams=3 --option a.b=c --kernel x=y --no-records "
        "--tensor-parallel-size 2 --dp 2 --profile p --no-compiled-kernels --draft mtp"
    )
    run(*command.split())
    assert asked["force"] is True
    assert asked["options"] == CompileConfig(
        target="cpu", recipe="bf16", weights="pack", layers=(2, 5), block_size=16,
        disable=("fuse_add_norm", "pack_swiglu", "absorb_mla"), stop_after="token_major",
        pass_options=("overlap_streams.streams=3", "a.b=c"), kernels=("x=y",), records=False,
        layout=Layout(tp=2, dp=2), profile="p", compiled_kernels=False, draft="mtp",
    )  # fmt: skip


def test_a_refusal_is_one_line_and_status_2(asked):
    status, printed, errors = run("m", "-o", "a")
    assert status == 2
    progress, refusal = errors.splitlines()
    assert refusal == "dsa-compile: error: no room"
    assert re.fullmatch(r"loading torch and transformers +\d+\.\d s", progress)
    assert printed == ""


def test_quiet_prints_errors_only(asked, model, tmp_path):
    assert run("m", "-o", "a", "--quiet") == (2, "", "dsa-compile: error: no room\n")


def test_an_interrupt_is_one_line(monkeypatch):
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "compile_model", interrupted)
    status, _, errors = run("m", "-o", "a")
    assert status == 130
    assert errors == "dsa-compile: error: interrupted; nothing was written\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "MODEL is missing; see dsa-compile --help"),
        (["model"], "-o ARTIFACT is missing; see dsa-compile --help"),
        (["-o", "a"], "MODEL is missing; see dsa-compile --help"),
        (["model", "other", "-o", "a"], "unrecognized arguments: other; see dsa-compile --help"),
        (["model", "-o", "a", "--layers", "3-"], "'3-' is not a range such as 0-3"),
    ],
)
def test_usage_errors_are_one_line(command, message):
    status, printed, errors = run(*command)
    assert (status, printed) == (2, "")
    assert re.fullmatch(r"dsa-compile: error: .*\n", errors)
    assert message in errors


def test_help_names_every_choice_and_default():
    text = " ".join(build_parser().format_help().split())
    assert "usage: dsa-compile MODEL -o ARTIFACT [options]" in text
    for choices in (TARGETS, tuple(RECIPES), WEIGHT_MODES, BLOCK_SIZES):
        assert all(str(choice) in text for choice in choices)
    for option in ("target", "recipe", "weights", "block_size"):
        described = text[text.index(f"--{option.replace('_', '-')} ") :]
        stated = re.search(r"\(default: (\w+)[,:)]", described)
        assert stated
        assert stated[1] == str(getattr(CompileConfig, option))
    assert all(len(line) <= 80 for line in build_parser().format_help().splitlines())


_LISTED = r"^(\w+) \((?:bitwise|tolerance)(?:; (?:recipe|target) [\w, -]+|; with --[\w -]+)*\)$"


def test_lists_are_data_where_that_is_asked_for() -> None:
    listed = json.loads(run("--list-passes", "--json")[1])
    assert [each["name"] for each in listed] == list(pass_names())
    models = json.loads(run("--list-models", "--json")[1])
    assert models["taken"]["axk2"]["recipes"] == ["fp32", "bf16"]
    assert "hy_v4" in models["not_yet"]


@pytest.mark.parametrize("option", ["--list-passes", "--help"])
def test_a_reader_that_has_enough_is_no_error(option: str) -> None:
    command = f"{sys.executable} -m dsa_compile.cli.compile {option}"
    with subprocess.Popen(
        command.split(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        process.stdout.close()
        _, error = process.communicate()
    assert (process.returncode, error) == (0, "")


def test_passes_are_listed_in_order():
    status, printed, errors = run("--list-passes")
    assert (status, errors) == (0, "")
    assert tuple(re.findall(_LISTED, printed, re.M)) == pass_names()
    assert printed.index("--- LOGICAL ---") < printed.index("\nabsorb_mla")
    assert printed.endswith("--- KERNEL ---\n")
    assert all(len(line) <= 80 for line in printed.splitlines())


def test_models_are_listed_with_what_the_others_lack():
    status, printed, errors = run("--list-models")
    assert (status, errors) == (0, "")
    taken, _, others = printed.partition("\nnot yet, ")
    assert [line.split()[0] for line in taken.splitlines()] == [
        "deepseek_v32",
        "glm_moe_dsa",
        "axk2",
        "mistral_large4_text",
    ]
    assert "axk2                 A.X-K2; recipes fp32, bf16\n" in taken
    assert "\nhy_v4                HY-V4: attention sinks" in others


def test_a_recipe_that_a_model_cannot_have_is_refused_before_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "axk2"}))
    status, printed, errors = run(str(tmp_path), "-o", str(tmp_path / "a"), "--recipe", "fp8")
    assert (status, printed) == (2, "")
    assert "recipe 'fp8' is not supported for model_type='axk2'; choose one of fp32, bf16" in errors


def test_in_a_terminal_the_running_phase_moves_and_a_failed_one_goes(monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    with redirect_stderr(out), suppress(ArtifactError), Display() as display:
        display.phase("imports")
        display.phase("emit")
        display.weights(1_300_000)
        raise ArtifactError("the disk is full")
    last = out.getvalue().split("\x1b[2K")[-1]
    assert "✓ loading torch and transformers" in last
    assert "writing the artifact" not in last


def test_help_needs_no_torch():
    code = (
        "import sys, dsa_compile.cli.compile as c; c.build_parser().format_help()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_reader_that_leaves_and_a_terminal_without_unicode():
    command = f"{shlex.quote(sys.executable)} -m dsa_compile.cli.compile --list-passes"
    script = f"set -o pipefail; PYTHONIOENCODING=ascii {command} | (read line; echo $line)"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith("Passes in the order they run.")
    assert done.stderr == ""
