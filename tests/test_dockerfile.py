"""The instructions of ``deploy/Dockerfile``, followed one by one in an empty folder, offline.

No builder is needed. Absolute paths stand below that folder, a second stage begins with an empty
one again, and what needs a system of its own (apt-get, useradd) only has its arguments recorded.
"""

import io
import json
import re
import shlex
import shutil
import socket
import string
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.installation import ROOT, add_dependencies, copy_checkout, offline, run
from tests.server.serving import serving

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
VENV = "opt/dsa"
RECORDED = ("apt-get", "useradd")


@dataclass
class Image:
    """What the instructions made.

    Attributes:
        folder: for everything; ``root`` in it stands for ``/``.
        arguments: given with ``--build-arg``.
        variables: of ARG and ENV, in this stage.
        settings: values of the other instructions, the last of each.
        recorded: calls of programs that are not run.
    """

    folder: Path
    arguments: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def recorded(self) -> str:
        return (self.folder / "recorded").read_text()

    def placed(self, text: str) -> str:
        """Text with absolute paths below the root; addresses stay."""
        return re.sub(r"(?<![\w:/}$.])/(?=\w)", f"{self.root}/", text)

    def follow(self, instruction: str, value: str) -> None:
        """Do what one instruction says."""
        match instruction:
            case "FROM":
                self._begin(value)
            case "ARG" | "ENV":
                self._set(value, self.arguments if instruction == "ARG" else {})
            case "COPY":
                self._copy(*value.split())
            case "RUN":
                run(["sh", "-ec", self.placed(value)], self.root, self.environment())
                if (self.root / VENV).exists() and not (self.root / VENV / "dependencies").exists():
                    add_dependencies(self.root / VENV)
            case _:
                self.settings[instruction] = value

    def environment(self) -> dict[str, str]:
        return offline(**self.variables)

    def _begin(self, value: str) -> None:
        if self.root.exists():
            self.root.rename(self.folder / self.settings["stage"])
        self.settings = {"stage": value.partition(" AS ")[2]}
        self.root.mkdir()
        self.variables = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin"}

    def _set(self, value: str, given: dict[str, str]) -> None:
        for pair in shlex.split(value):
            name, _, text = pair.partition("=")
            text = string.Template(self.placed(text)).substitute(self.variables)
            self.variables[name] = given.get(name, text)

    def _copy(self, source: str, *more: str) -> None:
        target = Path(self.placed(more[-1]))
        if stage := re.fullmatch("--from=(.+)", source):
            # links as they are: an environment's Python is one to the system's
            found = self.folder / stage[1] / more[0].lstrip("/")
            shutil.copytree(found, target, symlinks=True)
        else:
            assert source == "."
            copy_checkout(target)


def base_image(folder: Path) -> None:
    """Programs of the base image: this Python, and those whose calls are only recorded."""
    (folder / "bin").mkdir()
    texts = {"python": f'exec {sys._base_executable} "$@"'}  # type: ignore[attr-defined]
    texts |= dict.fromkeys(RECORDED, f'echo "${{0##*/}} $@" >> {folder / "recorded"}')
    for name, text in texts.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    parser = pytest.importorskip("dockerfile_parse").DockerfileParser
    folder = tmp_path_factory.mktemp("image")
    base_image(folder)
    made = Image(folder, {"TORCH": version("torch").partition("+")[0]})
    for each in parser(fileobj=io.BytesIO(DOCKERFILE.read_bytes())).structure:
        if made.root.exists() or each["instruction"] == "FROM":  # ARG before it is FROM's own
            made.follow(each["instruction"], each["value"])
    return made


@pytest.mark.slow
def test_the_image_serves_and_is_healthy(image: Image) -> None:
    assert [line.split()[:2] for line in image.recorded.splitlines()] == [
        ["apt-get", "update"],
        ["apt-get", "install"],
        ["useradd", "--create-home"],
    ]
    home = Path(image.placed(image.settings["WORKDIR"]))
    home.mkdir(parents=True)
    environment = image.environment()

    def inside(program: str, *words: str | Path) -> str:
        path = shutil.which(program, path=environment["PATH"])
        assert path is not None
        assert Path(path).is_relative_to(image.root)  # of the image, not of the machine
        return run([path, *map(str, words)], home, environment)

    inside("python", ROOT / "examples" / "small_random.py", home / "model")
    command = json.loads(image.settings["CMD"])
    artifact = Path(image.placed(command[0]))
    inside("dsa-compile", home / "model", "-o", artifact, "--target", "cpu")
    (entry,) = json.loads(image.settings["ENTRYPOINT"])
    program = [shutil.which(entry, path=environment["PATH"]) or ""]
    port = free_port()
    options = {"program": program, "cwd": home, "env": environment}
    with serving(artifact, *command[1:], "--port", str(port), **options) as server:
        words = json.loads(image.settings["HEALTHCHECK"].partition("CMD ")[2])
        exposed = image.settings["EXPOSE"]
        assert exposed in words[-1]
        inside(*(word.replace(exposed, str(port)) for word in words))
        answer = server.post("/v1/completions", prompt=[3, 1, 4], max_tokens=2)
        assert answer.status == 200
        assert server.terminate() == 0  # SIGTERM, as STOPSIGNAL says
    assert image.settings["STOPSIGNAL"] == "SIGTERM"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("text", "placed"),
    [
        ("python -m venv /opt/dsa", "python -m venv ROOT/opt/dsa"),
        ('pip install "/src[$extras]"', 'pip install "ROOT/src[$extras]"'),
        ("/opt/dsa/bin:$PATH", "ROOT/opt/dsa/bin:$PATH"),
        ("rm -rf /var/lib/apt/lists/*", "rm -rf ROOT/var/lib/apt/lists/*"),
        ("--index-url https://a.b/whl/cpu", "--index-url https://a.b/whl/cpu"),
    ],
)
def test_paths_stay_below_the_root(text: str, placed: str, tmp_path: Path) -> None:
    image = Image(tmp_path, {})
    assert image.placed(text) == placed.replace("ROOT", str(image.root))
