from pathlib import Path

import pytest

from dsa_compile.artifact import Artifact
from dsa_compile.errors import ArtifactError
from tests.artifact.building import Edit, edit_manifest, forge, refuses, set_field

FORGED: dict[str, tuple[Edit, str]] = {
    "newer version": (set_field("format_version", 8), "format version 8, this dsa-compile reads 7"),
    "no version": (lambda data: data.pop("format_version"), "no format_version"),
    "version a bool": (set_field("format_version", True), "no format_version"),
    "missing field": (lambda data: data.pop("caches"), r"manifest.json\.caches is missing"),
    "unknown field": (set_field("hook", "x"), "unknown field 'hook'"),
    "deep missing": (lambda data: data["files"][1].pop("size"), r"files\[1\]\.size is missing"),
    "wrong type": (set_field("files.0.size", "1"), r"files\[0\]\.size should be a whole number"),
    "bool for int": (set_field("block_size", True), "block_size should be a whole number"),
    "text for list": (set_field("regions", "dense"), "regions should be a list"),
    "list for object": (set_field("producer", []), "producer should be an object"),
    "no such MLP": (
        set_field("model.spec.kinds.0.mlp", "sparse"),
        r"kinds\[0\]\.mlp should be one of 'dense', 'experts'",
    ),
    "vocabulary": (set_field("model.spec.vocab_size", 10**9), "vocab_size=1000000000 must be from"),
    "no vocabulary": (set_field("model.spec.vocab_size", 0), "vocab_size=0 must be from 1"),
    "no group": (set_field("model.spec.n_group", 0), "n_group=0 must be from 1"),
    "end token": (set_field("model.spec.eos_token_ids", [-1]), "must name token ids"),
    "epsilon": (set_field("model.spec.rms_norm_eps", -1.0), "rms_norm_eps=-1.0 must be a positive"),
    "layers": (
        set_field("model.spec.num_hidden_layers", 3),
        "2 layer_kinds for num_hidden_layers=3",
    ),
    "escape": (set_field("passes.0.name", "\x1b[2Jred"), "holds the control character"),
    "surrogate": (set_field("passes.0.name", "\ud800"), "holds the control character"),
    "kind": (set_field("model.spec.layer_kinds", ["dense", "odd"]), "layer_kinds names a kind"),
    "pair": (set_field("model.spec.quantization.block", [1, 2, 3]), "block should be 2 entries"),
    "number for text": (
        set_field("plans.model.calls.0.vars.layer", 3),
        r"vars\.layer should be text",
    ),
    "absolute path": (set_field("files.0.path", "/etc/passwd"), "not a path inside"),
    "climbing path": (set_field("files.0.path", "../x"), "not a path inside"),
    "climbing later": (set_field("files.0.path", "graphs/../../x"), "not a path inside"),
    "backslash": (set_field("files.0.path", "graphs\\x"), "not a path inside"),
    "null byte": (set_field("files.0.path", "graphs/\0"), "holds the control character"),
    "empty path": (set_field("files.0.path", ""), "not a path inside"),
    "the manifest": (set_field("files.0.path", "manifest.json"), "not a path inside"),
    "twice": (lambda data: data["files"].append(data["files"][0]), "listed twice"),
    "hash": (set_field("files.0.sha256", "A" * 64), "no valid size and sha256"),
    "size": (set_field("files.0.size", -1), "no valid size and sha256"),
    "graph elsewhere": (set_field("regions.0.graph", "graphs/moe.long.json"), "has its graph in"),
    "source unlisted": (set_field("regions.0.source", "/etc/passwd"), "not listed in files"),
    "plan unlisted": (set_field("weights.plan", "../plan.json"), "not listed in files"),
    "tokenizer unlisted": (set_field("tokenizer", ["../../x"]), "not listed in files"),
    "listing unlisted": (set_field("passes.0.before", "/x"), "not listed in files"),
    "region name": (set_field("regions.0.name", "../dense"), "is not a region's name"),
    "region twice": (lambda data: data["regions"].append(data["regions"][0]), "listed twice"),
    "layer kind": (
        set_field("plans.model.calls.0.kind", "mtp"),
        "no region for kind 'mtp' of call layer_000",
    ),
    "layer number": (set_field("plans.model.calls.0.layer", 2), "the model has no layer 2"),
    "no plan": (lambda data: data["plans"].clear(), "plans: none is called 'model'"),
    "one name twice": (
        set_field("plans.model.calls.0.name", "layer_001"),
        "two calls have the same name",
    ),
    "name of a path": (
        set_field("plans.model.calls.0.name", "../x"),
        "'../x' is not the name of a call",
    ),
    "caches of nobody": (
        set_field("plans.model.calls.0.caches", "layer_009"),
        "shares the caches of 'layer_009'",
    ),
    "caches of no kind": (
        lambda data: data["caches"].update(mtp=[]),
        "caches: no region for kind 'mtp'",
    ),
    "cache dtype": (set_field("caches.moe.0.dtype", "object"), "no valid width and dtype"),
    "cache width": (set_field("caches.moe.0.width", 0), "no valid width and dtype"),
    "variants": (set_field("variants", ["short"]), "variants should be"),
    "prompt alone": (set_field("variants", ["long", "prompt"]), "variants should be"),
    "target": (set_field("compile.target", "sm_20"), "unknown target 'sm_20'"),
    "options": (set_field("compile.disable", ["x"]), "compile_digest does not match"),
    "block size": (set_field("block_size", 32), "block_size differs from compile"),
    "mode": (set_field("weights.mode", "none"), "weights.mode differs from compile.weights"),
    "no model": (set_field("weights.model_dir", None), "weights.model_dir goes with"),
    "weights climb": (set_field("weights.files.0.name", "../x"), "leaves its directory"),
    "weights absolute": (set_field("weights.files.0.name", "/x"), "leaves its directory"),
    "weights hash": (set_field("weights.files.0.sha256", ""), "no valid size and sha256"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_manifests_are_refused(artifact_dir: Path, case: str) -> None:
    edit, message = FORGED[case]
    edit_manifest(artifact_dir, edit)
    refuses(artifact_dir, message)


def test_packed_weights_must_be_listed(packed_dir: Path) -> None:
    edit_manifest(packed_dir, set_field("weights.files.0.size", 1))
    refuses(packed_dir, "layer_0.safetensors is not listed in files")


DEEP = b"[" * 100 + b"]" * 100
NOT_JSON = {
    "not UTF-8": (b'{"name": "\xff"}', "not UTF-8"),
    "cut short": (b'{"name": ', "not valid JSON"),
    "repeated key": (b'{"name": 1, "name": 2}', "'name' appears twice"),
    "nan": (b'{"name": NaN}', "NaN is not a number JSON has"),
    "infinite": (b'{"name": 1e999}', "1e999 does not fit"),
    "giant": (b'{"name": ' + b"9" * 100_000 + b"}", "whole number does not fit 64 bits"),
    "65 bits": (b'{"name": 9223372036854775808}', "whole number does not fit 64 bits"),
    "deep": (DEEP, "nested deeper than"),
    "very deep": (b"[" * 1_000_000, "nested too deeply"),
}


@pytest.mark.parametrize("case", NOT_JSON)
@pytest.mark.parametrize("name", ["manifest.json", "graphs/dense.json"])
def test_unusual_json_is_refused(artifact_dir: Path, name: str, case: str) -> None:
    content, message = NOT_JSON[case]
    if name == "manifest.json":
        (artifact_dir / name).write_bytes(content)
        refuses(artifact_dir, f"manifest.json: .*{message}")
        return
    forge(artifact_dir, name, content)
    artifact = Artifact.open(artifact_dir)
    with pytest.raises(ArtifactError, match=f"{name}: .*{message}"):
        artifact.region("dense")
