"""Signed requests: the HTTP client reads S3, Google Cloud Storage and Azure with the credentials of their libraries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import isawaitable
from typing import Any, NamedTuple, TypeAlias

from wds_datapipes.io.daemon_threads import start_call, wait_for
from wds_datapipes.io.remote.filesystem import RemotePath
from wds_datapipes.io.remote.http import HttpClient

#: For how many seconds a token is used: Google's library renews one only 225 seconds before it expires.
TOKEN_S = 180.0
#: The version of Azure's interface, and the scope of its tokens.
AZURE_VERSION, AZURE_SCOPE = "2021-08-06", "https://storage.azure.com/.default"


class SignedRequest(NamedTuple):
    """The URL of a file, and the options of `HttpClient` to request it."""

    url: str
    options: dict[str, Any]


Sign: TypeAlias = Callable[[Any, str, int], SignedRequest]
"""Signs the requests for a path of a file system, for a number of seconds; `FileSystem.sign` names the function."""


def sign_s3(filesystem: Any, path: str, valid_s: int) -> SignedRequest:
    """Sign the query of the URL, with any kind of credentials, such as those of a profile, a role or an instance."""
    url = filesystem.sign(path, expiration=valid_s, **filesystem.req_kw)
    authority = filesystem.client_kwargs.get("verify", filesystem.session.get_config_variable("ca_bundle"))
    headers = {"x-amz-request-payer": filesystem.req_kw["RequestPayer"]} if filesystem.req_kw else {}
    return SignedRequest(url, {"headers": headers, "ca_file": None if authority is True else authority})


def sign_google(filesystem: Any, path: str, _valid_s: int) -> SignedRequest:
    """Sign with a token, unless access is anonymous."""
    headers: dict[str, str] = {}
    filesystem.credentials.apply(headers)
    payer = filesystem.requester_pays
    query = f"&userProject={payer if isinstance(payer, str) else filesystem.project}" if payer else ""
    return SignedRequest(filesystem.url(path) + query, {"headers": headers})


def sign_azure(filesystem: Any, path: str, valid_s: int) -> SignedRequest:
    """Sign the query of the URL if there is a key or a signature; otherwise, use a token."""
    headers = {"x-ms-version": AZURE_VERSION}
    if filesystem.account_key or "AccountKey=" in (filesystem.connection_string or ""):
        return SignedRequest(filesystem.url(path, expires=valid_s), {"headers": headers})
    container, blob, _ = filesystem.split_path(path)
    url = filesystem.service_client.get_blob_client(container, blob).url
    if filesystem.credential is not None and not filesystem.sas_token:

        async def token() -> Any:
            found = filesystem.credential.get_token(AZURE_SCOPE)
            return await found if isawaitable(found) else found

        from fsspec.asyn import sync  # type: ignore[import-untyped]  # it carries no types

        headers["Authorization"] = f"Bearer {sync(filesystem.loop, token).token}"
    return SignedRequest(url, {"headers": headers})


class RequestSigner:
    """Signs the requests for a file and renews the signature after `Timeouts.signing_s`; it is thread-safe.

    Args:
        remote: the path of the file.
        sign: signs the requests for it.
        clock: returns the time in seconds.
    """

    def __init__(self, remote: RemotePath, sign: Sign, clock: Callable[[], float] = time.monotonic) -> None:
        self._remote, self._clock, self._until = remote, clock, 0.0
        self._sign = partial(sign, remote.filesystem, remote.path, int(remote.timeouts.signature_s))
        self._signed: tuple[HttpClient, str] | None = None
        self._lock = threading.Lock()

    def __call__(self) -> tuple[HttpClient, str]:
        """Return a client, and the URL to request from it.

        Raises:
            TooSlowError: new credentials take too long.
            Exception: any error of the store's library.
        """
        with self._lock:
            if self._signed is None or self._clock() >= self._until:
                # New credentials may come from a server.
                limits = self._remote.timeouts
                url, options = wait_for(start_call(self._sign), limits.silent_s)
                self._signed = HttpClient("", options, limits), url
                has_token = any(name.lower() == "authorization" for name in options.get("headers", ()))
                most_s = TOKEN_S if has_token else limits.signature_s / 2
                self._until = self._clock() + min(limits.signing_s, most_s)
            return self._signed


def signer_of(remote: RemotePath) -> RequestSigner | None:
    """Return an object that signs the requests for a file; None if its library must read it."""
    file_system, options = remote.file_system, remote.options
    if not file_system.sign or not {*file_system.library_only}.isdisjoint(_names_in(options)):
        return None
    if (options.get("client_kwargs") or {}).get("verify") is False:
        return None
    return RequestSigner(remote, globals()[file_system.sign])


def _names_in(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of options and nested options."""
    for name, value in options.items():
        yield name
        if isinstance(value, Mapping):
            yield from _names_in(value)
