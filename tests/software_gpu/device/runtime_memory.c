/* CUDA runtime: device and pinned memory, copies, handles for other processes. */
#include "runtime.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* -- device memory ----------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **address, size_t size)
{
    return sw_result((int)sw_allocate(address, size, sw_current()));
}

cudaError_t cudaFree(void *address)
{
    return sw_result((int)sw_free(address));
}

/* -- pinned memory ----------------------------------------------------------------------------- */

cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags)
{
    CUresult error = sw_context(sw_current());
    if (error) {
        return sw_result((int)error);
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t rounded = (size ? size + page - 1 : page) / page * page;
    int mode = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = mmap(NULL, rounded, PROT_READ | PROT_WRITE, mode, -1, 0);
    if (memory == MAP_FAILED) {
        return sw_result(cudaErrorMemoryAllocation);
    }
    uintptr_t start = (uintptr_t)memory;
    sw_insert((struct allocation){start, rounded, PINNED_MEMORY, sw_current(), NULL});
    *address = memory;
    return cudaSuccess;
}

#undef cudaMallocHost
cudaError_t cudaMallocHost(void **address, size_t size)
{
    return cudaHostAlloc(address, size, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *address)
{
    struct allocation removed;
    if (!address) {
        return cudaSuccess;
    }
    if (!sw_remove(address, PINNED_MEMORY, &removed)) {
        return sw_result(cudaErrorInvalidValue);
    }
    munmap(address, removed.size);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags)
{
    CUresult error = sw_context(sw_current());
    if (error) {
        return sw_result((int)error);
    }
    struct allocation found;
    if (sw_find(address, &found) && found.start == (uintptr_t)address) {
        return sw_result(cudaErrorHostMemoryAlreadyRegistered);
    }
    uintptr_t start = (uintptr_t)address;
    sw_insert((struct allocation){start, size, REGISTERED_MEMORY, sw_current(), NULL});
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address)
{
    struct allocation removed;
    bool found = sw_remove(address, REGISTERED_MEMORY, &removed);
    return sw_result(found ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    struct allocation found;
    if (!sw_find(host, &found)) {
        return sw_result(cudaErrorInvalidValue);
    }
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address)
{
    struct allocation found;
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
    if (!sw_find(address, &found)) {
        return cudaSuccess;
    }
    bool host = found.kind == PINNED_MEMORY || found.kind == REGISTERED_MEMORY;
    attributes->type = host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = found.device;
    attributes->devicePointer = (void *)address;
    attributes->hostPointer = host ? (void *)address : NULL;
    return cudaSuccess;
}

/* -- copies and fills -------------------------------------------------------------------------- */

bool sw_left_out(size_t bytes)
{
    size_t limit = sw_settings()->copy_limit;
    return limit && bytes > limit;
}

void sw_copy(void *target, const void *source, size_t bytes)
{
    if (bytes && target != source && !sw_left_out(bytes)) {
        memmove(target, source, bytes);
    }
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind)
{
    sw_copy(target, source, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size,
                            enum cudaMemcpyKind kind, cudaStream_t stream)
{
    sw_copy(target, source, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *target, int target_device, const void *source,
                                int source_device, size_t size, cudaStream_t stream)
{
    sw_copy(target, source, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source,
                              size_t source_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream)
{
    if (sw_left_out(width * height)) {
        return cudaSuccess;
    }
    for (size_t row = 0; row < height; row++) {
        const char *from = (const char *)source + row * source_pitch;
        sw_copy((char *)target + row * target_pitch, from, width);
    }
    return cudaSuccess;
}

cudaError_t cudaMemset(void *address, int value, size_t size)
{
    if (size && !sw_left_out(size)) {
        memset(address, value, size);
    }
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *address, int value, size_t size, cudaStream_t stream)
{
    return cudaMemset(address, value, size);
}

/* The compiler gives each variable of a device a host variable of its size and that address as its
 * symbol; it stands for the device's. */
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol)
{
    *address = (void *)symbol;
    return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t size, size_t offset,
                               enum cudaMemcpyKind kind)
{
    sw_copy((char *)symbol + offset, source, size);
    return cudaSuccess;
}

/* -- CUDA IPC ---------------------------------------------------------------------------------- */

/* In a cudaIpcMemHandle_t: where the exporting process holds the memory file. */
struct handle {
    pid_t pid;
    int file;
    int device;  /* index in the machine */
    ino_t inode; /* a number may be given to another file later */
    size_t size;
};

_Static_assert(sizeof(struct handle) <= sizeof(cudaIpcMemHandle_t), "fits into a handle");

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *given, void *address)
{
    struct allocation found;
    struct stat status;
    if (!sw_find(address, &found) || found.kind != DEVICE_MEMORY ||
        fstat(found.physical->file, &status) != 0) {
        return sw_result(cudaErrorInvalidValue);
    }
    struct handle handle = {getpid(), found.physical->file, found.physical->device,
                            status.st_ino, found.size};
    memset(given, 0, sizeof *given);
    memcpy(given, &handle, sizeof handle);
    return cudaSuccess;
}

/* The memory file of another process; -1 if it has ended or has freed the memory. */
static int open_file(const struct handle *handle)
{
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)handle->pid, handle->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        sw_say("cudaIpcOpenMemHandle: %s: %s", path, strerror(errno));
        return -1;
    }
    if (fstat(file, &status) != 0 || status.st_ino != handle->inode) {
        sw_say("cudaIpcOpenMemHandle: process %d has freed the memory", (int)handle->pid);
        close(file);
        return -1;
    }
    return file;
}

cudaError_t cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t given, unsigned flags)
{
    struct handle handle;
    memcpy(&handle, &given, sizeof handle);
    CUresult error = sw_context(sw_current());
    if (error) {
        return sw_result((int)error);
    }
    if (handle.pid == getpid()) {
        sw_say("cudaIpcOpenMemHandle: the handle is of this process");
        return sw_result(cudaErrorDeviceUninitialized);
    }
    if (handle.device != sw_physical(sw_current()) && sw_settings()->trace) {
        sw_say("cudaIpcOpenMemHandle: memory of device %d opened on device %d", handle.device,
               sw_physical(sw_current()));
    }
    int file = open_file(&handle);
    if (file < 0) {
        return sw_result(cudaErrorInvalidResourceHandle);
    }
    int access = PROT_READ | PROT_WRITE;
    void *mapped = mmap(NULL, handle.size, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (mapped == MAP_FAILED) {
        return sw_result(cudaErrorMemoryAllocation);
    }
    uintptr_t start = (uintptr_t)mapped;
    sw_insert((struct allocation){start, handle.size, IMPORTED_MEMORY, sw_current(), NULL});
    *address = mapped;
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *address)
{
    struct allocation removed;
    if (!sw_remove(address, IMPORTED_MEMORY, &removed)) {
        return sw_result(cudaErrorInvalidValue);
    }
    munmap(address, removed.size);
    return cudaSuccess;
}

/* What precedes a record is finished, so the event of another process is over, too. */
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event)
{
    memset(handle, 0, sizeof *handle);
    return cudaSuccess;
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle)
{
    return cudaEventCreateWithFlags(event, cudaEventDisableTiming | cudaEventInterprocess);
}
