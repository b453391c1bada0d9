"""Every route of the checkpoint server, as an OpenAPI document; tests compare it with the routes."""

from collections.abc import Mapping
from typing import Any

_STEP = {
    "name": "step",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^([0-9]{1,18}|latest)$"},
    "description": "A committed step, or latest.",
}
_LAST = {
    "name": "last",
    "in": "query",
    "schema": {"type": "integer", "minimum": 1},
    "description": "At most this many entries, the newest ones.",
}
_GENERATION = {
    "name": "generation",
    "in": "query",
    "schema": {"type": "integer", "minimum": 0},
    "description": "Steps of this generation only.",
}
_TENSORS = {
    "name": "tensors",
    "in": "query",
    "schema": {"type": "integer", "minimum": 0, "maximum": 1},
    "description": "0: without the list of tensors, which may be long.",
}
_TENSOR = {
    "name": "tensor",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1},
    "description": "A tensor's name, as the manifest lists it.",
}
_SLICE = {
    "name": "slice",
    "in": "query",
    "schema": {"type": "string", "maxLength": 2000},
    "description": "A part by index, BEGIN:END for each dimension, with commas between them: 0:10,:",
}
_OF = {
    "name": "of",
    "in": "query",
    "schema": {"type": "string", "enum": ["part", "whole"]},
    "description": "What the slice counts in: what this rank holds (part), or all of a sharded tensor.",
}
_BLOCKS = {
    "name": "blocks",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[0-9]{1,12}-[0-9]{1,12}$"},
    "description": "The first and the last block, as the manifest counts them.",
}
_ENCODING = {
    "name": "Accept-Encoding",
    "in": "header",
    "schema": {"type": "string"},
    "description": "zstd, or x-fabric-shuffle; of whole answers only, not of ranges.",
}
_RANGE = {
    "name": "Range",
    "in": "header",
    "schema": {"type": "string"},
    "description": "One range: bytes=0-99, bytes=100- or bytes=-99.",
}
_IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "schema": {"type": "string"},
    "description": "Only if the state still has this ETag.",
}
_IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "schema": {"type": "string"},
    "description": "Answer 304 if the state has this ETag.",
}
_WAIT = {
    "name": "wait_s",
    "in": "query",
    "schema": {"type": "number", "minimum": 0, "maximum": 60},
    "description": "Wait this many seconds for a gradient that is not yet published.",
}
_TAGS = (_IF_MATCH, _IF_NONE_MATCH)
_BODY = (_ENCODING, *_TAGS)


def _error(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }


def _get(summary: str, kind: str, *parameters: dict[str, Any], is_open: bool = False) -> dict[str, Any]:
    """Describe a GET operation that answers with ``kind``, and its refusals."""
    responses: dict[str, Any] = {"200": {"description": summary, "content": {kind: {}}}}
    if not is_open:
        responses["401"] = _error("No token, or not this job's.")
    if parameters:
        responses["400"] = _error("Something in the request is malformed.")
    if _STEP in parameters:
        responses["409"] = _error("That step is not held; `available` lists those that are.")
    if _TENSOR in parameters:
        responses["404"] = _error("The state has no tensor of that name.")
    if _BLOCKS in parameters:
        responses["404"] = _error("The state has no such blocks.")
    if _RANGE in parameters:
        responses["206"] = {"description": "The range.", "content": {kind: {}}}
        responses["416"] = _error("The range begins behind the last byte.")
    if _IF_MATCH in parameters:
        responses["412"] = _error("The server holds another state now.")
    if _IF_NONE_MATCH in parameters:
        responses["304"] = {"description": "The reader has this state already."}
    operation: dict[str, Any] = {"summary": summary, "parameters": list(parameters), "responses": responses}
    if is_open:
        operation["security"] = []
    return {"get": operation}


def _of_the_trainer(operation: dict[str, Any], others: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return ``operation``, which needs the trainer's process, with the refusals that follow from that."""
    refusals = {"409": "No trainer has attached, or it has ended.", **(others or {})}
    operation["get"]["responses"] |= {status: _error(text) for status, text in refusals.items()}
    return operation


_JSON, _BYTES, _TEXT = "application/json", "application/octet-stream", "text/plain"

DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {
        "title": "fabric checkpoint server",
        "version": "1",
        "description": "Snapshots of one worker's training state, and the gradients of the last steps.",
    },
    "security": [{"token": []}],
    "components": {
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        "schemas": {
            "Error": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {"type": "string"},
                    "available": {"type": "array", "items": {"type": "integer"}},
                    "gone": {"type": "boolean"},
                },
            }
        },
    },
    "paths": {
        "/healthz": _get("The process answers.", _JSON, is_open=True),
        "/metrics": _get("Prometheus' text format.", _TEXT, is_open=True),
        "/debug/state": _get("The trainer, the status, and every slot of shared memory.", _JSON),
        "/debug/stacks": _of_the_trainer(
            _get("The stacks of all threads of the trainer, and what the kernel says of them.", _JSON)
        ),
        "/debug/flight": _of_the_trainer(
            _get("Torch's recording of the trainer's collectives.", _JSON, _LAST),
            {"404": "The trainer has no recording.", "504": "The trainer did not answer in time."},
        ),
        "/debug/exchange": _of_the_trainer(
            _get("The trainer's recording of its newest exchanges with the other replicas.", _JSON),
            {"404": "The trainer has no recording.", "504": "The trainer did not answer in time."},
        ),
        "/v1/snapshots": _get("The snapshots held, oldest first.", _JSON),
        "/v1/snapshots/{step}/manifest": _get(
            "A snapshot's manifest.", _JSON, _STEP, _GENERATION, _TENSORS, *_TAGS
        ),
        "/v1/snapshots/{step}/data": _get(
            "The whole state, a safetensors file.", _BYTES, _STEP, _GENERATION, _RANGE, *_BODY
        ),
        "/v1/snapshots/{step}/blocks/{blocks}": _get(
            "Some blocks of the state, as its manifest cuts it.",
            _BYTES,
            _STEP,
            _BLOCKS,
            _GENERATION,
            _RANGE,
            *_BODY,
        ),
        "/v1/snapshots/{step}/tensors/{tensor}": _get(
            "One tensor's bytes, little-endian.",
            _BYTES,
            _STEP,
            _TENSOR,
            _SLICE,
            _OF,
            _GENERATION,
            _RANGE,
            *_BODY,
        ),
        "/v1/snapshots/{step}/statistics/{tensor}": _get(
            "Summary statistics of one tensor.", _JSON, _STEP, _TENSOR, _GENERATION
        ),
        "/v1/gradients": _get("The reduced gradients held, oldest first.", _JSON),
        "/v1/gradients/{step}": _get(
            "One step's reduced gradient.", _BYTES, _STEP, _GENERATION, _WAIT, _RANGE, *_BODY
        ),
    },
}
