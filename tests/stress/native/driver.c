/* Runs the shim without Python, under ThreadSanitizer: batches are answered at once, late from threads, or as streams,
 * while other threads take the events as Python does. Prints the number of answered requests. */
#include "host.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct Factory Any;
Error *TRITONBACKEND_ResponseNew(Response **, Request *);
Error *TRITONBACKEND_ResponseSend(Response *, uint32_t, Error *);
Error *TRITONBACKEND_ResponseFactoryNew(Any **, Request *);
Error *TRITONBACKEND_ResponseFactoryDelete(Any *);
Error *TRITONBACKEND_ResponseNewFromFactory(Response **, Any *);
Error *TRITONBACKEND_ResponseFactorySendFlags(Any *, uint32_t);
Error *TRITONBACKEND_ResponseOutput(Response *, Output **, const char *, DataType, const int64_t *, uint32_t);
Error *TRITONBACKEND_OutputBuffer(Output *, void **, uint64_t, MemoryType *, int64_t *);
Error *TRITONBACKEND_RequestRelease(Request *, uint32_t);
Error *TRITONBACKEND_RequestInput(Request *, const char *, Input **);
Error *TRITONBACKEND_InputBuffer(Input *, uint32_t, const void **, uint64_t *, MemoryType *, int64_t *);
Error *host_execute_alike(uint64_t, uint32_t, const uint64_t *, uint64_t, const uint64_t *, uint64_t);
const uint64_t *host_take(uint64_t *);
void host_taken(void);
void host_set_execute(void *);
void host_set_callbacks(const Callbacks *);
void host_set_tensors(bool, uint32_t, const char **, const int32_t *, uint32_t, const char **, const int32_t *);

enum { BATCH = 8, FLOATS = 4 };
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static atomic_int released, sent, running;

static void handle_events(void)
{
    uint64_t count;
    pthread_mutex_lock(&order);
    const uint64_t *words = host_take(&count);
    for (uint64_t at = 0; at < count;) {
        uint64_t kind = words[at];
        at += 3;
        released += kind == RELEASED;
        if (kind != SENT)
            continue;
        sent++;
        at += 2; /* number, error */
        for (uint64_t outputs = words[at++]; outputs > 0; outputs--) {
            if (*(const float *)words[at + 2] != 1.0f)
                die("a wrong output");
            at += 5 + words[at + 4] + 3;
        }
        at++; /* no parameters */
    }
    host_taken();
    pthread_mutex_unlock(&order);
}

static int never_cancelled(uint64_t token)
{
    (void)token;
    return 0;
}

static void add_output(Response *response)
{
    Output *output;
    int64_t dims[] = {1, FLOATS}, memory_id = 0;
    MemoryType memory = MEMORY_CPU;
    float *target;
    TRITONBACKEND_ResponseOutput(response, &output, "OUT", TYPE_FP32, dims, 2);
    TRITONBACKEND_OutputBuffer(output, (void **)&target, FLOATS * sizeof *target, &memory, &memory_id);
    for (int index = 0; index < FLOATS; index++)
        target[index] = 1;
}

static void answer(Request *request)
{
    Response *response;
    Input *input;
    const void *data;
    uint64_t size;
    int64_t memory_id;
    MemoryType memory;
    TRITONBACKEND_RequestInput(request, "IN", &input);
    TRITONBACKEND_InputBuffer(input, 0, &data, &size, &memory, &memory_id);
    TRITONBACKEND_ResponseNew(&response, request);
    add_output(response);
    TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, NULL);
    TRITONBACKEND_RequestRelease(request, RELEASE_ALL);
}

static void *answer_late(void *request)
{
    answer(request);
    running--;
    return NULL;
}

static void *send_stream(void *factory)
{
    for (int count = 0; count < 3; count++) {
        Response *response;
        TRITONBACKEND_ResponseNewFromFactory(&response, factory);
        add_output(response);
        TRITONBACKEND_ResponseSend(response, 0, NULL);
    }
    TRITONBACKEND_ResponseFactorySendFlags(factory, RESPONSE_FINAL);
    TRITONBACKEND_ResponseFactoryDelete(factory);
    running--;
    return NULL;
}

static void in_thread(void *(*run)(void *), void *subject)
{
    pthread_t thread;
    running++;
    if (pthread_create(&thread, NULL, run, subject) != 0)
        die("no thread");
    pthread_detach(thread);
}

static Error *execute_batch(void *instance, Request **requests, uint32_t count)
{
    (void)instance;
    for (uint32_t index = 0; index < count; index++) {
        Any *factory;
        switch (index % 3) {
        case 0: answer(requests[index]); break;
        case 1: in_thread(answer_late, requests[index]); break;
        default:
            TRITONBACKEND_ResponseFactoryNew(&factory, requests[index]);
            TRITONBACKEND_RequestRelease(requests[index], RELEASE_ALL);
            in_thread(send_stream, factory);
        }
    }
    return NULL;
}

int main(int count, char **words)
{
    int batches = count > 1 ? atoi(words[1]) : 100;
    const char *inputs[] = {"IN"}, *outputs[] = {"OUT"};
    int32_t types[] = {TYPE_FP32};
    Callbacks callbacks = {.notify = handle_events, .cancelled = never_cancelled};
    host_set_callbacks(&callbacks);
    host_set_tensors(true, 1, inputs, types, 1, outputs, types);
    host_set_execute(execute_batch);
    float data[BATCH * FLOATS] = {0};
    uint64_t rows[BATCH], given[] = {0, (uint64_t)data, FLOATS * sizeof *data, 2, 1, FLOATS};
    for (int index = 0; index < BATCH; index++)
        rows[index] = 1;
    for (int batch = 0; batch < batches; batch++) {
        host_execute_alike(1 + batch * BATCH, BATCH, rows, 1, given, sizeof given / sizeof *given);
        handle_events();
    }
    while (running > 0)
        sched_yield();
    handle_events();
    printf("%d released, %d sent\n", released, sent);
    return 0;
}
