/* Responses: made by the backend in any thread, also after its execution, and sent to Python as events; the factories
 * that make them after their request was released; and new states of sequences. */
#include "host.h"

#include <stdlib.h>
#include <string.h>

enum { INLINE_BYTES = 4096 }; /* smaller outputs are copied into messages, so they may be anywhere */

static uint64_t responses; /* made so far; with the lock */

static uint64_t refer(Request *request)
{
    LOCK();
    uint64_t number = ++responses;
    request->references++;
    request->answering++;
    UNLOCK();
    return number;
}

/* With the lock. */
static void unrefer(Request *request)
{
    request->references--;
    request->answering--;
    settle(request);
}

/* ------------------------------------------------------------------------------------------------------- factories */

EXPORT Error *TRITONBACKEND_ResponseFactoryNew(Factory **factory, Request *request)
{
    LIVE(request, A_REQUEST);
    refer(request);
    Factory *made = claim(sizeof *made);
    made->head.tag = A_FACTORY;
    made->request = request;
    *factory = made;
    return NULL;
}

EXPORT Error *TRITONBACKEND_ResponseFactoryDelete(Factory *factory)
{
    LIVE(factory, A_FACTORY);
    LOCK();
    unrefer(factory->request);
    unlock_and_notify();
    bury(factory);
    return NULL;
}

EXPORT Error *TRITONBACKEND_ResponseFactoryIsCancelled(Factory *factory, bool *is_cancelled)
{
    LIVE(factory, A_FACTORY);
    *is_cancelled = host.python.cancelled(factory->request->token);
    return NULL;
}

EXPORT Error *TRITONBACKEND_ResponseFactorySendFlags(Factory *factory, uint32_t flags)
{
    LIVE(factory, A_FACTORY);
    Request *request = factory->request;
    if (!(flags & RESPONSE_FINAL))
        return NULL;
    LOCK();
    bool again = request->final;
    request->final = true;
    if (!again)
        add_event(FINISHED, request->token, flags, NULL);
    unlock_and_notify();
    return again ? fail(INVALID_ARG, "the final response was sent before") : NULL;
}

/* ------------------------------------------------------------------------------------------------------- responses */

static Error *new_response(Response **response, Request *request)
{
    Response *made = claim(sizeof *made);
    made->head.tag = A_RESPONSE;
    made->number = refer(request);
    made->request = request;
    *response = made;
    return NULL;
}

EXPORT Error *TRITONBACKEND_ResponseNew(Response **response, Request *request)
{
    LIVE(request, A_REQUEST);
    return new_response(response, request);
}

EXPORT Error *TRITONBACKEND_ResponseNewFromFactory(Response **response, Factory *factory)
{
    LIVE(factory, A_FACTORY);
    return new_response(response, factory->request);
}

void free_response(Response *response)
{
    for (Output *output = response->outputs; output != NULL;) {
        Output *next = (Output *)output->head.next;
        if (!output->placed)
            free(output->buffer);
        free(output->name);
        bury(output);
        output = next;
    }
    for (uint32_t index = 0; index < response->parameter_count; index++)
        free(response->parameters[index]);
    free(response->parameters);
    free(response->error);
    bury(response);
}

EXPORT Error *TRITONBACKEND_ResponseDelete(Response *response)
{
    LIVE(response, A_RESPONSE);
    LOCK();
    if (response->placed)
        add_event(DROPPED, response->request->token, response->number, NULL);
    unrefer(response->request);
    unlock_and_notify();
    free_response(response);
    return NULL;
}

EXPORT Error *TRITONBACKEND_ResponseSend(Response *response, uint32_t flags, Error *error)
{
    LIVE(response, A_RESPONSE);
    Request *request = response->request;
    response->head.tag = DEAD;
    response->flags = flags;
    response->error = error ? error_of(error->code, error->text) : NULL;
    LOCK();
    request->final |= flags & RESPONSE_FINAL;
    add_event(SENT, request->token, flags, response);
    unrefer(request);
    unlock_and_notify();
    return NULL;
}

