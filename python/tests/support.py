"""What the tests share: where things are, and a software driver for every test process."""

from __future__ import annotations

import faulthandler
import json
import os
import pathlib
import shutil
import tempfile
import time
import unittest
from typing import Any, Callable, Dict, NoReturn, Optional

ROOT = pathlib.Path(__file__).resolve().parents[2]


def vectors(name: str) -> Any:
    """A language-neutral file of the protocol's tests."""
    return json.loads((ROOT / "internal/test/vectors/testdata" / name).read_text())


def lacks(what: str) -> NoReturn:
    """Skips the test because ``what`` is missing, or fails it if CUVMM_REQUIRE_TOOLS is set, as in CI."""
    if os.environ.get("CUVMM_REQUIRE_TOOLS"):
        raise AssertionError(f"CUVMM_REQUIRE_TOOLS is set, and this machine lacks {what}")
    raise unittest.SkipTest(f"needs {what}; set CUVMM_REQUIRE_TOOLS=1 to fail instead")


def needs_driver() -> None:
    """Skips unless there is a driver: CUVMM_LIBCUDA names the software driver's library, as scripts/test-python.sh does."""
    if not os.environ.get("CUVMM_LIBCUDA") and not os.environ.get("CUVMM_TEST_GPU"):
        lacks("CUVMM_LIBCUDA, the software driver's library (scripts/test-python.sh sets it), or CUVMM_TEST_GPU=1")


class DriverTest(unittest.TestCase):
    """A test with a driver, and a private folder for sockets."""

    folder: str

    @classmethod
    def setUpClass(cls) -> None:
        needs_driver()

    def setUp(self) -> None:
        faulthandler.dump_traceback_later(600, exit=True)  # a test that hangs shows where
        self.addCleanup(faulthandler.cancel_dump_traceback_later)
        self.folder = tempfile.mkdtemp(prefix="cuvmm-")
        self.addCleanup(shutil.rmtree, self.folder, True)

    def path(self, name: str = "socket") -> str:
        return os.path.join(self.folder, name)


def await_that(holds: Callable[[], bool], what: str) -> None:
    """Waits until something holds."""
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, f"not within a minute: {what}"
        time.sleep(0.001)


def environment(**more: Optional[str]) -> Dict[str, str]:
    """The environment of a child."""
    env = dict(os.environ, PYTHONPATH=str(ROOT / "python"))
    for name, value in more.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def root_text(path: str) -> str:
    """A file of the repository."""
    return (ROOT / path).read_text()
