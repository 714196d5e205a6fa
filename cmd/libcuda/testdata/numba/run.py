"""Runs Numba's own tests of the driver (numba.cuda.tests.cudadrv) on the libcuda that NUMBA_CUDA_DRIVER names, and lists what
it skips: all that needs libNVVM, NVIDIA's compiler, with which Numba makes kernels."""

import pkgutil
import sys
import unittest

from numba.cuda.tests import cudadrv

LAUNCHES = "launches a kernel"
LINKS = "compiles a kernel, to link it"
COMPILER = "tests the compiler alone"

# By module, class and test.
SKIPPED = {
    "test_context_stack.Test3rdPartyContext.test_cudajit_in_attached_primary_context": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_array_assign_all": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_array_assign_column": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_array_assign_deep_subarray": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_array_assign_row": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_array_assign_subarray": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_broadcast": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_no_sync_default_stream": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_no_sync_supplied_stream": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_rank": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_scalar": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_strides": LAUNCHES,
    "test_cuda_array_slicing.CudaArraySetting.test_sync": LAUNCHES,
    "test_cuda_devicerecord.TestRecordDtypeWithStructArrays.test_structured_array2": LAUNCHES,
    "test_cuda_devicerecord.TestRecordDtypeWithStructArrays.test_structured_array3": LAUNCHES,
    "test_cuda_devicerecord.TestRecordDtypeWithStructArrays.test_structured_array4": LAUNCHES,
    "test_cuda_ndarray.TestCoreContiguous.test_device_array_like_2d_f_transpose": LAUNCHES,
    "test_cuda_ndarray.TestCoreContiguous.test_device_array_like_2d_transpose": LAUNCHES,
    "test_cuda_ndarray.TestCudaNDArray.test_devicearray_transpose_T": LAUNCHES,
    "test_cuda_ndarray.TestCudaNDArray.test_devicearray_transpose_ok": LAUNCHES,
    "test_cuda_ndarray.TestRecarray.test_recarray": LAUNCHES,
    "test_managed_alloc.TestManagedAlloc.test_managed_array_attach_global": LAUNCHES,
    "test_managed_alloc.TestManagedAlloc.test_managed_array_attach_host": LAUNCHES,
    "test_ptds.TestPTDS.test_ptds": LAUNCHES,
    "test_inline_ptx.TestCudaInlineAsm.test_inline_rsqrt": COMPILER,
    "test_nvvm_driver.TestNvvmDriver.test_nvvm_compile_simple": COMPILER,
    "test_nvvm_driver.TestNvvmDriver.test_nvvm_from_llvm": COMPILER,
    "test_nvvm_driver.TestArchOption.test_get_arch_option": COMPILER,
    "test_nvvm_driver.TestLibDevice.test_libdevice_load": COMPILER,
    "test_linker.TestLinker.test_linking_eager_compile": LINKS,
    "test_linker.TestLinker.test_linking_file_with_no_extension_error": LINKS,
    "test_linker.TestLinker.test_linking_lazy_compile": LINKS,
    "test_linker.TestLinker.test_linking_unknown_filetype_error": LINKS,
    "test_linker.TestLinker.test_set_registers_38": LINKS,
    "test_linker.TestLinker.test_set_registers_57": LINKS,
    "test_linker.TestLinker.test_set_registers_eager": LINKS,
    "test_linker.TestLinker.test_set_registers_no_max": LINKS,
    "test_linker.TestLinker.test_try_to_link_nonexistent": LINKS,
}
PACKAGE = cudadrv.__name__ + "."


def tests(suite):
    for part in suite:
        if isinstance(part, unittest.TestSuite):
            yield from tests(part)
        else:
            yield part


def skip_listed(suite):
    unknown = set(SKIPPED)
    for test in tests(suite):
        name = test.id().removeprefix(PACKAGE)
        if name in SKIPPED:
            unknown.discard(name)
            setattr(test, test._testMethodName, unittest.skip(SKIPPED[name])(getattr(test, test._testMethodName)))
    if unknown:
        sys.exit(f"Numba has no tests of these names: {sorted(unknown)}")


def main():
    modules = sorted(PACKAGE + m.name for m in pkgutil.iter_modules(cudadrv.__path__) if m.name.startswith("test_"))
    suite = unittest.defaultTestLoader.loadTestsFromNames(modules)
    skip_listed(suite)
    result = unittest.TextTestRunner(stream=sys.stdout).run(suite)
    print("skipped:")
    for test, reason in sorted(result.skipped, key=lambda s: (s[1], s[0].id())):
        print(f"  {test.id().removeprefix(PACKAGE)}: {reason or 'by Numba'}")
    # A library that cannot be opened makes Numba skip everything.
    if not result.wasSuccessful() or result.testsRun - len(result.skipped) < 150:
        sys.exit(1)


if __name__ == "__main__":  # tests make processes that import this module
    main()