static Error *add_parameter(Response *response, const char *name, ParameterType type, const void *value, uint64_t size)
{
    LIVE(response, A_RESPONSE);
    uint32_t count = response->parameter_count++;
    response->parameters = realloc(response->parameters, (count + 1) * sizeof *response->parameters);
    if (response->parameters == NULL)
        die("no memory for %u parameters", count + 1);
    response->parameters[count] = parameter_of(name, type, value, size);
    return NULL;
}

EXPORT Error *TRITONBACKEND_ResponseSetStringParameter(Response *response, const char *name, const char *value)
{
    return add_parameter(response, name, PARAMETER_STRING, value, strlen(value));
}

EXPORT Error *TRITONBACKEND_ResponseSetIntParameter(Response *response, const char *name, int64_t value)
{
    return add_parameter(response, name, PARAMETER_INT, &value, 0);
}

EXPORT Error *TRITONBACKEND_ResponseSetBoolParameter(Response *response, const char *name, bool value)
{
    return add_parameter(response, name, PARAMETER_BOOL, &value, 0);
}

EXPORT Error *TRITONBACKEND_ResponseSetDoubleParameter(Response *response, const char *name, double value)
{
    return add_parameter(response, name, PARAMETER_DOUBLE, &value, 0);
}

/* --------------------------------------------------------------------------------------------------------- outputs */

int output_index(const char *name)
{
    for (uint32_t index = 0; index < host.output_count; index++)
        if (strcmp(host.outputs[index].name, name) == 0)
            return index;
    return -1;
}

EXPORT Error *TRITONBACKEND_ResponseOutput(Response *response, Output **output, const char *name, DataType type,
                                           const int64_t *dims, uint32_t rank)
{
    LIVE(response, A_RESPONSE);
    Output *made = claim(sizeof *made + rank * sizeof *dims);
    made->head.tag = AN_OUTPUT;
    made->response = response;
    made->name = copied(name);
    made->index = output_index(name);
    made->type = type;
    made->rank = rank;
    memcpy(made->dims, dims, rank * sizeof *dims);
    if (response->last != NULL)
        response->last->head.next = &made->head;
    else
        response->outputs = made;
    response->last = made;
    response->output_count++;
    *output = made;
    return NULL;
}

static bool asks_for_place(const Output *output, uint64_t size, MemoryType preferred)
{
    const Request *request = output->response->request;
    if (output->index < 0 || output->type != host.outputs[output->index].type || output->type == TYPE_BYTES || size == 0)
        return false;
    if (size > INLINE_BYTES || (host.on_gpu && preferred == MEMORY_GPU))
        return true;
    for (uint64_t at = 0; at < request->placed_count; at++)
        if (request->placed[at] == (uint64_t)output->index)
            return true;
    return false;
}

EXPORT Error *TRITONBACKEND_OutputBuffer(Output *output, void **buffer, uint64_t size, MemoryType *memory,
                                         int64_t *memory_id)
{
    LIVE(output, AN_OUTPUT);
    if (output->buffer != NULL)
        return fail(ALREADY_EXISTS, "output '%s' has a buffer of %llu bytes", output->name, (unsigned long long)output->size);
    Response *response = output->response;
    int kind = MEMORY_CPU;
    if (asks_for_place(output, size, *memory)) {
        kind = host.on_gpu ? *memory : MEMORY_CPU;
        output->buffer = (void *)host.python.place(response->number, response->request->token, output->index,
                                                   output->rank, output->dims, size, &kind);
        output->placed = output->buffer != NULL;
        response->placed = true;
    }
    if (output->buffer == NULL)
        output->buffer = malloc(size ? size : 1);
    if (output->buffer == NULL)
        return fail(UNAVAILABLE, "no memory for the %llu bytes of output '%s'", (unsigned long long)size, output->name);
    output->size = size;
    *buffer = output->buffer;
    *memory = output->memory = kind;
    *memory_id = 0;
    return NULL;
}

EXPORT Error *TRITONBACKEND_OutputBufferAttributes(Output *output, BufferAttributes **attributes)
{
    LIVE(output, AN_OUTPUT);
    output->attributes = (BufferAttributes){output->size, output->memory, 0, NULL};
    *attributes = &output->attributes;
    return NULL;
}

