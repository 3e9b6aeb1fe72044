"""The description of the HTTP interface: /openapi.json, and a page that shows it."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from elastic_reshard.supervisor.answers import Problem
from elastic_reshard.supervisor.api_examples import NAMES, examples
from elastic_reshard.supervisor.guard import PROBLEM, problem

__all__ = ["DOCS", "describe"]

_JSON: Final = "application/json"
_METHODS: Final = ("get", "put", "post", "delete", "patch")
# Without the token too.
_OPEN: Final = ("/v1/health", "/v1/ready")
_WHY: Final = {
    400: "the body is not JSON: Expecting value: line 1 column 1 (char 0)",
    401: "this supervisor wants its job's token: Authorization: Bearer <token>; see $ELASTIC_RESHARD_TOKEN",
    404: "no group 'engine-9'; there are engine-3, trainer",
    405: "DELETE is not for /v1/view",
    409: "publication p6.1 is committed: only one that moves can be abandoned",
    413: "the body is larger than 1048576 bytes; nothing was taken in",
    422: "body.within: Input should be greater than or equal to 0",
    500: "GET /v1/view failed: RuntimeError",
    503: "its journal was lost, and it decides nothing until its members are back: 2 of 4 members have said what they have",
}
_ABOUT: Final = """What people and programs ask of one job's supervisor.

Every call but /v1/health and /v1/ready brings the job's token (`Authorization: Bearer`). Errors are problem documents
(RFC 9457); `remedy` says what to do. Calls that change something may be named by `Idempotency-Key`: sent again under its name
such a call acts no second time and is answered alike, after a restart of the supervisor too (the last 2,048 are remembered).

WebSockets: /v1/events/stream?after=NUMBER&instance=INSTANCE tells events as they happen, each message an EventPage, first those
that came since; /v1/host is for watchdogs.
"""

# The page asks for the token once and keeps it for this window only. What it fetches from elsewhere sees the token, so that is
# named by its digest: another file is not run.
DOCS: Final = """<!doctype html>
<html><head><meta charset="utf-8"><title>elastic_reshard supervisor</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5.32.0/swagger-ui.css" crossorigin="anonymous"
 integrity="sha384-3nuX7df3EaAoiqLBeyS1Ola0Gpg9ryJKVtarubwfnA1cOH8AWHUdbPSIvEqPZ9VH"></head>
<body><div id="swagger-ui"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5.32.0/swagger-ui-bundle.js" crossorigin="anonymous"
 integrity="sha384-7xcoc6ZKDFF7Ek627QTC3Bg/K+5Y36NJ8MWAE43D2m6+3Sh9XO3tdsfHhrS8gNIQ"></script>
<script>
const token = prompt("the job's token ($ELASTIC_RESHARD_TOKEN)") || "";
SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#swagger-ui",
  requestInterceptor: (r) => { r.headers.Authorization = "Bearer " + token; return r; },
});
</script></body></html>
"""


def describe(app: FastAPI) -> None:
    """Let the application describe itself by `schema`, made when it is first asked for."""
    made: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not made:
            made.update(_schema(app))
        return made

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
    _, defined = models_json_schema([(Problem, "serialization")], ref_template="#/components/schemas/{model}")
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(defined["$defs"])
    for gone in ("HTTPValidationError", "ValidationError"):
        schemas.pop(gone, None)
    for path, operations in found["paths"].items():
        for method in _METHODS:
            if method in operations:
                _operation(path, method, operations[method])
    return found


def _operation(path: str, method: str, operation: dict[str, Any]) -> None:
    example = examples()[operation["operationId"]]
    if path in _OPEN:
        operation["security"] = [{}, *operation.get("security", ())]
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            parameter["example"] = NAMES[parameter["name"]]
    if example.sent is not None:
        sent = operation.setdefault("requestBody", {"content": {_JSON: {"schema": {}}}, "required": True})
        sent["content"][_JSON]["example"] = example.sent
    for code, answer in operation["responses"].items():
        if code.startswith("2") and _JSON in answer.get("content", {}):
            answer["content"][_JSON]["example"] = example.answered
    for status in _statuses(path, method, operation):
        operation["responses"][str(status)] = {
            "description": problem(status, "")["title"],
            "content": {
                PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}, "example": problem(status, _WHY[status])}
            },
        }


def _statuses(path: str, method: str, operation: dict[str, Any]) -> list[int]:
    """How else a call may be answered."""
    found = [401, 405, 422, 500, 503]
    named = any(p["in"] == "path" for p in operation.get("parameters", ()))
    if named or path == "/v1/groups/shrink":
        found.append(404)
    if method != "get":
        found += [400, 409, 413]
    return found
