/* NVML: devices of the machine and their memory. It needs no context and works after a fork.
 *
 * The environment has no nvml.h. These declarations cover what PyTorch, vLLM, Ray and sg_rlhf call;
 * pynvml raises NVMLError_FunctionNotFound for the others.
 */
#include "device.h"

#include <stdio.h>
#include <string.h>

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
} nvmlReturn_t;

/* A handle is the index of the device plus one. */
typedef void *nvmlDevice_t;

enum { NVML_P2P_STATUS_OK = 0 };

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_v2_t;

enum { NO_INSTANCE = 0xffffffff };

static int index_of(nvmlDevice_t device)
{
    return (int)(uintptr_t)device - 1;
}

static nvmlDevice_t handle_of(int index)
{
    return (nvmlDevice_t)(uintptr_t)(index + 1);
}

static nvmlReturn_t give_text(char *target, unsigned size, const char *text)
{
    int length = snprintf(target, size, "%s", text);
    return length < (int)size ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return sw_settings()->count ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    return nvmlInit_v2();
}

nvmlReturn_t nvmlShutdown(void)
{
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t error)
{
    switch (error) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    }
    return "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    return give_text(text, size, DRIVER_RELEASE);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    *version = CUDA_RELEASE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return nvmlSystemGetCudaDriverVersion(version);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = (unsigned)sw_settings()->count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    if (index >= (unsigned)sw_settings()->count) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *device = handle_of((int)index);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device)
{
    unsigned domain, bus;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus == 0) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    for (int i = 0; i < sw_settings()->count; i++) {
        char text[UUID_TEXT];
        sw_uuid_text(i, text);
        if (strcmp(text, uuid) == 0) {
            *device = handle_of(i);
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    *index = (unsigned)index_of(device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *number)
{
    return nvmlDeviceGetIndex(device, number);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned size)
{
    return give_text(text, size, sw_settings()->name);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned size)
{
    char uuid[UUID_TEXT];
    sw_uuid_text(index_of(device), uuid);
    return give_text(text, size, uuid);
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    *major = sw_settings()->major;
    *minor = sw_settings()->minor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    memory->total = sw_settings()->bytes;
    memory->used = sw_table_used(index_of(device));
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    nvmlMemory_t found;
    nvmlDeviceGetMemoryInfo(device, &found);
    memory->total = found.total;
    memory->used = found.used;
    memory->free = found.free;
    memory->reserved = 0;
    return NVML_SUCCESS;
}

enum { MOST_PROCESSES = 256 };

/* Processes with memory on the device; count is the room for them, then their number. */
static nvmlReturn_t processes(nvmlDevice_t device, unsigned *count, struct process_use *found)
{
    unsigned room = *count < MOST_PROCESSES ? *count : MOST_PROCESSES;
    *count = sw_table_processes(index_of(device), found, room);
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count,
                                                  nvmlProcessInfo_v1_t *infos)
{
    struct process_use found[MOST_PROCESSES];
    nvmlReturn_t error = processes(device, count, found);
    for (unsigned i = 0; !error && i < *count; i++) {
        infos[i] = (nvmlProcessInfo_v1_t){(unsigned)found[i].pid, found[i].bytes};
    }
    return error;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                     nvmlProcessInfo_v2_t *infos)
{
    struct process_use found[MOST_PROCESSES];
    nvmlReturn_t error = processes(device, count, found);
    for (unsigned i = 0; !error && i < *count; i++) {
        infos[i] = (nvmlProcessInfo_v2_t){(unsigned)found[i].pid, found[i].bytes, NO_INSTANCE,
                                          NO_INSTANCE};
    }
    return error;
}

/* All pairs have NVLink. */
nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t peer, int capability,
                                    int *status)
{
    *status = NVML_P2P_STATUS_OK;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    *current = 0;
    *pending = 0;
    return NVML_SUCCESS;
}

/* PyTorch looks up these with the others, and fails without them. */

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, int *type)
{
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, void *info)
{
    return NVML_ERROR_NOT_SUPPORTED;
}

/* Its first field is the version: the size of the structure in its lower 24 bits. All else is 0, of
 * which the state means that the device belongs to no fabric. */
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, unsigned *info)
{
    size_t bytes = *info & 0xffffff;
    if (bytes < sizeof *info) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    memset(info + 1, 0, bytes - sizeof *info);
    return NVML_SUCCESS;
}
