/* A backend that does to a request what its parameter `do` says: by default it copies IN to OUT, and TEXT to TEXT. */
#include "backend.h"

#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FP32 = 11, BYTES = 13 };
enum { INTERNAL = 1, INVALID = 3 };
enum { CPU, PINNED, GPU };
enum { FINAL = 1, ALL = 1, RESCHEDULE = 2 };

static Object *error(int code, const char *text) { return TRITONSERVER_ErrorNew(code, text); }

static const char *parameter(Object *request, const char *name)
{
    uint32_t count;
    TRITONBACKEND_RequestParameterCount(request, &count);
    for (uint32_t index = 0; index < count; index++) {
        const char *key;
        const void *value;
        int type;
        TRITONBACKEND_RequestParameter(request, index, &key, &type, &value);
        if (strcmp(key, name) == 0)
            return value;
    }
    return "";
}

static bool config_has(Object *model, const char *text)
{
    Object *message;
    const char *json;
    uint64_t size;
    TRITONBACKEND_ModelConfig(model, 1, &message);
    TRITONSERVER_MessageSerializeToJson(message, &json, &size);
    bool found = strstr(json, text) != NULL;
    TRITONSERVER_MessageDelete(message);
    return found;
}

/* ------------------------------------------------------------------------------------------------------------ life */

static bool stuck, unfinished;
static const char *always = ""; /* what to do to a request without the parameter */
static Object *server, *requests_counter, *manager, *described;

CALL(Initialize, Object *backend)
{
    Object *config;
    const char *json;
    uint64_t size;
    TRITONBACKEND_BackendMemoryManager(backend, &manager);
    TRITONBACKEND_BackendConfig(backend, &config);
    TRITONSERVER_MessageSerializeToJson(config, &json, &size);
    unfinished = strstr(json, "\"unfinished\"") != NULL;
    return strstr(json, "\"refuse\"") ? error(INVALID, "the backend refuses these settings") : NULL;
}

CALL(ModelInitialize, Object *model)
{
    if (config_has(model, "at model"))
        return error(INVALID, "the backend refuses this model");
    stuck = config_has(model, "stuck");
    static const char *const choices[] = {"always late", "always fail", "always prefer gpu", "always count by place"};
    for (int index = 0; index < 4; index++)
        if (config_has(model, choices[index]))
            always = choices[index] + strlen("always ");
    TRITONBACKEND_ModelServer(model, &server);
    TRITONSERVER_LogMessage(3, "backend.c", 1, "a verbose message");
    Object *family, *label = TRITONSERVER_ParameterNew("place", 0, "here");
    TRITONSERVER_MetricFamilyNew(&family, 0, "probe_requests", "requests that the backend got");
    TRITONSERVER_MetricNew(&requests_counter, family, &label, 1);
    TRITONSERVER_MetricFamilyDelete(family);
    TRITONSERVER_ParameterDelete(label);
    bool completes;
    TRITONBACKEND_ModelAutoCompleteConfig(model, &completes);
    if (completes && config_has(model, "\"input\":[]")) {
        const char *name;
        char json[512];
        Object *message;
        TRITONBACKEND_ModelName(model, &name);
        strcpy(json, "{\"name\":\"");
        strcat(json, name);
        strcat(json, "\",\"backend\":\"probe\",\"max_batch_size\":4,"
                     "\"input\":[{\"name\":\"IN\",\"data_type\":\"TYPE_FP32\",\"dims\":[2]}],"
                     "\"output\":[{\"name\":\"OUT\",\"data_type\":\"TYPE_FP32\",\"dims\":[2]}]}");
        TRITONSERVER_MessageNewFromSerializedJson(&message, json, strlen(json));
        Object *failed = TRITONBACKEND_ModelSetConfig(model, 1, message);
        TRITONSERVER_MessageDelete(message);
        return failed;
    }
    return NULL;
}

CALL(ModelInstanceInitialize, Object *instance)
{
    Object *model;
    described = instance;
    TRITONBACKEND_ModelInstanceModel(instance, &model);
    return config_has(model, "at instance") ? error(INTERNAL, "the backend refuses this instance") : NULL;
}

