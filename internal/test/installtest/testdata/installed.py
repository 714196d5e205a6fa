"""What an installed wheel has."""

import ctypes
import importlib.metadata
import pathlib

import cuvmm
from cuvmm import _torch_library

package = pathlib.Path(cuvmm.__file__).parent
assert "site-packages" in package.parts, package
assert (package / "py.typed").exists()
library = ctypes.CDLL(_torch_library.find(None))
metadata = importlib.metadata.metadata("cuvmm")
assert any("LICENSE" in str(f) for f in importlib.metadata.files("cuvmm") or [])
options = (ctypes.c_size_t * 4)(32, 0, 0, 0)
pool, block, error = ctypes.c_uint64(), ctypes.c_void_p(), _torch_library.CError(size=ctypes.sizeof(_torch_library.CError))
assert library.cuvmm_pool_open(options, ctypes.byref(pool), ctypes.byref(error)) == 0, error.message
assert library.cuvmm_alloc(pool, ctypes.c_size_t(1000), None, ctypes.c_uint64(0), ctypes.byref(block), ctypes.byref(error)) == 0, error.message
assert library.cuvmm_version() == _torch_library.VERSION
print(f"typed, {metadata['License']}, {'a' if block.value else 'no'} block")
