"""A web page of all samples of a dataset, with filters and pages, served to browsers of this host."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
import numpy.typing as npt

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.cli._options import parse_bytes
from wds_datapipes.cli.show_sheet import POLICY, facts_of_dataset, sheet_as_html
from wds_datapipes.prepare.dataset_contents import DatasetContents
from wds_datapipes.prepare.preview_html import escape_text

#: Only browsers of this host are served, as there are no passwords.
HOST = "127.0.0.1"
#: The maximum number of connections. Each has a thread, and those of browsers are mostly idle.
CONNECTIONS = 32
#: The most classes in the list of the page.
CLASSES = 1000


class Filters(NamedTuple):
    """What is shown, as in the query of a URL.

    Attributes:
        key: a part of the key.
        label: the class.
        smallest: the minimum size, such as ``"10kB"``.
        largest: the maximum size.
        page: the number of the page, counted from 1.
    """

    key: str = ""
    label: str = ""
    smallest: str = ""
    largest: str = ""
    page: int = 1

    @classmethod
    def of(cls, query: str) -> Filters:
        """Parse the query of a URL.

        >>> Filters.of("key=cat&page=3")
        Filters(key='cat', label='', smallest='', largest='', page=3)

        Raises:
            WrongUse: the page is not a number.
        """
        given = {name: values[-1].strip() for name, values in parse_qs(query).items() if name in cls._fields}
        page = given.pop("page", "1")
        if not page.isdecimal() or len(page) > 12:
            raise WrongUse(f"The page must be a number, not {page!r}")
        return cls(**given, page=max(int(page), 1))

    def query(self, page: int) -> str:
        """Return the query of another page."""
        return urlencode({name: value for name, value in self._replace(page=page)._asdict().items() if value})


class SampleServer(ThreadingHTTPServer):
    """Serves pages of samples until it is shut down.

    Args:
        table: the samples.
        title: the title of the page.
        count: the number of samples on a page.
        port: the port, or 0 for any that is free.

    Attributes:
        url: the address of the page.

    Raises:
        WrongUse: the port is not free.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, table: DatasetContents, title: str, *, count: int, port: int) -> None:
        self.table, self.title, self.count = table, title, count
        self.classes = [name for name, _ in Counter(filter(None, table.classes)).most_common()]
        self.find = lru_cache(maxsize=16)(self._find)
        #: The open connections, by the time of their last answer, and whether each is being answered.
        self._answering: dict[Any, bool] = {}
        self._lock = threading.Lock()
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            advice = "Choose another port with --port, or 0 for any free one"
            reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise WrongUse(f"Port {port} cannot be used: {reason}. {advice}") from None
        self.url = f"http://{HOST}:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a new connection in a thread. If there are too many, the one that was idle for longest ends first."""
        with self._lock:
            if len(self._answering) >= CONNECTIONS:
                idle = next((each for each, is_answering in self._answering.items() if not is_answering), request)
                self._answering.pop(idle, None)
                with contextlib.suppress(OSError):  # the browser has closed it
                    idle.shutdown(socket.SHUT_RDWR)  # so that its thread ends
            self._answering[request] = False
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._answering.pop(request, None)
        super().shutdown_request(request)

    def note(self, request: Any, is_answering: bool) -> None:
        """Note that the answer to a connection begins or ends."""
        with self._lock:
            if self._answering.pop(request, None) is not None:
                self._answering[request] = is_answering

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, unless the browser has closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def _find(self, key: str, label: str, smallest: str, largest: str) -> npt.NDArray[np.int64]:
        low = parse_bytes(smallest, "The smallest size") if smallest else 0
        high = parse_bytes(largest, "The largest size") if largest else np.inf
        return self.table.find(key=key, label=label, smallest=low, largest=high)

    def render(self, query: str) -> tuple[HTTPStatus, str]:
        """Return the page for the query of a URL, with a message if it is wrong."""
        status, filters, message = HTTPStatus.OK, Filters(), ""
        found = np.empty(0, np.int64)
        try:
            filters = Filters.of(query)
            found = self.find(*filters[:-1])
        except WrongUse as error:
            status, message = HTTPStatus.BAD_REQUEST, str(error)
        last = max(-(-len(found) // self.count), 1)
        page = min(filters.page, last)
        start = (page - 1) * self.count
        samples, faults = self.table.read(found[start : start + self.count].tolist())
        facts = {**facts_of_dataset(self.table), "found": f"{len(found):,}"}
        notes = [message, *(fault.message for fault in (*self.table.faults, *faults))]
        pages = self._pages(filters, page, last) if len(found) else ""
        return status, sheet_as_html(samples, self.title, facts, controls=self._form(filters, notes), pages=pages)

    def _form(self, filters: Filters, notes: Sequence[str]) -> str:
        """Return the filters as a form, and the messages above the samples."""
        key, smallest, largest = (escape_text(each) for each in (filters.key, filters.smallest, filters.largest))
        labels = [
            f"<option{' selected' if name == filters.label else ''}>{escape_text(name)}</option>"
            for name in self.classes[:CLASSES]
        ]
        chosen = (
            f'<label>Class <select name="label"><option value="">any</option>{"".join(labels)}</select></label>'
            if labels
            else '<span class="none">Class: start with --label FIELD</span>'
        )
        said = "".join(f'<p class="bad" role="alert">{escape_text(note)}</p>' for note in notes if note)
        return (
            '<form class="filters" method="get" action="/" role="search">'
            f'<label>Key contains <input name="key" value="{key}"></label>{chosen}'
            f'<label>At least <input name="smallest" value="{smallest}" placeholder="10 kB" size="8"></label>'
            f'<label>At most <input name="largest" value="{largest}" placeholder="2 MB" size="8"></label>'
            f'<button>Filter</button> <a href="/">Show all</a></form>{said}'
        )

    def _pages(self, filters: Filters, page: int, last: int) -> str:
        """Return links to other pages."""
        before = f'<a rel="prev" href="/?{escape_text(filters.query(page - 1))}">Previous</a>' if page > 1 else ""
        after = f'<a rel="next" href="/?{escape_text(filters.query(page + 1))}">Next</a>' if page < last else ""
        ends = "".join(
            f'<a href="/?{escape_text(filters.query(number))}">{name}</a>'
            for name, number, differs in (("First", 1, page > 2), ("Last", last, page < last - 1))
            if differs
        )
        return (
            f'<nav class="pages" aria-label="Pages">{before}<span>Page {page:,} of {last:,}</span>{after}{ends}</nav>'
        )


class Handler(BaseHTTPRequestHandler):
    """Answers requests for the page, and for nothing else."""

    server: SampleServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Send the page, or say why not."""
        self.server.note(self.connection, True)
        self._answer()
        self.server.note(self.connection, False)

    def _answer(self) -> None:
        host = self.headers.get("Host", "")
        if host not in (f"{HOST}:{self.server.server_port}", f"localhost:{self.server.server_port}"):
            # Otherwise, a page of another host could read this one, after its name has been given this address.
            status, page = HTTPStatus.FORBIDDEN, "Open the address that the command has printed."
        elif urlsplit(self.path).path != "/":
            status, page = HTTPStatus.NOT_FOUND, "There is one page only: /"
        else:
            status, page = self.server.render(urlsplit(self.path).query)
        body = page.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""
