#!/usr/bin/env python3
"""Tests the allocator with PyTorch on a GPU, and shows how to use it.

    make -C csrc/pytorch
    python3 csrc/pytorch/test_torch.py [-library PATH] [CASE...]

Each case runs in a process of its own, since PyTorch takes one allocator for
the life of a process. A case passes when its process ends with status 0, its
checks hold, and it writes nothing to standard error that PyTorch's own
allocator would not cause too. No case holds more than 1 GiB.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import threading
import time
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = os.path.join(HERE, "..", "..", "build", "pytorch", "libcuvmm_pytorch.so")
RESULT = "result: "
TIMEOUT = 180  # seconds for one process
MIB = 1 << 20
TIB = 1 << 40


def use(torch, library):
    """What a user's program does, before anything is put on the GPU."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "managed_malloc", "managed_free")
    torch.cuda.memory.change_current_allocator(allocator)


class Driver:
    """The driver's calls that the cases make themselves, in the exported form."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def call(self, name, *args):
        result = getattr(self.cuda, name)(*args)
        if result != 0:
            raise RuntimeError(f"{name} returned {result}")

    def context(self):
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value

    def begin_capture(self, stream, mode=0):
        self.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(mode))

    def end_capture(self, stream):
        """Fails where anything has ended the capture before."""
        graph = ctypes.c_void_p()
        self.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        return graph

    def launch(self, graph, stream):
        executable = ctypes.c_void_p()
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        self.call("cuGraphLaunch", executable, ctypes.c_void_p(stream))

    def range_attribute(self, attribute, tensor):
        value = ctypes.c_int(-99)
        size = tensor.numel() * tensor.element_size()
        self.call("cuMemRangeGetAttribute", ctypes.byref(value), ctypes.c_size_t(4), ctypes.c_int(attribute), ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(size))
        return value.value


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def refusal(call):
    """The text of the RuntimeError that call raises."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")


# The cases. Each is given torch, with the managed allocator chosen.


def nothing(torch):
    """Puts one tensor on the GPU: what PyTorch itself writes shows here."""
    check(float(torch.ones(1000, device="cuda").sum()) == 1000, "a sum of ones")


def train(torch):
    """Trains a small model, deterministically, and returns the losses."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.LayerNorm(512), torch.nn.GELU(),
        torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 8),
    )
    inputs, targets = torch.randn(2048, 64), torch.randn(2048, 8)
    model, inputs, targets = model.cuda(), inputs.cuda(), targets.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(60):
        batch = slice(256 * (step % 8), 256 * (step % 8 + 1))
        loss = torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    check(losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}")
    weights = sum(float(p.detach().double().cpu().sum()) for p in model.parameters())
    return {"losses": losses, "weights": weights}


def placement(torch):
    """Where memory is, as the driver tells, and that the CPU reads it."""
    driver = Driver()
    size = 64 * MIB
    tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
    tensor.fill_(0x5A)
    torch.cuda.synchronize()
    found = {name: driver.range_attribute(number, tensor) for name, number in (("preferred", 2), ("accessed by", 3), ("prefetched", 4))}
    check(found == {"preferred": 0, "accessed by": -1, "prefetched": 0}, f"the driver says {found}")
    check(ctypes.string_at(tensor.data_ptr(), size) == b"\x5a" * size, "the CPU reads what the GPU wrote")
    ctypes.memset(tensor.data_ptr(), 3, 1000)
    check(int(tensor.sum(dtype=torch.int64)) == 0x5A * (size - 1000) + 3000, "the GPU reads what the CPU wrote")
    return found


def out_of_memory(torch):
    """Too much is an exception, after which everything works."""
    kept = torch.ones(1000, device="cuda")
    text = refusal(lambda: torch.empty(16 * TIB, dtype=torch.uint8, device="cuda"))
    for part in ("CUDA out of memory.", "16384.000 GiB", "GiB free of", "smaller batch"):
        check(part in text, f"{part!r} is not in: {text}")
    check(float(kept.sum() + torch.ones(1000, device="cuda").sum()) == 2000, "tensors after the failure")
    return {"text": text}


def sizes(torch):
    check(torch.empty(0, device="cuda").data_ptr() == 0, "an empty tensor has no address")
    empty = torch.zeros(0, 5, device="cuda") + 1
    check(empty.numel() == 0 and torch.cat([empty, torch.ones(2, 5, device="cuda")]).sum() == 10, "empty tensors take part")
    del empty
    text = refusal(lambda: torch.empty(4, device=f"cuda:{torch.cuda.device_count()}"))
    return {"absent device": text.splitlines()[0]}


def capture(torch):
    """During a capture allocation is refused, freeing works, the capture lives."""
    driver = Driver()
    stream = torch.cuda.Stream()
    counter, doomed = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")
    texts = []
    with torch.cuda.stream(stream):
        counter.add_(1)  # so that the kernel is loaded
        torch.cuda.synchronize()
        for mode in (0, 1, 2):
            driver.begin_capture(stream.cuda_stream, mode)
            counter.add_(1)
            texts.append(refusal(lambda: torch.empty(1024, device="cuda")))
            doomed = None
            counter.add_(1)
            driver.launch(driver.end_capture(stream.cuda_stream), stream.cuda_stream)
            stream.synchronize()
            doomed = torch.ones(1024, device="cuda")
    check(float(counter[0]) == 7, f"three graphs of two additions each, and one: {float(counter[0])}")
    for text in texts:
        check("captured into a graph" in text and "before the capture" in text, text)
    return {"text": texts[0]}


def capture_elsewhere(torch):
    """While another stream is captured, memory comes and goes, and it lives."""
    driver = Driver()
    captured, other = torch.cuda.Stream(), torch.cuda.Stream()
    counter = torch.zeros(1024, device="cuda")
    counter.add_(1)
    torch.cuda.synchronize()
    failed = []

    def come_and_go(stream, where):
        try:
            with torch.cuda.stream(stream):
                torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            failed.append(f"{where}: {error}")

    for mode in (0, 1, 2):
        for name, stream in (("another stream", other), ("the default stream", torch.cuda.default_stream())):
            for thread in ("the capture's thread", "another thread"):
                with torch.cuda.stream(captured):
                    driver.begin_capture(captured.cuda_stream, mode)
                    counter.add_(1)
                where = f"capture mode {mode}, {name}, {thread}"
                if thread == "another thread":
                    worker = threading.Thread(target=come_and_go, args=(stream, where))
                    worker.start()
                    worker.join()
                else:
                    come_and_go(stream, where)
                try:
                    driver.end_capture(captured.cuda_stream)
                except RuntimeError as error:
                    failed.append(f"{where}: the capture was ended: {error}")
    check(not failed, "; ".join(failed))


def capture_blocking(torch):
    """A stream that waits for the legacy stream is captured: PyTorch's default
    stream, which is the legacy one, is then left alone."""
    driver = Driver()
    kept = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    blocking = ctypes.c_void_p()
    driver.call("cuStreamCreate", ctypes.byref(blocking), ctypes.c_uint(0))
    driver.begin_capture(blocking.value)
    text = refusal(lambda: torch.empty(1024, device="cuda"))
    del kept
    driver.end_capture(blocking.value)
    check("captured into a graph" in text, text)
    return {"text": text}


def forked(torch):
    """A forked child drops the parent's tensors, and ends, without a word."""
    held = [torch.ones(1000, device="cuda") for _ in range(3)]
    child = os.fork()
    if child == 0:
        held.clear()
        os._exit(0)
    check(os.waitpid(child, 0)[1] == 0, "the child's status")
    check(float(sum(t.sum() for t in held)) == 3000, "the parent's tensors")


