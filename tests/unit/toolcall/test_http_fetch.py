"""`http_fetch`: what it refuses, at any redirect, and what it makes of a page."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.unit.toolcall.support import run_one
from toolcall import Executor, Outcome, Tool, ToolResult
from toolcall.tools.http_fetch import http_fetch_tool
from toolcall.tools.plain_text import html_to_text


def call(tool: Tool, url: str) -> ToolResult:
    return asyncio.run(run_one(Executor([tool]), tool, url=url))


@contextmanager
def server(pages: dict[str, tuple[int, dict[str, str], bytes]]) -> Iterator[tuple[str, list[str]]]:
    """`host:port` of a server on this machine, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(f"{self.headers['Host'].partition(':')[0]}{self.path}")
            status, headers, body = pages.get(self.path, (404, {}, b""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{httpd.server_port}", asked
        httpd.shutdown()
        thread.join()


def page(body: str, kind: str = "text/html", **headers: str) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": kind, **headers}, body.encode()


def test_a_listed_host_s_page_is_fetched_as_text():
    head = "<html><head><title>T</title><style>p{}</style></head>"
    html = f"{head}<body><p>One &amp; two<script>x()</script></p></body>"
    with server({"/": page(html)}) as (host, _):
        result = call(http_fetch_tool([host]), f"http://{host}/")
    assert (result.outcome, result.text) == (Outcome.OK, "T\nOne & two")


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "http://evil-example.org/",
        "http://example.org.evil.com/",
        "http://example.org:8080/",
        "http://example.org@evil.com/",
        "http://user:password@example.org/",
        "ftp://example.org/",
        "file:///etc/passwd",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://2130706433/",
        "http://sub.example.org/",
        "example.org",
        "http://",
        "",
    ],
)
def test_what_is_not_listed_is_refused_before_any_request(monkeypatch, url):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail("it was looked up"))
    result = call(http_fetch_tool(["example.org"]), url)
    assert result.outcome is Outcome.TOOL_ERROR


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "::1",
        "::ffff:10.0.0.1",
        "fd00::1",
        "0.0.0.0",
    ],
)
def test_a_listed_name_that_leads_to_a_private_address_is_refused(monkeypatch, address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    public = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80))
    private = (family, socket.SOCK_STREAM, 6, "", (address, 80))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [public, private])
    result = call(http_fetch_tool(["*.example.org"]), "http://www.example.org/")
    assert result.text == f"www.example.org is at {address}, which is not a public address"


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch):
    """A name whose answer changes between the check and the connection gains nothing."""
    with server({"/": page("hello", "text/plain")}) as (host, asked):
        port = int(host.partition(":")[2])
        looked_up: list[str] = []
        real = socket.getaddrinfo

        def look_up(name: Any, *args: Any, **options: Any) -> Any:
            looked_up.append(name)
            return real("127.0.0.1" if name == "name.test" else name, *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        result = call(http_fetch_tool([f"name.test:{port}", "127.0.0.1"]), f"http://name.test:{port}/")
    assert result.text == "hello"
    assert looked_up.count("name.test") == 1
    assert asked == ["name.test/"]


@pytest.mark.parametrize("target", ["http://example.com/", "file:///etc/passwd", "//example.com/x"])
def test_a_redirect_away_from_the_list_is_refused(target):
    with server({"/": (302, {"Location": target}, b"")}) as (host, _):
        result = call(http_fetch_tool([host]), f"http://{host}/")
    assert result.outcome is Outcome.TOOL_ERROR


def test_redirects_on_the_list_are_followed_but_not_for_ever():
    pages = {
        "/": (302, {"Location": "/a"}, b""),
        "/a": page("here", "text/plain"),
        "/loop": (302, {"Location": "/loop"}, b""),
    }
    with server(pages) as (host, asked):
        tool = http_fetch_tool([host])
        assert call(tool, f"http://{host}/").text == "here"
        assert call(tool, f"http://{host}/loop").text.endswith("redirects more than 5 times")
    assert len(asked) == 2 + 6


def test_large_pages_are_cut_with_a_note():
    with server({"/": page("x" * 5000, "text/plain")}) as (host, _):
        result = call(http_fetch_tool([host], max_bytes=100), f"http://{host}/")
    assert result.text == "x" * 100 + "\n[cut after 100 bytes]"


def test_compressed_bodies_pictures_and_missing_pages_are_told():
    pages = {"/zip": page("x", "text/plain", **{"Content-Encoding": "gzip"}), "/png": page("x", "image/png")}
    with server(pages) as (host, _):
        tool = http_fetch_tool([host])
        assert call(tool, f"http://{host}/png").text == f"http://{host}/png is image/png, not text"
        assert call(tool, f"http://{host}/none").text == f"http://{host}/none: status 404 Not Found"
        assert call(tool, f"http://{host}/zip").outcome is Outcome.INFRASTRUCTURE


def test_a_server_that_hangs_is_a_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        result = call(http_fetch_tool([host], timeout=0.05), f"http://{host}/")
    assert result.outcome is Outcome.TIMEOUT


def test_no_hosts_is_refused_when_the_tool_is_made():
    with pytest.raises(ValueError, match="name the allowed hosts"):
        http_fetch_tool([])


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("no html at all", "no html at all"),
        ("<ul><li>a<li>b</ul>", "a\nb"),
        ("<p>a\n   b</p>", "a\nb"),
        ("<script>1<p>hidden</p></script>seen", "seen"),
        ("<style>never closed", ""),
        ("a<br/>b &lt;c&gt;", "a\nb <c>"),
        ("<<<>>><", "<<<>>><"),
    ],
)
def test_html_becomes_its_words(html, text):
    assert html_to_text(html) == text
