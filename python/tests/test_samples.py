"""The samples, each as a user runs it, on little data."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import unittest
from typing import List

from .serving import ServedTest
from .support import ROOT, DriverTest, environment, lacks


def run_sample(name: str, *args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(ROOT / "python/samples" / name), *args], env=environment(), capture_output=True, text=True, timeout=300)


class BesideABroker(ServedTest):
    def test_an_engine_that_is_killed(self) -> None:
        for _ in range(2):  # nothing is left behind
            done = run_sample("broker.py", "--socket", self.socket, "--layers", "10", "--width", "64")
            self.assertEqual(done.returncode, 0, done.stderr)
            first, killed, second, answered = done.stdout.splitlines()
            pid = killed.split()[1].rstrip(":")
            self.assertTrue(first.startswith(f"engine {pid}: 10 tensors, ") and first.endswith(": loaded them"), first)
            self.assertTrue(second.endswith(f": found what process {pid} had loaded"), second)
            self.assertIn("answered all 16", answered)
        self.assertEqual(self.connect().list(), [])


class Samples(DriverTest):
    def test_weights(self) -> None:
        size = int(os.environ.get("CUVMM_TEST_WEIGHTS", str(8 << 20)))
        done = run_sample("weights.py", "--bytes", str(size), "--steps", "3")
        self.assertEqual(done.returncode, 0, done.stderr)
        out = done.stdout
        for worker in (1, 2):
            self.assertIn(f"worker {worker}: computes with the weights of step 4, 2 tensors", out)
        self.assertIn("with both workers still following", out)

    @unittest.skipUnless(os.environ.get("CUVMM_TEST_GPU") and importlib.util.find_spec("torch"), "needs a GPU and PyTorch, for which CUVMM_TEST_GPU=1 is set")
    def test_trainers_take_turns(self) -> None:
        """Each turn of either goes on from its last: both lose as they would alone, from one seed the same."""
        trainers = [self.start([sys.executable, str(ROOT / "python/samples/sleep.py"), self.path("turn"), "--turns", "3", "--seed", "1"]) for _ in range(2)]
        said = [p.communicate(timeout=300)[0].splitlines() for p in trainers]
        self.assertEqual([p.returncode for p in trainers], [0, 0], said)
        losses = [[line.split(";")[0] for line in lines] for lines in said]
        self.assertEqual(losses[0], losses[1])
        self.assertEqual(len(set(losses[0])), 3, losses)

    def test_arguments_that_cannot_be(self) -> None:
        """A sample ends with a line, not with a traceback."""
        for name, arguments, status, says in (("weights.py", ["--bytes", "0"], 2, "use at least 8 bytes"), ("follow.py", [self.path("none"), "x"], 1, "no process serves"),
                                              ("train.py", ["/nowhere/a", "b"], 1, "folder '/nowhere' does not exist"),
                                              ("sleep.py", ["--turns", "0", self.path("turn")], 2, "at least one layer and one turn"),
                                              ("broker.py", ["--width", "0"], 2, "at least 1 of each"), ("broker.py", ["--socket", self.path("none")], 1, "no process serves")):
            done = run_sample(name, *arguments)
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertIn(says, done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_a_model_from_go_to_python_and_back(self) -> None:
        """Go publishes a growing table, Python trains on it and publishes the model, and Go serves that."""
        programs = os.environ.get("CUVMM_TEST_SAMPLES")
        if not programs:
            lacks("CUVMM_TEST_SAMPLES, the folder of the Go samples (scripts/test-python.sh builds them)")
        table = self.start([f"{programs}/embeddings", "-dir", self.path("t"), "-rounds", "0", "-every", "50ms"])
        self.assertIn("waiting", self.line(table))
        trainer = self.start([sys.executable, str(ROOT / "python/samples/train.py"), self.path("t/table"), self.path("m/model")])
        self.assertIn("generation", self.line(trainer))
        server = self.start([f"{programs}/serve", "-socket", self.path("m/model")])
        predicted, until = 0.0, time.monotonic() + 60
        while abs(predicted - 10) > 0.1:
            self.assertLess(time.monotonic(), until, f"the last prediction was {predicted}, and 10 is right")
            assert server.stdin is not None
            server.stdin.write("1 1 0 0 0 0 1 0\n")
            server.stdin.flush()
            said = self.line(server)
            self.assertIn(" predicts ", said)
            predicted = float(said.split()[-1])
        table.send_signal(signal.SIGINT)
        for process in (table, trainer, server):
            out, _ = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, out)

    def start(self, args: List[str]) -> "subprocess.Popen[str]":
        p = subprocess.Popen(args, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def end() -> None:
            p.kill()
            p.wait()
            for f in (p.stdin, p.stdout):
                if f is not None:
                    f.close()

        self.addCleanup(end)
        return p

    def line(self, p: "subprocess.Popen[str]") -> str:
        assert p.stdout is not None
        return p.stdout.readline()


if __name__ == "__main__":
    unittest.main()
