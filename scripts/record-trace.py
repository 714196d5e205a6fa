#!/usr/bin/env python3
"""Records what a program requests of PyTorch's allocator, as a trace. The traces in
vmm/pool/testdata/traces were recorded with it.

    record-trace.py PROGRAM NAME.json.gz

The programs have random weights and data, and stand for kinds of programs: see the
functions' descriptions. To record a program of your own, call
torch.cuda.memory._record_memory_history(context=None) before it and
torch.cuda.memory._dump_snapshot("mine.pickle") after it: pool-peers.py reads that.
"""

import argparse
import contextlib
import gzip
import json
import random
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("program", help="speech, evaluation, server, pipeline or moe")
parser.add_argument("out", help="the file to write: NAME.json.gz")
parser.add_argument("-seconds", type=float, default=22, help="how long the program runs at most (default 22)")
parser.add_argument("-operations", type=int, default=90_000, help="how many are kept at most (default 90000)")
parser.add_argument("-dry-run", action="store_true", help="without a GPU: run a small copy of the program, and write nothing")
ARGS = parser.parse_args()
CPU = ARGS.dry_run
DEV = "cpu" if CPU else "cuda"
SMALL = 16 if CPU else 1  # by which sizes are divided
START = time.time()


def late():
    return time.time() - START > ARGS.seconds


