"""Requests that cannot be served, and one whose numbers are not finite."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsa_compile.cli import generate as generate_cli
from tests.artifact.building import edit_manifest, sha256
from tests.e2e.bad_input.damage import GREEDY

POISONED = 300  # a token id that the clean prompts do not hold


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
            ["--prompt-ids", " ".join(["7"] * 40), "--num-gpu-blocks-override", "2"],
            "exceed the cache's 32 tokens (2 blocks of 16)",
        ),
        (
            ["--prompt-ids", "7", "--num-gpu-blocks-override", "0"],
            "--num-gpu-blocks-override must be an integer >= 1",
        ),
        (
            ["--prompt-ids", "7", "--num-gpu-blocks-override", "9" * 30],
            "must be from 1 to 134217727",
        ),
        (
            ["--prompt-ids", "7", "--max-num-batched-tokens", "0"],
            "--max-num-batched-tokens must be an",
        ),
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
