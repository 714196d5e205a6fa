"""The samples, each as a user runs it, on little data."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest

from .support import ROOT, DriverTest, environment


class Samples(DriverTest):
    def run_sample(self, name: str, *args: str) -> str:
        done = subprocess.run([sys.executable, str(ROOT / "python/samples" / name), *args], env=environment(), capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_weights(self) -> None:
        size = int(os.environ.get("CUVMM_TEST_WEIGHTS", str(8 << 20)))
        out = self.run_sample("weights.py", "--bytes", str(size), "--steps", "3")
        for worker in (1, 2):
            self.assertIn(f"worker {worker}: computes with the weights of step 4, {size // 4} of them", out)
        self.assertIn("with both workers still following", out)


if __name__ == "__main__":
    unittest.main()
