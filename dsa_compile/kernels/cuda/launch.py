"""Launching compiled CUDA C++ kernels on torch's streams."""

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsa_compile.errors import UserError
from dsa_compile.kernels.cuda.compiler import Defines, build
from dsa_compile.kernels.cuda.device import multiprocessors, rehearsal
from dsa_compile.kernels.cuda.driver import checked, load_driver
from dsa_compile.kernels.cuda.launch_arguments import check_arguments
from dsa_compile.kernels.cuda.shipped import kernels_in_use
from dsa_compile.kernels.late_kernels import kernel_made_ready

Grid = tuple[int, int, int]


class Int64(int):
    """An integer argument that the kernel takes as ``long long``."""


@functools.cache
def architecture(device: int) -> str:
    """The real architecture to compile for, with Hopper's and Blackwell's own instructions."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class CudaKernel:
    """One kernel of one source file, compiled for the current device when first launched.

    What was loaded is kept by the content of the shipped kernels in use
    (:class:`~dsa_compile.kernels.cuda.shipped.ShippedKernels`): an engine that runs those of its
    artifact and one that does not never get each other's.

    Args:
        source: file name in ``cuda/src``.
        name: of the ``extern "C" __global__`` function.
        defines: preprocessor macros.
        shared: bytes of dynamic shared memory.
        cluster: thread blocks of a cluster, along each axis.
        cooperative: all blocks must be resident at once.
        overlap: allow this kernel to start before the one before it on the stream has ended
            (programmatic dependent launch); it must then execute ``griddepcontrol.wait``.
    """

    def __init__(
        self,
        source: str,
        name: str,
        defines: Defines | None = None,
        *,
        shared: int = 0,
        cluster: Grid = (1, 1, 1),
        cooperative: bool = False,
        overlap: bool = False,
    ) -> None:
        self.source, self.name, self.defines = source, name, dict(defines or {})
        self.shared, self.cluster = shared, cluster
        self.cooperative, self.overlap = cooperative, overlap
        # Both by device and by the digest of the shipped kernels in use.
        self._loaded: dict[tuple[int, str], Any] = {}
        self._resident: dict[tuple[int, str, int, Grid], int] = {}
        self._config: Any = None

    def __call__(self, grid: Grid, block: int | Grid, *args: Any) -> None:
        """Launch on the current stream of the current device.

        Args:
            grid: thread blocks along each axis; nothing is launched if one is zero.
            block: threads.
            args: the kernel's, in order: a tensor is passed as its pointer, ``bool`` and ``int`` as
                32 bits, :class:`Int64` as 64, ``float`` as fp32, None as a null pointer, and what
                :func:`tensor_map` returns as a ``const __grid_constant__ CUtensorMap``.

        Raises:
            UserError: the driver refused the launch, or the kernel does not compile.
        """
        if 0 in grid:
            return
        if rehearsed := rehearsal():
            rehearsed.kernels.setdefault(self)
            return
        driver = load_driver()
        function = self._function(driver)
        if self._config is None:
            self._config = self._new_config(driver, self.cluster)
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        threads = (block, 1, 1) if isinstance(block, int) else block
        config.blockDimX, config.blockDimY, config.blockDimZ = threads
        config.hStream = torch.cuda.current_stream().cuda_stream
        values, types = _pack(args)
        check_arguments(driver, function, args, types, f"{self.source}: {self.name}")
        (status,) = driver.cuLaunchKernelEx(config, function, (values, types), 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise UserError(f"{self.source}: {self.name} grid {grid} block {block}: {status.name}")

    def warm(self, built: bytes | None = None) -> None:
        """Load for the current device now.

        Args:
            built: machine code of :func:`~dsa_compile.kernels.cuda.compiler.build`, for a kernel
                that the shipped ones in use lack; None to compile it here.
        """
        self._function(load_driver(), built)

    def resident_clusters(self, threads: int, cluster: Grid) -> int:
        """Clusters of that many blocks of ``threads`` that the current device holds at once."""
        if rehearsal():
            return multiprocessors() // math.prod(cluster)
        key = (*_loaded_for(), threads, cluster)
        if key not in self._resident:
            driver = load_driver()
            config = self._new_config(driver, cluster)
            config.gridDimX, config.gridDimY, config.gridDimZ = cluster
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            counted = driver.cuOccupancyMaxActiveClusters(self._function(driver), config)
            self._resident[key] = checked(driver, counted, self.name)
        return self._resident[key]

    def _new_config(self, driver: Any, cluster: Grid) -> Any:
        config = driver.CUlaunchConfig()
        config.sharedMemBytes = self.shared
        attributes = []
        if cluster != (1, 1, 1):
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dim = attribute.value.clusterDim
            dim.x, dim.y, dim.z = cluster
            attributes.append(attribute)
        if self.cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if self.overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def _function(self, driver: Any, built: bytes | None = None) -> Any:
        key = _loaded_for()
        function = self._loaded.get(key)
        if function is None:
            function = self._loaded[key] = self._load(driver, key[0], built)
        return function

    def _load(self, driver: Any, device: int, built: bytes | None = None) -> Any:
        torch.cuda.current_stream()  # makes sure that the primary context is current
        arch, library = architecture(device), None
        if cubin := kernels_in_use().find(self.source, arch=arch, defines=self.defines):
            # of a compiler that may be newer than this driver takes: then it is compiled here
            _, library = driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
        if not library:
            cubin = built or build(self.source, arch=arch, defines=self.defines)
            loaded = driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
            library = checked(driver, loaded, self.source)
        kernel = checked(driver, driver.cuLibraryGetKernel(library, self.name.encode()), self.name)
        function = checked(driver, driver.cuKernelGetFunction(kernel), self.name)
        attributes = driver.CUfunction_attribute
        if self.shared:  # 48 KB are free to take, but of them the kernel's static part is taken
            attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver, driver.cuFuncSetAttribute(function, attribute, self.shared), self.name)
        if self.cluster[0] * self.cluster[1] * self.cluster[2] > 8:
            attribute = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            checked(driver, driver.cuFuncSetAttribute(function, attribute, 1), self.name)
        kernel_made_ready()
        return function


def _loaded_for() -> tuple[int, str]:
    return torch.cuda.current_device(), kernels_in_use().digest


def tensor_map(
    tensor: Tensor,
    box: Sequence[int],
    *,
    swizzle: int = 128,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    l2_promotion: int = 128,
) -> Any:
    """Descriptor of a tensor for the bulk tensor copy engine (``cuTensorMapEncodeTiled``).

    Args:
        tensor: on the GPU; its last dimension contiguous, its address a multiple of 16 bytes.
        box: elements of one copy along each dimension, in the tensor's order.
        swizzle: bytes of the shared-memory swizzle: 0, 32, 64 or 128.
        dtype: reads the memory as this type of the same size.
        shape: sizes other than the tensor's own (then ``strides``, in elements, too).
        strides: in elements.
        l2_promotion: bytes fetched into L2 around what is read: 0, 64, 128 or 256.

    Raises:
        UserError: the driver refuses the layout.
    """
    if rehearsal():
        return None
    driver = load_driver()
    size = tensor.element_size()
    kinds = driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float32: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        torch.int32: kinds.CU_TENSOR_MAP_DATA_TYPE_INT32,
        torch.uint8: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        torch.float8_e4m3fn: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[dtype or tensor.dtype]
    swizzles = driver.CUtensorMapSwizzle
    swizzled = {
        0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[swizzle]
    promotions = driver.CUtensorMapL2promotion
    promotion = {
        0: promotions.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        64: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
        128: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        256: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    }[l2_promotion]
    sizes = list(shape if shape is not None else tensor.shape)
    steps = list(strides if strides is not None else tensor.stride())
    status, encoded = driver.cuTensorMapEncodeTiled(
        kind,
        len(sizes),
        tensor.data_ptr(),
        [driver.cuuint64_t(n) for n in reversed(sizes)],
        [driver.cuuint64_t(n * size) for n in reversed(steps[:-1])],
        [driver.cuuint32_t(n) for n in reversed(list(box))],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzled,
        promotion,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise UserError(
            f"tensor map of {list(sizes)} strides {list(steps)} box {list(box)}: {status.name}"
        )
    return encoded


def _pack(args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values: list[Any] = []
    types: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            values.append(value.data_ptr())
            types.append(ctypes.c_void_p)
        elif value is None:
            values.append(0)
            types.append(ctypes.c_void_p)
        elif isinstance(value, float):
            values.append(value)
            types.append(ctypes.c_float)
        elif isinstance(value, Int64):
            values.append(int(value))
            types.append(ctypes.c_int64)
        elif isinstance(value, int):
            values.append(int(value))
            types.append(ctypes.c_int32)
        else:  # a tensor map: the bindings copy it from its own memory
            values.append(value)
            types.append(None)
    return tuple(values), tuple(types)
