/* Requests: made from the words of a batch, read by the backend, and released by it. */
#include "host.h"

#include <stdlib.h>
#include <string.h>

pthread_mutex_t host_lock = PTHREAD_MUTEX_INITIALIZER;
Error *(*execute)(void *instance, Request **requests, uint32_t count);
void *host_instance(void);
static bool executing; /* the thread that executes takes the events itself */
static pthread_t executor;
static bool pending; /* an event was added that nobody will take without being told */

/* ---------------------------------------------------------------------------------------------------------- events */

typedef struct Event {
    struct Event *next;
    EventKind kind;
    uint64_t token, flags;
    void *object;
} Event;

static Event *first, **last = &first;
static Event *taken;
static Words words;

void add_event(EventKind kind, uint64_t token, uint64_t flags, void *object)
{
    Event *event = claim(sizeof *event);
    *event = (Event){NULL, kind, token, flags, object};
    *last = event;
    last = &event->next;
    pending |= host.decoupled || !executing || !pthread_equal(executor, pthread_self());
}

void unlock_and_notify(void)
{
    bool wanted = pending;
    pending = false;
    UNLOCK();
    if (wanted)
        host.python.notify();
}

/* Returns the events so far as words, and their count. The objects in them live until `host_taken`. */
EXPORT const uint64_t *host_take(uint64_t *count)
{
    LOCK();
    taken = first;
    first = NULL;
    last = &first;
    UNLOCK();
    Words *out = &words;
    out->count = 0;
    for (Event *event = taken; event != NULL; event = event->next) {
        put_word(out, event->kind);
        put_word(out, event->token);
        put_word(out, event->flags);
        if (event->kind == SENT)
            put_response(out, event->object);
        else if (event->kind == STATE)
            put_state(out, event->object);
    }
    *count = out->count;
    return out->words;
}

EXPORT void host_taken(void)
{
    while (taken != NULL) {
        Event *event = taken;
        taken = event->next;
        if (event->kind == SENT)
            free_response(event->object);
        else if (event->kind == STATE)
            free_state(event->object);
        free(event);
    }
}

/* -------------------------------------------------------------------------------------------------------- requests */

static void read_input(Input *input, Cursor *at)
{
    input->head.tag = AN_INPUT;
    input->tensor = &host.inputs[*(*at)++];
    input->dims = (const int64_t *)read_list(at, &input->rank);
    input->buffer_count = *(*at)++;
    input->buffers = *at;
    *at += 2 * input->buffer_count;
    for (uint64_t index = 0; index < input->buffer_count; index++)
        input->size += input->buffers[2 * index + 1];
}

/* One block: the request, its inputs, its parameters, and a copy of its words, which the others refer to. */
static Request *request_of(const uint64_t *given)
{
    uint64_t size = given[0], inputs = given[1], parameters = given[2];
    Request *request =
        claim(sizeof *request + inputs * sizeof(Input) + parameters * sizeof(Parameter) + size * sizeof(uint64_t));
    request->inputs = (Input *)(request + 1);
    request->parameters = (Parameter *)(request->inputs + inputs);
    request->head.tag = A_REQUEST;
    request->references = 2;
    request->input_count = inputs;
    request->parameter_count = parameters;
    Cursor at = memcpy(request->parameters + parameters, given, size * sizeof(uint64_t));
    at += 3;
    request->token = *at++;
    request->flags = *at++;
    request->timeout_us = *at++;
    request->correlation = *at++;
    request->correlation_text = read_text(&at);
    request->id = read_text(&at);
    request->outputs = read_list(&at, &request->output_count);
    request->placed = read_list(&at, &request->placed_count);
    for (uint64_t index = 0; index < inputs; index++)
        read_input(&request->inputs[index], &at);
    for (uint64_t index = 0; index < parameters; index++)
        read_parameter(&request->parameters[index], &at);
    return request;
}