def loader(torch):
    """DataLoader workers made by fork, which inherit tensors and drop them."""
    global inherited
    inherited = torch.ones(1000, device="cuda")

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            return torch.tensor(float(i * i))

    def drop(_):
        global inherited
        inherited = None

    loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=2, worker_init_fn=drop, multiprocessing_context="fork")
    for _ in range(2):
        total = sum(float(batch.cuda().sum()) for batch in loader)
        check(total == sum(i * i for i in range(64)), f"the sum is {total}")
    check(float(inherited.sum()) == 1000, "the parent's tensor")


def threads(torch):
    """Eight threads, two hundred tensors each."""
    failed = []

    def work(seed):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                held = []
                for i in range(200):
                    held.append(torch.full((1 + (i * seed) % 999,), float(i), device="cuda"))
                    if i % 3 == 0:
                        check(float(held.pop(0)[0]) >= 0, "a tensor's first element")
        except Exception as error:
            failed.append(repr(error))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    check(not failed, "; ".join(failed))


def thread_as_found(torch):
    """A thread without a context has none afterwards."""
    torch.ones(1, device="cuda")
    driver, library, found = Driver(), ctypes.CDLL(os.environ["CUVMM_TEST_LIBRARY"]), []
    library.managed_malloc.restype = ctypes.c_void_p
    library.managed_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.managed_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.managed_free.restype = None

    def work():
        found.append(driver.context())
        p = library.managed_malloc(MIB, 0, None)
        found.append(driver.context())
        library.managed_free(p, MIB, 0, None)
        found.append(driver.context())

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    check(found == [None, None, None], f"the thread's contexts: {found}")


def ends(torch):
    """The process ends with tensors held and work running."""
    global held
    held = [torch.randn(2048, 2048, device="cuda") for _ in range(4)]
    for _ in range(20):
        held[0] = held[1] @ held[2]


