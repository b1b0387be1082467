"""Targets of fuzzing: each damages a copy of something and then uses it as a user would.

A target returns normally or raises a :class:`~dsa_compile.errors.UserError`; anything else is a
finding, and so are tokens that differ where the digest should have told.
"""

import contextlib
import io
import json
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz import bases
from tests.fuzz.cases import Case, Finding, mutated, mutated_bytes
from tests.fuzz.file_mutations import mutate_tree, replace
from tests.fuzz.json_mutations import flip

PROMPTS = ([5, 6, 7], list(range(20, 60)))
_ARTIFACTS = ("fp32", "fp8")


def _serve(artifact: Path, **options: Any) -> list[Any]:
    from dsa_compile.runtime import Engine, SamplingParams

    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine = Engine.load(artifact, num_gpu_blocks_override=4, **options)
    outputs = engine.generate(list(PROMPTS), params)
    if (artifact / "tokenizer/tokenizer.json").is_file():
        engine.generate(["some text"], SamplingParams(max_tokens=2, stop=["x"], logprobs=2))
    return [(out.token_ids, out.finish_reason) for out in outputs]


def _expected(base: Path, name: str) -> list[Any]:
    """Tokens of the sound artifact, kept in a file beside it."""
    kept = base / f"{name}.tokens.json"
    if not kept.exists():
        kept.write_text(json.dumps(_serve(base / name)))
    return [tuple(entry) for entry in json.loads(kept.read_text())]


def manifest(case: Case, base: Path, work: Path) -> None:
    """A manifest edited and sealed again."""
    name = case.rng().choice((*_ARTIFACTS, "reference"))
    path = bases.copy(base, name, work) / "manifest.json"
    replace(path, bases.sealed(mutated(case, json.loads(path.read_bytes()))))
    _serve(path.parent)


def listed(case: Case, base: Path, work: Path) -> None:
    """A graph, the weight plan or a tokenizer file edited, and the manifest made to fit."""
    name = case.rng().choice(_ARTIFACTS)
    artifact = bases.copy(base, name, work)
    kinds = ("graphs/*.json", "weights/plan.json", "tokenizer/*.json")
    choices = sorted(artifact.glob(case.rng("kind").choice(kinds)))
    file = case.rng("file").choice(choices)
    data = mutated_bytes(case, file.read_bytes())
    bases.seal(artifact, file.relative_to(artifact).as_posix(), data)
    _serve(artifact)


def packed_weights(case: Case, base: Path, work: Path) -> None:
    """The header of a packed weight file edited, and the manifest made to fit."""
    artifact = bases.copy(base, case.rng().choice(_ARTIFACTS), work)
    file = case.rng("file").choice(sorted(artifact.glob("weights/*.safetensors")))
    data = _mutated_header(case, file.read_bytes())
    bases.seal(artifact, file.relative_to(artifact).as_posix(), data)
    _serve(artifact)