/* What the instance is, and whether the server gives it memory of each kind. */
static void describe(Object *response)
{
    static const char *const kinds[] = {"AUTO", "CPU", "GPU", "MODEL"};
    char text[256];
    const char *policy;
    uint64_t size;
    int kind;
    int32_t device;
    bool passive;
    Object *message, *again;
    TRITONBACKEND_ModelInstanceKind(described, &kind);
    TRITONBACKEND_ModelInstanceDeviceId(described, &device);
    TRITONBACKEND_ModelInstanceIsPassive(described, &passive);
    TRITONBACKEND_ModelInstanceHostPolicy(described, &message);
    TRITONSERVER_MessageSerializeToJson(message, &policy, &size);
    snprintf(text, sizeof text, "%s %d %.*s %d", kinds[kind], device, (int)size, policy, passive);
    TRITONBACKEND_ResponseSetStringParameter(response, "instance", text);
    for (int type = CPU; type <= GPU; type++) {
        void *memory = NULL;
        const char *outcome = "freed";
        Object *failed = TRITONBACKEND_MemoryManagerAllocate(manager, &memory, type, 0, 1000);
        if (failed == NULL) {
            memset(memory, 1, 1000);
            failed = TRITONBACKEND_MemoryManagerFree(manager, memory, type, 0);
        }
        if (failed == NULL && type != CPU) { /* twice */
            again = TRITONBACKEND_MemoryManagerFree(manager, memory, type, 0);
            outcome = again == NULL ? "freed twice" : "freed once";
            if (again != NULL)
                TRITONSERVER_ErrorDelete(again);
        }
        TRITONBACKEND_ResponseSetStringParameter(response, TRITONSERVER_MemoryTypeString(type),
                                                 failed == NULL ? outcome : TRITONSERVER_ErrorMessage(failed));
        if (failed != NULL)
            TRITONSERVER_ErrorDelete(failed);
    }
}

CALL(ModelFinalize, Object *model)
{
    (void)model;
    return unfinished ? error(INTERNAL, "the model cannot be finalized") : NULL;
}

CALL(ModelInstanceFinalize, Object *instance)
{
    (void)instance;
    TRITONSERVER_LogMessage(0, "backend.c", 1, "the instance is finalized");
    while (stuck)
        pause();
    return unfinished ? error(INTERNAL, "the instance cannot be finalized") : NULL;
}

/* --------------------------------------------------------------------------------------------------------- answers */

static const char *wanted(Object *request)
{
    const char *what = parameter(request, "do");
    return *what ? what : always;
}

/* Copies bytes, if one of them is on a GPU, and there is one, with its driver. */
static void move(void *target, const void *source, uint64_t size, bool on_gpu)
{
    static int (*on_device)(uint64_t, uint64_t, size_t);
    void *driver = on_gpu && on_device == NULL ? dlopen("libcuda.so.1", RTLD_NOW) : NULL;
    if (driver != NULL)
        on_device = (int (*)(uint64_t, uint64_t, size_t))dlsym(driver, "cuMemcpy");
    if (!on_gpu || on_device == NULL)
        memcpy(target, source, size);
    else if (on_device((uint64_t)target, (uint64_t)source, size) != 0)
        abort();
}

static void copy(Object *request, Object *response, const char *from, const char *to)
{
    Object *input, *output;
    Object *absent = TRITONBACKEND_RequestInput(request, from, &input);
    if (absent != NULL) {
        TRITONSERVER_ErrorDelete(absent);
        return;
    }
    const char *name;
    const int64_t *dims;
    uint32_t rank, buffers;
    uint64_t size, part;
    int type, read = CPU, written = strcmp(wanted(request), "prefer gpu") == 0 ? GPU : CPU;
    int64_t memory_id = 0;
    TRITONBACKEND_InputProperties(input, &name, &type, &dims, &rank, &size, &buffers);
    TRITONBACKEND_ResponseOutput(response, &output, to, type, dims, rank);
    char *target;
    TRITONBACKEND_OutputBuffer(output, (void **)&target, size, &written, &memory_id);
    for (uint32_t index = 0; index < buffers; index++) {
        const void *source;
        TRITONBACKEND_InputBuffer(input, index, &source, &part, &read, &memory_id);
        move(target, source, part, read == GPU || written == GPU);
        target += part;
    }
    if (strcmp(from, "IN") == 0) {
        TRITONBACKEND_ResponseSetIntParameter(response, "buffers", buffers);
        TRITONBACKEND_ResponseSetIntParameter(response, "read", read);
        TRITONBACKEND_ResponseSetIntParameter(response, "written", written);
    }
}

