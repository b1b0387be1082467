"""What goes wrong in a user's hands: one line that says what and where, and nothing half-written.

Here everything passes through the commands themselves; each layer's own tests go through its cases.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_compile import compiling
from dsa_compile.artifact.manifest import FORMAT_VERSION
from dsa_compile.cli import compile as compile_cli
from dsa_compile.cli import generate as generate_cli
from dsa_compile.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.passes.manager import run_pipeline
from dsa_compile.testing.models import save_byte_tokenizer, save_hf, tiny_config, tiny_model
from tests.artifact.building import edit_manifest, forge, sha256

POISONED = 300  # a token id that the clean prompts do not hold
GREEDY = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--json"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded model with a tokenizer: a dense layer and a mixture of experts."""
    path = tmp_path_factory.mktemp("source") / "model"
    config = tiny_config(
        2, first_k_dense_replace=1, n_routed_experts=8, max_position_embeddings=256
    )
    save_hf(tiny_model(config), path, max_shard_size="300KB")
    save_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def kernel(source: Path) -> Any:
    """The model's program after every pass; compiling it again would show nothing new here."""
    program = build_program(source, CompileConfig(block_size=16))
    run_pipeline(program)
    return program


@pytest.fixture
def quick(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``dsa-compile`` takes the finished program, and reads, writes and checks as ever."""
    monkeypatch.setattr(compiling, "build_program", lambda _, config: _finished(kernel, config))
    monkeypatch.setattr(compiling, "run_pipeline", lambda *_: None)


def _finished(kernel: Any, config: CompileConfig) -> Any:
    program = kernel.fork(config)
    program.level, program.records = kernel.level, kernel.records
    return program


@pytest.fixture(scope="module")
def compiled(source: Path, kernel: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two artifacts of the model, ``reference`` and ``pack``."""
    root = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "build_program", lambda _, config: _finished(kernel, config))
        patch.setattr(compiling, "run_pipeline", lambda *_: None)
        for mode in ("reference", "pack"):
            out = str(root / mode)
            command = [str(source), "-o", out, "--weights", mode, "--block-size", "16"]
            assert compile_cli.main([*command, "--quiet"]) == 0
    return root


@pytest.fixture
def model(source: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(source, tmp_path / "model"))


@pytest.fixture
def artifact(compiled: Path, tmp_path: Path) -> Path:
    """A packed artifact to damage."""
    return Path(shutil.copytree(compiled / "pack", tmp_path / "artifact"))


class Refusal:
    """Runs a command that must be refused and returns what it said."""

    def __init__(self, capsys: pytest.CaptureFixture[str], root: Path) -> None:
        self._capsys = capsys
        self.root = root

    def compiling(self, model: Path, *options: str, out: str = "out") -> str:
        before = sorted(self.root.rglob("*"))
        argv = [str(model), "-o", str(self.root / out), *options]
        message = self._refused("dsa-compile", compile_cli.main, argv)
        assert sorted(self.root.rglob("*")) == before, "something is left behind"
        return message

    def generating(self, artifact: Path, *options: str) -> str:
        argv = [str(artifact), *(options or ("--prompt-ids", "5"))]
        return self._refused("dsa-generate", generate_cli.main, argv)

    def _refused(self, program: str, main: Callable[[list[str]], int], argv: list[str]) -> str:
        self._capsys.readouterr()
        assert main(argv) == 2
        message = self._capsys.readouterr().err
        assert message.startswith(f"{program}: error: ")
        assert message.count("\n") == 1
        assert message.endswith("\n")
        return message


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refusal:
    return Refusal(capsys, tmp_path)


def shard_of(model: Path, key: str) -> Path:
    index = json.loads((model / "model.safetensors.index.json").read_text())
    return model / index["weight_map"][key]


def edit_shard(model: Path, key: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    path = shard_of(model, key)
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


NORM = "model.layers.0.input_layernorm.weight"


# The model directory.


def test_missing_shard(model, refusal):
    path = shard_of(model, NORM)
    path.unlink()
    assert f"{path}: missing" in refusal.compiling(model)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_shard(model, refusal, keep):
    path = shard_of(model, NORM)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    assert str(path) in refusal.compiling(model)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t[:-1].clone(), "has shape [127], config.json asks for [128]"),
        (lambda t: t.double(), "is stored as float64; wanted F32, BF16, F16"),
        (lambda t: t.to(torch.int8), "is stored as int8"),
    ],
)
def test_wrong_shape_or_dtype(model, refusal, change, what):
    path = edit_shard(model, NORM, lambda t: t.update({NORM: change(t[NORM])}))
    assert f"{path}: '{NORM}' {what}" in refusal.compiling(model)