def cast():
    return contextlib.nullcontext() if CPU else torch.autocast(DEV, dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self, d, heads, ff=4, causal=False):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, ff * d), nn.Linear(ff * d, d)
        self.h, self.causal = heads, causal

    def forward(self, x, cache=None):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and t == k.shape[2])
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def speech():
    """wav2vec2-shaped: convolutions over raw sound of 2 to 20 s, an encoder, CTC loss; batches by length."""
    d = 768 // SMALL
    convs, c = [], 1
    for k, s in ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)):
        convs += [nn.Conv1d(c, 512 // SMALL, k, s), nn.GELU()]
        c = 512 // SMALL
    front = nn.Sequential(*convs).to(DEV)
    model = nn.ModuleDict({"p": nn.Linear(c, d), "pos": nn.Conv1d(d, d, 128, padding=64, groups=16 if not CPU else 1),
                           "b": nn.ModuleList(Block(d, 12 if not CPU else 4) for _ in range(12 if not CPU else 2)), "out": nn.Linear(d, 40)}).to(DEV)
    opt = torch.optim.AdamW(list(front.parameters()) + list(model.parameters()), 1e-4)
    r = random.Random(1)
    for _ in range(260):
        secs = r.choice([2, 3, 5, 8, 12, 16, 20]) + r.random()
        n = max(1, int(160 / SMALL / secs))
        sound = torch.randn(n, int(secs * 16000 / SMALL)).to(DEV)
        with cast():
            x = front(sound[:, None]).transpose(1, 2)
            x = model["p"](x)
            x = x + F.gelu(model["pos"](x.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2))
            for b in model["b"]:
                x = b(x)
            logits = model["out"](x).float().log_softmax(-1).transpose(0, 1)
        t = logits.shape[0]
        target = torch.randint(1, 40, (n, max(1, t // 4)), device=DEV)
        loss = F.ctc_loss(logits, target, torch.full((n,), t, dtype=torch.long), torch.full((n,), target.shape[1], dtype=torch.long), zero_infinity=True)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        if late():
            break


def evaluation():
    """A language model in training; every 12 steps it is evaluated on other shapes, and writes texts with a cache that grows."""
    d, v, layers = 1536 // SMALL, 50304 // SMALL, 16 if not CPU else 2
    emb = nn.Embedding(v, d).to(DEV)
    blocks = nn.ModuleList(Block(d, 12 if not CPU else 4, causal=True) for _ in range(layers)).to(DEV)
    head = nn.Linear(d, v, bias=False).to(DEV)
    opt = torch.optim.AdamW([*emb.parameters(), *blocks.parameters(), *head.parameters()], 1e-4)
    r = random.Random(2)

    def logits(x):
        x = emb(x)
        for b in blocks:
            x = b(x)
        return head(x)

    for step in range(96):
        x = torch.randint(0, v, (8, 1024 // SMALL), device=DEV)
        with cast():
            loss = F.cross_entropy(logits(x).view(-1, v).float(), x.view(-1))
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 12 == 11:
            with torch.no_grad(), cast():
                kept = []
                for _ in range(10):
                    x = torch.randint(0, v, (r.choice([1, 4, 16, 24]), r.randrange(64, 2000) // SMALL + 1), device=DEV)
                    out = logits(x)
                    kept.append(F.cross_entropy(out.view(-1, v).float(), x.view(-1), reduction="none").view(x.shape))
                    del out
                caches = [[] for _ in blocks]
                x = torch.randint(0, v, (r.choice([4, 16]), r.randrange(100, 900) // SMALL + 1), device=DEV)
                for _ in range(60):
                    h = emb(x)
                    for b, c in zip(blocks, caches):
                        h = b(h, c)
                    x = head(h[:, -1:]).argmax(-1)
                torch.cat([k.flatten() for k in kept]).mean().item()
        if late():
            break


def server():
    """Loads and unloads models of 0.2 to 7 GB; serves requests with caches that grow; copies in on a second stream."""
    r = random.Random(3)
    side = None if CPU else torch.cuda.Stream()
    shapes = [(1024, 8), (1536, 12), (2048, 16), (2560, 24), (3072, 20), (4096, 16)]
    loaded = []
    for _ in range(26):
        while loaded and (len(loaded) > 3 or r.random() < 0.35):
            loaded.pop(r.randrange(len(loaded)))
        d, n = r.choice(shapes)
        d //= SMALL
        with contextlib.nullcontext() if CPU else torch.device("meta"):
            m = nn.ModuleList(Block(d, 8, causal=True) for _ in range(n)).to(torch.bfloat16)
        m = m if CPU else m.to_empty(device=DEV)
        for p in m.parameters():
            CPU or nn.init.normal_(p, std=0.01)
        if side:  # an adapter arrives on a second stream
            with torch.cuda.stream(side):
                for _ in range(4):
                    a = torch.zeros(r.randrange(1, 60) << 20, dtype=torch.uint8).to(DEV, non_blocking=True)
                    a += 1
        loaded.append(m)
        with torch.no_grad():
            for _ in range(3):
                m = r.choice(loaded)
                d = m[0].o.in_features
                x = torch.randn(r.choice([1, 2, 8, 16]), r.randrange(20, 3000) // SMALL + 1, d, device=DEV, dtype=torch.bfloat16)
                caches = [[] for _ in m]
                for _ in range(24):
                    for b, c in zip(m, caches):
                        x = b(x, c)
                    x = x[:, -1:]
        if late():
            break


def pipeline():
    """Images of many sizes: to floats, resized, cropped, blurred, stacked; features by a ResNet-shaped net; detections of varying number."""
    r = random.Random(4)

    def conv(a, b, s=1):
        return nn.Sequential(nn.Conv2d(a, b, 3, s, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

    w = 64 // (4 if CPU else 1)
    net = nn.Sequential(conv(3, w, 2), conv(w, w), conv(w, 2 * w, 2), conv(2 * w, 2 * w), conv(2 * w, 4 * w, 2), conv(4 * w, 4 * w), conv(4 * w, 8 * w, 2)).to(DEV).eval()
    blur = torch.ones(3, 1, 9, 9, device=DEV) / 81
    ready = []
    with torch.no_grad():
        for _ in range(330):
            batch = []
            big = r.choice([224, 384, 512, 768, 1024]) // SMALL * (4 if CPU else 1)
            for _ in range(r.randrange(2, 14)):
                h, ww = int(r.lognormvariate(7.0, 0.6)) // SMALL + 32, int(r.lognormvariate(7.1, 0.6)) // SMALL + 32
                h, ww = min(h, 6000), min(ww, 6000)
                img = torch.randint(0, 255, (3, h, ww), dtype=torch.uint8).to(DEV) if CPU else torch.empty(3, h, ww, dtype=torch.uint8, device=DEV)
                x = img.float().div_(255)
                mean = x.mean((1, 2), keepdim=True)
                x = (x - mean) / (x.std((1, 2), keepdim=True) + 1e-3)
                if r.random() < 0.4:
                    x = F.conv2d(x[None], blur, padding=4, groups=3)[0]
                if r.random() < 0.5:
                    x = x.flip(-1)
                s = r.uniform(0.6, 1)
                x = x[:, : int(h * s) + 1, : int(ww * s) + 1]
                batch.append(F.interpolate(x[None], (big, big), mode="bilinear", align_corners=False)[0])
            x = torch.stack(batch)
            with cast():
                f = net(x)
            boxes = torch.rand(r.randrange(50, 20000) // SMALL + 2, 4, device=DEV)
            iou = torch.minimum(boxes[:2500, None, 2:], boxes[None, :2500, 2:]).prod(-1)
            keep = (iou > 0.9).any(0)
            ready.append((f.float().mean((2, 3)), boxes[:2500][keep], x[:1].half() if r.random() < 0.2 else None))
            if len(ready) > r.randrange(8, 40):
                del ready[: r.randrange(1, 8)]
            if late():
                break


def moe():
    """Training with experts: how many tokens each has differs in each step and layer; sequences are packed."""
    d, ff, experts, layers = 1024 // SMALL, 2816 // SMALL, 16, 8 if not CPU else 2
    layer = lambda: nn.ModuleDict({"a": Block(d, 8, 1, True), "g": nn.Linear(d, experts, bias=False),  # noqa: E731
                                   "up": nn.ModuleList(nn.Linear(d, ff, bias=False) for _ in range(experts)),
                                   "down": nn.ModuleList(nn.Linear(ff, d, bias=False) for _ in range(experts))})  # fmt: skip
    emb, net = nn.Embedding(32000 // SMALL, d).to(DEV), nn.ModuleList(layer() for _ in range(layers)).to(DEV)
    opt = torch.optim.AdamW([*emb.parameters(), *net.parameters()], 1e-3)
    r = random.Random(5)
    for _ in range(60):
        x = torch.randint(0, 32000 // SMALL, (r.randrange(2, 9), r.randrange(256, 2048) // SMALL + 1), device=DEV)
        with cast():
            h = emb(x)
            for m in net:
                h = m["a"](h)
                flat = h.reshape(-1, d)
                p, which = m["g"](flat + torch.randn_like(flat)).float().softmax(-1).topk(2, -1)
                out = torch.zeros_like(flat, dtype=torch.float32)
                for e in range(experts):
                    token, slot = (which == e).nonzero(as_tuple=True)
                    y = m["down"][e](F.silu(m["up"][e](flat[token])))
                    out = out.index_add(0, token, y.float() * p[token, slot, None])
                h = h + out.view_as(h).to(h.dtype)
            loss = h.float().pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        if late():
            break


def events():
    """What the program requested: the allocator's own history."""
    program = globals()[ARGS.program]
    if CPU:
        program()
        return []
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=4_000_000)
    program()
    torch.cuda.synchronize()
    return torch.cuda.memory._snapshot()["device_traces"][0]


def main():
    torch.manual_seed(0)
    live, streams, ops = {}, {}, []  # ops are (block, bytes, stream), with 0 bytes for a free
    blocks = 0
    for e in events():
        if len(ops) == ARGS.operations:
            break
        if e["action"] == "alloc" and e["size"] > 0:
            live[e["addr"]] = blocks
            ops.append((blocks, e["size"], streams.setdefault(e["stream"], len(streams))))
            blocks += 1
        elif e["action"] == "free_requested" and e["addr"] in live:
            ops.append((live.pop(e["addr"]), 0, 0))
    if CPU:
        return
    with gzip.open(ARGS.out, "wt", compresslevel=9) as f:
        if len(streams) <= 1:
            json.dump([[block, size] for block, size, _ in ops], f, separators=(",", ":"))
            return
        print(json.dumps({"trace": ARGS.program, "streams": len(streams), "tags": [""]}), file=f)
        for block, size, stream in ops:
            alloc = {"op": "alloc", "id": block, "bytes": size, "stream": stream, "tag": ""}
            print(json.dumps(alloc if size else {"op": "free", "id": block}), file=f)


main()