/* With the lock: after a reference was given back. */
void settle(Request *request)
{
    if (request->released && !request->answering && !request->final && !request->rescheduled) {
        request->final = true;
        add_event(LOST, request->token, 0, NULL);
    }
    if (request->references == 0)
        free(request);
}

static void release(Request *request, uint32_t flags)
{
    LOCK();
    request->released = true;
    request->rescheduled = flags & RELEASE_RESCHEDULE;
    request->head.tag = DEAD;
    request->references--;
    add_event(RELEASED, request->token, flags, NULL);
    settle(request);
    unlock_and_notify();
}

EXPORT Error *host_execute(const uint64_t *given, uint32_t count)
{
    Request **requests = claim(2 * count * sizeof *requests), **own = requests + count;
    for (uint32_t index = 0; index < count; index++) {
        requests[index] = own[index] = request_of(given);
        given += given[0];
    }
    LOCK();
    executing = true;
    executor = pthread_self();
    UNLOCK();
    Error *error = execute(host_instance(), requests, count);
    LOCK();
    executing = false;
    pending = false;
    UNLOCK();
    for (uint32_t index = 0; index < count; index++) {
        Request *request = own[index];
        LOCK();
        if (error != NULL && !request->released) { /* the host keeps the requests */
            request->released = request->final = true;
            request->head.tag = DEAD;
            request->references--;
        }
        request->references--;
        settle(request);
        UNLOCK();
    }
    free(requests);
    return error;
}

EXPORT void host_set_execute(void *function) { execute = (Error * (*)(void *, Request **, uint32_t)) function; }

EXPORT Error *TRITONBACKEND_RequestRelease(Request *request, uint32_t flags)
{
    LIVE(request, A_REQUEST);
    if (flags == 0)
        return fail(INVALID_ARG, "RequestRelease needs a flag: ALL or RESCHEDULE");
    release(request, flags);
    return NULL;
}

/* ---------------------------------------------------------------------------------------------- what a request says */

#define GET(function, type, value)                                        \
    EXPORT Error *TRITONBACKEND_##function(Request *request, type *result) \
    {                                                                     \
        LIVE(request, A_REQUEST);                                         \
        *result = value;                                                  \
        return NULL;                                                      \
    }

typedef const char *Text;

GET(RequestId, Text, request->id)
GET(RequestCorrelationIdString, Text, request->correlation_text)
GET(InferenceRequestTimeoutMicroseconds, uint64_t, request->timeout_us)
GET(RequestFlags, uint32_t, request->flags)
GET(RequestInputCount, uint32_t, request->input_count)
GET(RequestOutputCount, uint32_t, request->output_count)
GET(RequestParameterCount, uint32_t, request->parameter_count)
GET(RequestIsCancelled, bool, host.python.cancelled(request->token))

EXPORT Error *TRITONBACKEND_RequestCorrelationId(Request *request, uint64_t *id)
{
    LIVE(request, A_REQUEST);
    if (*request->correlation_text)
        return fail(INVALID_ARG, "the correlation id is the text '%s'", request->correlation_text);
    *id = request->correlation;
    return NULL;
}

#define CHECK_INDEX(request, index, count, what) \
    if ((index) >= (count))                      \
        return fail(INVALID_ARG, "out of bounds index %u, request has %llu " what, index, (unsigned long long)(count))

EXPORT Error *TRITONBACKEND_RequestParameter(Request *request, uint32_t index, const char **key, ParameterType *type,
                                             const void **value)
{
    LIVE(request, A_REQUEST);
    CHECK_INDEX(request, index, request->parameter_count, "parameters");
    *key = request->parameters[index].name;
    *type = request->parameters[index].type;
    *value = value_of(&request->parameters[index]);
    return NULL;
}

EXPORT Error *TRITONBACKEND_RequestInputName(Request *request, uint32_t index, const char **name)
{
    LIVE(request, A_REQUEST);
    CHECK_INDEX(request, index, request->input_count, "inputs");
    *name = request->inputs[index].tensor->name;
    return NULL;
}

