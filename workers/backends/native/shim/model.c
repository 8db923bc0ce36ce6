/* The backend, its model and the model's instance, their life, and what they report of themselves. */
#include "host.h"

#include <stdlib.h>
#include <string.h>

struct Backend {
    const char *name, *folder;
    Message *config;
    void *state;
    ExecutionPolicy policy;
} backend;
struct Model {
    const char *folder;
    uint64_t version;
    Message *config;
    void *state;
    bool completes; /* the configuration can be changed */
} model;
struct Instance {
    const char *name;
    InstanceKind kind;
    int32_t device;
    Message *policy;
    bool passive;
    void *state;
} instance;
struct Server {
    int unused;
} server;
struct MemoryManager {
    int unused;
} memory_manager;

Host host;

/* --------------------------------------------------------------------------------------------------- for Python */

EXPORT void host_set_backend(const char *name, const char *folder, const char *config)
{
    backend.name = copied(name);
    backend.folder = copied(folder);
    TRITONSERVER_MessageNewFromSerializedJson(&backend.config, config, strlen(config));
}

EXPORT void host_set_config(const char *config)
{
    if (model.config != NULL)
        TRITONSERVER_MessageDelete(model.config);
    TRITONSERVER_MessageNewFromSerializedJson(&model.config, config, strlen(config));
}

EXPORT void host_set_model(const char *name, uint64_t version, const char *folder, bool completes, const char *config)
{
    host.model = copied(name);
    model.version = version;
    model.folder = copied(folder);
    model.completes = completes;
    host_set_config(config);
}

/* `policy`: a JSON object, which must have a member with the name of the policy. */
EXPORT void host_set_instance(const char *name, InstanceKind kind, int32_t device, const char *policy, bool passive)
{
    instance.name = copied(name);
    instance.kind = kind;
    instance.device = device;
    TRITONSERVER_MessageNewFromSerializedJson(&instance.policy, policy, strlen(policy));
    instance.passive = passive;
    host.on_gpu = kind == KIND_GPU;
}

EXPORT void host_set_callbacks(const Callbacks *callbacks) { host.python = *callbacks; }

static Tensor *tensors_of(uint32_t count, const char **names, const int32_t *types)
{
    Tensor *tensors = claim(count * sizeof *tensors);
    for (uint32_t index = 0; index < count; index++)
        tensors[index] = (Tensor){copied(names[index]), types[index]};
    return tensors;
}

EXPORT void host_set_tensors(bool decoupled, uint32_t input_count, const char **input_names, const int32_t *input_types,
                             uint32_t output_count, const char **output_names, const int32_t *output_types)
{
    host.decoupled = decoupled;
    host.inputs = tensors_of(input_count, input_names, input_types);
    host.input_count = input_count;
    host.outputs = tensors_of(output_count, output_names, output_types);
    host.output_count = output_count;
    host.all_outputs = claim(output_count * sizeof *host.all_outputs);
    for (uint32_t index = 0; index < output_count; index++)
        host.all_outputs[index] = index;
}

EXPORT void host_set_states(uint32_t count, const char **inputs, const char **outputs, const bool *shared)
{
    host.states = claim(count * sizeof *host.states);
    host.state_count = count;
    for (uint32_t index = 0; index < count; index++)
        host.states[index] =
            (StateSpec){copied(inputs[index]), copied(outputs[index]), output_index(outputs[index]), shared[index]};
}

EXPORT const char *host_config(void) { return model.config->text; }
EXPORT void *host_backend(void) { return &backend; }
EXPORT void *host_model(void) { return &model; }
EXPORT void *host_instance(void) { return &instance; }

/* ------------------------------------------------------------------------------------------------------- versions */

EXPORT Error *TRITONBACKEND_ApiVersion(uint32_t *major, uint32_t *minor)
{
    *major = API_MAJOR;
    *minor = API_MINOR;
    return NULL;
}

EXPORT Error *TRITONSERVER_ApiVersion(uint32_t *major, uint32_t *minor)
{
    *major = SERVER_API_MAJOR;
    *minor = SERVER_API_MINOR;
    return NULL;
}

/* -------------------------------------------------------------------------------------------------------- getters */

#define GET(function, object, type, value)                                       \
    EXPORT Error *TRITONBACKEND_##function(struct object *object, type *result)  \
    {                                                                            \
        (void)object;                                                            \
        *result = value;                                                         \
        return NULL;                                                             \
    }