def _mutated_header(case: Case, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = case.rng().random()
    if kind < 0.15:
        for rng in case.rngs():
            data = flip(data[: 8 + length], rng) + body
        return data
    header = mutated_bytes(case, header)
    size = case.rng("size").choice((len(header),) * 8 + (0, len(header) + 1, 2**62))
    return size.to_bytes(8, "little") + header + body


def unsealed(case: Case, base: Path, work: Path) -> None:
    """Files damaged, the manifest as it was: refused, or the damage does not matter."""
    name = case.rng().choice((*_ARTIFACTS, "reference"))
    expected = _expected(base, name)
    artifact = bases.copy(base, name, work)
    digest = json.loads((artifact / "manifest.json").read_bytes())["digest"]
    for rng in case.rngs():
        mutate_tree(artifact, rng)
    pinned = {"digest": digest} if case.rng("pin").random() < 0.5 else {}
    if (found := _serve(artifact, **pinned)) != expected:
        raise Finding(f"loads, and answers {found} instead of {expected}")


def records(case: Case, base: Path, work: Path) -> None:
    """Records of passes edited and sealed again, read by dsa-inspect."""
    artifact = bases.copy(base, "fp32", work)
    choices = [*artifact.glob("passes/*/graphs.json"), *artifact.glob("passes/*.json")]
    file = case.rng("file").choice(sorted(choices))
    if case.rng("which").random() < 0.3:
        manifest = artifact / "manifest.json"
        replace(manifest, bases.sealed(mutated(case, json.loads(manifest.read_bytes()))))
    else:
        data = mutated_bytes(case, file.read_bytes())
        bases.seal(artifact, file.relative_to(artifact).as_posix(), data)
    stage = file.parent.name if file.parent.name != "passes" else "recognize_swiglu"
    verbs = (
        *([], ["--json"], ["diff", stage], ["why", "experts"], ["near-miss", stage], ["graph"]),
        *(["graph", "--after", stage], ["why", "swiglu", "--after", stage], ["time"]),
        *(["compare", str(base / "fp8")], ["html", "-o", str(work / "report.html")]),
    )
    _inspect([str(artifact), *case.rng("verb").choice(verbs)])


def measured(case: Case, base: Path, work: Path) -> None:
    """Files of measurements for dsa-inspect: --bench, --profile, and verify.json."""
    from dsa_compile.ir.stream_profile import Profile

    bench: Any = {
        "context": {"device": "x", "gpu": {"name": "x"}},
        "rows": [
            {
                "case": "decode 1", "kind": "decode", "layer": 0.2, "ms": 1.0,
                "ops": {"dsa.rms_norm.default": {"us": 3.0, "launches": 1, "names": ["k"]}},
            }
        ],
        "ablation": [{"name": "fuse_add_norm", "problem": "", "layers": {"decode 1": 0.25}}],
    }  # fmt: skip
    profile = {
        "format": 1, "device": "x", "target": "sm_90a", "tokens": 1, "context": 8192,
        "calls": {"dsa.rms_norm.default(f32[T, 8])": 3.0},
    }  # fmt: skip
    verify: Any = {
        "passes": [{"name": "recognize_swiglu", "error": 0.1, "problem": "", "sites": []}]
    }
    file = work / "measured.json"
    kind = case.rng("kind").choice(("bench", "profile", "calls", "verify"))
    document = {"bench": bench, "profile": profile, "calls": profile, "verify": verify}[kind]
    file.write_bytes(mutated_bytes(case, json.dumps(document).encode()))
    if kind == "profile":
        Profile.load(file, "sm_90a")
    elif kind == "verify":
        artifact = bases.copy(base, "fp32", work)
        file.rename(artifact / "verify.json")
        _inspect([str(artifact)])
        _inspect([str(artifact), "html", "-o", str(work / "report.html")])
    else:
        option = "--bench" if kind == "bench" else "--profile"
        verb = case.rng("verb").choice((["time"], []))
        _inspect([str(base / "fp32"), *verb, option if verb else "--bench", str(file)])


_FORMATTING = re.compile("\x1b\\[[0-9;]*m")


def _inspect(argv: list[str]) -> None:
    """A command that must show or refuse, and print nothing that a terminal would obey."""
    from dsa_compile.cli.inspect import command

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = command.main(argv)
    if status not in (0, 1, 2):
        raise Finding(f"exit status {status}")
    if status == 2 and err.getvalue().count("\n") != 1:
        raise Finding(f"an error of several lines: {err.getvalue()[:200]!r}")
    if len(err.getvalue()) > 5000:
        raise Finding(f"an error of {len(err.getvalue())} characters")
    printed = out.getvalue() + err.getvalue()
    controls = {c for c in set(printed) - set("\n\t") if unicodedata.category(c) in ("Cc", "Cs")}
    if controls:
        raise Finding(f"prints control characters: {sorted(controls)!r}")


def config(case: Case, base: Path, work: Path) -> None:
    """A model's config.json, read and its weights' headers compared."""
    from dsa_compile.frontend.build import load_spec
    from dsa_compile.weights.checkpoint import Checkpoint

    model = bases.copy(base, "model", work)
    path = model / "config.json"
    replace(path, mutated_bytes(case, path.read_bytes()))
    spec = load_spec(model)
    Checkpoint.open(model, spec, range(min(spec.num_hidden_layers, 2)))


def compiled(case: Case, base: Path, work: Path) -> None:
    """A damaged model directory, compiled, and what comes of it served."""
    import dsa_compile

    model = bases.copy(base, "model", work)
    if case.rng().random() < 0.6:
        path = model / "config.json"
        replace(path, mutated_bytes(case, path.read_bytes()))
    else:
        for rng in case.rngs():
            mutate_tree(model, rng)
    options = case.rng("options").choice(({}, {"weights": "none"}, {"weights": "pack"}))
    dsa_compile.compile(model, work / "out", recipe="fp32", **options)
    if options != {"weights": "none"}:
        _serve(work / "out")


def checkpoint(case: Case, base: Path, work: Path) -> None:
    """Headers and index of a checkpoint; what opens must be read without error."""
    import torch

    from dsa_compile.frontend.build import load_spec
    from dsa_compile.weights.checkpoint import Checkpoint

    model = bases.copy(base, "model", work)
    spec = load_spec(model)
    kind = case.rng("kind").random()
    if kind < 0.4:
        path = model / "model.safetensors.index.json"
        replace(path, mutated_bytes(case, path.read_bytes()))
    elif kind < 0.8:
        path = case.rng("file").choice(sorted(model.glob("*.safetensors")))
        replace(path, _mutated_header(case, path.read_bytes()))
    else:
        for rng in case.rngs():
            mutate_tree(model, rng)
    opened = Checkpoint.open(model, spec, range(2))
    opened.hash_files()
    for name in ("model.norm.weight", "model.layers.1.mlp.gate.weight"):
        opened.read_into(name, torch.empty(opened.shape(name)))


_ENGINES: dict[Path, Any] = {}


def requests(case: Case, base: Path, work: Path) -> None:
    """Sampling parameters and prompts; a sound request beside them gets its tokens."""
    from dsa_compile.runtime import Engine, SamplingParams

    sound: dict[str, Any] = {
        "max_tokens": 3, "min_tokens": 0, "temperature": 0.7, "top_k": 5, "top_p": 0.9,
        "min_p": 0.0, "seed": 1, "repetition_penalty": 1.1, "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "logit_bias": None, "logprobs": 2, "stop": ["x", "yz"],
        "stop_token_ids": [3], "ignore_eos": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    document = mutated(
        case, {"params": sound, "prompt": [5, 6, 7], "text": "hello", "id": "a", "priority": 0}
    )
    document = document if isinstance(document, dict) else {"params": document, "prompt": document}
    if base not in _ENGINES:
        _ENGINES[base] = Engine.load(base / "fp32", num_gpu_blocks_override=8)
    engine = _ENGINES[base]
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    try:
        engine.add_request("sound", PROMPTS[0], greedy)
        params = document.get("params")
        made = SamplingParams(**params) if isinstance(params, dict) and _named(params) else params
        prompt = document.get(case.rng("prompt").choice(("prompt", "text")), [1])
        engine.add_request(document.get("id", "b"), prompt, made, document.get("priority", 0))
        done: Any = {}
        while engine.has_unfinished():
            done |= {out.request_id: out.token_ids for out in engine.step() if out.finished}
        if done["sound"] != _expected(base, "fp32")[0][0]:
            raise Finding(f"a sound request beside it got {done['sound']}")
        engine.generate([prompt], made)
        engine.abort(prompt)
    finally:
        try:
            for request in list(engine._live):
                engine.abort(request.request_id)
            engine.drain()
        except BaseException:
            del _ENGINES[base]
            raise


def _named(params: dict[str, Any]) -> bool:
    from dsa_compile.runtime import SamplingParams

    # A field of another name is a TypeError, as for any function.
    return set(params) <= set(SamplingParams.__dataclass_fields__)


def arguments(case: Case, base: Path, work: Path) -> None:
    """Command lines: options with odd values, through the commands' own parsers."""
    from dsa_compile.cli import generate

    argv = [str(base / "fp32"), "--prompt", "hello", "--max-tokens", "2", "--temperature", "0.5"]
    argv += [
        "--top-p",
        "0.9",
        "--stop",
        "x",
        "--num-gpu-blocks-override",
        "4",
        "--seed",
        "3",
        "--json",
    ]
    document = mutated(case, {"argv": argv})
    argv = document.get("argv") if isinstance(document, dict) else None
    if not isinstance(argv, list):
        return
    if not all(isinstance(text, str) and "\0" not in text for text in argv):
        return  # not what an operating system hands over
    argv = [text.replace("\ud800", "\udce9") for text in argv]  # Latin-1 as Python decodes it
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = generate.main(argv)
        except SystemExit as exit:  # --help
            status = int(exit.code or 0)
    if status not in (0, 1, 2) or "Traceback" in err.getvalue():
        raise Finding(f"exit status {status}: {err.getvalue()[-300:]}")


TARGETS: dict[str, Callable[[Case, Path, Path], None]] = {
    target.__name__: target
    for target in (
        *(manifest, listed, packed_weights, unsealed, records, measured, config, compiled),
        *(checkpoint, requests, arguments),
    )
}
"""By name."""


def run_case(case: Case, base: Path, work: Path) -> str:
    """Run a case in an empty folder.

    Returns:
        What came of it: ``accepted``, or ``refused: …`` with the error's text.

    Raises:
        BaseException: a finding.
    """
    from dsa_compile.errors import UserError

    try:
        TARGETS[case.target](case, base, work)
    except UserError as error:
        text = str(error)
        if len(text) > 2500:
            raise Finding(f"an error of {len(text)} characters: {text[:300]}") from error
        return f"refused: {text}"
    finally:
        sys.stdout.flush()
    return "accepted"
