"""Which combinations of parameters a run of the tests covers: some of each, or with ``WHOLE_SWEEPS``, all."""

from __future__ import annotations

import os

#: Set by `nox -s nightly`.
WHOLE = bool(os.environ.get("WHOLE_SWEEPS"))
