/* A backend in C for Triton's interface: y = 2 x. It declares what it uses of the interface; with Triton's headers,
 * include triton/core/tritonbackend.h instead.
 *
 *     cc -O2 -shared -fPIC -o 1/libtriton_scale.so scale.c
 */
#include <stdint.h>

typedef struct Error Error;
typedef struct Input Input;
typedef struct Instance Instance;
typedef struct Output Output;
typedef struct Request Request;
typedef struct Response Response;
enum { INVALID_ARG = 3, FINAL = 1, RELEASE_ALL = 1, CPU = 0 };

Error *TRITONSERVER_ErrorNew(int code, const char *text);
void TRITONSERVER_ErrorDelete(Error *error);
Error *TRITONBACKEND_RequestInput(Request *request, const char *name, Input **input);
Error *TRITONBACKEND_RequestRelease(Request *request, uint32_t flags);
Error *TRITONBACKEND_InputProperties(Input *input, const char **name, int *type, const int64_t **dims, uint32_t *rank,
                                     uint64_t *size, uint32_t *buffers);
Error *TRITONBACKEND_InputBuffer(Input *input, uint32_t index, const void **buffer, uint64_t *size, int *memory,
                                 int64_t *memory_id);
Error *TRITONBACKEND_ResponseNew(Response **response, Request *request);
Error *TRITONBACKEND_ResponseOutput(Response *response, Output **output, const char *name, int type,
                                    const int64_t *dims, uint32_t rank);
Error *TRITONBACKEND_OutputBuffer(Output *output, void **buffer, uint64_t size, int *memory, int64_t *memory_id);
Error *TRITONBACKEND_ResponseSend(Response *response, uint32_t flags, Error *error);

#define RETURN_IF_ERROR(call)      \
    do {                           \
        Error *failed = (call);    \
        if (failed != 0)           \
            return failed;         \
    } while (0)

/* Adds y to a response. An input may consist of several buffers. */
static Error *scale(Request *request, Response *response)
{
    Input *input;
    Output *output;
    const char *name;
    const int64_t *dims;
    uint32_t rank, buffers;
    uint64_t size;
    int64_t memory_id = 0;
    int type, memory = CPU;
    float *y;
    RETURN_IF_ERROR(TRITONBACKEND_RequestInput(request, "x", &input));
    RETURN_IF_ERROR(TRITONBACKEND_InputProperties(input, &name, &type, &dims, &rank, &size, &buffers));
    RETURN_IF_ERROR(TRITONBACKEND_ResponseOutput(response, &output, "y", type, dims, rank));
    RETURN_IF_ERROR(TRITONBACKEND_OutputBuffer(output, (void **)&y, size, &memory, &memory_id));
    for (uint32_t index = 0; index < buffers; index++) {
        const void *buffer;
        RETURN_IF_ERROR(TRITONBACKEND_InputBuffer(input, index, &buffer, &size, &memory, &memory_id));
        if (memory != CPU)
            return TRITONSERVER_ErrorNew(INVALID_ARG, "x must be in the memory of the host");
        const float *x = buffer;
        for (uint64_t place = 0; place < size / sizeof *x; place++)
            *y++ = 2 * x[place];
    }
    return 0;
}

/* Called for each batch. A request is answered, then released: its inputs are valid until then. */
Error *TRITONBACKEND_ModelInstanceExecute(Instance *instance, Request **requests, uint32_t count)
{
    (void)instance;
    for (uint32_t index = 0; index < count; index++) {
        Response *response;
        RETURN_IF_ERROR(TRITONBACKEND_ResponseNew(&response, requests[index]));
        Error *failed = scale(requests[index], response);
        RETURN_IF_ERROR(TRITONBACKEND_ResponseSend(response, FINAL, failed));
        if (failed != 0)
            TRITONSERVER_ErrorDelete(failed);
        RETURN_IF_ERROR(TRITONBACKEND_RequestRelease(requests[index], RELEASE_ALL));
    }
    return 0;
}
