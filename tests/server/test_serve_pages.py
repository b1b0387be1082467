"""The pages on serving released models: their commands, run on small models of the same shape."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import blocks
from tests.docs.commands import ROOT
from tests.server.serving import serving

# Of two ranks on CPUs in place of eight GPUs: what is there the same goes without saying.
ONLY_GPUS = {"--collectives": "nccl"}
SMALLER = {"--tp": "2", "--ep": "2", "--max-model-len": "2K"}


def _command(page: str, program: str) -> list[str]:
    lines = [line for block in blocks(ROOT, page) for line in block.text.splitlines()]
    (found,) = [line for line in lines if line.startswith(program + " ") and "--tp" in line]
    return shlex.split(found)[1:]


def _request(page: str) -> dict[str, Any]:
    (found,) = [block.text for block in blocks(ROOT, page) if block.text.startswith("curl")]
    body = shlex.split(found)
    request: dict[str, Any] = json.loads(body[body.index("-d") + 1])
    return request


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("page", "family"),
    [("docs/serve-deepseek-v3.2.md", "deepseek"), ("docs/serve-glm-5.2.md", "glm")],
)
def test_from_the_model_to_the_first_answer(tmp_path: Path, page: str, family: str) -> None:
    model = tmp_path / "model"
    script = ROOT / "examples" / "small_production.py"
    subprocess.run([sys.executable, script, model, "--family", family], check=True)
    hub, *flags = _command(page, "dsa-serve")
    for name, value in (SMALLER | ONLY_GPUS).items():
        flags[flags.index(name) + 1] = value
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with serving(model, *flags, "--served-model-name", hub, env=env) as server:
        request = _request(page)
        assert request["model"] == hub
        if family == "glm":  # the small one's template has no tools
            del request["tools"]
        answer = server.post("/v1/chat/completions", **request | {"max_tokens": 8})
        assert answer.status == 200, answer.body
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert server.metric("dsa:spec_decode_num_draft_tokens_total") > 0
        if family == "deepseek":
            forced = request | {"tool_choice": "required", "max_tokens": 64, "temperature": 0}
            (choice,) = server.post("/v1/chat/completions", **forced).json()["choices"]
            assert not choice["message"]["content"]  # markup of a call is no content
        assert server.terminate() == 0
