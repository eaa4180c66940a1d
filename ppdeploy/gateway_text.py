"""What the templates of the gateway print: refusals as OpenAI's clients read them, and HAProxy's words for the plan."""

from __future__ import annotations

import json
from typing import Any

from ppdeploy.plan.gateway import (
    CA,
    CONFIG,
    GET_PATHS,
    KEYS_MAP,
    MODELS_MAP,
    MOST_CONNECTIONS,
    PEER_CERTIFICATE,
    POST_PATHS,
    RUN_FOLDER,
    SOCKET,
    THREADS,
)
from ppdeploy.plan.types import GatewayModel, GatewayPeers, GatewayPlan, GatewayServer

HARD_STOP = 86400
"""Seconds after which what is left of an old process is ended: a day, longer than any answer takes."""

HEADER_ROOM = 1 << 16
"""Bytes in a buffer beside a body: the headers, and HAProxy's own book-keeping."""

RETRY_BYTES = 1 << 18
"""A request of this size, some 60,000 tokens, can go to another pipeline where another gateway says 503. HAProxy copies
a whole buffer for each request that it may have to send again: 0.1 ms of a core, and 10 ms with buffers of 16 MiB
(measured: docs/gateway.md)."""

MEMORY = "4G"
"""Of HAProxy, at most. All its connections with a buffer of 320 KiB each way have 2.5 GiB; with buffers of 16 MiB it is
250 of the largest requests at once. Without it, whoever reaches the port takes the host's memory with headers alone,
and the kernel ends the rank for it (measured: 40 connections without a key had 0.6 GiB)."""

SHORT_BYTES = 1 << 14
"""A request of this size is read before it is looked at: a buffer of HAProxy has it."""

PREFIX_PLACES = (
    "$.system",
    "$.instructions",
    "$.messages[0].content",
    "$.messages[1].content",
    "$.prompt",
    "$.input",
)
"""Where requests begin, for what a gateway takes; in a chat the first question tells conversations of one system prompt
apart, and stays the same as the chat goes on."""

PREFIX_BYTES = 1024
"""Of each place."""

REFUSALS: dict[str, tuple[str, str, str]] = {
    "not_found": ("There is no such path here.", "invalid_request_error", "unknown_url"),
    "no_key": ("The API key is missing, unknown, revoked or expired.", "invalid_request_error", "invalid_api_key"),
    "rate": ("This API key has made too many requests within a minute.", "requests", "rate_limit_exceeded"),
    "concurrency": ("This API key has too many requests under way.", "requests", "rate_limit_exceeded"),
    "method_get": ("This path is for GET.", "invalid_request_error", "method_not_supported"),
    "method_post": ("This path is for POST.", "invalid_request_error", "method_not_supported"),
    "length": ("The request has no Content-Length.", "invalid_request_error", "length_required"),
    "size": ("The request is too large.", "invalid_request_error", "request_too_large"),
    "model": ("The model does not exist, or the request names none.", "invalid_request_error", "model_not_found"),
    "queue": ("Too many requests are waiting for this model.", "server_error", "overloaded"),
    "down": ("No pipeline serves this model now.", "server_error", "unavailable"),
    "unhealthy": ("No pipeline serves now.", "server_error", "unavailable"),
}
"""What the gateway answers by a rule: message, type and code."""

ERRORS: dict[int, tuple[str, str, str, int]] = {
    400: ("The request is no valid HTTP.", "invalid_request_error", "bad_request", 0),
    408: ("The request was not complete in time.", "invalid_request_error", "request_timeout", 0),
    500: ("The gateway failed.", "server_error", "internal_error", 0),
    502: ("The pipeline ended before it answered.", "server_error", "bad_gateway", 2),
    503: ("No pipeline could take the request in time.", "server_error", "unavailable", 10),
    504: ("The pipeline did not answer in time.", "server_error", "timeout", 10),
}
"""What HAProxy answers by itself: message, type, code, and seconds after which to try again (0: never)."""