EXPORT Error *TRITONBACKEND_RequestInputByIndex(Request *request, uint32_t index, Input **input)
{
    LIVE(request, A_REQUEST);
    CHECK_INDEX(request, index, request->input_count, "inputs");
    *input = &request->inputs[index];
    return NULL;
}

EXPORT Error *TRITONBACKEND_RequestInput(Request *request, const char *name, Input **input)
{
    LIVE(request, A_REQUEST);
    for (uint64_t index = 0; index < request->input_count; index++) {
        if (strcmp(request->inputs[index].tensor->name, name) == 0) {
            *input = &request->inputs[index];
            return NULL;
        }
    }
    *input = NULL;
    return fail(INVALID_ARG, "unknown request input name '%s'", name);
}

EXPORT Error *TRITONBACKEND_RequestOutputName(Request *request, uint32_t index, const char **name)
{
    LIVE(request, A_REQUEST);
    CHECK_INDEX(request, index, request->output_count, "outputs");
    *name = host.outputs[request->outputs[index]].name;
    return NULL;
}

EXPORT Error *TRITONBACKEND_RequestOutputBufferProperties(Request *request, const char *name, size_t *size,
                                                          MemoryType *memory, int64_t *memory_id)
{
    LIVE(request, A_REQUEST);
    (void)name, (void)size;
    *memory = MEMORY_CPU;
    *memory_id = 0;
    return NULL;
}

/* ---------------------------------------------------------------------------------------------------------- inputs */

EXPORT Error *TRITONBACKEND_InputProperties(Input *input, const char **name, DataType *type, const int64_t **dims,
                                            uint32_t *rank, uint64_t *size, uint32_t *buffers)
{
    LIVE(input, AN_INPUT);
    if (name != NULL)
        *name = input->tensor->name;
    if (type != NULL)
        *type = input->tensor->type;
    if (dims != NULL)
        *dims = input->dims;
    if (rank != NULL)
        *rank = input->rank;
    if (size != NULL)
        *size = input->size;
    if (buffers != NULL)
        *buffers = input->buffer_count;
    return NULL;
}

EXPORT Error *TRITONBACKEND_InputPropertiesForHostPolicy(Input *input, const char *policy, const char **name,
                                                         DataType *type, const int64_t **dims, uint32_t *rank,
                                                         uint64_t *size, uint32_t *buffers)
{
    (void)policy;
    return TRITONBACKEND_InputProperties(input, name, type, dims, rank, size, buffers);
}

EXPORT Error *TRITONBACKEND_InputBuffer(Input *input, uint32_t index, const void **buffer, uint64_t *size,
                                        MemoryType *memory, int64_t *memory_id)
{
    LIVE(input, AN_INPUT);
    *buffer = NULL;
    *size = 0;
    CHECK_INDEX(input, index, input->buffer_count, "buffers");
    *buffer = (const void *)input->buffers[2 * index];
    *size = input->buffers[2 * index + 1];
    *memory = MEMORY_CPU;
    *memory_id = 0;
    return NULL;
}

EXPORT Error *TRITONBACKEND_InputBufferForHostPolicy(Input *input, const char *policy, uint32_t index,
                                                     const void **buffer, uint64_t *size, MemoryType *memory,
                                                     int64_t *memory_id)
{
    (void)policy;
    return TRITONBACKEND_InputBuffer(input, index, buffer, size, memory, memory_id);
}

EXPORT Error *TRITONBACKEND_InputBufferAttributes(Input *input, uint32_t index, const void **buffer,
                                                  BufferAttributes **attributes)
{
    LIVE(input, AN_INPUT);
    *buffer = NULL;
    CHECK_INDEX(input, index, input->buffer_count, "buffers");
    *buffer = (const void *)input->buffers[2 * index];
    input->attributes = (BufferAttributes){input->buffers[2 * index + 1], MEMORY_CPU, 0, NULL};
    *attributes = &input->attributes;
    return NULL;
}
