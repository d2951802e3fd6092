"""Runs saved reproducers, all in one process of its own that has never heard of thunderpatch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_RUNNER = """
import contextlib, io, json, runpy, sys, traceback
paths, found = sys.argv[1:], []
for path in paths:
    path, _, flags = path.partition(" ")
    sys.argv = [path, *flags.split()]
    out, status = io.StringIO(), None
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            status = end.code
        except BaseException:
            print(traceback.format_exc())
    found.append((status, out.getvalue()))
assert not any(name.partition(".")[0] == "thunderpatch" for name in sys.modules)
print("\\n" + json.dumps(found))
"""


class Ran(NamedTuple):
    status: int | None  # None where the script ended in another way than by exiting
    output: str


def run_scripts(paths: Sequence[Path | str], timeout: int = 540) -> list[Ran]:
    """Run each script, given by its path and then its flags, and return its exit status and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", _RUNNER, *map(str, paths)]
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=elsewhere, env=environment, check=False
        )
    assert done.returncode == 0, done.stderr
    return [Ran(*ran) for ran in json.loads(done.stdout.splitlines()[-1])]
