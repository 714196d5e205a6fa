"""The examples of the cookbook are run, and those of the README name what exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import unittest
from typing import List

import cuvmm

from .go import GoTest
from .support import environment, root_text


def examples(readme: str) -> List[str]:
    return re.findall(r"(?ms)^```python\n(.*?)^```$", root_text(readme))


class Examples(GoTest):
    def test_a_follower_of_a_go_process(self) -> None:
        example = examples("docs/cookbook.md")[0]
        self.assertIn('"/run/user/1000/app/server"', example)
        go = self.serving(weights=1000)
        program = subprocess.Popen([sys.executable, "-c", example.replace("/run/user/1000/app/server", self.path())], env=environment(PYTHONUNBUFFERED="1"),
                                   stdout=subprocess.PIPE, text=True)
        self.addCleanup(program.kill)
        assert program.stdout is not None
        self.assertEqual(program.stdout.readline(), "1000 [999]\n")
        go.done("grow", "weights", 2000)
        self.assertEqual(program.stdout.readline(), "2000 [1999]\n")
        go.done("withdraw", "weights")
        out, _ = program.communicate(timeout=60)
        self.assertEqual((out, program.returncode), ("withdrawn\n", 0))


class Names(unittest.TestCase):
    def test_they_exist(self) -> None:
        used = {n.attr for readme in ("docs/cookbook.md", "python/README.md") for example in examples(readme) for n in ast.walk(ast.parse(example))
                if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "cuvmm"}
        self.assertIn("connect", used)
        self.assertLessEqual(used, {*cuvmm.__all__, "torch"})


if __name__ == "__main__":
    unittest.main()
