/* Where the generated functions end: those that no source defines (build.py). */
#ifndef SOFTWARE_GPU_STUBS_H
#define SOFTWARE_GPU_STUBS_H

#include <stdbool.h>

/* A computation: does nothing. SOFTWARE_GPU_TRACE=1 reports its first call. */
int sw_nothing(const char *function, bool *reported);

/* A function that is not written: fails. Its first call is always reported. */
int sw_missing(const char *function, bool *reported, int error);

#endif
