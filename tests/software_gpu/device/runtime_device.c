/* CUDA runtime: devices, their properties, versions, the last error. */
#include "runtime.h"

#include <stdio.h>
#include <string.h>

static __thread cudaError_t last_error;

cudaError_t sw_result(int error)
{
    if (error) {
        last_error = (cudaError_t)error;
    }
    return (cudaError_t)error;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDA_RELEASE;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDA_RELEASE;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 0;
    CUresult error = sw_start();
    if (!error) {
        *count = sw_visible_count();
    }
    return sw_result((int)error);
}

cudaError_t cudaGetDevice(int *ordinal)
{
    *ordinal = sw_current();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int ordinal)
{
    return sw_result((int)sw_set_current(ordinal));
}

static bool is_device(int ordinal)
{
    return ordinal >= 0 && ordinal < sw_visible_count();
}

cudaError_t cudaDeviceSynchronize(void)
{
    return sw_result((int)sw_context(sw_current()));
}

cudaError_t cudaDeviceReset(void)
{
    static bool reported;
    return sw_result(sw_missing("cudaDeviceReset", &reported, cudaErrorNotSupported));
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int ordinal)
{
    if (!is_device(ordinal)) {
        return sw_result(cudaErrorInvalidDevice);
    }
    *value = sw_attribute((CUdevice_attribute)attribute, ordinal);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int ordinal)
{
#define ATTRIBUTE(name) sw_attribute(CU_DEVICE_ATTRIBUTE_##name, ordinal)
    if (!is_device(ordinal)) {
        return sw_result(cudaErrorInvalidDevice);
    }
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "%s", sw_settings()->name);
    sw_uuid(sw_physical(ordinal), (unsigned char *)found->uuid.bytes);
    found->totalGlobalMem = sw_settings()->bytes;
    found->major = ATTRIBUTE(COMPUTE_CAPABILITY_MAJOR);
    found->minor = ATTRIBUTE(COMPUTE_CAPABILITY_MINOR);
    found->pciBusID = ATTRIBUTE(PCI_BUS_ID);
    found->sharedMemPerBlock = (size_t)ATTRIBUTE(MAX_SHARED_MEMORY_PER_BLOCK);
    found->sharedMemPerBlockOptin = (size_t)ATTRIBUTE(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    found->sharedMemPerMultiprocessor =
        (size_t)ATTRIBUTE(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    found->reservedSharedMemPerBlock = (size_t)ATTRIBUTE(RESERVED_SHARED_MEMORY_PER_BLOCK);
    found->regsPerBlock = ATTRIBUTE(MAX_REGISTERS_PER_BLOCK);
    found->regsPerMultiprocessor = ATTRIBUTE(MAX_REGISTERS_PER_MULTIPROCESSOR);
    found->warpSize = ATTRIBUTE(WARP_SIZE);
    found->memPitch = (size_t)ATTRIBUTE(MAX_PITCH);
    found->maxThreadsPerBlock = ATTRIBUTE(MAX_THREADS_PER_BLOCK);
    found->maxThreadsDim[0] = ATTRIBUTE(MAX_BLOCK_DIM_X);
    found->maxThreadsDim[1] = ATTRIBUTE(MAX_BLOCK_DIM_Y);
    found->maxThreadsDim[2] = ATTRIBUTE(MAX_BLOCK_DIM_Z);
    found->maxGridSize[0] = ATTRIBUTE(MAX_GRID_DIM_X);
    found->maxGridSize[1] = ATTRIBUTE(MAX_GRID_DIM_Y);
    found->maxGridSize[2] = ATTRIBUTE(MAX_GRID_DIM_Z);
    found->totalConstMem = (size_t)ATTRIBUTE(TOTAL_CONSTANT_MEMORY);
    found->textureAlignment = (size_t)ATTRIBUTE(TEXTURE_ALIGNMENT);
    found->multiProcessorCount = ATTRIBUTE(MULTIPROCESSOR_COUNT);
    found->maxThreadsPerMultiProcessor = ATTRIBUTE(MAX_THREADS_PER_MULTIPROCESSOR);
    found->maxBlocksPerMultiProcessor = ATTRIBUTE(MAX_BLOCKS_PER_MULTIPROCESSOR);
    found->canMapHostMemory = ATTRIBUTE(CAN_MAP_HOST_MEMORY);
    found->concurrentKernels = ATTRIBUTE(CONCURRENT_KERNELS);
    found->ECCEnabled = ATTRIBUTE(ECC_ENABLED);
    found->asyncEngineCount = ATTRIBUTE(ASYNC_ENGINE_COUNT);
    found->unifiedAddressing = ATTRIBUTE(UNIFIED_ADDRESSING);
    found->memoryBusWidth = ATTRIBUTE(GLOBAL_MEMORY_BUS_WIDTH);
    found->l2CacheSize = ATTRIBUTE(L2_CACHE_SIZE);
    found->accessPolicyMaxWindowSize = ATTRIBUTE(MAX_ACCESS_POLICY_WINDOW_SIZE);
    found->streamPrioritiesSupported = ATTRIBUTE(STREAM_PRIORITIES_SUPPORTED);
    found->globalL1CacheSupported = ATTRIBUTE(GLOBAL_L1_CACHE_SUPPORTED);
    found->localL1CacheSupported = ATTRIBUTE(LOCAL_L1_CACHE_SUPPORTED);
    found->computePreemptionSupported = ATTRIBUTE(COMPUTE_PREEMPTION_SUPPORTED);
    found->canUseHostPointerForRegisteredMem =
        ATTRIBUTE(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
    found->hostRegisterSupported = ATTRIBUTE(HOST_REGISTER_SUPPORTED);
    found->cooperativeLaunch = ATTRIBUTE(COOPERATIVE_LAUNCH);
    found->clusterLaunch = ATTRIBUTE(CLUSTER_LAUNCH);
    found->ipcEventSupported = ATTRIBUTE(IPC_EVENT_SUPPORTED);
    return cudaSuccess;
#undef ATTRIBUTE
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int ordinal)
{
    if (!is_device(ordinal)) {
        return sw_result(cudaErrorInvalidDevice);
    }
    int bus = sw_attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, ordinal);
    snprintf(text, (size_t)size, "0000:%02X:00.0", (unsigned)bus);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *access, int ordinal, int peer)
{
    if (!is_device(ordinal) || !is_device(peer)) {
        return sw_result(cudaErrorInvalidDevice);
    }
    *access = ordinal != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    return sw_result(is_device(peer) ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    if (least) {
        *least = 0;
    }
    if (greatest) {
        *greatest = -5;
    }
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    CUresult error = sw_context(sw_current());
    if (error) {
        return sw_result((int)error);
    }
    *total = sw_settings()->bytes;
    *available = *total - sw_table_used(sw_physical(sw_current()));
    return cudaSuccess;
}

cudaError_t cudaProfilerStart(void)
{
    return cudaSuccess;
}

cudaError_t cudaProfilerStop(void)
{
    return cudaSuccess;
}
