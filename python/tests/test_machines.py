"""The two state machines of a publication, one against the other, in random orders."""

from __future__ import annotations

import random
import unittest
from typing import List, Optional

from cuvmm._progress import Progress, Shown
from cuvmm._replica import ENDED, MOVED, SUSPENDED, Chunk, Replica, View, size_of
from cuvmm.errors import Error, ProtocolError

UNIT, GRANULARITY = 8, 64


class Model(unittest.TestCase):
    def test_a_follower_reaches_what_is_shown(self) -> None:
        for seed in range(300):
            with self.subTest(seed=seed):
                self._run(random.Random(seed))

    def _run(self, r: random.Random) -> None:
        room = GRANULARITY * r.randint(1, 30)
        progress, replica = Progress(UNIT, room), Replica(UNIT, GRANULARITY, room, 1 << 16)
        chunks: List[Chunk] = []
        shown, number = Shown(0, 0, 0, ()), 0
        out: Optional[View] = None
        for _ in range(r.randint(1, 60)):
            what = r.randrange(4)
            if what == 0:  # the publication changes
                if chunks and r.random() < 0.4:
                    del chunks[r.randrange(len(chunks)):]
                for _ in range(r.randint(0, 4)):
                    number += 1
                    chunks.append(Chunk(number, GRANULARITY * r.randint(1, 3)))
                length = r.randint(0, size_of(chunks) // UNIT)
                if length < shown.length:
                    progress.lower(length)
                shown = Shown(shown.generation + 1, shown.generation + 1, length, tuple(chunks))
            elif what == 1 and out is None:
                out = progress.next(shown, 2)
                if out is not None:
                    replica.begin(out)
            elif what == 2 and out is not None:
                failed = Error("no room") if r.random() < 0.1 else None
                progress.acknowledge(replica.finish(failed))
                out = None
            elif what == 3 and r.random() < 0.2:  # the connection ends, and the follower comes back, to this publisher or another
                out = None
                replica.restart()
                if r.random() < 0.3:
                    chunks = [Chunk(c.identity + 1_000_000, c.size) for c in chunks]
                if shown.generation:
                    shown = Shown(max(shown.generation, replica.generation + 1), 0, min(shown.length, size_of(chunks) // UNIT), tuple(chunks))
                progress = Progress(UNIT, room, list(replica.chunks), replica.length, replica.generation)
        for _ in range(1000):  # at rest the follower has what is shown, or refused it, or has no room
            if out is not None:
                progress.acknowledge(replica.finish(None))
                out = None
            out = progress.next(shown, 2)
            if out is None:
                break
            replica.begin(out)
        self.assertEqual(progress.reached, shown.generation)
        if not progress.reason:
            self.assertEqual((replica.length, replica.chunks), (shown.length, list(shown.chunks)))
            self.assertEqual(progress.pinned(shown), 0)

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

    def test_what_a_publisher_refuses(self) -> None:
        for reply in ({"serial": 2, "status": 0, "chunks": 1, "reason": ""}, {"serial": 1, "status": 0, "chunks": 0, "reason": ""}, {"serial": 1, "status": 6, "chunks": 1, "reason": ""}):
            f = Progress(UNIT, 1 << 20)
            f.next(Shown(1, 1, 8, (Chunk(1, 64),)), 64)
            with self.assertRaises(ProtocolError):
                f.acknowledge(reply)
        with self.assertRaises(ProtocolError):
            Progress(UNIT, 64).acknowledge({"serial": 0, "status": 0, "chunks": 0, "reason": ""})



if __name__ == "__main__":
    unittest.main()
