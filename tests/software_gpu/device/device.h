/* The software GPU: shared declarations of its sources.
 *
 * Host memory stands for the memory of the devices. Kernels and cuBLAS calls do nothing.
 * Allocation, copies, events, inter-process handles, virtual memory, NVML and NCCL do what their
 * interfaces say.
 * Every call is finished when it returns, so streams never have pending work.
 */
#ifndef SOFTWARE_GPU_DEVICE_H
#define SOFTWARE_GPU_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "stubs.h"

enum { MAX_DEVICES = 16 };

#define MIB ((size_t)1 << 20)
/* cudaMalloc and the virtual memory functions of an H100 work in pages of this size. */
#define PAGE_BYTES (2 * MIB)

/* CUDA 13.0; a driver of its branch. NVML and the runtime report them. */
#define CUDA_RELEASE 13000
#define DRIVER_RELEASE "580.95.05"

/* -- settings.c: the environment variables ----------------------------------------------------- */

struct settings {
    bool usable; /* false: a variable is missing or wrong; the machine then has no device */
    int count;   /* devices of the machine */
    size_t bytes;
    int major, minor; /* compute capability */
    const char *name;
    const char *table; /* path of the table of memory.c */
    bool trace;
    bool values; /* every operation computes its values: an unexpected kernel is refused */
    size_t copy_limit; /* larger copies and fills are left out; 0: none is */
};

const struct settings *sw_settings(void);

/* Devices that CUDA_VISIBLE_DEVICES leaves to this process, read at the first call. */
int sw_visible_count(void);

/* Index in the machine of a visible device. */
int sw_physical(int ordinal);

/* The 16 bytes of a device's UUID, and its text form "GPU-...". */
enum { UUID_BYTES = 16, UUID_TEXT = 48 };
void sw_uuid(int physical, unsigned char uuid[UUID_BYTES]);
void sw_uuid_text(int physical, char text[UUID_TEXT]);

/* One line "[software GPU] pid N: ..." on stderr. */
void sw_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* -- table.c: memory that all processes have taken --------------------------------------------- */

struct process_use {
    pid_t pid;
    size_t bytes;
};

/* False where the table cannot be opened; a line says why. */
bool sw_table_open(void);
/* False if the device has less than that left. */
bool sw_table_take(int physical, size_t bytes);
void sw_table_return(int physical, size_t bytes);
size_t sw_table_used(int physical);
/* Live processes with memory on a device; returns their number, which may exceed the limit. */
unsigned sw_table_processes(int physical, struct process_use *found, unsigned limit);
/* False for a process that has ended, though its parent has not waited for it. */
bool sw_is_running(pid_t pid);

/* -- runtime_kernel.c: whether a kernel may start; the runtime's and the driver's error -------- */

int sw_launch(void);

/* Python calls it: kernels of this thread are expected from now on, or no longer. */
void software_gpu_expect_launches(int on);

/* -- allocations.c: memory that this process has mapped ---------------------------------------- */

enum kind {
    DEVICE_MEMORY,     /* cudaMalloc */
    PINNED_MEMORY,     /* cudaHostAlloc */
    REGISTERED_MEMORY, /* cudaHostRegister: the caller's own memory */
    IMPORTED_MEMORY,   /* cudaIpcOpenMemHandle */
    MAPPED_MEMORY,     /* cuMemMap */
};

/* Memory of a device that has no address: a file in memory. The table counts its bytes. */
struct physical {
    int file;
    size_t size;
    int device;     /* index in the machine */
    bool counted;   /* false: imported, and counted by its exporter */
    int references; /* handles and mappings */
};

struct allocation {
    uintptr_t start;
    size_t size;
    enum kind kind;
    int device;                /* ordinal */
    struct physical *physical; /* of DEVICE_MEMORY and MAPPED_MEMORY */
};

/* Whether an address lies in an allocation. */
bool sw_find(const void *address, struct allocation *found);
void sw_insert(struct allocation allocation);
/* Remove the allocation of that kind that starts at an address. */
bool sw_remove(const void *start, enum kind kind, struct allocation *removed);

/* NULL where the device's memory does not suffice. */
struct physical *sw_physical_create(int device, size_t size);
void sw_physical_release(struct physical *memory);

CUresult sw_allocate(void **address, size_t size, int ordinal);
CUresult sw_free(void *address);

/* -- context.c: initialisation, the current device, errors ------------------------------------- */

/* cuInit: fails without a device, and in a child that was forked after its parent's cuInit. */
CUresult sw_start(void);
/* Create the primary context of a visible device, if it has none. */
CUresult sw_context(int ordinal);
bool sw_has_context(int ordinal);
int sw_current(void);
CUresult sw_set_current(int ordinal);
int sw_attribute(CUdevice_attribute attribute, int ordinal);

/* -- runtime_memory.c -------------------------------------------------------------------------- */

/* Whether SOFTWARE_GPU_COPY_LIMIT_MIB leaves out a copy of that size. */
bool sw_left_out(size_t bytes);
void sw_copy(void *target, const void *source, size_t bytes);

#endif
