"""The Python examples of docs/cookbook.md are run: the first beside a Go process in test_readme.py, the others here."""

from __future__ import annotations

import contextlib
import io
import sys
import unittest
from unittest import mock

from .support import DriverTest
from .test_readme import examples
from .test_torch_sleep import SleepTest, Tensor

_, GROWS, SLEEPS = examples("docs/cookbook.md")


def run(example: str) -> str:
    """Runs an example, and returns what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "docs/cookbook.md", "exec"), {})
    return printed.getvalue()


class Grows(DriverTest):
    def test_an_array_stays_where_it_is(self) -> None:
        first, hint = run(GROWS).splitlines()
        self.assertEqual(first, "True 2000000")
        self.assertIn("reserve", hint)


class Sleeps(SleepTest):
    """On the library in a process of its own, with a stand-in for PyTorch, which has no functions that make tensors."""

    def test_tensors_sleep_by_tags(self) -> None:
        torch = sys.modules["torch"]
        with mock.patch.object(torch, "empty", lambda size, **_: Tensor(size), create=True), mock.patch.object(torch, "uint8", None, create=True):
            self.assertEqual(run(SLEEPS), "['cache', 'weights']\n")
        self.assertEqual(self.front.sleeping(), [])


if __name__ == "__main__":
    unittest.main()