#define SET(function, object, type, place)                                       \
    EXPORT Error *TRITONBACKEND_##function(struct object *object, type value)    \
    {                                                                            \
        (void)object;                                                            \
        place = value;                                                           \
        return NULL;                                                             \
    }

typedef const char *Text;
typedef void *Pointer;
typedef MemoryManager *ManagerPointer;
typedef Message *MessagePointer;
typedef Server *ServerPointer;
typedef Backend *BackendPointer;
typedef Model *ModelPointer;

GET(BackendName, Backend, Text, backend.name)
GET(BackendConfig, Backend, MessagePointer, backend.config)
GET(BackendExecutionPolicy, Backend, ExecutionPolicy, backend.policy)
SET(BackendSetExecutionPolicy, Backend, ExecutionPolicy, backend.policy)
GET(BackendMemoryManager, Backend, ManagerPointer, &memory_manager)
GET(BackendState, Backend, Pointer, backend.state)
SET(BackendSetState, Backend, Pointer, backend.state)
GET(ModelName, Model, Text, host.model)
GET(ModelVersion, Model, uint64_t, model.version)
GET(ModelAutoCompleteConfig, Model, bool, model.completes)
GET(ModelServer, Model, ServerPointer, &server)
GET(ModelBackend, Model, BackendPointer, &backend)
GET(ModelState, Model, Pointer, model.state)
SET(ModelSetState, Model, Pointer, model.state)
GET(ModelInstanceName, Instance, Text, instance.name)
GET(ModelInstanceKind, Instance, InstanceKind, instance.kind)
GET(ModelInstanceDeviceId, Instance, int32_t, instance.device)
GET(ModelInstanceIsPassive, Instance, bool, instance.passive)
GET(ModelInstanceProfileCount, Instance, uint32_t, 0)
GET(ModelInstanceSecondaryDeviceCount, Instance, uint32_t, 0)
GET(ModelInstanceHostPolicy, Instance, MessagePointer, instance.policy) /* stays the host's */
GET(ModelInstanceModel, Instance, ModelPointer, &model)
GET(ModelInstanceState, Instance, Pointer, instance.state)
SET(ModelInstanceSetState, Instance, Pointer, instance.state)

EXPORT Error *TRITONBACKEND_BackendArtifacts(Backend *object, int *kind, const char **folder)
{
    (void)object;
    *kind = ARTIFACT_FILESYSTEM;
    *folder = backend.folder;
    return NULL;
}

EXPORT Error *TRITONBACKEND_ModelRepository(Model *object, int *kind, const char **folder)
{
    (void)object;
    *kind = ARTIFACT_FILESYSTEM;
    *folder = model.folder;
    return NULL;
}

/* The caller owns the message. */
EXPORT Error *TRITONBACKEND_ModelConfig(Model *object, uint32_t version, Message **config)
{
    (void)object;
    if (version != CONFIG_VERSION)
        return fail(INVALID_ARG, "model configuration version %u is not known, only %u", version, CONFIG_VERSION);
    return TRITONSERVER_MessageNewFromSerializedJson(config, model.config->text, model.config->size);
}

EXPORT Error *TRITONBACKEND_ModelSetConfig(Model *object, uint32_t version, Message *config)
{
    (void)object;
    if (version != CONFIG_VERSION)
        return fail(INVALID_ARG, "model configuration version %u is not known, only %u", version, CONFIG_VERSION);
    if (!model.completes)
        return fail(UNSUPPORTED, "the configuration cannot be changed: it is complete, or auto-completion is off");
    LIVE(config, A_MESSAGE);
    host_set_config(config->text);
    return NULL;
}


EXPORT Error *TRITONBACKEND_ModelInstanceProfileName(Instance *object, uint32_t index, const char **name)
{
    (void)object, (void)name;
    return fail(INVALID_ARG, "profile %u does not exist: the instance has none", index);
}

EXPORT Error *TRITONBACKEND_ModelInstanceSecondaryDeviceProperties(Instance *object, uint32_t index, const char **kind,
                                                                   int64_t *id)
{
    (void)object, (void)kind, (void)id;
    return fail(INVALID_ARG, "secondary device %u does not exist: the instance has none", index);
}

EXPORT Error *TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(void *attributes, InstanceKind kind, uint64_t count,
                                                                      const uint64_t *devices, uint64_t device_count)
{
    (void)attributes, (void)kind, (void)count, (void)devices, (void)device_count;
    return NULL; /* Instances are started before the backend is asked. */
}

