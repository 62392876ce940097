/* CUDA driver: devices, contexts, modules, launches, memory; virtual memory is in driver_memory.c.
 *
 * The headers name some functions by macros of their present version; sources and libraries use
 * several versions, so the functions are written with their versions.
 */
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#undef cuGetProcAddress

/* -- devices ------------------------------------------------------------------------------------------ */

CUresult cuInit(unsigned flags)
{
    return sw_start();
}

CUresult cuDriverGetVersion(int *version)
{
    *version = CUDA_RELEASE;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    *count = sw_visible_count();
    return CUDA_SUCCESS;
}

static bool is_device(CUdevice device)
{
    return device >= 0 && device < sw_visible_count();
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    if (!is_device(ordinal)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    snprintf(name, (size_t)size, "%s", sw_settings()->name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    if (!is_device(device)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    sw_uuid(sw_physical(device), (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    *bytes = sw_settings()->bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    if (!is_device(device)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *value = sw_attribute(attribute, device);
    return CUDA_SUCCESS;
}

/* -- contexts: the primary one of each device --------------------------------------------------------- */

struct CUctx_st {
    int ordinal;
};

static struct CUctx_st primary[MAX_DEVICES];

enum { STACK = 16 };
static __thread int stack[STACK];
static __thread int stack_depth;

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CUresult error = sw_context(device);
    if (!error) {
        primary[device].ordinal = device;
        *context = &primary[device];
    }
    return error;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    if (flags) {
        *flags = 0;
    }
    *active = sw_has_context(device);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = NULL;
    return sw_has_context(sw_current()) ? cuDevicePrimaryCtxRetain(context, sw_current())
                                        : CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    return context ? sw_set_current(context->ordinal) : CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    if (!context || stack_depth == STACK) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    stack[stack_depth++] = sw_current();
    return sw_set_current(context->ordinal);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    if (stack_depth == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (context) {
        *context = &primary[sw_current()];
    }
    return sw_set_current(stack[--stack_depth]);
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    *device = sw_current();
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit)
{
    *value = MIB;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
    return cuDevicePrimaryCtxRetain(context, sw_current());
}

CUresult cuStreamSynchronize(CUstream stream)
{
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    return CUDA_SUCCESS;
}

/* -- memory ------------------------------------------------------------------------------------------- */

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    return sw_allocate((void **)address, size, sw_current());
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    return sw_free((void *)address);
}

CUresult cuMemGetInfo_v2(size_t *available, size_t *total)
{
    return (CUresult)cudaMemGetInfo(available, total);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t size)
{
    sw_copy((void *)target, source, size);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t size)
{
    sw_copy(target, (const void *)source, size);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t size, CUstream stream)
{
    return cuMemcpyHtoD_v2(target, source, size);
}

CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t size, CUstream stream)
{
    return cuMemcpyDtoH_v2(target, source, size);
}

CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count)
{
    return (CUresult)cudaMemset((void *)address, value, count);
}

CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream)
{
    unsigned *entries = (unsigned *)address;
    if (!sw_left_out(count * sizeof value)) {
        for (size_t i = 0; i < count; i++) {
            entries[i] = value;
        }
    }
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr address)
{
    struct allocation found;
    if (!sw_find((void *)address, &found)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (start) {
        *start = found.start;
    }
    if (size) {
        *size = found.size;
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
    struct allocation found;
    if (!sw_find((void *)address, &found)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    bool host = found.kind == PINNED_MEMORY || found.kind == REGISTERED_MEMORY;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        return cuDevicePrimaryCtxRetain(value, found.device);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)value = address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = found.device;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)value = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)value = found.start;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)value = found.size;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned *)value = found.kind == DEVICE_MEMORY;
        return CUDA_SUCCESS;
    default:
        sw_say("cuPointerGetAttribute: attribute %d is not implemented", (int)attribute);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

/* -- modules and launches, as of Triton: loaded into nothing -------------------------------------------- */

static char code;

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    *module = (CUmodule)&code;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count,
                            CUjit_option *options, void **values)
{
    return cuModuleLoadData(module, image);
}

CUresult cuModuleLoad(CUmodule *module, const char *path)
{
    return cuModuleLoadData(module, path);
}

CUresult cuModuleUnload(CUmodule module)
{
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    *function = (CUfunction)&code;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
    *module = (CUmodule)&code;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
             : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                                  : 0;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        CUstream stream, void **arguments, void **extra)
{
    return (CUresult)sw_launch();
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments,
                          void **extra)
{
    return (CUresult)sw_launch();
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                   unsigned grid_z, unsigned block_x, unsigned block_y,
                                   unsigned block_z, unsigned shared, CUstream stream,
                                   void **arguments)
{
    return (CUresult)sw_launch();
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function,
                                                     int block_size, size_t shared)
{
    *blocks = 2;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function,
                                      const CUlaunchConfig *config)
{
    *clusters = 2;
    return CUDA_SUCCESS;
}

/* A descriptor for the hardware's copies of tiles; only kernels read it. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}

/* -- functions by name ---------------------------------------------------------------------------------- */

static CUresult unsupported(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* The newest version that is here. The library may have been loaded without its names being global,
 * so it is opened again. */
static void *by_name(const char *name)
{
    static void *self;
    const char *versions[] = {"_v3", "_v2", ""};
    if (!self) {
        Dl_info info;
        if (!dladdr((void *)by_name, &info)) {
            return NULL;
        }
        self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        char versioned[128];
        snprintf(versioned, sizeof versioned, "%s%s", name, versions[i]);
        void *function = self ? dlsym(self, versioned) : NULL;
        if (function) {
            return function;
        }
    }
    return NULL;
}

/* Callers look up all functions of their table first and stop where one is missing; so it is
 * there, and fails when it is called. */
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *result)
{
    *function = by_name(name);
    if (!*function) {
        if (sw_settings()->trace) {
            sw_say("no driver function %s", name);
        }
        *function = (void *)unsupported;
    }
    if (result) {
        *result = CU_GET_PROC_ADDRESS_SUCCESS;
    }
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result)
{
    cuGetProcAddress_v2(name, function, (int)version, flags, NULL);
    if (result) {
        *result = cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
}
