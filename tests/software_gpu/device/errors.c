/* Names and texts of the errors that the software GPU returns. Runtime and driver share numbers. */
#include "device.h"

#include <stdio.h>

struct error {
    int number;
    const char *runtime;
    const char *driver;
    const char *text;
};

static const struct error errors[] = {
    {CUDA_SUCCESS, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE",
     "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY",
     "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED",
     "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE",
     "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE",
     "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "cudaErrorDeviceUninitialized", "CUDA_ERROR_INVALID_CONTEXT",
     "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE",
     "invalid resource handle"},
    {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "cudaErrorPeerAccessAlreadyEnabled",
     "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered",
     "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered",
     "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_NOT_SUPPORTED, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED",
     "operation not supported"},
};

static const struct error *named(int number)
{
    static const struct error unknown = {CUDA_ERROR_UNKNOWN, "cudaErrorUnknown",
                                         "CUDA_ERROR_UNKNOWN", "unknown error"};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].number == number) {
            return &errors[i];
        }
    }
    return &unknown;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return named((int)error)->runtime;
}

const char *cudaGetErrorString(cudaError_t error)
{
    return named((int)error)->text;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = named((int)error)->driver;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = named((int)error)->text;
    return CUDA_SUCCESS;
}
