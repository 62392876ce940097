/* CUDA driver: memory by address. Virtual memory management is in driver_virtual.c. */
#include "device.h"

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
