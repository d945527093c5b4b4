"""SFTP file system of fsspec that connects only to servers whose keys are known."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.implementations.sftp import SFTPFileSystem  # type: ignore[import-untyped]  # it carries no types
from fsspec.utils import infer_storage_options  # type: ignore[import-untyped]  # the same
from paramiko import AutoAddPolicy, SSHClient  # type: ignore[import-untyped]  # the same

#: The files in which OpenSSH looks for the keys of servers.
KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")


class KnownHostsFileSystem(SFTPFileSystem):  # type: ignore[misc]  # it carries no types
    """Refuses a server whose key is not in the files of known hosts; fsspec's file system accepts every key.

    Args:
        host: the server.
        known_hosts: a file with the keys of servers, instead of `KNOWN_HOSTS`; None accepts any server.
        options: see paramiko's ``SSHClient.connect``.
    """

    def _connect(self) -> None:
        options: dict[str, Any] = dict(self.ssh_kwargs)
        known = options.pop("known_hosts", KNOWN_HOSTS)
        self.client = SSHClient()  # rejects unknown keys
        if known is None:
            self.client.set_missing_host_key_policy(AutoAddPolicy())
        for file in [known] if isinstance(known, str | Path) else known or ():
            with suppress(FileNotFoundError):
                self.client.load_system_host_keys(str(Path(file).expanduser()))
        try:
            self.client.connect(self.host, **options)
            self.ftp = self.client.open_sftp()
        except BaseException:
            self.client.close()
            raise


def connect(url: str, options: dict[str, Any]) -> tuple[KnownHostsFileSystem, str]:
    """Return a file system with its own connection for a URL, and the path in it."""
    of_url = infer_storage_options(url)
    path = of_url.pop("path")
    del of_url["protocol"]
    return KnownHostsFileSystem(**{**of_url, **options, "skip_instance_cache": True}), path