static Object *response_to(Object *request)
{
    Object *response;
    TRITONBACKEND_ResponseNew(&response, request);
    copy(request, response, "IN", "OUT");
    copy(request, response, "TEXT", "TEXT");
    if (strcmp(parameter(request, "do"), "describe") == 0)
        describe(response);
    const char *id;
    TRITONBACKEND_RequestId(request, &id);
    if (*id)
        TRITONBACKEND_ResponseSetStringParameter(response, "id", id);
    return response;
}

static void number(Object *response, float value)
{
    Object *output;
    int64_t dims[] = {1, 1}, memory_id = 0;
    int memory = 0;
    void *target;
    TRITONBACKEND_ResponseOutput(response, &output, "OUT", FP32, dims, 2);
    TRITONBACKEND_OutputBuffer(output, &target, sizeof value, &memory, &memory_id);
    memcpy(target, &value, sizeof value);
}

static float first(Object *request, const char *name)
{
    Object *input;
    const void *data;
    uint64_t size;
    int memory = CPU;
    int64_t memory_id = 0;
    TRITONBACKEND_RequestInput(request, name, &input);
    TRITONBACKEND_InputBuffer(input, 0, &data, &size, &memory, &memory_id);
    return *(const float *)data;
}

/* Adds IN to the state of the sequence. `iterates`: the request runs until that is 10, and each time is a response if the
 * model is decoupled. `in_place`: the memory of the new state has the old one, and needs no update. */
static void count(Object *request, bool iterates, bool streams, bool in_place)
{
    Object *state, *response;
    int memory = CPU;
    int64_t memory_id = 0, dims[] = {1, 1};
    void *target;
    float added = first(request, "IN"), sum = first(request, "SUM_IN") + added;
    TRITONBACKEND_StateNew(&state, request, "SUM_OUT", FP32, dims, 2);
    TRITONBACKEND_StateBuffer(state, &target, sizeof sum, &memory, &memory_id);
    if (in_place) {
        sum = *(float *)target += added;
    } else {
        memcpy(target, &sum, sizeof sum);
        TRITONBACKEND_StateUpdate(state);
    }
    bool again = iterates && sum < 10;
    if (!again || streams) {
        TRITONBACKEND_ResponseNew(&response, request);
        number(response, sum);
        TRITONBACKEND_ResponseSend(response, again ? 0 : FINAL, NULL);
    }
    TRITONBACKEND_RequestRelease(request, again ? RESCHEDULE : ALL);
}

/* Keeps the sum of a sequence itself, for its place in the batch. */
static void count_by_place(Object *request, uint32_t place)
{
    static float sums[8];
    Object *response;
    if (first(request, "READY") != 0)
        sums[place] = first(request, "IN") + (first(request, "START") != 0 ? 0 : sums[place]);
    TRITONBACKEND_ResponseNew(&response, request);
    number(response, sums[place]);
    TRITONBACKEND_ResponseSend(response, FINAL, NULL);
    TRITONBACKEND_RequestRelease(request, ALL);
}

/* In a thread of the backend: a response to a request that it still has. */
static void *answer_late(void *request)
{
    TRITONBACKEND_ResponseSend(response_to(request), FINAL, NULL);
    TRITONBACKEND_RequestRelease(request, ALL);
    return NULL;
}

/* In a thread of the backend: three numbers and the final flag alone, after the request was released. */
static void *send_three(void *factory)
{
    for (int index = 0; index < 3; index++) {
        Object *response;
        TRITONBACKEND_ResponseNewFromFactory(&response, factory);
        number(response, index);
        TRITONBACKEND_ResponseSend(response, 0, NULL);
    }
    TRITONBACKEND_ResponseFactorySendFlags(factory, FINAL);
    TRITONBACKEND_ResponseFactoryDelete(factory);
    return NULL;
}

