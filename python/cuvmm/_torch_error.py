"""The shim that makes the pool throw PyTorch's own out-of-memory error: a few lines of C++, compiled against the installed PyTorch.

libcuvmm.so is built without PyTorch's headers, so it cannot name the error's class, which every version of PyTorch lays
out in its own way.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
import tempfile
from typing import Any, List

from .errors import NotSupported

_SOURCE = """#include <c10/util/Exception.h>
extern "C" void cuvmm_throw_out_of_memory(const char *message) { TORCH_CHECK_WITH(OutOfMemoryError, false, message); }
"""


def _cache() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "cuvmm"


def _command(torch: Any, compiler: List[str], out: str, source: str) -> List[str]:
    root = pathlib.Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return compiler + ["-O1", "-std=c++17", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{root / 'include'}", "-o", out, source,
                       f"-L{root / 'lib'}", "-lc10"]


def build(torch: Any) -> str:
    """The path of the compiled shim, which is kept in the user's cache folder for the next process."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    key = hashlib.sha256("\n".join([torch.__version__, torch.__file__, _SOURCE]).encode()).hexdigest()[:16]
    path = _cache() / f"torch-error-{key}.so"
    if path.exists():
        return str(path)
    if shutil.which(compiler[0]) is None:
        raise NotSupported(f"{compiler[0]} is not in PATH, and PyTorch's error class needs a C++ compiler once",
                           "install one, name it in CXX, or leave own_error out and catch RuntimeError")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        source, out = os.path.join(work, "shim.cc"), os.path.join(work, "shim.so")
        pathlib.Path(source).write_text(_SOURCE)
        done = subprocess.run(_command(torch, compiler, out, source), capture_output=True, text=True)
        if done.returncode != 0:
            raise NotSupported(f"the shim for PyTorch {torch.__version__} was not compiled: {done.stderr.strip()[-2000:]}",
                               "install PyTorch's headers, or leave own_error out and catch RuntimeError")
        os.replace(out, path)
    return str(path)


def install(torch: Any, library: ctypes.CDLL) -> None:
    """Makes the library throw PyTorch's error. PyTorch must be imported, so that the shim finds its libraries."""
    path = build(torch)
    try:
        shim = ctypes.CDLL(path)
    except OSError as e:
        raise NotSupported(f"{path} could not be loaded: {e}", "remove it, so that it is compiled again") from None
    library.cuvmm_torch_throw_with(ctypes.cast(shim.cuvmm_throw_out_of_memory, ctypes.c_void_p))
