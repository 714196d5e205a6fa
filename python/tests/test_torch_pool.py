"""PyTorch on the pool, on a GPU: set CUVMM_TEST_GPU=1 and CUVMM_LIBCUVMM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from typing import Any, Dict

from .support import ROOT, environment, lacks


class TorchPool(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        if not os.environ.get("CUVMM_TEST_GPU"):
            raise unittest.SkipTest("set CUVMM_TEST_GPU=1 on a machine with a GPU and PyTorch")
        if not os.environ.get("CUVMM_LIBCUVMM"):
            lacks("CUVMM_LIBCUVMM, the library of the pool (go build -buildmode=c-shared -o libcuvmm.so ./cmd/libcuvmm)")

    def run_program(self, name: str, allocator: str, module: str = "torch_programs") -> Dict[str, Any]:
        done = subprocess.run([sys.executable, "-m", "tests." + module, name, allocator], env=environment(), cwd=ROOT / "python", capture_output=True,
                              text=True, timeout=300)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        self.assertTrue(lines, f"{name} on {allocator} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        result: Dict[str, Any] = json.loads(lines[0][len("RESULT "):])
        print(f"{name:14} {allocator:10} " + " ".join(f"{k} {v}" for k, v in result.items() if k not in ("losses",)), file=sys.stderr)
        return result

    def test_losses_are_those_of_the_native_allocator(self) -> None:
        for model in ("transformer", "vision", "graph_layers", "small"):
            with self.subTest(model):
                native = self.run_program(model, "native")
                self.run_program(model, "expandable")
                pool = self.run_program(model, "pool")
                self.assertEqual(pool["losses"], native["losses"])

    def test_programs(self) -> None:
        for name in ("graphs", "streams", "forks", "ends", "interrupted", "compiled", "workspaces", "exhausted", "memory_functions", "extensible", "queues"):
            with self.subTest(name):
                result = self.run_program(name, "pool")
                self.assertTrue(result["ok"], result)

    def test_pytorchs_own_error(self) -> None:
        result = self.run_program("own_error", "own_error")
        self.assertTrue(result["ok"], result)

    def test_a_mempool(self) -> None:
        for name in ("segments", "gradients", "extensible", "queues"):
            with self.subTest(name):
                result = self.run_program(name, "native")
                self.assertTrue(result["ok"], result)

    def test_sleep(self) -> None:
        for name in ("model", "mistaken"):
            for allocator in ("regions", "pool"):
                with self.subTest(f"{name} {allocator}"):
                    result = self.run_program(name, allocator, "torch_sleeps")
                    self.assertTrue(result["ok"], result)


if __name__ == "__main__":
    unittest.main()
