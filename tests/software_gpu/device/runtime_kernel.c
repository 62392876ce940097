/* CUDA runtime: kernels, which are registered, asked about and launched, and which do nothing. */
#include "runtime.h"

#include <stdlib.h>
#include <string.h>

/* The compiler's registration of kernels and variables when a library is loaded. It must not start
 * the device: a process may never use it. */

void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}

void __cudaUnregisterFatBinary(void **handle) {}

char __cudaInitModule(void **handle)
{
    return 1;
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int thread_limit, void *thread, void *block, void *block_size,
                            void *grid_size, int *warp_size)
{
}

void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external,
                       size_t size, int constant, int global)
{
}

/* kernel<<<grid, block, shared, stream>>>: push, then pop in the kernel's host function. */
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream)
{
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    memcpy(stream, &pushed.stream, sizeof pushed.stream);
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

/* Where values are computed, a kernel may start only in a thread that says that the values of its
 * operation are (software_values.py). Else a result would be wrong, and nothing would say so. */
static __thread bool expected;

void software_gpu_expect_launches(int on)
{
    expected = on;
}

int sw_launch(void)
{
    if (!sw_settings()->values || expected) {
        return cudaSuccess;
    }
    sw_say("REFUSED: a kernel started whose values nothing computes");
    return cudaErrorLaunchFailure;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared, cudaStream_t stream)
{
    return sw_result(sw_launch());
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                             size_t shared, cudaStream_t stream)
{
    return sw_result(sw_launch());
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block,
                                        void **arguments, size_t shared, cudaStream_t stream)
{
    return sw_result(sw_launch());
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel,
                                void **arguments)
{
    return sw_result(sw_launch());
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel)
{
    int version = 10 * sw_settings()->major + sw_settings()->minor;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = version;
    attributes->ptxVersion = version;
    attributes->maxDynamicSharedSizeBytes = 227 * 1024;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute,
                                            int value, int ordinal)
{
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel,
                                                          int block_size, size_t shared)
{
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
                                                                   const void *kernel,
                                                                   int block_size, size_t shared,
                                                                   unsigned flags)
{
    *blocks = 2;
    return cudaSuccess;
}

/* Kernels that are compiled at run time. All have the same handle. */
static char code;

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *image,
                                enum cudaJitOption *options, void **values, unsigned option_count,
                                enum cudaLibraryOption *library_options, void **library_values,
                                unsigned library_option_count)
{
    *library = (cudaLibrary_t)&code;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
    *kernel = (cudaKernel_t)&code;
    return cudaSuccess;
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library)
{
    return cudaSuccess;
}
