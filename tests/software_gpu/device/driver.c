/* CUDA driver: devices, contexts, functions by name.
 *
 * The headers name some functions by macros of their present version; sources and libraries use
 * several versions, so the functions are written with their versions.
 */
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>

#undef cuGetProcAddress

/* -- devices ----------------------------------------------------------------------------------- */

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

/* -- contexts: the primary one of each device -------------------------------------------------- */

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

/* -- functions by name ------------------------------------------------------------------------- */

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
