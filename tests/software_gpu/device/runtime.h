/* The CUDA runtime reports the last error of a thread once more in cudaGetLastError. */
#ifndef SOFTWARE_GPU_RUNTIME_H
#define SOFTWARE_GPU_RUNTIME_H

#include "device.h"

/* Remember an error and return it. Runtime and driver errors share their numbers. */
cudaError_t sw_result(int error);

#endif