/* In a thread of the backend: numbers until the caller no longer wants them. */
static void *send_until_cancelled(void *factory)
{
    bool cancelled = false;
    while (!cancelled) {
        Object *response;
        TRITONBACKEND_ResponseNewFromFactory(&response, factory);
        number(response, 1);
        TRITONBACKEND_ResponseSend(response, 0, NULL);
        usleep(1000);
        TRITONBACKEND_ResponseFactoryIsCancelled(factory, &cancelled);
    }
    TRITONSERVER_LogMessage(0, "backend.c", 1, "the stream was cancelled");
    TRITONBACKEND_ResponseFactorySendFlags(factory, FINAL);
    TRITONBACKEND_ResponseFactoryDelete(factory);
    return NULL;
}

/* ----------------------------------------------------------------------------------------------------------- calls */

static Object *allocate(Object *allocator, const char *name, uint64_t size, int wanted, int64_t wanted_id, void *user,
                        void **buffer, void **buffer_user, int *memory, int64_t *memory_id)
{
    (void)allocator, (void)name, (void)wanted, (void)wanted_id, (void)user;
    *buffer = malloc(size + 1);
    *buffer_user = NULL;
    *memory = 0;
    *memory_id = 0;
    return NULL;
}

static Object *release(Object *allocator, void *buffer, void *user, uint64_t size, int memory, int64_t memory_id)
{
    (void)allocator, (void)user, (void)size, (void)memory, (void)memory_id;
    free(buffer);
    return NULL;
}

static void delete_call(Object *call, uint32_t flags, void *user)
{
    (void)flags, (void)user;
    TRITONSERVER_InferenceRequestDelete(call);
}

/* Answers the request with the first response of the model that it called, in the server's thread. */
static void pass_on(Object *reply, uint32_t flags, void *request)
{
    (void)flags;
    Object *response, *output, *failed = TRITONSERVER_InferenceResponseError(reply);
    TRITONBACKEND_ResponseNew(&response, request);
    if (failed == NULL) {
        const char *name;
        const int64_t *dims;
        const void *base;
        uint64_t rank, size;
        int64_t memory_id;
        int type, memory;
        void *user, *target;
        TRITONSERVER_InferenceResponseOutput(reply, 0, &name, &type, &dims, &rank, &base, &size, &memory, &memory_id, &user);
        TRITONBACKEND_ResponseOutput(response, &output, "OUT", type, dims, rank);
        TRITONBACKEND_OutputBuffer(output, &target, size, &memory, &memory_id);
        memcpy(target, base, size);
    }
    TRITONBACKEND_ResponseSend(response, FINAL, failed);
    TRITONBACKEND_RequestRelease(request, ALL);
    TRITONSERVER_InferenceResponseDelete(reply);
}

/* Calls the model that the parameter `model` names, with the input of the request. */
static Object *call(Object *request)
{
    static Object *allocator;
    Object *made, *input;
    const char *name, *then = parameter(request, "then");
    const int64_t *dims;
    const void *data;
    uint32_t rank, buffers;
    uint64_t size;
    int type, memory;
    int64_t memory_id;
    if (allocator == NULL)
        TRITONSERVER_ResponseAllocatorNew(&allocator, allocate, release, NULL);
    TRITONBACKEND_RequestInput(request, "IN", &input);
    TRITONBACKEND_InputProperties(input, &name, &type, &dims, &rank, &size, &buffers);
    TRITONBACKEND_InputBuffer(input, 0, &data, &size, &memory, &memory_id);
    TRITONSERVER_InferenceRequestNew(&made, server, parameter(request, "model"), -1);
    TRITONSERVER_InferenceRequestAddInput(made, "IN", strcmp(then, "type") == 0 ? 99 : type, dims, rank);
    TRITONSERVER_InferenceRequestAppendInputData(made, "IN", data, size, memory, memory_id);
    TRITONSERVER_InferenceRequestSetStringParameter(made, "do", then);
    TRITONSERVER_InferenceRequestSetReleaseCallback(made, delete_call, NULL);
    TRITONSERVER_InferenceRequestSetResponseCallback(made, allocator, NULL, pass_on, request);
    return TRITONSERVER_ServerInferAsync(server, made, NULL);
}

static void post(Object *reply, uint32_t flags, void *answered)
{
    (void)flags;
    TRITONSERVER_InferenceResponseDelete(reply);
    sem_post(answered);
}

