"""Bodies made from the OpenAPI schema and then damaged: a 4xx or an answer, never a failure."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.serving import PATIENCE, Server, events

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PATHS = ("/v1/completions", CHAT, RESPONSES, "/tokenize", "/detokenize")
MOST = {CHAT: "max_tokens", RESPONSES: "max_output_tokens"}  # without it, up to the model's limit
# Of what clients may send instead of what the schema says.
ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(st.characters(), max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"])},
    optional={"content": TEXT | ANYTHING, "tool_calls": ANYTHING, "tool_call_id": ANYTHING},
)
ITEM_KINDS = ("message", "reasoning", "function_call", "function_call_output")
ITEM_FIELDS = ("role", "content", "summary", "call_id", "name", "arguments", "output")
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(ITEM_KINDS)}, optional=dict.fromkeys(ITEM_FIELDS, TEXT | ANYTHING)
)


@pytest.fixture(scope="module")
def schema(server: Server) -> dict[str, Any]:
    return server.get("/openapi.json").json()


def fields_of(schema: dict[str, Any], path: str) -> dict[str, Any]:
    reference = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = reference["schema"]["$ref"].rpartition("/")[2]
    return schema["components"]["schemas"][name]["properties"]


def value_of(schema: dict[str, Any], field: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values as the schema describes them, small ones."""
    if "anyOf" in field:
        return st.one_of([value_of(schema, option) for option in field["anyOf"]])
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        inner = schema["components"]["schemas"][name]["properties"]
        optional = {key: value_of(schema, option) for key, option in inner.items()}
        return st.fixed_dictionaries({}, optional=optional)
    if "enum" in field:
        return st.sampled_from(field["enum"])
    match field.get("type"):
        case "string":
            return TEXT
        case "integer":
            return st.integers(-2, 9)
        case "number":
            return st.floats(-2, 3)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(value_of(schema, field.get("items", {})), max_size=4)
        case "object":
            return st.dictionaries(st.text(max_size=5), ANYTHING, max_size=2)
    return ANYTHING


def bodies(schema: dict[str, Any], path: str) -> st.SearchStrategy[dict[str, Any]]:
    fields = {
        name: value_of(schema, field)
        if name not in ("messages", "input")
        else st.lists(MESSAGE if name == "messages" else MESSAGE | ITEM, max_size=4)
        for name, field in fields_of(schema, path).items()
    }
    required = {
        name: fields.pop(name)
        for name in ("prompt", "messages", "tokens", "input")
        if name in fields
    }
    fields["model"] = st.sampled_from(["tiny", "other"])
    if path in MOST:
        required[MOST[path]] = st.integers(-1, 9)
        del fields[MOST[path]]
    elif "completions" in path:
        fields["max_tokens"] = st.integers(-1, 9)
    return st.fixed_dictionaries(required, optional=fields)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(data=st.data())
@pytest.mark.parametrize("path", PATHS)
def test_damaged_bodies(server: Server, schema: dict[str, Any], path: str, data) -> None:
    body = data.draw(bodies(schema, path))
    for name in data.draw(st.lists(st.sampled_from(sorted(body)), max_size=1)) if body else []:
        body[name] = data.draw(ANYTHING)
    if path in MOST and not isinstance(body.get(MOST[path]), int):
        body[MOST[path]] = 3
    if type(seconds := body.get("timeout")) in (int, float) and 0 < seconds < PATIENCE:
        body["timeout"] = PATIENCE  # what a slow machine makes of less is no malformed body
    if isinstance(body.get("min_tokens"), int):
        body["min_tokens"] = min(body["min_tokens"], 9)
    raw = json.dumps(body).encode()
    if data.draw(st.integers(0, 4)) == 0:
        cut = data.draw(st.integers(0, len(raw)))
        raw = raw[:cut] + data.draw(st.binary(max_size=3)) + raw[cut:]
    answer = server.request("POST", path, raw, **{"content-type": "application/json"})
    if answer.status == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            *chunks, last = events(answer.body)
            if path == RESPONSES:
                assert last["type"] in ("response.completed", "response.incomplete"), last
                return
            assert last == "[DONE]"
            assert not any("error" in chunk for chunk in chunks), chunks[-1]
        return
    assert answer.status in (400, 404), (raw, answer)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_the_server_is_well_afterwards(server: Server) -> None:
    server.wait_for_idle()
    assert server.get("/health").json() == {"status": "ready", "restarts": 0}
    assert not any("Traceback" in line for line in server.log), "\n".join(server.log)
