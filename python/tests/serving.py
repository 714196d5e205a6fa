"""A broker, cuvmm serve, which scripts/test-python.sh builds, for the tests beside it."""

from __future__ import annotations

import os
import subprocess
from typing import Optional

import cuvmm

from .support import DriverTest, environment, lacks


class ServedTest(DriverTest):
    """A test beside a broker of its own."""

    process: "subprocess.Popen[str]"

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if not os.environ.get("CUVMM_TEST_COMMAND"):
            lacks("CUVMM_TEST_COMMAND, the program cuvmm (scripts/test-python.sh builds it)")

    def setUp(self) -> None:
        super().setUp()
        self.socket = os.path.join(self.folder, "s", "broker")
        self.process = subprocess.Popen([os.environ["CUVMM_TEST_COMMAND"], "serve", "-socket", self.socket, "-return", "200ms", "-limit", "64"], env=environment(),
                                        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.addCleanup(self.end)

    def end(self) -> None:
        self.process.terminate()
        _, said = self.process.communicate(timeout=60)
        self.assertEqual(self.process.returncode, 0, said)

    def connect(self) -> cuvmm.Broker:
        b = cuvmm.connect_broker(self.socket, 60, wait=True)
        self.addCleanup(b.close)
        return b

    def broker_pid(self) -> Optional[int]:
        for task in os.listdir(f"/proc/{self.process.pid}/task"):
            with open(f"/proc/{self.process.pid}/task/{task}/children") as f:
                children = f.read().split()
            if children:
                return int(children[0])
        return None