/* In a thread of the backend: calls of the model with this name, one after another, most of them while the backend has no
 * request. */
static void *call_alone(void *name)
{
    static const float data[1];
    Object *allocator, *made;
    int64_t dims[] = {1, 1};
    sem_t answered;
    sem_init(&answered, 0, 0);
    TRITONSERVER_ResponseAllocatorNew(&allocator, allocate, release, NULL);
    for (int count = 0; count < 20; count++) {
        TRITONSERVER_InferenceRequestNew(&made, server, name, -1);
        TRITONSERVER_InferenceRequestAddInput(made, "IN", FP32, dims, 2);
        TRITONSERVER_InferenceRequestAppendInputData(made, "IN", data, sizeof data, 0, 0);
        TRITONSERVER_InferenceRequestSetReleaseCallback(made, delete_call, NULL);
        TRITONSERVER_InferenceRequestSetResponseCallback(made, allocator, NULL, post, &answered);
        TRITONSERVER_ServerInferAsync(server, made, NULL);
        sem_wait(&answered);
    }
    TRITONSERVER_LogMessage(0, "backend.c", 1, "the calls of a thread were answered");
    TRITONSERVER_ResponseAllocatorDelete(allocator);
    free(name);
    return NULL;
}

static void in_thread(void *(*run)(void *), void *subject)
{
    pthread_t thread;
    pthread_create(&thread, NULL, run, subject);
    pthread_detach(thread);
}

static void stream(Object *request, void *(*run)(void *))
{
    Object *factory;
    TRITONBACKEND_ResponseFactoryNew(&factory, request);
    TRITONBACKEND_RequestRelease(request, ALL);
    in_thread(run, factory);
}

static Object *answer(Object *request, uint32_t place)
{
    const char *what = wanted(request);
#define IS(name) (strcmp(what, name) == 0)
    if (IS("call"))
        return call(request);
    if (IS("count by place")) {
        count_by_place(request, place);
        return NULL;
    }
    if (IS("count in place")) {
        count(request, false, false, true);
        return NULL;
    }
    if (IS("count")) {
        count(request, false, false, false);
        return NULL;
    }
    if (IS("iterate") || IS("iterate and stream")) {
        count(request, true, !IS("iterate"), false);
        return NULL;
    }
    if (IS("three") || IS("endless")) {
        stream(request, IS("three") ? send_three : send_until_cancelled);
        return NULL;
    }
    if (IS("late")) {
        in_thread(answer_late, request);
        return NULL;
    }
    if (IS("fail"))
        return error(INVALID, "the backend refuses this batch");
    if (IS("abort"))
        abort();
    if (IS("segfault"))
        *(volatile int *)16 = 1;
    while (IS("hang"))
        pause();
    if (IS("child") && fork() == 0)
        while (true)
            pause();
    if (IS("call alone"))
        in_thread(call_alone, strdup(parameter(request, "model")));
    if (!IS("never")) {
        Object *response = response_to(request);
        if (IS("delete")) {
            TRITONBACKEND_ResponseDelete(response);
            response = response_to(request);
        }
        Object *failed = IS("error") ? error(INVALID, "the backend refuses this request") : NULL;
        if (IS("long error")) {
            char text[3001] = "";
            memset(text, 'x', sizeof text - 1);
            failed = error(INVALID, text);
        }
        if (IS("unknown"))
            copy(request, response, "IN", "NOWHERE");
        TRITONBACKEND_ResponseSend(response, FINAL, failed);
        if (failed != NULL)
            TRITONSERVER_ErrorDelete(failed);
        if (IS("twice"))
            TRITONBACKEND_ResponseSend(response_to(request), FINAL, NULL);
        if (IS("sent"))
            TRITONBACKEND_ResponseSend(response, FINAL, NULL);
    }
    TRITONBACKEND_RequestRelease(request, ALL);
    if (IS("released"))
        TRITONBACKEND_RequestRelease(request, ALL);
    return NULL;
}

CALL(ModelInstanceExecute, Object *instance, Object **requests, uint32_t count)
{
    (void)instance;
    TRITONSERVER_MetricIncrement(requests_counter, count);
    for (uint32_t index = 0; index < count; index++) {
        Object *failed = answer(requests[index], index);
        if (failed != NULL)
            return failed;
    }
    return NULL;
}
