/* Requests that a backend makes itself, the responses to them, and what it asks the server about models. Python sends
 * them as the calls of any other model (`server_calls.py`). */
#include "host.h"

#include <stdlib.h>
#include <string.h>

typedef struct Server Server;
typedef struct Allocator Allocator;
typedef struct Call Call;
typedef struct Reply Reply;

typedef Error *Allocate(Allocator *, const char *name, size_t size, MemoryType wanted, int64_t wanted_id, void *user,
                        void **buffer, void **buffer_user, MemoryType *memory, int64_t *memory_id);
typedef Error *Release(Allocator *, void *buffer, void *buffer_user, size_t size, MemoryType memory, int64_t memory_id);
typedef Error *Start(Allocator *, void *user);
typedef void Released(Call *, uint32_t flags, void *user);
typedef void Responded(Reply *, uint32_t flags, void *user);

struct Allocator {
    Head head;
    Allocate *allocate;
    Release *release;
    Start *start;
};

typedef struct CallInput {
    struct CallInput *next;
    char *name;
    DataType type;
    uint64_t rank;
    int64_t *dims;
    Words chunks; /* address and size of each */
} CallInput;

typedef struct Name {
    struct Name *next;
    char *text;
} Name;

struct Call {
    Head head;
    char *model, *id, *correlation_text;
    int64_t version;
    uint32_t flags;
    uint64_t correlation, timeout_us, priority;
    CallInput *inputs;
    Name *outputs;
    uint64_t parameter_count;
    Parameter **parameters;
    Released *released;
    void *released_user;
    Allocator *allocator;
    void *allocator_user;
    Responded *responded;
    void *responded_user;
    bool cancelled;
};

typedef struct {
    char *name;
    DataType type;
    uint64_t rank;
    int64_t *dims;
    void *buffer, *buffer_user;
    size_t size;
    MemoryType memory;
    int64_t memory_id;
} ReplyOutput;

struct Reply {
    Head head;
    Error *error;
    char *model, *id;
    int64_t version;
    Allocator *allocator;
    void *allocator_user;
    uint64_t output_count, parameter_count;
    ReplyOutput *outputs;
    Parameter **parameters;
};

/* ------------------------------------------------------------------------------------------------------ allocators */

EXPORT Error *TRITONSERVER_ResponseAllocatorNew(Allocator **allocator, Allocate *allocate, Release *release, Start *start)
{
    Allocator *made = claim(sizeof *made);
    *made = (Allocator){{.tag = AN_ALLOCATOR}, allocate, release, start};
    *allocator = made;
    return NULL;
}

/* The server asks for ordinary memory only, so it needs neither query nor attributes. */
EXPORT Error *TRITONSERVER_ResponseAllocatorSetQueryFunction(Allocator *allocator, void *function)
{
    LIVE(allocator, AN_ALLOCATOR);
    (void)function;
    return NULL;
}

EXPORT Error *TRITONSERVER_ResponseAllocatorSetBufferAttributesFunction(Allocator *allocator, void *function)
{
    return TRITONSERVER_ResponseAllocatorSetQueryFunction(allocator, function);
}

EXPORT Error *TRITONSERVER_ResponseAllocatorDelete(Allocator *allocator)
{
    LIVE(allocator, AN_ALLOCATOR);
    bury(allocator);
    return NULL;
}

/* ----------------------------------------------------------------------------------------------------------- calls */

EXPORT Error *TRITONSERVER_InferenceRequestNew(Call **call, Server *server, const char *model, int64_t version)
{
    (void)server;
    Call *made = claim(sizeof *made);
    made->head.tag = A_CALL;
    made->model = copied(model);
    made->version = version;
    made->id = copied("");
    made->correlation_text = copied("");
    *call = made;
    return NULL;
}

static void remove_inputs(Call *call)
{
    while (call->inputs != NULL) {
        CallInput *input = call->inputs;
        call->inputs = input->next;
        free(input->name);
        free(input->dims);
        free(input->chunks.words);
        free(input);
    }
}

static void remove_outputs(Call *call)
{
    while (call->outputs != NULL) {
        Name *name = call->outputs;
        call->outputs = name->next;
        free(name->text);
        free(name);
    }
}

