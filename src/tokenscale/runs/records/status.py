"""A small status file for people who watch: replaced atomically, never read by any table."""

import json
import os
import time
from pathlib import Path

from tokenscale.base.files import aside


class Status:
    """Keeps `<run>/status.json` current, at most once in `every_s` seconds."""

    def __init__(self, path: Path, every_s: float = 2.0):
        self.path, self.every_s, self._last = path, every_s, 0.0

    def update(self, force: bool = False, **fields: object) -> None:
        """Write the fields and the time, if it is due. A full disk here must not end a training: errors are ignored."""
        now = time.monotonic()  # the wall clock may be set back
        if not force and now - self._last < self.every_s:
            return
        self._last = now
        temporary = aside(self.path)
        try:
            temporary.write_text(json.dumps({"t_unix_s": round(time.time(), 3), **fields}))
            os.replace(temporary, self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
