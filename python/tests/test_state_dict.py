"""A module of PyTorch whose weights others follow by name while they are updated, on a GPU: set CUVMM_TEST_GPU=1 where PyTorch is installed."""

from __future__ import annotations

import os
import unittest
from typing import Any

import cuvmm

from .support import DriverTest
from .test_sharing import child

STEPS = 100  # bfloat16 has these numbers exactly
READER = """
    import sys, torch, cuvmm
    last, steps = -1.0, int(sys.argv[3])
    with cuvmm.connect(sys.argv[1]) as client, client.follow("policy", expect=sys.argv[2].encode()) as policy:
        weights, stream = policy.tensors, torch.cuda.current_stream()
        print("ready", flush=True)
        while last < steps - 1:
            generation = policy.next(stream, timeout=60)
            tensors = [torch.from_dlpack(weights[name].allow_readonly()) for name in weights]
            low, high = torch.stack([torch.stack([t.float().min(), t.float().max()]) for t in tensors]).aminmax(dim=0)
            low, high = float(low.min()), float(high.max())  # which waits for the work
            assert policy.intact(generation)  # the publisher excludes nobody
            policy.release(stream)
            assert low == high > last, (low, high, last)
            last = low
            del tensors
    print("whole", flush=True)
"""


class StateDict(DriverTest):
    def setUp(self) -> None:
        super().setUp()
        if not os.environ.get("CUVMM_TEST_GPU"):
            raise unittest.SkipTest("set CUVMM_TEST_GPU=1 on a machine with a GPU and PyTorch")

    def test_a_module_is_followed_by_name(self) -> None:
        import torch
        nn: Any = torch.nn
        embed = nn.Embedding(1000, 512, dtype=torch.bfloat16, device="cuda")
        head = nn.Linear(512, 1000, bias=False, dtype=torch.bfloat16, device="cuda")
        head.weight = embed.weight  # tied
        module = nn.ModuleDict({"embed": embed, "head": head, "norm": nn.BatchNorm1d(300, device="cuda")})
        module.register_parameter("turned", nn.Parameter(torch.empty(512, 300, device="cuda").t()))
        del module["norm"].num_batches_tracked

        def become(value: float) -> None:
            with torch.no_grad():
                for t in module.state_dict().values():
                    t.fill_(value)

        become(0)
        with cuvmm.Weights.of(module) as weights, cuvmm.Server(self.path()) as server:
            self.assertEqual(weights["embed.weight"].ptr, weights["head.weight"].ptr)
            self.assertEqual((weights["turned"].shape, weights["turned"].strides), ((300, 512), (1, 300)))
            self.assertEqual((weights["turned"].kind, weights["norm.running_mean"].kind), ("parameter", "buffer"))
            self.assertEqual(weights.manifest(), cuvmm.manifest_of(module))
            publication = server.publish("policy", weights)
            readers = [child(READER, self.path(), weights.manifest().decode(), str(STEPS)) for _ in range(3)]
            for r in readers:
                self.addCleanup(r.kill)
                assert r.stdout is not None
                self.assertEqual(r.stdout.readline(), "ready\n")
            publication.announce(stream=torch.cuda.current_stream())
            for step in range(1, STEPS):
                become(step)
                with publication.rewrite(60):
                    weights.update(module)
                    publication.announce(stream=torch.cuda.current_stream())
            for r in readers:
                self.assertEqual(r.communicate(timeout=120)[0], "whole\n")
            publication.withdraw()
            torch.cuda.synchronize()
            followed = [torch.from_dlpack(t).float() for t in weights.values()]
            self.assertEqual({float(v) for t in followed for v in (t.min(), t.max())}, {float(STEPS - 1)})
            del followed


if __name__ == "__main__":
    unittest.main()
