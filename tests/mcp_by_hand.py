"""An MCP server without the SDK, so that it starts in no time: `python mcp_by_hand.py [OPTION...]`.

Options: `stay` outlives the end of its input, with a child; `mute` never answers; `broken` says why on stderr
and ends. Speaks the 2025-06-18 protocol over stdio, one call at a time.
"""

import json
import os
import signal
import subprocess
import sys
import time

TOOLS = {
    "echo": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "getenv": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    "pids": {"type": "object", "properties": {}},
    "die": {"type": "object", "properties": {}},
    "nested": {
        "type": "object",
        "properties": {
            "place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    },
}
PAGES = [["echo", "getenv", "pids"], ["die", "nested"]]  # of the list of tools
child: subprocess.Popen[bytes] | None = None


def call(name, arguments):
    if name == "echo":
        return arguments["text"]
    if name == "getenv":
        return os.environ.get(arguments["name"], "")
    if name == "pids":
        return json.dumps([os.getpid(), *([child.pid] if child else [])])
    if name == "nested":
        return json.dumps(arguments)
    os._exit(3)


def answer(method, params):
    if method == "initialize":
        info = {"name": "by hand", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        page = int(params.get("cursor", 0))
        tools = [{"name": n, "description": f"The {n} tool.", "inputSchema": TOOLS[n]} for n in PAGES[page]]
        return {"tools": tools} | ({"nextCursor": str(page + 1)} if page + 1 < len(PAGES) else {})
    if method == "tools/call":
        return {"content": [{"type": "text", "text": call(params["name"], params.get("arguments", {}))}]}
    return None


def serve():
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request or "mute" in sys.argv:
            continue
        result = answer(request["method"], request.get("params") or {})
        outcome = {"error": {"code": -32601, "message": "no"}} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **outcome}), flush=True)


if __name__ == "__main__":
    if "broken" in sys.argv:
        print("no such map: atlantis", file=sys.stderr)
        sys.exit(1)
    if "stay" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    serve()
    if "stay" in sys.argv:
        time.sleep(600)
