"""Refuses redirects of object stores to other hosts.

obstore follows redirects and has no option against it; the header with a session token goes along. It does have a proxy, and a
list of hosts that it reaches without: the list is that of the allowed hosts, and the proxy refuses everything.
"""

from __future__ import annotations

import re
import socket
import threading
import weakref
from collections.abc import Collection
from contextlib import suppress
from urllib.request import getproxies

from headrace.core.store_url import StoreUrl
from headrace.core.threads import start_thread

# Addresses at which clouds serve the credentials of a machine or container.
_METADATA = ("169.254.0.0/16", "fd00:ec2::/32", "metadata.google.internal")
_DOMAINS = {"gs": ("googleapis.com",), "az": ("core.windows.net", "login.microsoftonline.com")}
_TARGET = re.compile(rb"[A-Z]+ (?:https?://)?(\[[^\]]*\]|[^/:?\s]*)")
_READ_S = 1.0


class RedirectGuard:
    """Proxy on the loopback interface that refuses every request and records its host. Its thread ends with this object.

    Behind a proxy of the environment there is no guard: that proxy decides which hosts are reached.

    Args:
        url: of the repository.
        hosts: of stores and their credentials by the environment, see `settings.store_hosts`.

    Attributes:
        client_options: for obstore.
    """

    def __init__(self, url: StoreUrl, hosts: Collection[str]) -> None:
        self.client_options: dict[str, str] = {}
        self._refused: list[str] = []
        if getproxies().keys() & {"http", "https", "all"}:
            return
        listener = socket.create_server(("127.0.0.1", 0))
        weakref.finalize(self, _close, listener)
        start_thread(threading.Thread(target=_refuse, args=(listener, self._refused), name="redirects", daemon=True))
        allowed = (*hosts, *_METADATA, *_DOMAINS.get(url.scheme, ()))
        self.client_options = {
            "proxy_url": f"http://127.0.0.1:{listener.getsockname()[1]}",
            "proxy_excludes": ",".join(allowed),
        }

    @property
    def refused_host(self) -> str:
        """The host of the first refused request since `reset`; "" without one."""
        return next(iter(self._refused), "")

    def reset(self) -> None:
        """Forget refused requests."""
        self._refused.clear()


def _close(listener: socket.socket) -> None:
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
    listener.close()


def _refuse(listener: socket.socket, refused: list[str]) -> None:
    with suppress(OSError):  # closed
        while True:
            client, _ = listener.accept()
            with client, suppress(OSError):
                client.settimeout(_READ_S)
                match = _TARGET.match(client.recv(8192))
                if match is not None:
                    refused.append(match[1].decode(errors="replace"))
                    client.sendall(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
