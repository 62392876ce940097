/* CUDA runtime: streams, events, graphs. Work is finished when its call returns. */
#include "runtime.h"

#include <stdlib.h>
#include <time.h>

/* -- streams ----------------------------------------------------------------------------------- */

struct CUstream_st {
    int priority;
};

/* The legacy and the per-thread default stream are the numbers 0 to 2 instead of addresses. */
static bool is_default(cudaStream_t stream)
{
    return (uintptr_t)stream <= 2;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    CUresult error = sw_context(sw_current());
    if (error) {
        return sw_result((int)error);
    }
    *stream = malloc(sizeof **stream);
    if (!*stream) {
        return sw_result(cudaErrorMemoryAllocation);
    }
    (*stream)->priority = priority;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    if (is_default(stream)) {
        return sw_result(cudaErrorInvalidResourceHandle);
    }
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = is_default(stream) ? 0 : stream->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data,
                                  unsigned flags)
{
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    function(data);
    return cudaSuccess;
}

/* -- events ------------------------------------------------------------------------------------ */

struct CUevent_st {
    bool timed;
    double recorded; /* ms; below 0: never */
};

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    CUresult error = sw_context(sw_current());
    if (error) {
        return sw_result((int)error);
    }
    *event = malloc(sizeof **event);
    if (!*event) {
        return sw_result(cudaErrorMemoryAllocation);
    }
    **event = (struct CUevent_st){!(flags & cudaEventDisableTiming), -1};
    return cudaSuccess;
}

#undef cudaEventCreate
cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->recorded = (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    if (!start->timed || !end->timed || start->recorded < 0 || end->recorded < 0) {
        return sw_result(cudaErrorInvalidResourceHandle);
    }
    *milliseconds = (float)(end->recorded - start->recorded);
    return cudaSuccess;
}

/* -- graphs ---------------------------------------------------------------------------------------
 * A captured graph is empty, as kernels are; its launch does nothing. */

struct CUgraph_st {
    int unused;
};

struct CUgraphExec_st {
    int unused;
};

/* One capture at a time; side streams belong to it, so all streams are said to capture. */
static bool capturing;
static unsigned long long capture;

static enum cudaStreamCaptureStatus capture_status(void)
{
    return capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    capturing = true;
    capture++;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    capturing = false;
    *graph = calloc(1, sizeof **graph);
    return sw_result(*graph ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    *status = capture_status();
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *dependency_count)
{
    static struct CUgraph_st captured;
    *status = capture_status();
    if (id) {
        *id = capture;
    }
    if (graph) {
        *graph = &captured;
    }
    if (dependencies) {
        *dependencies = NULL;
    }
    if (edges) {
        *edges = NULL;
    }
    if (dependency_count) {
        *dependency_count = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    static __thread enum cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode former = current;
    current = *mode;
    *mode = former;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                          unsigned long long flags)
{
    *executable = calloc(1, sizeof **executable);
    return sw_result(*executable ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    return cudaSuccess;
}

/* PyTorch warns of a graph without nodes. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    if (nodes) {
        return sw_result(cudaErrorNotSupported);
    }
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    free(executable);
    return cudaSuccess;
}