def test_missing_key(model, refusal):
    path = edit_shard(model, NORM, lambda t: t.pop(NORM))
    assert f"{path}: lacks '{NORM}'" in refusal.compiling(model)


def test_key_in_two_shards(model, refusal):
    path = edit_shard(model, "lm_head.weight", lambda t: t.update({NORM: torch.ones(128)}))
    message = refusal.compiling(model)
    assert f"{path}: holds '{NORM}'" in message
    assert "in one file only" in message


def test_index_leading_out_of_the_model_directory(model, refusal):
    index = model / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=names | {NORM: "../stolen.safetensors"})
    assert "outside the model directory" in refusal.compiling(model)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not supported; dsa-compile takes"),
        ({"hidden_size": 10**30}, "hidden_size=1"),
        ({"n_routed_experts": 2**40}, "n_routed_experts=1099511627776 must be from 1 to 65536"),
        ({"index_topk": 0}, "index_topk=0 must be from 1"),
        ({"num_hidden_layers": 3}, "num_hidden_layers"),
        ({"vocab_size": 100}, "'model.embed_tokens.weight' has shape [512, 128]"),
        ({"n_group": 3}, "n_routed_experts=8 must divide into n_group=3 groups"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported, only 'sigmoid'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope"),
        ({"rope_parameters": {"rope_type": "none"}}, "rope_type='none' is not supported"),
        ({"rope_parameters": 5}, "rope_parameters=5 should be an object"),
        ({"quantization_config": 5}, "quantization_config=5 should be an object"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, "a"]}},
            "two-element weight_block_size",
        ),
        ({"eos_token_id": [1, -7]}, "eos_token_id=[1, -7] must name token ids"),
        ({"num_nextn_predict_layers": "x"}, "num_nextn_predict_layers='x' should be int"),
    ],
)
def test_config_values(model, refusal, values, what):
    edit_json(model / "config.json", **values)
    assert what in refusal.compiling(model)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON ('utf-8' codec"),
        (b"[]", "expected a JSON object, found list"),
        (b'{"model_type": "deep', "not valid JSON (Unterminated string"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON (Exceeds the limit"),
        (b'{"a": NaN}', "NaN is not a number JSON has"),
    ],
)
def test_config_that_is_no_config(model, refusal, data, what):
    (model / "config.json").write_bytes(data)
    message = refusal.compiling(model)
    assert f"{model / 'config.json'}: " in message
    assert what in message


def test_a_float_too_large(model, refusal):
    text = (model / "config.json").read_text()
    edited = text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e999')
    assert edited != text
    (model / "config.json").write_text(edited)
    assert "rms_norm_eps=inf must be a positive number" in refusal.compiling(model)


def test_directories_that_are_no_model(tmp_path, refusal):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert "config.json: missing" in refusal.compiling(tmp_path / "empty")
    assert "no such directory" in refusal.compiling(tmp_path / "file")
    assert "no such directory" in refusal.compiling(tmp_path / "absent")


def test_config_that_is_a_directory(tmp_path, refusal):
    (tmp_path / "model/config.json").mkdir(parents=True)
    assert "config.json: cannot be read (Is a directory)" in refusal.compiling(tmp_path / "model")


def test_a_model_without_weights(source, tmp_path, refusal):
    (tmp_path / "model").mkdir()
    shutil.copy(source / "config.json", tmp_path / "model")
    message = refusal.compiling(tmp_path / "model")
    assert "no weights" in message
    assert "--weights none" in message


# The options.


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--recipe", "int3"], "unknown recipe 'int3'; choose one of fp32, bf16"),
        (["--target", "tpu"], "unknown target 'tpu'; choose one of cpu"),
        (["--weights", "all"], "unknown weights 'all'; choose one of reference, pack, none"),
        (["--disable", "absorb_mlp"], "unknown pass 'absorb_mlp'; did you mean 'absorb_mla'?"),
        (["--stop-after", "nothing"], "unknown pass 'nothing'; passes: strip_noise,"),
        (["--disable", "absorb_mla"], "cannot disable 'absorb_mla': fuse_rope_absorb needs it"),
        (["--layers", "0-9"], "--layers 0-9: the model has layers 0-1"),
        (["--layers", "1-0"], "--layers 1-0: the model has layers 0-1"),
        (["--layers", "two"], "argument --layers: 'two' is not a range such as 0-3"),
        (["--block-size", "48"], "unknown block size 48; choose one of 16, 32, 64"),
        (["--block-size", "9" * 30], "unknown block size 999"),
        (["--block-size", "x"], "argument --block-size: invalid int value: 'x'"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate; see dsa-compile --help"),
    ],
)
def test_options(source, refusal, options, what):
    assert what in refusal.compiling(source, *options)