EXPORT Error *TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading(void *attributes, bool enabled)
{
    (void)attributes, (void)enabled;
    return NULL; /* Each process loads one instance. */
}

/* ---------------------------------------------------------------------------------------------------------- memory */

/* Without a GPU, pinned memory is refused: the documented interface lets a backend go on with ordinary memory. */
EXPORT Error *TRITONBACKEND_MemoryManagerAllocate(MemoryManager *manager, void **buffer, MemoryType type, int64_t id,
                                                  uint64_t size)
{
    (void)manager, (void)id;
    if (type != MEMORY_CPU) {
        *buffer = (void *)host.python.allocate(type, size);
        return *buffer ? NULL : refused();
    }
    *buffer = malloc(size ? size : 1);
    return *buffer ? NULL : fail(UNAVAILABLE, "no memory for %llu bytes", (unsigned long long)size);
}

EXPORT Error *TRITONBACKEND_MemoryManagerFree(MemoryManager *manager, void *buffer, MemoryType type, int64_t id)
{
    (void)manager, (void)id;
    if (type != MEMORY_CPU)
        return host.python.deallocate(type, (uint64_t)buffer) ? NULL : refused();
    free(buffer);
    return NULL;
}

EXPORT Error *TRITONBACKEND_ModelReportMemoryUsage(Model *object, BufferAttributes **usage, uint32_t count)
{
    (void)object, (void)usage, (void)count;
    return NULL; /* The server measures its processes. */
}

EXPORT Error *TRITONBACKEND_ModelInstanceReportMemoryUsage(Instance *object, BufferAttributes **usage, uint32_t count)
{
    (void)object, (void)usage, (void)count;
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------ statistics */

/* The server measures all models in the same way, so reports are accepted and dropped. They must not fail: a backend may
 * not expect it and stop in the middle of an answer. */
EXPORT Error *TRITONBACKEND_ModelInstanceReportStatistics(Instance *object, Request *request, bool success, uint64_t begin,
                                                          uint64_t compute, uint64_t computed, uint64_t end)
{
    (void)object, (void)request, (void)success, (void)begin, (void)compute, (void)computed, (void)end;
    return NULL;
}

EXPORT Error *TRITONBACKEND_ModelInstanceReportBatchStatistics(Instance *object, uint64_t size, uint64_t begin,
                                                               uint64_t compute, uint64_t computed, uint64_t end)
{
    (void)object, (void)size, (void)begin, (void)compute, (void)computed, (void)end;
    return NULL;
}

EXPORT Error *TRITONBACKEND_ModelInstanceResponseStatisticsNew(void **statistics)
{
    *statistics = claim(1);
    return NULL;
}

EXPORT Error *TRITONBACKEND_ModelInstanceResponseStatisticsDelete(void *statistics)
{
    free(statistics);
    return NULL;
}

#define DROPPED_STATISTIC(name, type)                                                                          \
    EXPORT Error *TRITONBACKEND_ModelInstanceResponseStatisticsSet##name(void *statistics, type value)         \
    {                                                                                                          \
        (void)statistics, (void)value;                                                                         \
        return NULL;                                                                                           \
    }

DROPPED_STATISTIC(ModelInstance, Instance *)
DROPPED_STATISTIC(ResponseFactory, void *)
DROPPED_STATISTIC(ResponseStart, uint64_t)
DROPPED_STATISTIC(ComputeOutputStart, uint64_t)
DROPPED_STATISTIC(ResponseEnd, uint64_t)
DROPPED_STATISTIC(Error, Error *)

EXPORT Error *TRITONBACKEND_ModelInstanceReportResponseStatistics(void *statistics)
{
    (void)statistics;
    return NULL;
}

/* ---------------------------------------------------------------------------------------------------------- traces */

/* The server traces requests itself; a backend sees none. */
EXPORT Error *TRITONBACKEND_RequestTrace(Request *request, void **trace)
{
    LIVE(request, A_REQUEST);
    *trace = NULL;
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceTraceReportActivity(void *trace, uint64_t time, const char *name)
{
    (void)trace, (void)time, (void)name;
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceTraceSpawnChildTrace(void *trace, void **child)
{
    (void)trace;
    *child = NULL;
    return NULL;
}

EXPORT Error *TRITONSERVER_InferenceTraceContext(void *trace, const char **context)
{
    (void)trace;
    *context = "";
    return NULL;
}