def pool(torch):
    """PyTorch's caching allocator on top: native memory outside of the pool,
    managed memory inside, without a call to the driver once it is warm."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(os.environ["CUVMM_TEST_LIBRARY"], "managed_malloc", "managed_free")
    driver = Driver()
    pool = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.ones(4 * MIB, device="cuda")
        check(driver.range_attribute(2, tensor) == 0, "the pool's memory is managed")
        first = tensor.data_ptr()
        del tensor
        check(torch.empty(4 * MIB, device="cuda").data_ptr() == first, "the pool gives memory out again")
    del pool
    text = refusal(lambda: driver.range_attribute(2, torch.ones(1024, device="cuda")))
    check("cuMemRangeGetAttribute" in text, "memory outside of the pool is not managed")


def cost(torch):
    """Means in microseconds of a tensor that comes and goes."""
    means = {}
    for size in (4096, MIB, 64 * MIB, 256 * MIB):
        torch.cuda.synchronize()
        count, start = 20, time.perf_counter()
        for _ in range(count):
            torch.empty(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        means[size] = round((time.perf_counter() - start) / count * 1e6, 1)
    return {f"{size >> 10} KiB": mean for size, mean in means.items()}


# name: the case, and the allocators it runs with.
CASES = {
    case.__name__: (case, allocators)
    for case, allocators in (
        (nothing, ("managed",)), (train, ("native", "managed")), (placement, ("managed",)), (out_of_memory, ("managed",)),
        (sizes, ("managed",)), (capture, ("managed",)), (capture_elsewhere, ("managed",)), (capture_blocking, ("managed",)),
        (forked, ("managed",)), (loader, ("managed",)), (threads, ("managed",)), (thread_as_found, ("managed",)),
        (ends, ("managed",)), (pool, ("native",)), (cost, ("native", "managed")),
    )
}


def child(name, allocator):
    import torch

    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    if allocator == "managed":
        use(torch, os.environ["CUVMM_TEST_LIBRARY"])
    result = CASES[name][0](torch)
    print(RESULT + json.dumps(result), flush=True)


def run(name, allocator, library):
    """Runs a case; returns what it returned, its standard error's lines, and
    why it failed, or None."""
    environment = dict(os.environ, CUVMM_TEST_LIBRARY=library, CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONUNBUFFERED="1")
    command = [sys.executable, os.path.abspath(__file__), "-child", name, allocator]
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", timeout=TIMEOUT)
    except subprocess.TimeoutExpired as expired:
        text = expired.stderr or b""
        return None, (text.decode(errors="replace") if isinstance(text, bytes) else text).splitlines(), f"it did not end in {TIMEOUT} s"
    results = [line[len(RESULT):] for line in done.stdout.splitlines() if line.startswith(RESULT)]
    failure = None
    if done.returncode != 0:
        failure = f"status {done.returncode}"
    elif len(results) != 1:
        failure = f"it reported {len(results)} times"
    return json.loads(results[0]) if results else None, done.stderr.splitlines(), failure


def pattern(line):
    """The line without what differs from run to run: times, process ids."""
    return re.sub(r"[0-9]+", "0", line)


def compare(managed, native):
    """Why the two trainings differ, or None. Sums may be done in another order
    where memory is aligned differently; nothing else is allowed for."""
    pairs = list(zip(managed["losses"] + [managed["weights"]], native["losses"] + [native["weights"]]))
    worst = max(abs(m - n) / max(abs(n), 1e-12) for m, n in pairs)
    same = "bit for bit" if worst == 0 else f"within {worst:.2g}"
    print(f"     {len(managed['losses'])} losses from {native['losses'][0]:.6f} to {native['losses'][-1]:.6f}, the same {same}")
    return None if worst <= 1e-5 else f"the trainings differ by {worst:.2g}"


def main(arguments):
    library = LIBRARY
    if arguments[:1] == ["-library"]:
        library, arguments = arguments[1], arguments[2:]
    unknown = [name for name in arguments if name not in CASES]
    if unknown:
        return f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}"
    library = os.path.abspath(library)
    if not os.path.exists(library):
        return f"{library} is missing: make -C csrc/pytorch"
    _, usual, failure = run("nothing", "native", library)
    if failure:
        return "\n".join(usual + [f"PyTorch does not work on this machine without the library either: {failure}"])

    failures = 0
    for name in arguments or CASES:
        results, began = {}, time.monotonic()
        failure, noise, known = None, [], {pattern(line) for line in usual}
        for allocator in CASES[name][1]:
            results[allocator], lines, failed = run(name, allocator, library)
            if allocator == "native" and not failed and "managed" in CASES[name][1]:
                known |= {pattern(line) for line in lines}
            lines = [line for line in lines if pattern(line) not in known]
            failed = failed or (f"it wrote {len(lines)} lines to standard error" if lines else None)
            if failed:
                failure, noise = f"{allocator}: {failed}", noise + lines
        if not failure and name == "train":
            failure = compare(results["managed"], results["native"])
        print(f"{'FAIL' if failure else 'ok  '} {name} ({time.monotonic() - began:.1f} s){': ' + failure if failure else ''}")
        for line in noise:
            print(f"     | {line}")
        if name != "train":
            for allocator, result in results.items():
                if result:
                    print(f"     {allocator}: {json.dumps(result)}")
        sys.stdout.flush()
        failures += failure is not None
    print(f"{failures} failed" if failures else "all passed")
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["-child"]:
        sys.exit(child(*sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