# The output.


def test_the_output_exists(compiled, source, tmp_path, refusal):
    shutil.copytree(compiled / "pack", tmp_path / "out")
    manifest = (tmp_path / "out/manifest.json").read_bytes()
    assert "out: exists already; use --force" in refusal.compiling(source)
    assert (tmp_path / "out/manifest.json").read_bytes() == manifest


def test_force_replaces_an_artifact_and_nothing_else(source, model, tmp_path, refusal):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/thesis.txt").write_text("years of work")
    assert "holds files but no artifact" in refusal.compiling(source, "--force", out="notes")
    assert "holds files but no artifact" in refusal.compiling(model, "--force", out="model")
    (tmp_path / "file").touch()
    assert "is not a directory" in refusal.compiling(source, "--force", out="file")


def test_the_outputs_parent_is_missing(source, refusal):
    assert "is not a directory; create it first" in refusal.compiling(source, out="no/where")


def test_an_output_inside_the_model_directory_is_only_a_directory(model, quick, refusal, capsys):
    out = model / "compiled"
    assert compile_cli.main([str(model), "-o", str(out), "--block-size", "16", "--quiet"]) == 0
    assert generate_cli.main([str(out), "--prompt-ids", "5", *GREEDY]) == 0


@pytest.mark.parametrize("mode", ["reference", "pack"])
@pytest.mark.parametrize("failing", [1, 20, 60])
def test_a_full_disk(source, quick, refusal, monkeypatch, mode, failing):
    write, calls = Path.write_bytes, iter(range(1000))

    def until_full(self: Path, data: bytes) -> int:
        if next(calls) == failing:
            write(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", until_full)
    options = ("--weights", mode, "--block-size", "16")
    message = refusal.compiling(source, *options)
    assert "cannot write" in message
    assert "No space left on device" in message


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs more rights")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_too_small_for_the_weights(source, quick, refusal, small_disk):
    message = refusal.compiling(source, "--weights", "pack", "--block-size", "16", out="disk/out")
    assert "No space left on device" in message
    assert list(small_disk.iterdir()) == []


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process; the number of the signal that ended it, or 0."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # never outlives a parent that failed
        try:
            work()
        finally:
            os._exit(0)
    return -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("mode", ["reference", "pack"])
def test_killed_while_writing_and_compiled_again(source, quick, tmp_path, monkeypatch, mode):
    """SIGKILL at each kind of moment: a first file, in between, at the last flush, after it."""
    out = tmp_path / "out"
    command = [str(source), "-o", str(out), "--weights", mode, "--block-size", "16", "--quiet"]
    sync, done = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(fd), sync(fd)))
    assert compile_cli.main(command) == 0
    shutil.rmtree(out)
    total = len(done)
    for moment in (1, 3, total // 2, total - 1, total):

        def work(moment: int = moment) -> None:
            left = iter(range(moment - 1))
            monkeypatch.setattr(
                os, "fsync", lambda fd: sync(fd) if next(left, None) is not None else die()
            )
            compile_cli.main(command)

        assert in_child(work) == signal.SIGKILL
        # the last flush is that of the parent directory: by then the artifact is whole
        assert out.exists() == (moment == total)
    assert compile_cli.main([*command, "--force"]) == 0
    assert sorted(tmp_path.iterdir()) == [out]
    assert generate_cli.main([str(out), "--prompt-ids", "5", *GREEDY]) == 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_module(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"dsa_compile.cli.{name}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_commands_as_processes(source, compiled, tmp_path):
    """Exit status and both streams as a script sees them, from importing torch to the end."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    refused = run_module("compile", tmp_path / "model", "-o", tmp_path / "out")
    assert refused.returncode == 2
    assert refused.stderr.startswith("dsa-compile: error: config.json: model_type='llama'")
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    refused = run_module("generate", tmp_path / "model", "--prompt-ids", "1")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.count("\n") == 1
    assert "manifest.json: missing; is this an artifact?" in refused.stderr


def test_a_process_killed_from_outside(source, tmp_path):
    """While it exports the model; whatever it left is gone after the next run."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "dsa_compile.cli.compile", source, "-o", out, "--quiet"]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.tmp-*")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    [left] = tmp_path.iterdir()
    assert compile_cli.main([str(tmp_path / "absent"), "-o", str(out)]) == 2
    assert not left.exists()


# The artifact.


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "graphs/dense.long.json", "weights/plan.json", "weights/head.safetensors"],
)
def test_an_edited_file(artifact, refusal, name):
    path = artifact / name
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert str(path) in refusal.generating(artifact)


