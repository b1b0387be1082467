"""The files of ``deploy/``: what Docker and Compose read, and the dashboard's metrics."""

import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsa_compile.cli.serve import _arguments
from tests.server.serving import Server

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dsa-serve.json"
DOCKERFILE = DEPLOY / "Dockerfile"
# https://docs.docker.com/reference/compose-file/services/, those that these files use
SERVICE_KEYS = {
    *("build", "cap_drop", "command", "depends_on", "deploy", "environment", "image", "ports"),
    *("profiles", "read_only", "restart", "security_opt", "shm_size", "stop_grace_period"),
    *("tmpfs", "volumes"),
}
COMPOSE = [DEPLOY / "compose.yaml", DEPLOY / "compose.cuda.yaml"]
# https://docs.docker.com/reference/dockerfile/
INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COMMENT", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK"),
    *("LABEL", "ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}


@pytest.fixture
def instructions() -> list[dict[str, Any]]:
    parser = pytest.importorskip("dockerfile_parse").DockerfileParser
    found = parser(fileobj=io.BytesIO(DOCKERFILE.read_bytes())).structure
    return [each for each in found if each["instruction"] != "COMMENT"]


def values(instructions: list[dict[str, Any]], name: str) -> list[str]:
    return [each["value"] for each in instructions if each["instruction"] == name]


def test_instructions_of_the_dockerfile(instructions) -> None:
    assert {each["instruction"] for each in instructions} <= INSTRUCTIONS
    stages = {image.split(" AS ")[1] for image in values(instructions, "FROM") if " AS " in image}
    sources = [re.search(r"--from=(\S+)", value) for value in values(instructions, "COPY")]
    assert {found.group(1) for found in sources if found} == stages == {"build"}
    assert not any(re.search(r":latest|^[^:]+$", image) for image in values(instructions, "FROM"))
    assert values(instructions, "USER") == ["dsa"]
    (stop,) = values(instructions, "STOPSIGNAL")
    assert stop == "SIGTERM"  # which drains


def test_builds_of_the_dockerfile(instructions) -> None:
    """Both stages know the variant, and what is installed exists."""
    assert values(instructions, "ARG").count("VARIANT=cpu") == 2
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    extras = set(",".join(re.findall(r"extras=\"?([\w,$]+)", DOCKERFILE.read_text())).split(","))
    assert extras - {"$extras"} == {"serve", "grammar", "otel", "cuda"}
    for extra in extras - {"$extras"}:
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
    for shell in values(instructions, "RUN"):
        done = subprocess.run(["sh", "-n"], input=shell, text=True, capture_output=True)
        assert done.returncode == 0, (shell, done.stderr)


def test_the_command_of_the_image(instructions) -> None:
    assert values(instructions, "ENTRYPOINT") == ['["dsa-serve"]']
    (command,) = values(instructions, "CMD")
    given = _arguments(json.loads(command))
    assert (given.artifact, given.host) == ("/artifact", "0.0.0.0")
    (check,) = values(instructions, "HEALTHCHECK")
    script = json.loads(check.partition("CMD ")[2])
    assert script[:2] == ["python", "-c"]
    compile(script[2], "healthcheck", "exec")
    assert ":8000/health'" in script[2]
    assert values(instructions, "EXPOSE") == ["8000"]


def services_of(file: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(file.read_text())["services"]


def test_compose_files() -> None:
    services = [item for file in COMPOSE for item in services_of(file).items()]
    for file in COMPOSE:
        assert set(yaml.safe_load(file.read_text())) <= {"name", "services"}
    for name, service in services:
        assert set(service) <= SERVICE_KEYS, name
        assert set(service.get("depends_on", ())) <= dict(services).keys(), name
        for volume in service.get("volumes", ()):
            host, _, _ = volume.partition(":")
            if host.startswith("."):
                assert (DEPLOY / host).is_file(), (name, host)
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), (name, port)
        if build := service.get("build"):
            variants = build["args"]["VARIANT"]
            assert service["image"] == f"dsa-serve:{variants}"
    served, cuda = (services_of(file)["serve"] for file in COMPOSE)
    assert _arguments(served["command"]).host == "0.0.0.0"
    built = DEPLOY / served["build"]["context"] / served["build"]["dockerfile"]
    assert built.resolve() == DOCKERFILE
    assert cuda["build"]["args"] == {"VARIANT": "cuda"}


@pytest.mark.parametrize("files", [COMPOSE[:1], COMPOSE])
def test_compose_accepts_them(files) -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    version = subprocess.run(["docker", "compose", "version"], capture_output=True)
    if version.returncode:
        pytest.skip("docker has no compose")
    chosen = [option for file in files for option in ("-f", str(file))]
    done = subprocess.run(
        ["docker", "compose", *chosen, "--profile", "monitoring", "config", "--quiet"],
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", "ARTIFACT": "/tmp"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_metric_of_the_dashboard_is_exported(server: Server) -> None:
    for stream in (False, True):
        server.post("/v1/completions", prompt="import os", max_tokens=3, stream=stream)
    page = server.get("/metrics").body.decode()
    exported = set(re.findall(r"^(dsa:\w+)", page, re.MULTILINE))
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    variables = [each["query"] for each in dashboard["templating"]["list"]]
    used = set(re.findall(r"dsa:\w+", json.dumps([expressions, variables])))
    assert len(used) > 20
    assert used <= exported, used - exported
    labels = {label for text in expressions for label in re.findall(r"by \(([\w, ]+)\)", text)}
    for label in {name.strip() for names in labels for name in names.split(",")}:
        assert f'{label}="' in page, label


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    ids = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        ids.add(panel["id"])
        for cell in (
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        ):
            assert cell[0] < 24
            assert taken.setdefault(cell, panel["title"]) == panel["title"]
    assert len(ids) == len(json.loads(DASHBOARD.read_text())["panels"])
