"""Folders of the checkout, and Python in a process of its own, which finds the package and these helpers."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]


def python(code: str, *args: str, timeout: float = 120, cwd: Path | None = None, **env: str) -> str:
    """Standard output of the code, which must end well; where it hangs it is stopped with all its children."""
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT), str(HELPERS)])
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **env}, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a hung grandchild would keep the pipes open
        out, err = process.communicate()
        raise AssertionError(f"hung for {timeout} s; it had printed {out!r} and {err[-2000:]!r}") from None
    assert process.returncode == 0, f"status {process.returncode}, after {out[-2000:]!r}: {err[-3000:]}"
    return out.strip()


def program(*argv: object, status: int | None = 0, env: dict[str, str] | None = None, **how: Any) -> Any:
    """A program, which must end with this status if one is named, in this environment and `env`: what it printed."""
    every = {**os.environ, **(env or {})}
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False, env=every, **how)
    assert status in (None, done.returncode), f"status {done.returncode}: {(done.stdout + done.stderr)[-6000:]}"
    return done


def copy_tracked(to: Path) -> None:
    """What git tracks, as it stands in the checkout."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