EXPORT Error *TRITONSERVER_InferenceRequestDelete(Call *call)
{
    LIVE(call, A_CALL);
    remove_inputs(call);
    remove_outputs(call);
    for (uint64_t index = 0; index < call->parameter_count; index++)
        free(call->parameters[index]);
    free(call->parameters);
    free(call->model);
    free(call->id);
    free(call->correlation_text);
    bury(call);
    return NULL;
}

static Error *replace(char **place, const char *text)
{
    free(*place);
    *place = copied(text);
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceRequestSetId(Call *call, const char *id)
{
    LIVE(call, A_CALL);
    return replace(&call->id, id);
}

EXPORT Error *TRITONSERVER_InferenceRequestSetCorrelationIdString(Call *call, const char *id)
{
    LIVE(call, A_CALL);
    return replace(&call->correlation_text, id);
}

EXPORT Error *TRITONSERVER_InferenceRequestCorrelationIdString(Call *call, const char **id)
{
    LIVE(call, A_CALL);
    *id = call->correlation_text;
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceRequestId(Call *call, const char **id)
{
    LIVE(call, A_CALL);
    *id = call->id;
    return NULL;
}

#define PROPERTY(name, type, field)                                                  \
    EXPORT Error *TRITONSERVER_InferenceRequestSet##name(Call *call, type value)     \
    {                                                                                \
        LIVE(call, A_CALL);                                                          \
        call->field = value;                                                         \
        return NULL;                                                                 \
    }                                                                                \
    EXPORT Error *TRITONSERVER_InferenceRequest##name(Call *call, type *value)       \
    {                                                                                \
        LIVE(call, A_CALL);                                                          \
        *value = call->field;                                                        \
        return NULL;                                                                 \
    }

PROPERTY(Flags, uint32_t, flags)
PROPERTY(CorrelationId, uint64_t, correlation)
PROPERTY(TimeoutMicroseconds, uint64_t, timeout_us)
PROPERTY(Priority, uint32_t, priority)
PROPERTY(PriorityUInt64, uint64_t, priority)

static CallInput *find_input(Call *call, const char *name)
{
    CallInput *input = call->inputs;
    while (input != NULL && strcmp(input->name, name) != 0)
        input = input->next;
    return input;
}

EXPORT Error *TRITONSERVER_InferenceRequestAddInput(Call *call, const char *name, DataType type, const int64_t *dims,
                                                    uint64_t rank)
{
    LIVE(call, A_CALL);
    if (find_input(call, name) != NULL)
        return fail(INVALID_ARG, "input '%s' already exists in request", name);
    CallInput **last = &call->inputs;
    while (*last != NULL)
        last = &(*last)->next;
    CallInput *made = *last = claim(sizeof *made);
    made->name = copied(name);
    made->type = type;
    made->rank = rank;
    made->dims = memcpy(claim(rank * sizeof *dims), dims, rank * sizeof *dims);
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceRequestAppendInputData(Call *call, const char *name, const void *base, size_t size,
                                                           MemoryType memory, int64_t memory_id)
{
    LIVE(call, A_CALL);
    (void)memory_id;
    CallInput *input = find_input(call, name);
    if (input == NULL)
        return fail(INVALID_ARG, "input '%s' does not exist in request", name);
    if (memory == MEMORY_GPU)
        return fail(UNSUPPORTED, "input '%s' is on a GPU; a call needs it on the host", name);
    put_word(&input->chunks, (uint64_t)base);
    put_word(&input->chunks, size);
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceRequestAppendInputDataWithHostPolicy(Call *call, const char *name, const void *base,
                                                                         size_t size, MemoryType memory,
                                                                         int64_t memory_id, const char *policy)
{
    (void)policy;
    return TRITONSERVER_InferenceRequestAppendInputData(call, name, base, size, memory, memory_id);
}

EXPORT Error *TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes(Call *call, const char *name,
                                                                               const void *base,
                                                                               const BufferAttributes *attributes)
{
    return TRITONSERVER_InferenceRequestAppendInputData(call, name, base, attributes->size, attributes->memory,
                                                        attributes->memory_id);
}

EXPORT Error *TRITONSERVER_InferenceRequestRemoveAllInputs(Call *call)
{
    LIVE(call, A_CALL);
    remove_inputs(call);
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceRequestAddRequestedOutput(Call *call, const char *name)
{
    LIVE(call, A_CALL);
    Name **last = &call->outputs;
    while (*last != NULL)
        last = &(*last)->next;
    *last = claim(sizeof **last);
    (*last)->text = copied(name);
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceRequestRemoveAllRequestedOutputs(Call *call)
{
    LIVE(call, A_CALL);
    remove_outputs(call);
    return NULL;
}

static Error *add_parameter(Call *call, const char *name, ParameterType type, const void *value, uint64_t size)
{
    LIVE(call, A_CALL);
    uint64_t count = call->parameter_count++;
    call->parameters = realloc(call->parameters, (count + 1) * sizeof *call->parameters);
    if (call->parameters == NULL)
        die("no memory for the parameters of a call");
    call->parameters[count] = parameter_of(name, type, value, size);
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceRequestSetStringParameter(Call *call, const char *name, const char *value)
{
    return add_parameter(call, name, PARAMETER_STRING, value, strlen(value));
}

EXPORT Error *TRITONSERVER_InferenceRequestSetIntParameter(Call *call, const char *name, int64_t value)
{
    return add_parameter(call, name, PARAMETER_INT, &value, 0);
}

EXPORT Error *TRITONSERVER_InferenceRequestSetBoolParameter(Call *call, const char *name, bool value)
{
    return add_parameter(call, name, PARAMETER_BOOL, &value, 0);
}

EXPORT Error *TRITONSERVER_InferenceRequestSetDoubleParameter(Call *call, const char *name, double value)
{
    return add_parameter(call, name, PARAMETER_DOUBLE, &value, 0);
}

EXPORT Error *TRITONSERVER_InferenceRequestSetReleaseCallback(Call *call, Released *released, void *user)
{
    LIVE(call, A_CALL);
    call->released = released;
    call->released_user = user;
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceRequestSetResponseCallback(Call *call, Allocator *allocator, void *allocator_user,
                                                               Responded *responded, void *user)
{
    LIVE(call, A_CALL);
    call->allocator = allocator;
    call->allocator_user = allocator_user;
    call->responded = responded;
    call->responded_user = user;
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceRequestCancel(Call *call)
{
    LIVE(call, A_CALL);
    call->cancelled = true;
    host.python.cancel((uint64_t)call);
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceRequestIsCancelled(Call *call, bool *is_cancelled)
{
    LIVE(call, A_CALL);
    *is_cancelled = call->cancelled;
    return NULL;
}

static void put_call(Words *out, const Call *call)
{
    put_text(out, call->model);
    put_word(out, call->version);
    put_text(out, call->id);
    put_word(out, call->flags);
    put_word(out, call->timeout_us);
    put_word(out, call->priority);
    put_word(out, call->correlation);
    put_text(out, call->correlation_text);
    for (const CallInput *input = call->inputs; input != NULL; input = input->next) {
        put_word(out, 1);
        put_text(out, input->name);
        put_word(out, input->type);
        put_word(out, input->rank);
        for (uint64_t axis = 0; axis < input->rank; axis++)
            put_word(out, input->dims[axis]);
        put_word(out, input->chunks.count / 2);
        for (size_t index = 0; index < input->chunks.count; index++)
            put_word(out, input->chunks.words[index]);
    }
    put_word(out, 0);
    for (const Name *name = call->outputs; name != NULL; name = name->next) {
        put_word(out, 1);
        put_text(out, name->text);
    }
    put_word(out, 0);
    put_word(out, call->parameter_count);
    for (uint64_t index = 0; index < call->parameter_count; index++)
        put_parameter(out, call->parameters[index]);
}

EXPORT Error *TRITONSERVER_ServerInferAsync(Server *server, Call *call, void *trace)
{
    (void)server, (void)trace;
    LIVE(call, A_CALL);
    if (call->responded == NULL || call->allocator == NULL)
        return fail(INVALID_ARG, "the request to model '%s' has no response callback", call->model);
    Words words = {0};
    put_call(&words, call);
    int64_t answer = host.python.infer((uint64_t)call, words.words, words.count);
    free(words.words);
    return answer < 0 ? refused() : NULL;
}

/* --------------------------------------------------------------------------------------------------------- replies */

static Error *read_output(Reply *reply, ReplyOutput *output, Cursor *at)
{
    output->name = copied(read_text(at));
    output->type = *(*at)++;
    const uint64_t *dims = read_list(at, &output->rank);
    output->dims = memcpy(claim(output->rank * sizeof *dims), dims, output->rank * sizeof *dims);
    const void *data = (const void *)*(*at)++;
    size_t size = *(*at)++;
    Error *error = reply->allocator->allocate(reply->allocator, output->name, size, MEMORY_CPU, 0, reply->allocator_user,
                                              &output->buffer, &output->buffer_user, &output->memory, &output->memory_id);
    if (error != NULL)
        return error;
    output->size = size;
    if (output->memory == MEMORY_GPU)
        return fail(UNSUPPORTED, "output '%s' can be delivered in memory of the host only", output->name);
    if (size > 0)
        memcpy(output->buffer, data, size); /* to where the backend wants it */
    return NULL;
}

/* Delivers a response. `given` NULL: only flags. */
EXPORT void host_reply(Call *call, const uint64_t *given, uint32_t flags)
{
    if (given == NULL) {
        call->responded(NULL, flags, call->responded_user);
        return;
    }
    Cursor at = given;
    Reply *reply = claim(sizeof *reply);
    reply->head.tag = A_REPLY;
    reply->model = copied(call->model);
    reply->id = copied(call->id);
    reply->version = call->version;
    reply->allocator = call->allocator;
    reply->allocator_user = call->allocator_user;
    uint64_t code = *at++;
    const char *text = read_text(&at);
    if (code)
        reply->error = error_of(code - 1, text);
    if (reply->allocator->start != NULL && reply->error == NULL)
        reply->error = reply->allocator->start(reply->allocator, reply->allocator_user);
    uint64_t count = *at++;
    reply->outputs = claim(count * sizeof *reply->outputs);
    while (reply->error == NULL && reply->output_count < count)
        reply->error = read_output(reply, &reply->outputs[reply->output_count++], &at);
    if (reply->error == NULL) {
        count = *at++;
        reply->parameters = claim(count * sizeof *reply->parameters);
        for (; reply->parameter_count < count; reply->parameter_count++) {
            Parameter parameter = {0};
            read_parameter(&parameter, &at);
            reply->parameters[reply->parameter_count] =
                parameter_of(parameter.name, parameter.type, value_of(&parameter), parameter.size);
        }
    }
    call->responded(reply, flags, call->responded_user);
}

/* Gives the request back to the backend, which may delete it. */
EXPORT void host_end_call(Call *call)
{
    if (call->released != NULL)
        call->released(call, RELEASE_ALL, call->released_user);
}

EXPORT Error *TRITONSERVER_InferenceResponseDelete(Reply *reply)
{
    LIVE(reply, A_REPLY);
    for (uint64_t index = 0; index < reply->output_count; index++) {
        ReplyOutput *output = &reply->outputs[index];
        if (output->buffer != NULL || output->buffer_user != NULL)
            free(reply->allocator->release(reply->allocator, output->buffer, output->buffer_user, output->size,
                                           output->memory, output->memory_id));
        free(output->name);
        free(output->dims);
    }
    for (uint64_t index = 0; index < reply->parameter_count; index++)
        free(reply->parameters[index]);
    free(reply->parameters);
    free(reply->outputs);
    free(reply->error);
    free(reply->model);
    free(reply->id);
    bury(reply);
    return NULL;
}

/* The error stays the response's. */
EXPORT Error *TRITONSERVER_InferenceResponseError(Reply *reply)
{
    LIVE(reply, A_REPLY);
    return reply->error;
}

EXPORT Error *TRITONSERVER_InferenceResponseModel(Reply *reply, const char **model, int64_t *version)
{
    LIVE(reply, A_REPLY);
    *model = reply->model;
    *version = reply->version;
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceResponseId(Reply *reply, const char **id)
{
    LIVE(reply, A_REPLY);
    *id = reply->id;
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceResponseOutputCount(Reply *reply, uint32_t *count)
{
    LIVE(reply, A_REPLY);
    *count = reply->output_count;
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceResponseOutput(Reply *reply, uint32_t index, const char **name, DataType *type,
                                                   const int64_t **dims, uint64_t *rank, const void **base, size_t *size,
                                                   MemoryType *memory, int64_t *memory_id, void **user)
{
    LIVE(reply, A_REPLY);
    if (index >= reply->output_count)
        return fail(INVALID_ARG, "out of bounds index %u, response has %llu outputs", index,
                    (unsigned long long)reply->output_count);
    const ReplyOutput *output = &reply->outputs[index];
    *name = output->name;
    *type = output->type;
    *dims = output->dims;
    *rank = output->rank;
    *base = output->buffer;
    *size = output->size;
    *memory = output->memory;
    *memory_id = output->memory_id;
    *user = output->buffer_user;
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceResponseParameterCount(Reply *reply, uint32_t *count)
{
    LIVE(reply, A_REPLY);
    *count = reply->parameter_count;
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceResponseParameter(Reply *reply, uint32_t index, const char **name,
                                                      ParameterType *type, const void **value)
{
    LIVE(reply, A_REPLY);
    if (index >= reply->parameter_count)
        return fail(INVALID_ARG, "out of bounds index %u, response has %llu parameters", index,
                    (unsigned long long)reply->parameter_count);
    *name = reply->parameters[index]->name;
    *type = reply->parameters[index]->type;
    *value = value_of(reply->parameters[index]);
    return NULL;
}

/* ---------------------------------------------------------------------------------------------------------- server */

enum { READY, DECOUPLED, LOAD, UNLOAD, UNLOAD_ALL };
enum { ONE_TO_ONE = 1, SEVERAL = 2 };

static Error *ask(int question, const char *model, int64_t version, uint64_t count, Parameter *const *parameters,
                  int64_t *answer)
{
    Words words = {0};
    for (uint64_t index = 0; index < count; index++)
        put_parameter(&words, parameters[index]);
    *answer = host.python.ask(question, model, version, count, words.words, words.count);
    free(words.words);
    return *answer < 0 ? refused() : NULL;
}

EXPORT Error *TRITONSERVER_ServerModelIsReady(Server *server, const char *model, int64_t version, bool *ready)
{
    (void)server;
    int64_t answer;
    Error *error = ask(READY, model, version, 0, NULL, &answer);
    *ready = answer > 0;
    return error;
}

EXPORT Error *TRITONSERVER_ServerModelTransactionProperties(Server *server, const char *model, int64_t version,
                                                            uint32_t *flags, void **unused)
{
    (void)server, (void)unused;
    int64_t answer;
    Error *error = ask(DECOUPLED, model, version, 0, NULL, &answer);
    *flags = answer > 0 ? SEVERAL : ONE_TO_ONE;
    return error;
}

EXPORT Error *TRITONSERVER_ServerLoadModelWithParameters(Server *server, const char *model, Parameter *const *parameters,
                                                         uint64_t count)
{
    (void)server;
    int64_t answer;
    return ask(LOAD, model, 0, count, parameters, &answer);
}

EXPORT Error *TRITONSERVER_ServerLoadModel(Server *server, const char *model)
{
    return TRITONSERVER_ServerLoadModelWithParameters(server, model, NULL, 0);
}

EXPORT Error *TRITONSERVER_ServerUnloadModel(Server *server, const char *model)
{
    (void)server;
    int64_t answer;
    return ask(UNLOAD, model, 0, 0, NULL, &answer);
}

EXPORT Error *TRITONSERVER_ServerUnloadModelAndDependents(Server *server, const char *model)
{
    (void)server;
    int64_t answer;
    return ask(UNLOAD_ALL, model, 0, 0, NULL, &answer);
}
