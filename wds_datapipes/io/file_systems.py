"""File systems of fsspec: what is special about each, such as its package, its time limits and how it is signed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from wds_datapipes.io.timeouts import Timeouts

SetTimeouts: TypeAlias = "Callable[[Mapping[str, Any], Timeouts], dict[str, Any]]"
"""Returns storage options with time limits in the form that a library expects; those of the user take precedence."""


def _set_none(options: Mapping[str, Any], _timeouts: Timeouts) -> dict[str, Any]:
    return dict(options)


@dataclass(frozen=True)
class FileSystem:
    """What is special about a file system of fsspec.

    Attributes:
        package: the package that it needs besides fsspec.
        extra: the extra of wds-datapipes that installs the package.
        is_on_network: whether all its files are on a network, so that ``allow_local_files=False`` allows them. Other
            file systems of fsspec read local files, unpack archives, or read from another URL.
        is_web: whether its URLs are files on web servers, which only our HTTP client reads.
        may_mix_versions: whether it requests ranges by name alone, so that a range may belong to another version of
            the file.
        is_thread_bound: whether two threads may not share a connection; each file has its own then.
        authority: how to configure a private certificate authority.
        sign: the function of ``io/remote/signing`` that signs requests, so that our HTTP client reads the files.
        library_only: the storage options that only the library can apply. If one is given, the library reads.
        set_timeouts: adds time limits to storage options.
    """

    package: str = ""
    extra: str = ""
    is_on_network: bool = False
    is_web: bool = False
    may_mix_versions: bool = False
    is_thread_bound: bool = False
    authority: str = "the environment variable SSL_CERT_FILE"
    sign: str = ""
    library_only: tuple[str, ...] = ()
    set_timeouts: SetTimeouts = _set_none


def _set_s3(options: Mapping[str, Any], timeouts: Timeouts) -> dict[str, Any]:
    read, connect = timeouts.response_s, timeouts.connect_s or timeouts.response_s
    limits = {name: value for name, value in (("connect_timeout", connect), ("read_timeout", read)) if value}
    # The default for URLs is an older signature, which newer buckets reject.
    return {**options, "config_kwargs": {"signature_version": "s3v4", **limits, **(options.get("config_kwargs") or {})}}


def _set_google(options: Mapping[str, Any], timeouts: Timeouts) -> dict[str, Any]:
    if "requests_timeout" in options or "timeout" in (options.get("session_kwargs") or {}):
        return dict(options)
    from aiohttp import ClientTimeout  # gcsfs uses aiohttp

    limits = timeouts.resolve()
    connect, read = timeouts.connect_s or limits.response_s, limits.response_s
    return {**options, "requests_timeout": ClientTimeout(total=limits.request_s, sock_connect=connect, sock_read=read)}


def _set_azure(options: Mapping[str, Any], timeouts: Timeouts) -> dict[str, Any]:
    limits = {"connection_timeout": timeouts.connect_s or timeouts.response_s, "read_timeout": timeouts.response_s}
    return {**{name: value for name, value in limits.items() if value}, **options}


def _set_sftp(options: Mapping[str, Any], timeouts: Timeouts) -> dict[str, Any]:
    response = timeouts.resolve().response_s
    names = dict.fromkeys(("banner_timeout", "auth_timeout", "channel_timeout"), response)
    return {"timeout": timeouts.connect_s or response, **names, **options}


def _set_ftp(options: Mapping[str, Any], timeouts: Timeouts) -> dict[str, Any]:
    limit = timeouts.response_s or timeouts.connect_s
    return {**({"timeout": limit} if limit else {}), **options}


#: The file systems with anything special, by all their schemes.
FILE_SYSTEMS: dict[str, FileSystem] = {
    scheme: file_system
    for schemes, file_system in {
        ("http", "https"): FileSystem(
            is_on_network=True, is_web=True, authority='storage_options={"ca_file": "authority.pem"}'
        ),
        ("s3", "s3a"): FileSystem(
            *("s3fs", "s3"),
            is_on_network=True,
            authority='storage_options={"client_kwargs": {"verify": "authority.pem"}}',
            sign="sign_s3",
            library_only=("proxies", "proxies_config", "client_cert", "SSECustomerKey"),
            set_timeouts=_set_s3,
        ),
        ("gs", "gcs"): FileSystem(
            *("gcsfs", "gs"),
            is_on_network=True,
            may_mix_versions=True,
            sign="sign_google",
            library_only=("session_kwargs", "use_mtls_endpoint"),
            set_timeouts=_set_google,
        ),
        ("az", "abfs", "abfss"): FileSystem(
            *("adlfs", "az"),
            is_on_network=True,
            may_mix_versions=True,
            sign="sign_azure",
            library_only=("request_session", "version_aware", "location_mode"),
            set_timeouts=_set_azure,
        ),
        ("hf",): FileSystem("huggingface_hub", "hf", is_on_network=True, may_mix_versions=True),
        ("ais",): FileSystem(is_on_network=True),
        ("ftp",): FileSystem(is_on_network=True, set_timeouts=_set_ftp),
        # paramiko mixes up the responses to two threads, and does not recover from a broken connection.
        ("sftp",): FileSystem("paramiko", "sftp", is_on_network=True, is_thread_bound=True, set_timeouts=_set_sftp),
        ("ssh",): FileSystem("paramiko", "sftp", is_thread_bound=True, set_timeouts=_set_sftp),
    }.items()
    for scheme in schemes
}
#: Any other one.
OTHER = FileSystem()

#: The names under which file systems report the version of a file.
VERSION_FACTS = (
    *("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "generation", "version_id"),
    *("blob_id", "created", "modified"),
)
#: Of these, the names whose values differ between any two versions, like a strong ETag.
VERSION_NUMBERS = ("generation", "version_id")
#: Of these, the names of an ETag, in the order of preference.
ETAGS = ("ETag", "etag", "blob_id")
#: Of these, the names of the time of the last modification.
TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


def file_system_of(scheme: str) -> FileSystem:
    """Return what is special about the file system of a scheme."""
    return FILE_SYSTEMS.get(scheme, OTHER)


def is_web(scheme: str) -> bool:
    """Whether the URLs of a scheme are files on web servers."""
    return file_system_of(scheme).is_web