def test_a_missing_file(artifact, refusal):
    (artifact / "weights/head.safetensors").unlink()
    assert "head.safetensors: missing" in refusal.generating(artifact)


def test_another_version(artifact, refusal):
    edit_manifest(artifact, lambda data: data.update(format_version=99))
    said = refusal.generating(artifact)
    assert f"format version 99, this dsa-compile reads {FORMAT_VERSION}" in said


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "weights/../../x"])
@pytest.mark.parametrize("place", ["files", "weights", "plan", "tokenizer"])
def test_a_manifest_that_leaves_its_directory(artifact, refusal, place, path):
    def edit(data: dict[str, Any]) -> None:
        if place == "files":
            data["files"][0]["path"] = path
        elif place == "weights":
            data["weights"]["files"][0]["name"] = path
        elif place == "plan":
            data["weights"]["plan"] = path
        else:
            data["tokenizer"] = [path]

    edit_manifest(artifact, edit)
    message = refusal.generating(artifact)
    assert "manifest.json" in message
    assert "the file was edited, recompile" in message


@pytest.mark.parametrize("op", ["aten.set_.source_Tensor", "dsa.shell.default", "os.system"])
def test_a_graph_with_an_op_outside_the_whitelist(artifact, refusal, op):
    name = "graphs/head.json"
    text = (artifact / name).read_text()
    edited = text.replace("dsa.linear.default", op)
    assert edited != text
    forge(artifact, name, edited.encode())
    assert op in refusal.generating(artifact)


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan: plan["head"].clear(),
        lambda plan: plan.pop("dense"),
        lambda plan: plan["head"].update(extra=7),
        lambda plan: plan["head"]["lm_head.weight"].update(shape=[64]),
        lambda plan: plan["head"]["lm_head.weight"].update(dtype="bfloat16"),
    ],
)
def test_a_forged_plan(artifact, refusal, edit):
    plan = json.loads((artifact / "weights/plan.json").read_text())
    edit(plan)
    forge(artifact, "weights/plan.json", json.dumps(plan).encode())
    refusal.generating(artifact)


def test_artifacts_to_read_are_not_run(source, quick, tmp_path, refusal):
    for options, what in (
        (["--weights", "none"], "compiled with --weights none, it holds graphs only"),
        (["--stop-after", "absorb_mla"], "compiled with --stop-after absorb_mla"),
    ):
        out = tmp_path / options[-1]
        command = [str(source), "-o", str(out), "--block-size", "16", "--quiet", *options]
        assert compile_cli.main(command) == 0
        assert what in refusal.generating(out)


def test_what_is_no_artifact(source, tmp_path, refusal):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert "no such directory" in refusal.generating(tmp_path / "file")
    assert "no such directory" in refusal.generating(tmp_path / "absent")
    assert "manifest.json: missing; is this an artifact?" in refusal.generating(tmp_path / "empty")
    assert "manifest.json: missing; is this an artifact?" in refusal.generating(source)


def test_a_tokenizer_that_is_none(artifact, refusal):
    forge(artifact, "tokenizer/tokenizer.json", b'{"model": 3}')
    assert "tokenizer.json: not a tokenizer" in refusal.generating(artifact)


# The model that an artifact refers to.


def test_another_model(compiled, model, source, refusal):
    other = tiny_model(
        tiny_config(2, first_k_dense_replace=1, n_routed_experts=8, max_position_embeddings=256),
        seed=1,
    )
    shutil.rmtree(model)
    save_hf(other, model, max_shard_size="300KB")
    command = ("--prompt-ids", "5", "--model-dir", str(model))
    message = refusal.generating(compiled / "reference", *command)
    assert str(model) in message
    assert "not the content that was compiled" in message