def error_body(message: str, kind: str, code: str) -> str:
    """Return an error as OpenAI's API writes it, on one line."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}, separators=(",", ":"))


def gateway_values(gateway: GatewayPlan) -> dict[str, Any]:
    """Return what the templates print as `node.gateway`."""
    return {
        "config": CONFIG,
        "socket": SOCKET,
        "run_folder": RUN_FOLDER,
        "keys_map": KEYS_MAP,
        "models_map": MODELS_MAP,
        "threads": THREADS,
        "connections": MOST_CONNECTIONS,
        "connections_each": MOST_CONNECTIONS // 4,
        # A connection of a client and one of a server for each request, and as many again after a reload.
        "files": 8 * MOST_CONNECTIONS,
        "memory": MEMORY,
        "hard_stop": max(HARD_STOP, gateway.timeout),
        "buffer_bytes": _buffer(gateway),
        "retry_on": "conn-failure 503" if gateway.several and not gateway.reads_bodies else "conn-failure",
        "short_bytes": SHORT_BYTES,
        "body_bytes": gateway.body_mib << 20,
        "bind": f"{gateway.address}:{gateway.port}",
        "certificate": gateway.certificate,
        "metrics_port": gateway.metrics_port,
        "timeout": gateway.timeout,
        "drain": gateway.drain,
        "rate": gateway.rate,
        "concurrency": gateway.concurrency,
        "by_prefix": gateway.balance == "prefix",
        "prefix_places": PREFIX_PLACES,
        "prefix_bytes": PREFIX_BYTES,
        "queue": gateway.queue,
        "get_paths": " ".join(GET_PATHS),
        "post_paths": " ".join(POST_PATHS),
        "refuse": {
            name: f"content-type application/json string '{error_body(*words)}'" for name, words in REFUSALS.items()
        },
        "errors": [
            {
                "status": status,
                "body": error_body(message, kind, code),
                "headers": f" hdr Retry-After {retry}" if retry else "",
            }
            for status, (message, kind, code, retry) in ERRORS.items()
        ],
        "routes": gateway.routes,
        "models_json": _models_json(gateway.models),
        "models": [_model(model) for model in gateway.models],
        "peers": _peers(gateway.peers, gateway) if gateway.peers else {},
    }


def _buffer(gateway: GatewayPlan) -> int:
    """Return the bytes of a buffer of HAProxy; 0: its own."""
    if gateway.reads_bodies:
        return (gateway.body_mib << 20) + HEADER_ROOM
    return RETRY_BYTES + HEADER_ROOM if gateway.several else 0


def _model(model: GatewayModel) -> dict[str, Any]:
    pipelines = ", ".join(server.pipeline for server in model.servers)
    return {
        "backend": model.backend,
        "names": list(model.names),
        "text": f"{model.names[0]}: {'pipelines' if len(model.servers) > 1 else 'pipeline'} {pipelines}",
        "servers": [{"name": server.pipeline, "line": _server_line(server)} for server in model.servers],
    }


def _server_line(server: GatewayServer) -> str:
    words = [server.pipeline, f"{server.address}:{server.port}", f"maxconn {server.most}"]
    if server.verify:
        words.append(f"ssl crt {PEER_CERTIFICATE} ca-file {CA} verify required verifyhost {server.verify}")
    else:
        words.append(f"port {server.health_port}")
    return " ".join(words)


def _peers(peers: GatewayPeers, gateway: GatewayPlan) -> dict[str, str]:
    own = next(server for model in gateway.models for server in model.servers if not server.verify)
    return {
        "bind": f"{peers.address}:{peers.port}",
        "certificate": PEER_CERTIFICATE,
        "ca": CA,
        "callers": " ".join(peers.callers),
        "pipeline": own.pipeline,
        "own": _server_line(own),
    }


def _models_json(models: tuple[GatewayModel, ...]) -> str:
    """Return the list of all models as vLLM writes it, as a log-format string: the time is HAProxy's."""
    entries = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "root": model.names[0],
            "parent": None if name == model.names[0] else model.names[0],
            "max_model_len": model.max_model_len,
        }
        for model in models
        for name in model.names
    ]
    text = json.dumps({"object": "list", "data": entries}, separators=(",", ":"))
    return text.replace("%", "%%").replace('"created":0', '"created":%[date]')