EXPORT Error *TRITONBACKEND_InferenceResponseOutput(Response *response, uint32_t index, const char **name,
                                                    DataType *type, const int64_t **dims, uint64_t *rank)
{
    LIVE(response, A_RESPONSE);
    if (index >= response->output_count)
        return fail(INVALID_ARG, "out of bounds index %u, response has %u outputs", index, response->output_count);
    Output *output = response->outputs;
    while (index-- > 0)
        output = (Output *)output->head.next;
    *name = output->name;
    *type = output->type;
    *dims = output->dims;
    *rank = output->rank;
    return NULL;
}

EXPORT Error *TRITONBACKEND_InferenceResponseOutputByName(Response *response, const char *name, DataType *type,
                                                          const int64_t **dims, uint64_t *rank)
{
    LIVE(response, A_RESPONSE);
    const char *found;
    for (uint32_t index = 0; index < response->output_count; index++) {
        TRITONBACKEND_InferenceResponseOutput(response, index, &found, type, dims, rank);
        if (strcmp(found, name) == 0)
            return NULL;
    }
    return fail(NOT_FOUND, "the response has no output '%s'", name);
}

/* ------------------------------------------------------------------------------------------------ responses that are alike */

#define EACH_OUTPUT(response, output) \
    (const Output *output = (response)->outputs; output != NULL; output = (const Output *)output->head.next)

/* Whether a response has only outputs of the configuration with this many rows of whole elements, in memory of its own. */
bool is_plain(const Response *response, uint64_t rows)
{
    if (response->error != NULL || response->placed)
        return false;
    for EACH_OUTPUT (response, output) {
        uint64_t size = TRITONSERVER_DataTypeByteSize(output->type);
        if (output->index < 0 || output->type != host.outputs[output->index].type || size == 0)
            return false;
        if (output->rank == 0 || (uint64_t)output->dims[0] != rows)
            return false;
        for (uint32_t axis = 0; axis < output->rank; axis++)
            size *= output->dims[axis];
        if (size != output->size || (output->buffer == NULL && size > 0))
            return false;
    }
    return true;
}

static bool same_parameter(const Parameter *one, const Parameter *other)
{
    if (one->type != other->type || one->size != other->size || strcmp(one->name, other->name) != 0)
        return false;
    size_t size = one->type == PARAMETER_STRING || one->type == PARAMETER_BYTES ? one->size
                  : one->type == PARAMETER_BOOL                                 ? sizeof(bool)
                                                                                : sizeof(int64_t);
    return memcmp(value_of(one), value_of(other), size) == 0;
}

/* Whether two plain responses differ only in their rows and data. */
bool responses_match(const Response *one, const Response *other)
{
    if (one->output_count != other->output_count || one->parameter_count != other->parameter_count)
        return false;
    const Output *second = other->outputs;
    for EACH_OUTPUT (one, output) {
        if (output->index != second->index || output->rank != second->rank)
            return false;
        if (memcmp(output->dims + 1, second->dims + 1, (output->rank - 1) * sizeof *output->dims) != 0)
            return false;
        second = (const Output *)second->head.next;
    }
    for (uint32_t index = 0; index < one->parameter_count; index++)
        if (!same_parameter(one->parameters[index], other->parameters[index]))
            return false;
    return true;
}

/* Copies an output to where its batch is read, and returns its size. */
uint64_t copy_output(const Response *response, uint32_t index, char *target)
{
    const Output *output = response->outputs;
    while (index-- > 0)
        output = (const Output *)output->head.next;
    if (output->size > 0)
        memcpy(target, output->buffer, output->size);
    return output->size;
}

/* ---------------------------------------------------------------------------------------------------------- states */

static const StateSpec *state_spec(const char *name)
{
    for (uint32_t index = 0; index < host.state_count; index++)
        if (strcmp(host.states[index].output, name) == 0)
            return &host.states[index];
    return NULL;
}

