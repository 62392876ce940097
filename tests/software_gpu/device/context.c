/* Initialisation, primary contexts, the current device of a thread, attributes of a device. */
#include "device.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

/* What a context takes of an H100 before its first allocation. */
#define CONTEXT_BYTES (520 * MIB)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t started_by;
static bool has_context[MAX_DEVICES];
static __thread int current;

/* Each allocation holds a file. */
static void raise_file_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

CUresult sw_start(void)
{
    if (sw_visible_count() == 0) {
        return CUDA_ERROR_NO_DEVICE;
    }
    pthread_mutex_lock(&lock);
    if (!started_by) {
        started_by = getpid();
        raise_file_limit();
    }
    bool forked = started_by != getpid();
    pthread_mutex_unlock(&lock);
    return forked ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

CUresult sw_context(int ordinal)
{
    CUresult error = sw_start();
    if (error) {
        return error;
    }
    if (ordinal < 0 || ordinal >= sw_visible_count()) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    pthread_mutex_lock(&lock);
    if (!has_context[ordinal]) {
        has_context[ordinal] = sw_table_take(sw_physical(ordinal), CONTEXT_BYTES);
    }
    bool created = has_context[ordinal];
    pthread_mutex_unlock(&lock);
    return created ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

bool sw_has_context(int ordinal)
{
    return ordinal >= 0 && ordinal < MAX_DEVICES && has_context[ordinal];
}

int sw_current(void)
{
    return current;
}

CUresult sw_set_current(int ordinal)
{
    CUresult error = sw_context(ordinal);
    if (!error) {
        current = ordinal;
    }
    return error;
}

/* Figures of an H100 SXM; the capability alone is a setting. */
int sw_attribute(CUdevice_attribute attribute, int ordinal)
{
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return sw_settings()->major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return sw_settings()->minor;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        return sw_physical(ordinal) + 1;

    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
        return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
        return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
        return 0x7fffffff;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
        return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        return 48 * 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        return 227 * 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        return 228 * 1024;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
        return 1024;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
        return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
        return 32;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: /* kHz */
        return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
        return 2619000;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
        return 512;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return 132;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
        return 5120;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        return 50 * (int)MIB;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        return 2048;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        return 3;
    case CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE:
        return 128 * (int)MIB;

    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
        return 1;
    default: /* not supported, as managed memory, memory pools, multicast and fabric handles */
        return 0;
    }
}
