"""The two state machines of a publication do what those of the Go library do, in whatever order things happen."""

from __future__ import annotations

import copy
import json
import unittest
from typing import Any, Callable, Dict, Optional

from cuvmm._progress import Progress, Shown
from cuvmm._replica import ENDED, MOVED, SUSPENDED, Chunk, Replica, View
from cuvmm.errors import Error, ProtocolError

from .support import ROOT

UNIT, GRANULARITY = 8, 64


def chunks(e: Dict[str, Any]) -> "tuple[Chunk, ...]":
    return tuple(Chunk(*c) for c in e["chunks"])


def view(e: Dict[str, Any]) -> View:
    return View(e["serial"], e["generation"], e["ordered"], e["length"], e["keep"], e["last"], e["over"], chunks(e))


def done(e: Dict[str, Any]) -> Dict[str, Any]:
    return {"serial": e["serial"], "status": e["status"], "chunks": e["chunks"], "reason": ""}


def takes(call: Callable[..., Any], what: Any) -> bool:
    try:
        call(what)
    except Error:
        return False
    return True


class Replay:
    """A publisher's and a follower's machine, which go through the events of one run of the model in Go."""

    def __init__(self, e: Dict[str, Any]) -> None:
        self.of = e
        self.progress = Progress(e["unit"], e["room"])
        self.replica = Replica(e["unit"], e["granularity"], e["room"], e["most"])
        self.shown = Shown(0, 0, 0, ())
        self.out: Optional[View] = None
        self.reply: Dict[str, Any] = {}

    def results(self, e: Dict[str, Any]) -> Dict[str, Any]:
        """Does what the event says, and returns its results."""
        do = e["do"]
        if do == "show":
            self.shown = Shown(e["generation"], e["ordered"], e["length"], chunks(e), e["state"])
        elif do == "lower":
            self.progress.lower(e["length"])
        elif do == "next":
            v = self.progress.next(self.shown, self.of["batch"])
            if v is None:
                return {"serial": 0}
            self.out = v
            return {"serial": v.serial, "generation": v.generation, "ordered": v.ordered, "length": v.length, "keep": v.keep,
                    "last": v.last, "over": v.over, "state": v.state, "chunks": [list(c) for c in v.add]}
        elif do == "try update":
            return {"taken": takes(copy.deepcopy(self.replica).begin, view(e))}
        elif do == "carry out":
            assert self.out is not None
            self.replica.begin(self.out)
            self.reply = self.replica.finish(Error("refused") if e["status"] else None)
            return {**{k: self.reply[k] for k in ("serial", "status", "chunks")}, "length": self.replica.length, "generation": self.replica.generation}
        elif do == "try acknowledge":
            return {"taken": takes(copy.deepcopy(self.progress).acknowledge, done(e))}
        elif do == "acknowledge":
            self.progress.acknowledge(self.reply)
            return {"reached": self.progress.reached, "pinned": self.progress.pinned(self.shown)}
        elif do == "come back":
            self.replica.restart()
            self.progress = Progress(self.of["unit"], self.of["room"])
            self.progress.resume([c.identity for c in self.replica.chunks], self.replica.length, self.replica.generation, self.shown)
        else:
            raise AssertionError(f"an event {do!r}, which this test does not know")
        return {}


class Machines(unittest.TestCase):
    def test_the_traces_of_the_model(self) -> None:
        replay: Optional[Replay] = None
        traces = (ROOT / "internal/test/vectors/testdata/traces.jsonl").read_text().splitlines()
        for n, line in enumerate(traces, 1):
            e = json.loads(line)
            if e["do"] == "begin":
                replay = Replay(e)
                continue
            assert replay is not None
            got = replay.results(e)
            self.assertEqual(got, {k: e[k] for k in got}, f"line {n}: {line}")
        self.assertIsNotNone(replay)

    def test_what_a_follower_refuses(self) -> None:
        good = View(1, 1, 1, 8, 0, add=(Chunk(1, 64),))
        for what, u in {
            "another serial": good._replace(serial=2),
            "generation 0": good._replace(generation=0, ordered=0),
            "a generation too large": good._replace(generation=1 << 62),
            "ordered behind a later one": good._replace(ordered=2),
            "chunks that it lacks": good._replace(keep=1),
            "over with chunks": good._replace(over=True),
            "a chunk of no multiple": good._replace(add=(Chunk(1, 65),)),
            "an empty chunk": good._replace(add=(Chunk(1, 0),)),
            "more than the room": good._replace(add=(Chunk(1, 64 * 5),)),
            "more elements than bytes": good._replace(length=9),
            "a status": good._replace(status=3),
            "suspended and shown": good._replace(state=SUSPENDED),
            "ended with a serial": View(1, 1, 0, 0, 0, state=ENDED, status=3),
            "ended without a status": View(0, 1, 0, 0, 0, state=ENDED),
            "ended and shown": View(0, 1, 0, 8, 0, state=ENDED, status=3),
            "moved with a status": View(0, 1, 0, 0, 0, state=MOVED, status=3),
        }.items():
            with self.subTest(what), self.assertRaises(Error):
                Replica(UNIT, GRANULARITY, 4 * GRANULARITY, 100).begin(View.of(u.fields(b"")))
        t = Replica(UNIT, GRANULARITY, 4 * GRANULARITY, 100)
        t.begin(good)
        with self.assertRaises(ProtocolError):
            t.begin(good._replace(serial=2, generation=2))


if __name__ == "__main__":
    unittest.main()
