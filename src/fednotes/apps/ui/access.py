"""Access control for the local web UIs.

The server listens only on 127.0.0.1. The first address contains a random token, which
becomes a cookie. Browsers send cookies to every port of a computer, including those of
other users' programs, so all addresses begin with a random folder and the cookie is
restricted to it. The `Host` header of each request, and the `Origin` of each request
that changes something, must be those of this server, so that no other web site in the
same browser can read or change the pages.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"

# They forbid content from other hosts, inline scripts, frames and storage.
_SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Access:
    """The secrets that grant access to the pages of one server.

    Attributes:
        token: The secret of the first address and of the cookie.
        root: The random folder with which all addresses begin.
    """

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    root: str = field(default_factory=lambda: f"/{secrets.token_urlsafe(16)}")

    async def guard(
        self, request: Request, answer: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Answer a request that carries the cookie; refuse all others.

        Args:
            request: The request.
            answer: Answers an admitted request.
        """
        response = self._refuse_or_enter(request)
        if response is None:
            response = await answer(request)
        response.headers.update(_SECURITY_HEADERS)
        return response

    def _refuse_or_enter(self, request: Request) -> Response | None:
        """Return a refusal, or a redirect that sets the cookie; None admits a request.

        No refusal contains an address, because addresses begin with the secret folder.
        """
        from starlette.responses import PlainTextResponse

        _, port = request.scope.get("server") or (HOST, 80)
        host = request.headers.get("host", "")
        if host not in (f"{HOST}:{port}", f"localhost:{port}"):
            return PlainTextResponse(
                "unknown host name: use the address that the terminal shows", 421
            )
        changes_something = request.method not in ("GET", "HEAD")
        if changes_something and request.headers.get("origin") != f"http://{host}":
            return PlainTextResponse(
                "this request came from another web site and was ignored", 403
            )
        cookie_name = f"fednotes-{port}"
        if self._is_token(request.query_params.get("token", "")):
            return self._enter(request, cookie_name)
        if self._is_token(request.cookies.get(cookie_name, "")):
            return None
        return PlainTextResponse(
            "open the complete address that the terminal shows, with its token", 403
        )

    def _is_token(self, text: str) -> bool:
        """Return whether a text is the token; compare them in constant time."""
        return secrets.compare_digest(text.encode(), self.token.encode())

    def _enter(self, request: Request, cookie_name: str) -> Response:
        """Return a redirect to the address without the token, which sets the cookie."""
        from starlette.responses import RedirectResponse

        # With two slashes at its beginning, a path would name another host.
        path = f"/{request.scope['path'].lstrip('/')}"
        response = RedirectResponse(path, 303)
        response.set_cookie(
            cookie_name, self.token, path=self.root, httponly=True, samesite="strict"
        )
        return response
