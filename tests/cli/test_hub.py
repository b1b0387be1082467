"""Models of the Hub: from a local cache, and downloaded from a server of our own."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

NAME, COMMIT = "maker/tiny", "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"model_type": "deepseek_v32", "num_hidden_layers": 3}
WEIGHT_MAP = {
    "model.embed_tokens.weight": "model-1.safetensors",
    "model.layers.0.mlp.weight": "model-1.safetensors",
    "model.layers.1.mlp.weight": "model-2.safetensors",
    "model.layers.2.mlp.weight": "model-3.safetensors",
    "lm_head.weight": "model-4.safetensors",
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "README.md": b"a card",
    "model.safetensors.index.json": json.dumps({"weight_map": WEIGHT_MAP}).encode(),
    **{name: name.encode() for name in set(WEIGHT_MAP.values())},
}
_TREE = [
    {"type": "file", "path": name, "oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
    for name, data in FILES.items()
]
# The directory that a request leaves, and which of its files are there; no torch on the way.
CODE = """\
import json, sys
from dsa_compile.facts.config import CompileConfig
from dsa_compile.errors import UserError
from dsa_compile.lowering.request import check_request
model, out, options = json.loads(sys.argv[1])
revision = options.pop("revision", None)
try:
    found = check_request(model, out, CompileConfig(**options), revision=revision)
    files = sorted(path.name for path in found.model_dir.iterdir())
    print(json.dumps([str(found.model_dir), files, found.notes]))
except UserError as error:
    print(json.dumps(str(error)))
assert not {"torch", "transformers"} & set(sys.modules)
"""


class _Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        parts = self.path.partition("?")[0].split("/")
        if self.path.startswith(f"/api/models/{NAME}/tree/"):
            self._send(
                200, json.dumps(self.server.tree).encode(), {"Content-Type": "application/json"}
            )
        elif self.path.startswith("/api/models/"):
            self._api("/".join(parts[3:5]), parts[6] if len(parts) > 6 else "main")
        elif (name := parts[-1]) in FILES:
            self.server.fetched.append(name)  # type: ignore[attr-defined]
            etag = hashlib.sha1(FILES[name]).hexdigest()
            head = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
            self._send(200, FILES[name] if body else b"", head, len(FILES[name]))
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _api(self, name: str, revision: str) -> None:
        if name == "maker/gated":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif name == "maker/broken":
            self._send(500, b"{}", {})
        elif name != NAME:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [{"rfilename": file} for file in FILES]
            info = {"_id": "1", "id": NAME, "sha": COMMIT, "siblings": siblings, "private": False}
            self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, body: bytes, head: dict[str, str], size: int | None = None) -> None:
        self.send_response(code)
        for name, value in head.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        return None


@pytest.fixture
def endpoint() -> Iterator[ThreadingHTTPServer]:
    """A server that answers as the Hub does; ``fetched`` lists the files asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.fetched, server.tree = [], _TREE  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(folder: Path, model: str, environment: dict[str, str], **options: object) -> object:
    """Result of a request for a model: directory, files and notes, or its refusal."""
    given = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
    given = {name: value for name, value in given.items() if name != "HF_HUB_OFFLINE"}
    argv = [sys.executable, "-c", CODE, json.dumps([model, "out", options])]
    done = subprocess.run(
        argv, capture_output=True, text=True, cwd=folder, env={**given, **environment}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def online(server: ThreadingHTTPServer) -> dict[str, str]:
    return {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}"}


OFFLINE = {"HF_HUB_OFFLINE": "1"}


def test_a_model_is_downloaded_once_and_only_what_is_needed(
    endpoint: ThreadingHTTPServer, tmp_path: Path
) -> None:
    small = ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    path, files, notes = ask(tmp_path, NAME, online(endpoint), weights="none")
    assert files == small
    assert Path(path).name == COMMIT
    assert notes[-1].startswith(f"{NAME} at {COMMIT[:12]} of the Hub: ")
    _, files, _ = ask(tmp_path, NAME, online(endpoint), layers=[1, 1])
    assert files == sorted([*small, *(f"model-{n}.safetensors" for n in (1, 2, 4))])
    endpoint.fetched.clear()  # type: ignore[attr-defined]
    again, files, _ = ask(tmp_path, NAME, OFFLINE, layers=[1, 1])
    assert (again, len(files)) == (path, 6)
    assert endpoint.fetched == []  # type: ignore[attr-defined]
    says = ask(tmp_path, NAME, OFFLINE, layers=[0, 2])
    assert "not in the local Hub cache, and HF_HUB_OFFLINE is set" in str(says)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("maker/absent", {}, "maker/absent: there is no such directory here and no such model on"),
        ("maker/gated", {}, "access must be granted first: accept its terms on http"),
        ("maker/broken", {}, "maker/broken: "),
        (NAME, {"revision": "nightly"}, "has no revision 'nightly'; give a branch, a tag or a"),
        ("maker/two--dashes", {}, "a name that the Hub does not allow"),
        (NAME, {"layers": [2, 3]}, "--layers 2-3: the model has layers 0-2"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    endpoint: ThreadingHTTPServer, tmp_path: Path, model: str, options: dict[str, object], says: str
) -> None:
    message = ask(tmp_path, model, online(endpoint), **options)
    assert isinstance(message, str)
    assert says in message
    assert "\n" not in message
    wanted = [file for file in endpoint.fetched if file.endswith("safetensors")]  # type: ignore[attr-defined]
    assert wanted == []


@pytest.mark.slow
def test_a_file_that_would_leave_the_cache(endpoint: ThreadingHTTPServer, tmp_path: Path) -> None:
    leaving = [{**entry, "path": f"../../../../{entry['path']}"} for entry in _TREE]
    endpoint.tree = leaving  # type: ignore[attr-defined]
    message = ask(tmp_path, NAME, online(endpoint), weights="none")
    assert "a name that the Hub does not allow" in str(message)
    assert not list(tmp_path.glob("*.json"))


def test_offline_and_without_network(tmp_path: Path) -> None:
    message = ask(tmp_path, NAME, OFFLINE)
    assert message == (
        f"{NAME}: not in the local Hub cache, and HF_HUB_OFFLINE is set; unset it, or give a "
        "directory"
    )
    message = ask(tmp_path, NAME, {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert "http://127.0.0.1:9 cannot be reached; check the network, or give a directory" in message


def test_a_path_under_a_directory_that_is_here_is_no_name_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "maker").mkdir()
    message = ask(tmp_path, NAME, {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert str(message).startswith(f"{NAME}: no such directory; give a Hugging Face model")
