"""lm-eval, aiperf and guidellm as their projects ship them, each where it is installed.

Both bring much with them, so they are in no extra: put their commands on the PATH.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.serving import Server
from tests.trained import trained_model

ROOT = Path(__file__).parents[2]
# Nothing is fetched from a hub.
ENV = {**os.environ, "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}


def command(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.slow
def test_lm_eval(server: Server, tmp_path: Path) -> None:
    """Questions of the recall that the model was trained for; it answers most of them."""
    program = command("lm_eval")
    (tmp_path / "demo").mkdir()
    items = tmp_path / "demo" / "recall.jsonl"
    script = ROOT / "examples" / "lm_eval" / "recall_items.py"
    subprocess.run([sys.executable, str(script), str(items)], check=True, cwd=ROOT)
    options = {
        "model": "tiny",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(trained_model()),
        "num_concurrent": "4",
        "max_retries": "1",
    }
    done = subprocess.run(
        [
            *(program, "--model", "local-completions", "--tasks", "dsa_recall_generate"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in options.items())),
            *("--include_path", str(script.parent), "--output_path", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**ENV, "HF_HOME": str(tmp_path / "hf")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    result = json.loads(file.read_text())["results"]["dsa_recall_generate"]
    assert result["exact_match,word"] > 0.5
    server.wait_for_idle()


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_aiperf(server: Server, tmp_path: Path, endpoint: str) -> None:
    program = command("aiperf")
    done = subprocess.run(
        [
            *(program, "profile", "--model", "tiny", "--url", server.url, "--streaming"),
            *("--endpoint-type", endpoint, "--tokenizer", str(trained_model()), "--ui", "none"),
            *("--concurrency", "2", "--request-count", "6", "--output-tokens-mean", "8"),
            *("--synthetic-input-tokens-mean", "32", "--artifact-dir", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENV,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"Request Count \(requests\) │ +6\.00", done.stdout), done.stdout[-3000:]
    server.wait_for_idle()


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["chat/completions", "completions", "responses"])
def test_guidellm(server: Server, tmp_path: Path, endpoint: str) -> None:
    program = command("guidellm")
    backend = f"kind=openai_http,target={server.url},request_format=/v1/{endpoint}"
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(program, "run", "--backend", backend, "--profile", "kind=concurrent,streams=2"),
            *("--constraint", "kind=max_requests,count=4", "--disable-progress"),
            *("--tokenizer", f"kind=hf_auto,model={trained_model()}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", f"kind=json,path={report}"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**ENV, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"]["successful"] == metrics["request_totals"]["total"] == 4
    assert metrics["output_token_count"]["successful"]["mean"] == 8
    server.wait_for_idle()
