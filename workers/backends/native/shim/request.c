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

static void take(void)
{
    LOCK();
    taken = first;
    first = NULL;
    last = &first;
    UNLOCK();
}

/* Returns the events so far as words, and their count. The objects in them live until `host_taken`. */
EXPORT const uint64_t *host_take(uint64_t *count)
{
    take();
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
    input->buffers = (const Buffer *)*at;
    for (uint64_t index = 0; index < input->buffer_count; index++)
        input->size += input->buffers[index].size;
    *at = (Cursor)(input->buffers + input->buffer_count);
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
    end_states(request, false);
    request->released = true;
    request->rescheduled = flags & RELEASE_RESCHEDULE;
    request->head.tag = DEAD;
    request->references--;
    add_event(RELEASED, request->token, flags, NULL);
    settle(request);
    unlock_and_notify();
}

/* Runs a batch. The first half of `requests` is the backend's, the second half a copy of it. */
static Error *execute_all(Request **requests, uint32_t count)
{
    Request **own = requests + count;
    memcpy(own, requests, count * sizeof *requests);
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
            end_states(request, true);
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

EXPORT Error *host_execute(const uint64_t *given, uint32_t count)
{
    Request **requests = claim(2 * count * sizeof *requests);
    for (uint32_t index = 0; index < count; index++) {
        requests[index] = request_of(given);
        given += given[0];
    }
    return execute_all(requests, count);
}

/* ---------------------------------------------------------------------------------------------- requests that are alike */

/* One block, as in `request_of`. `at` moves on to the rows of the next request. */
static Request *alike_request(uint64_t token, uint64_t rows, uint64_t inputs, uint64_t words, const uint64_t *given,
                              uint64_t *at)
{
    Request *request = claim(sizeof *request + inputs * sizeof(Input) + words * sizeof(uint64_t));
    request->inputs = (Input *)(request + 1);
    uint64_t *own = (uint64_t *)(request->inputs + inputs);
    request->head.tag = A_REQUEST;
    request->references = 2;
    request->token = token;
    request->id = request->correlation_text = "";
    request->outputs = host.all_outputs;
    request->output_count = host.output_count;
    request->input_count = inputs;
    for (uint64_t index = 0; index < inputs; index++) {
        Input *input = &request->inputs[index];
        uint64_t row_size = given[2], rank = given[3];
        input->head.tag = AN_INPUT;
        input->tensor = &host.inputs[given[0]];
        input->rank = rank;
        input->dims = memcpy(own, given + 4, rank * sizeof *own);
        own[0] = rows;
        Buffer *buffer = (Buffer *)(own + rank);
        *buffer = (Buffer){(const void *)at[index], rows * row_size, MEMORY_CPU};
        input->buffers = buffer;
        input->size = buffer->size;
        input->buffer_count = input->size > 0;
        at[index] += input->size;
        own = (uint64_t *)(buffer + 1);
        given += 4 + rank;
    }
    return request;
}

/* Runs requests that want all outputs, have no options, and whose inputs follow one another in one array for each input.
 * Words for each input: index, address, size of a row, rank, dims with any first one. */
EXPORT Error *host_execute_alike(uint64_t token, uint32_t count, const uint64_t *rows, uint64_t inputs,
                                 const uint64_t *given, uint64_t words)
{
    Request **requests = claim(2 * count * sizeof *requests);
    uint64_t *at = claim(inputs * sizeof *at);
    const uint64_t *input = given;
    for (uint64_t index = 0; index < inputs; index++, input += 4 + input[3])
        at[index] = input[1];
    for (uint32_t index = 0; index < count; index++)
        requests[index] = alike_request(token + index, rows[index], inputs, words, given, at);
    free(at);
    return execute_all(requests, count);
}

static Response **alike;

/* If each of these requests was released and has one response, and these are alike but for their data and rows: returns
 * words that describe the first one, after which `host_collect` copies the outputs. Otherwise NULL. */
EXPORT const uint64_t *host_alike(uint64_t token, uint32_t count, const uint64_t *rows, uint64_t *word_count)
{
    alike = realloc(alike, count * sizeof *alike);
    if (alike == NULL)
        die("no memory for %u requests", count);
    memset(alike, 0, count * sizeof *alike);
    uint64_t released = 0, sent = 0;
    bool same = true;
    LOCK();
    for (Event *event = first; event != NULL && same; event = event->next) {
        uint64_t position = event->token - token;
        same = position < count && (event->kind == RELEASED || (event->kind == SENT && alike[position] == NULL));
        same = same && event->flags == 1; /* RELEASE_ALL, RESPONSE_FINAL */
        if (same && event->kind == SENT) {
            alike[position] = event->object;
            same = is_plain(alike[position], rows[position]);
        }
        released += event->kind == RELEASED;
        sent += event->kind == SENT;
    }
    UNLOCK();
    for (uint32_t index = 1; index < count && same && sent == count; index++)
        same = responses_match(alike[0], alike[index]);
    if (!same || released != count || sent != count)
        return NULL;
    words.count = 0;
    put_response(&words, alike[0]);
    *word_count = words.count;
    return words.words;
}

/* Copies an output of all requests to where it will be read. */
EXPORT void host_collect(uint32_t count, uint32_t output, char *target)
{
    for (uint32_t index = 0; index < count; index++)
        target += copy_output(alike[index], output, target);
}

/* Drops the events of requests that are alike. */
EXPORT void host_collected(void)
{
    take();
    host_taken();
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

Input *input_of(Request *request, const char *name)
{
    for (uint64_t index = 0; index < request->input_count; index++)
        if (strcmp(request->inputs[index].tensor->name, name) == 0)
            return &request->inputs[index];
    return NULL;
}

EXPORT Error *TRITONBACKEND_RequestInput(Request *request, const char *name, Input **input)
{
    LIVE(request, A_REQUEST);
    *input = input_of(request, name);
    return *input ? NULL : fail(INVALID_ARG, "unknown request input name '%s'", name);
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
    *buffer = input->buffers[index].base;
    *size = input->buffers[index].size;
    *memory = input->buffers[index].memory;
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
    const Buffer *given = &input->buffers[index];
    *buffer = given->base;
    input->attributes = (BufferAttributes){given->size, given->memory, 0, NULL};
    *attributes = &input->attributes;
    return NULL;
}