def test_a_model_in_other_files(compiled, model, source, refusal):
    for path in model.glob("*.safetensors"):
        path.unlink()
    message = refusal.generating(
        compiled / "reference", "--prompt-ids", "5", "--model-dir", str(model)
    )
    assert "cannot be read (No such file or directory)" in message


def test_a_model_changed_after_it_was_compiled(model, quick, tmp_path, refusal):
    out = tmp_path / "out"
    assert compile_cli.main([str(model), "-o", str(out), "--block-size", "16", "--quiet"]) == 0
    path = edit_shard(model, NORM, lambda t: t[NORM].add_(1))
    message = refusal.generating(out)
    assert f"{path}: not the content that was compiled" in message
    shutil.rmtree(model)
    assert "say where the model is now (--model-dir)" in refusal.generating(out)


def test_a_model_for_an_artifact_that_needs_none(artifact, model, refusal):
    message = refusal.generating(artifact, "--prompt-ids", "5", "--model-dir", str(model))
    assert "leave out --model-dir" in message


# Requests.


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--prompt-ids", "512"], "'prompt 1': token id 512 is out of range; the model's ids are"),
        (["--prompt-ids", "-- -1"], "--prompt-ids takes integers"),
        (["--prompt-ids", "5", "9" * 30], "'prompt 2': token id 9999"),
        (["--prompt-ids", " ".join(["7"] * 256)], "exceed the limit of 256 tokens"),
        (["--prompt-ids", "7", "--max-tokens", "256"], "use max_tokens <= 255"),
        (["--prompt-ids", "7", "--max-tokens", "9" * 30], "exceed the limit of 256 tokens"),
        (
            ["--prompt-ids", " ".join(["7"] * 40), "--num-blocks", "2"],
            "exceed the cache's 32 tokens (2 blocks of 16)",
        ),
        (["--prompt-ids", "7", "--num-blocks", "0"], "num_blocks=0 must be from 1 to"),
        (["--prompt-ids", "7", "--num-blocks", "9" * 30], "must be from 1 to 134217727"),
        (["--prompt-ids", "7", "--max-batched-tokens", "0"], "max_batched_tokens must be an"),
        (["--prompt", ""], "'prompt 1': the prompt is empty"),
    ],
)
def test_requests(compiled, refusal, options, what):
    assert what in refusal.generating(compiled / "pack", *options)


def poison(artifact: Path, token: int) -> None:
    """Make a packed embedding row NaN, as a damaged checkpoint would be, and seal it again."""
    path = artifact / "weights/embed.safetensors"
    [(key, table)] = [(k, t) for k, t in load_file(path).items() if t.dim() == 2]
    raw = bytearray(path.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    row = table.shape[1] * table.element_size()
    start = 8 + header + json.loads(raw[8 : 8 + header])[key]["data_offsets"][0] + token * row
    raw[start : start + row] = torch.full((table.shape[1],), torch.nan).numpy().tobytes()
    path.write_bytes(raw)
    digest = sha256(path)

    def fit(data: dict[str, Any]) -> None:
        for entry, name in (("files", "path"), ("weights", "name")):
            records = data["files"] if entry == "files" else data["weights"]["files"]
            next(r for r in records if r[name].endswith("embed.safetensors"))["sha256"] = digest

    edit_manifest(artifact, fit)


def test_nan_logits_fail_one_request_alone(artifact, capsys):
    # below and above index_topk: a NaN among the keys must not lose itself in the selection
    clean = ["5 6 7", " ".join(str(n) for n in range(20, 60)), "8"]
    bad = f"9 {POISONED} " + " ".join(["11"] * 30)
    assert generate_cli.main([str(artifact), "--prompt-ids", *clean, *GREEDY]) == 0
    want = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    poison(artifact, POISONED)
    prompts = [clean[0], bad, *clean[1:]]
    assert generate_cli.main([str(artifact), "--prompt-ids", *prompts, *GREEDY]) == 1
    out, err = capsys.readouterr()
    outputs = [json.loads(line) for line in out.splitlines()]
    failed = outputs.pop(1)
    assert failed["finish_reason"] == "error"
    assert failed["token_ids"] == []
    assert [output["token_ids"] for output in outputs] == want
    errors = [line for line in err.splitlines() if line.startswith("dsa-generate: error: ")]
    assert errors == [f"dsa-generate: error: {failed['error']}"]
    assert "'prompt 2'" in failed["error"]
    assert "NaN" in failed["error"]
