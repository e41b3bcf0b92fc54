"""An MCP server over HTTP with sessions, in a thread: the answers of `tests.mcp_by_hand`."""

from __future__ import annotations

import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from tests.mcp_by_hand import answer

PATIENCE_S = 60.0


class HandWrittenSite:
    """`with HandWrittenSite() as site`. `headers`: of every request. `opened`: sessions.

    A call with the text `no answer` or `half an answer` gets that and a closed connection; one with `slow`
    sets `slow` and waits for `go`.
    """

    def __init__(self, port: int = 0) -> None:
        self.headers: list[dict[str, str]] = []
        self.opened = 0
        self.refuse_calls_with = 0  # an HTTP status
        self.slow, self.go = threading.Event(), threading.Event()
        self._sessions: set[str] = set()
        self._server = _Server(("127.0.0.1", port), _Handler, site=self)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    def forget_sessions(self) -> None:
        self._sessions.clear()

    def reply(self, session: str | None, request: dict[str, Any]) -> tuple[int, str, dict[str, Any] | None]:
        """Status, session id and body."""
        method = request["method"]
        if "id" not in request:
            return 202, session or "", None
        failure = None
        status = 200
        if method == "initialize":
            session = uuid.uuid4().hex
            self._sessions.add(session)
            self.opened += 1
        elif session is not None and session not in self._sessions:
            status, failure = 404, {"code": -32600, "message": "Session not found"}
        elif method == "tools/call" and self.refuse_calls_with:
            return self.refuse_calls_with, "", None
        result = answer(method, request.get("params") or {})
        if result is None:
            failure = {"code": -32601, "message": "Method not found"}
        outcome = {"error": failure} if failure else {"result": result}
        return status, session or "", {"jsonrpc": "2.0", "id": request["id"], **outcome}

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(30)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any, site: HandWrittenSite) -> None:
        self.site = site
        super().__init__(*arguments)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, _Server)
        site = self.server.site
        site.headers.append(dict(self.headers))
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request.get("params", {}).get("arguments", {}).get("text")
        if text == "slow":
            site.slow.set()
            site.go.wait(PATIENCE_S)
        self.close_connection = text in ("no answer", "half an answer")
        if text == "no answer":
            return
        status, session, body = site.reply(self.headers.get("mcp-session-id"), request)
        content = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        if body is not None:
            self.send_header("Content-Type", "application/json")
        if session:
            self.send_header("mcp-session-id", session)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if text == "half an answer" else content)

    def log_message(self, *_: object) -> None:
        """Nothing to the terminal."""
