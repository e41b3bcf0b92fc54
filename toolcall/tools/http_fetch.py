"""`http_fetch`: the text of a web page from a list of allowed hosts. Off unless a config names hosts.

Invariant: no request leaves for a host that is not listed, nor, at any redirect, for an address that is not
public unless the address itself is listed; the address that was checked is the one that is connected to.
Time, size and redirects are bounded. No proxy and no cookie of the environment is used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from toolcall.errors import ToolError, ToolUnavailable
from toolcall.registry import Tool, tool
from toolcall.tools.plain_text import html_to_text

MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_AGENT = "slipstream-http-fetch"


def http_fetch_tool(
    hosts: Sequence[str],
    *,
    timeout: float = 15.0,
    max_bytes: int = 1 << 20,
    max_concurrency: int = 16,
) -> Tool:
    """A tool that fetches pages of `hosts`.

    hosts: `example.org`, `*.example.org` for its subdomains, `example.org:8080` for a port other than 80 and
    443, or an address such as `10.0.0.7`, which alone makes a private address reachable.
    """
    if not hosts:
        raise ValueError(
            "http_fetch_tool: hosts is empty, so nothing could be fetched; name the allowed hosts"
        )
    fetcher = _Fetcher(tuple(host.lower() for host in hosts), max_bytes, timeout)

    async def http_fetch(url: str) -> str:
        return await fetcher.fetch(url)

    http_fetch.__doc__ = f"""Fetch a web page and return its text. Reachable hosts: {", ".join(hosts)}.

    Args:
        url: The page's address, beginning with http:// or https://.
    """
    return tool(timeout=timeout + 1, max_concurrency=max_concurrency, idempotent=True, retries=1)(http_fetch)


@dataclass(frozen=True)
class _Fetcher:
    hosts: tuple[str, ...]
    max_bytes: int
    timeout: float

    async def fetch(self, url: str) -> str:
        try:
            async with asyncio.timeout(self.timeout):
                async with httpx.AsyncClient(trust_env=False, timeout=self.timeout) as client:
                    return await self._follow(client, url)
        except httpx.TimeoutException as error:
            raise TimeoutError(f"{url} gave no answer in time") from error
        except httpx.HTTPError as error:
            raise ToolUnavailable(f"{url}: {error or type(error).__name__}") from error

    async def _follow(self, client: httpx.AsyncClient, url: str) -> str:
        place = self._parse(url)
        for _ in range(MAX_REDIRECTS + 1):
            request = await self._request(client, place)
            response = await client.send(request, stream=True)
            try:
                if response.status_code not in _REDIRECTS or "location" not in response.headers:
                    return await self._read(response, place)
                place = self._parse(str(place.join(response.headers["location"])))
            finally:
                await response.aclose()
        raise ToolError(f"{url} redirects more than {MAX_REDIRECTS} times")

    def _parse(self, url: str) -> httpx.URL:
        """Raises ToolError unless the URL is one that may be asked."""
        try:
            place = httpx.URL(url.strip())
        except (httpx.InvalidURL, ValueError, TypeError) as error:
            raise ToolError(f"{url!r} is not a URL: {error}") from None
        if place.scheme not in ("http", "https") or not place.host:
            raise ToolError(f"{url!r} must begin with http:// or https:// and name a host")
        if place.userinfo:
            raise ToolError(f"{url!r} has a user name in it, which is not allowed")
        if not self._listed(place):
            port = f":{place.port}" if place.port else ""
            raise ToolError(f"{place.host}{port} is not allowed; the hosts are: {', '.join(self.hosts)}")
        return place

    def _listed(self, place: httpx.URL) -> bool:
        host = place.host.lower().rstrip(".")
        wanted = host if place.port in (None, 80, 443) else f"{host}:{place.port}"
        return any(
            wanted == listed or (listed.startswith("*.") and wanted.endswith(listed[1:]))
            for listed in self.hosts
        )

    async def _request(self, client: httpx.AsyncClient, place: httpx.URL) -> httpx.Request:
        """To the address that was checked, in the host's name: a second look-up could give another."""
        address = await self._address(place.host, place.port or (443 if place.scheme == "https" else 80))
        headers = {"Host": place.netloc.decode("ascii"), "User-Agent": _AGENT, "Accept-Encoding": "identity"}
        return client.build_request(
            "GET", place.copy_with(host=address), headers=headers, extensions={"sni_hostname": place.host}
        )

    async def _address(self, host: str, port: int) -> str:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ToolUnavailable(
                f"the name {host} cannot be looked up: {error.strerror or error}"
            ) from error
        addresses = [str(entry[4][0]) for entry in found]
        for address in addresses:
            if not _is_public(address) and not self._lists_address(address):
                raise ToolError(f"{host} is at {address}, which is not a public address")
        return addresses[0]

    def _lists_address(self, address: str) -> bool:
        return any(listed == address or listed.rpartition(":")[0] == address for listed in self.hosts)

    async def _read(self, response: httpx.Response, place: httpx.URL) -> str:
        if response.status_code >= 500:
            raise ToolUnavailable(f"{place}: status {response.status_code} {response.reason_phrase}")
        if response.status_code >= 400:
            raise ToolError(f"{place}: status {response.status_code} {response.reason_phrase}")
        kind = response.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
        if not (kind.startswith("text/") or kind.endswith(("json", "xml"))):
            raise ToolError(f"{place} is {kind}, not text")
        body, cut = await self._body(response)
        text = body.decode(response.charset_encoding or "utf-8", "replace")
        if "html" in kind:
            text = html_to_text(text)
        note = f"\n[cut after {self.max_bytes} bytes]" if cut else ""
        return (text.strip() or "(the page has no text)") + note

    async def _body(self, response: httpx.Response) -> tuple[bytes, bool]:
        """At most `max_bytes`, as sent: a compressed body could unpack to any size."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ToolUnavailable(f"{response.url} sends compressed text although asked not to")
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) > self.max_bytes:
                return bytes(body[: self.max_bytes]), True
        return bytes(body), False


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)  # ::ffff:10.0.0.1 is 10.0.0.1
    return (mapped or parsed).is_global and not (mapped or parsed).is_multicast