EXPORT Error *TRITONBACKEND_StateNew(State **state, Request *request, const char *name, DataType type,
                                     const int64_t *dims, uint32_t rank)
{
    LIVE(request, A_REQUEST);
    const StateSpec *spec = state_spec(name);
    if (host.state_count == 0)
        return fail(INVALID_ARG, "unable to add state '%s'. State configuration is missing for model '%s'.", name,
                    host.model);
    if (spec == NULL)
        return fail(INVALID_ARG, "state '%s' is not a valid state name.", name);
    State *made = claim(sizeof *made + rank * sizeof *dims);
    made->head.tag = A_STATE;
    made->spec = spec;
    made->request = request;
    made->type = type;
    made->rank = rank;
    memcpy(made->dims, dims, rank * sizeof *dims);
    LOCK();
    made->head.next = (Head *)request->states;
    request->states = made;
    UNLOCK();
    *state = made;
    return NULL;
}

EXPORT Error *TRITONBACKEND_StateBuffer(State *state, void **buffer, uint64_t size, MemoryType *memory,
                                        int64_t *memory_id)
{
    LIVE(state, A_STATE);
    free(state->buffer);
    state->buffer = malloc(size ? size : 1);
    if (state->buffer == NULL)
        return fail(UNAVAILABLE, "no memory for %llu bytes of a state", (unsigned long long)size);
    state->size = size;
    const Input *before = state->spec->shared ? input_of(state->request, state->spec->input) : NULL;
    if (before != NULL && before->buffer_count == 1) /* a state is in one part, on the host */
        memcpy(state->buffer, before->buffers[0].base, size < before->size ? size : before->size);
    *buffer = state->buffer;
    *memory = MEMORY_CPU;
    *memory_id = 0;
    return NULL;
}

EXPORT Error *TRITONBACKEND_StateBufferAttributes(State *state, BufferAttributes **attributes)
{
    LIVE(state, A_STATE);
    state->attributes = (BufferAttributes){state->size, MEMORY_CPU, 0, NULL};
    *attributes = &state->attributes;
    return NULL;
}

/* The state becomes that of the sequence when its request has been answered. */
EXPORT Error *TRITONBACKEND_StateUpdate(State *state)
{
    LIVE(state, A_STATE);
    LOCK();
    Head **at = (Head **)&state->request->states;
    while (*at != &state->head)
        at = &(*at)->next;
    *at = state->head.next;
    state->head.tag = DEAD;
    add_event(STATE, state->request->token, 0, state);
    unlock_and_notify();
    return NULL;
}

/* With the lock: when the request is released, or has failed. States that were not updated are lost, unless they are
 * shared and the request has not failed. */
void end_states(Request *request, bool failed)
{
    for (State *state = request->states, *next; state != NULL; state = next) {
        next = (State *)state->head.next;
        state->head.tag = DEAD;
        if (!failed && state->spec->shared && state->buffer != NULL)
            add_event(STATE, request->token, 0, state);
        else
            free_state(state);
    }
    request->states = NULL;
}

void free_state(State *state)
{
    free(state->buffer);
    bury(state);
}

/* ------------------------------------------------------------------------------------------------- words for Python */

static void put_tensor(Words *out, int index, DataType type, uint32_t rank, const int64_t *dims, void *buffer, uint64_t size)
{
    put_word(out, index < 0 ? UINT64_MAX : (uint64_t)index);
    put_word(out, type);
    put_word(out, (uint64_t)buffer);
    put_word(out, size);
    put_word(out, rank);
    for (uint32_t axis = 0; axis < rank; axis++)
        put_word(out, dims[axis]);
}

void put_response(Words *out, Response *response)
{
    put_word(out, response->number);
    put_word(out, response->error ? response->error->code + 1 : 0);
    if (response->error != NULL)
        put_text(out, response->error->text);
    put_word(out, response->output_count);
    for (Output *output = response->outputs; output != NULL; output = (Output *)output->head.next) {
        put_tensor(out, output->index, output->type, output->rank, output->dims, output->buffer, output->size);
        put_text(out, output->name);
        put_word(out, output->placed);
    }
    put_word(out, response->parameter_count);
    for (uint32_t index = 0; index < response->parameter_count; index++)
        put_parameter(out, response->parameters[index]);
}

void put_state(Words *out, State *state)
{
    put_tensor(out, state->spec->index, state->type, state->rank, state->dims, state->buffer, state->size);
}
