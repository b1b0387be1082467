"""``dsa-inspect`` from the outside."""

import io
import json
import os
import resource
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from dsa_compile.cli.inspect.command import COMMANDS, build_parser, main
from dsa_compile.lowering.compile_model import compile_model

BENCH = {
    "machine": {},
    "rows": [{
        "case": "decode 1 × 8K", "kind": "moe", "layer": 0.2,
        "ops": {"experts_fp8 mlp": {"us": 31.0, "launches": 2.0, "names": ["k"]}},
    }],
    "ablation": [{"name": "overlap_streams", "layers": {"decode 1 × 8K": 0.224}, "problem": ""}],
}  # fmt: skip


def run(*argv: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([str(argument) for argument in argv])
    return status, out.getvalue(), err.getvalue()


def number(artifact: Path, name: str) -> int:
    """Number of a pass in an artifact, from 1."""
    manifest = json.loads((artifact / "manifest.json").read_text())
    return [summary["name"] for summary in manifest["passes"]].index(name) + 1


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    path.write_text(json.dumps(BENCH))
    return path


@pytest.fixture(scope="module")
def questions(published: Path, bench: Path) -> list[list[str]]:
    return [
        [],
        ["diff", "token_major"],
        ["diff", "recognize_rms_norm", "--layer", "37", "--site", "6"],
        ["why", "paged_latent_attention_fp8_expand"],
        ["why", "linear", "--kind", "moe", "--after", "merge_projections"],
        ["near-miss", "fuse_add_norm"],
        ["graph", "--layer", "37", "--variant", "long", "--inputs"],
        ["graph", "--after", "export"],
        ["compare", str(published)],
        ["time", "--bench", str(bench)],
    ]


@pytest.mark.slow
def test_every_question_has_an_answer_in_words_and_in_data(
    published: Path, questions: list[list[str]]
) -> None:
    for question in questions:
        status, text, errors = run(published, *question)
        assert (status, errors) == (0, ""), question
        assert text.strip(), question
        assert "\x1b" not in text, question  # plain where it is no terminal
        status, data, errors = run(published, *question, "--json")
        assert (status, errors) == (0, ""), question
        assert json.loads(data), question


@pytest.mark.slow
def test_answers_come_within_two_seconds_without_torch(
    published: Path, questions: list[list[str]]
) -> None:
    code = (
        "import sys; from dsa_compile.cli.inspect.command import main; "
        "status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    for question in questions:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        argv = [sys.executable, "-c", code, str(published), *question]
        done = subprocess.run(argv, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        # time on a processor: what a loaded machine makes others wait for is not ours
        taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert taken < 2.0, (question, taken)


def test_the_list_of_passes(published: Path, bench: Path) -> None:
    _, text, _ = run(published)
    lines = {words[1]: words for line in text.splitlines() if len(words := line.split()) > 5}
    manifest = json.loads((published / "manifest.json").read_text())
    for summary in manifest["passes"]:
        words = lines[summary["name"]]
        assert words[2] == str(summary["rewrites"])
        assert str(summary["nodes_after"]) in words
    _, text, _ = run(published, "--bench", bench)
    (line,) = (line for line in text.splitlines() if " overlap_streams " in line)
    assert "+24.0" in line


def test_errors_that_verify_left_are_shown(tiny: Path, tmp_path: Path) -> None:
    passes = [{"name": "absorb_mla", "error": 0.25, "problem": "differs by 0.25 in layer 1"}]
    path = tmp_path / "verify.json"
    path.write_text(json.dumps({"passes": passes, "sites": []}))
    _, text, _ = run(tiny / "artifact", "--verify", path)
    (line,) = (line for line in text.splitlines() if " absorb_mla " in line)
    assert "2.5e-01" in line
    assert line.rstrip().endswith("tolerance  differs by 0.25 in layer 1")


def test_a_diff_reads_like_python(published: Path) -> None:
    _, text, _ = run(published, "diff", "recognize_swiglu")
    lines = text.splitlines()
    numbered = f"{number(published, 'recognize_swiglu')} recognize_swiglu"
    assert lines[0].startswith(f"{numbered}  bitwise, 61 rewrites, 61 promised")
    assert lines[1] == "Recognise the gated activation of dense and shared-expert MLPs."
    assert "61 rewrites: mlp, mlp.shared_experts × 61 layers (0-60)  [sites 1-2]" in lines
    minus = [line for line in lines if line.startswith("- ")]
    plus = [line for line in lines if line.startswith("+ ")]
    assert [line.split(" = ")[1].split("(")[0] for line in minus] == [
        "ops.aten.silu", "ops.aten.mul.Tensor",
    ]  # fmt: skip
    assert plus == [
        "+ swiglu = ops.dsa.swiglu(linear_8, linear_9)  # bf16[B, S, 18432]  mlp",
    ]


def test_a_diff_with_what_verify_found(published: Path, tmp_path: Path) -> None:
    sites = [
        {"pass_name": "recognize_swiglu", "number": 2, "layer": n, "error": e, "problem": p}
        for n, e, p in ((3, 1e-7, ""), (37, 0.5, "differs by 0.5"))
    ]
    path = tmp_path / "verify.json"
    path.write_text(json.dumps({"passes": [], "sites": sites}))
    _, text, _ = run(published, "diff", "recognize_swiglu", "--verify", path)
    assert "  error that verify found: 5.0e-01 in layer 37\n  layer 37: differs by 0.5" in text


def test_layers_that_take_other_weights_are_told(published: Path) -> None:
    _, text, _ = run(published)
    assert "odd       layer 60 takes model.norm for next_norm" in text


def test_an_input_is_told_by_how_it_is_made(tiny: Path) -> None:
    _, text, _ = run(tiny / "artifact", "why", "self_attn_w_uk", "--kind", "moe")
    expression = "narrow(reshape({layer}.self_attn.kv_b_proj.weight, shape="
    assert f"weight self_attn.w_uk: f32[8, 16, 32] = {expression}" in text
    numbered = f"{number(tiny / 'artifact', 'absorb_mla')} absorb_mla"
    assert f"{numbered} site 2 in self_attn" in text
    _, text, _ = run(tiny / "artifact", "why", "latent_cache", "--kind", "moe")
    assert "cache latent_cache: f32[P, 64, " in text


def test_a_layer_alone(published: Path) -> None:
    _, text, _ = run(published, "diff", "recognize_swiglu", "--layer", "2")
    assert "3 rewrites: mlp × 3 layers (0-2)  [site 1]" in text
    _, text, _ = run(published, "diff", "recognize_router", "--layer", "2")
    assert "nothing changed here" in text


def test_streams_are_drawn(published: Path) -> None:
    _, text, _ = run(published, "graph", "--layer", "5", "--variant", "long")
    assert "moe.long  58 layers (3-60)" in text
    assert "├─▼  stream 1 waits for the inputs" in text
    assert "▼─┤  stream 0 waits for" in text
    assert any(line.startswith("│ ●  ") for line in text.splitlines())


def test_two_that_differ(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    disable = ("pack_swiglu", "merge_shared_expert")
    compile_model(tiny / "model", other, recipe="fp32", disable=disable)
    status, text, errors = run(tiny / "artifact", "compare", other)
    assert (status, errors) == (1, "")
    assert "  disable: none → pack_swiglu, merge_shared_expert" in text
    assert "- pack_swiglu: 2 rewrites" in text
    assert "+ swiglu = ops.dsa.swiglu(" in text


NUMBER = "of swiglu"  # stands for the number of recognize_swiglu


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["diff", "recognise_router"], "unknown pass 'recognise_router'; did you mean 'recognize_"),
        (["diff", NUMBER, "--layer", "61"], "no layer 61 in"),
        (["diff", NUMBER, "--kind", "mo"], "unknown kind 'mo'; did you mean 'moe'?"),
        (
            ["diff", NUMBER, "--kind", "moe", "--layer", "0"],
            "layer 0 is of kind 'dense', not 'moe'",
        ),
        (["diff", NUMBER, "--site", "9"], "recognize_swiglu has no rewrite 9 here; choose of 1-2"),
        (["why", "expertsfp8"], "unknown node 'expertsfp8'; did you mean 'experts_fp8'?"),
        (["why", "experts_fp8", "--layer", "0"], "unknown node 'experts_fp8'"),
        (["near-miss", "fuse_ad_norm"], "did you mean 'fuse_add_norm'?"),
        (["graph", "--variant", "lng"], "unknown variant 'lng'; did you mean 'long'?"),
        (["compare", "/nowhere"], "/nowhere: no such directory"),
        (["time"], "give one of --bench FILE and --profile FILE"),
        (["time", "--bench", "/nowhere.json"], "/nowhere.json: cannot be read"),
        (["tim"], "unknown command 'tim': did you mean time?"),
        (["diff"], "the following arguments are required: PASS"),
    ],
)
def test_bad_input_is_one_line(published: Path, argv: list[str], says: str) -> None:
    swiglu = number(published, "recognize_swiglu")
    status, text, errors = run(published, *(swiglu if a == NUMBER else a for a in argv))
    assert (status, text) == (2, "")
    assert errors.startswith("dsa-inspect: error: ")
    assert errors.count("\n") == 1
    assert says in errors


def test_no_records(tiny: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    compile_model(tiny / "model", bare, records=False, weights="none")
    for argv in (["diff", "absorb_mla"], ["why", "experts"], ["graph", "--after", "absorb_mla"]):
        status, _, errors = run(bare, *argv)
        assert status == 2
        assert "compiled with --no-records" in errors
    for argv in ([], ["near-miss", "absorb_mla"], ["graph"], ["compare", str(bare)]):
        assert run(bare, *argv)[0] == 0, argv


def test_colour_in_a_terminal_only(published: Path) -> None:
    argv = [sys.executable, "-m", "dsa_compile.cli.inspect", str(published), "diff"]
    argv.append(str(number(published, "recognize_swiglu")))
    plain = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR")}
    for extra, coloured in (({}, False), ({"FORCE_COLOR": "1", "TERM": "xterm"}, True)):
        done = subprocess.run(argv, capture_output=True, text=True, env=plain | extra)
        assert done.returncode == 0
        assert ("\x1b[31m" in done.stdout) == coloured


def test_a_reader_that_leaves(published: Path) -> None:
    command = f"{sys.executable} -m dsa_compile.cli.inspect {published} graph --after export"
    done = subprocess.run(f"{command} | head -1", shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("embed")
    assert done.stderr == ""


def test_help_lists_every_command() -> None:
    text = build_parser().format_help()
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2].replace("_", "-")
        assert f"\n    {name} " in text
