/* The part of Triton's interface for backends that the tests use, declared from its documentation. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Object Object; /* every opaque type */

#define CALL(name, ...) Object *TRITONBACKEND_##name(__VA_ARGS__)

CALL(ApiVersion, uint32_t *, uint32_t *);
CALL(BackendConfig, Object *, Object **);
CALL(ModelConfig, Object *, uint32_t, Object **);
CALL(ModelSetConfig, Object *, uint32_t, Object *);
CALL(ModelAutoCompleteConfig, Object *, bool *);
CALL(ModelInstanceModel, Object *, Object **);
CALL(ModelInstanceName, Object *, const char **);
CALL(ModelName, Object *, const char **);
CALL(RequestParameterCount, Object *, uint32_t *);
CALL(RequestParameter, Object *, uint32_t, const char **, int *, const void **);
CALL(RequestId, Object *, const char **);
CALL(RequestCorrelationId, Object *, uint64_t *);
CALL(RequestFlags, Object *, uint32_t *);
CALL(RequestInputCount, Object *, uint32_t *);
CALL(RequestInput, Object *, const char *, Object **);
CALL(RequestIsCancelled, Object *, bool *);
CALL(RequestRelease, Object *, uint32_t);
CALL(InputProperties, Object *, const char **, int *, const int64_t **, uint32_t *, uint64_t *, uint32_t *);
CALL(InputBuffer, Object *, uint32_t, const void **, uint64_t *, int *, int64_t *);
CALL(ResponseFactoryNew, Object **, Object *);
CALL(ResponseFactoryDelete, Object *);
CALL(ResponseFactorySendFlags, Object *, uint32_t);
CALL(ResponseFactoryIsCancelled, Object *, bool *);
CALL(ResponseNew, Object **, Object *);
CALL(ResponseNewFromFactory, Object **, Object *);
CALL(ResponseDelete, Object *);
CALL(ResponseSend, Object *, uint32_t, Object *);
CALL(ResponseOutput, Object *, Object **, const char *, int, const int64_t *, uint32_t);
CALL(ResponseSetIntParameter, Object *, const char *, int64_t);
CALL(ResponseSetStringParameter, Object *, const char *, const char *);
CALL(OutputBuffer, Object *, void **, uint64_t, int *, int64_t *);
CALL(StateNew, Object **, Object *, const char *, int, const int64_t *, uint32_t);
CALL(StateBuffer, Object *, void **, uint64_t, int *, int64_t *);
CALL(StateUpdate, Object *);

Object *TRITONSERVER_ErrorNew(int, const char *);
void TRITONSERVER_ErrorDelete(Object *);
Object *TRITONSERVER_LogMessage(int, const char *, int, const char *);
Object *TRITONSERVER_MessageNewFromSerializedJson(Object **, const char *, uint64_t);
Object *TRITONSERVER_MessageSerializeToJson(Object *, const char **, uint64_t *);
Object *TRITONSERVER_MessageDelete(Object *);
Object *TRITONSERVER_ParameterNew(const char *, int, const void *);
void TRITONSERVER_ParameterDelete(Object *);
Object *TRITONSERVER_MetricFamilyNew(Object **, int, const char *, const char *);
Object *TRITONSERVER_MetricFamilyDelete(Object *);
Object *TRITONSERVER_MetricNew(Object **, Object *, Object **, uint64_t);
Object *TRITONSERVER_MetricIncrement(Object *, double);
Object *TRITONSERVER_MetricDelete(Object *);

typedef Object *Allocate(Object *, const char *, uint64_t, int, int64_t, void *, void **, void **, int *, int64_t *);
typedef Object *Free(Object *, void *, void *, uint64_t, int, int64_t);
typedef void Responded(Object *, uint32_t, void *);
typedef void Released(Object *, uint32_t, void *);
Object *TRITONSERVER_ResponseAllocatorNew(Object **, Allocate *, Free *, void *);
Object *TRITONSERVER_ResponseAllocatorDelete(Object *);
Object *TRITONSERVER_InferenceRequestNew(Object **, Object *, const char *, int64_t);
Object *TRITONSERVER_InferenceRequestDelete(Object *);
Object *TRITONSERVER_InferenceRequestAddInput(Object *, const char *, int, const int64_t *, uint64_t);
Object *TRITONSERVER_InferenceRequestAppendInputData(Object *, const char *, const void *, uint64_t, int, int64_t);
Object *TRITONSERVER_InferenceRequestSetStringParameter(Object *, const char *, const char *);
Object *TRITONSERVER_InferenceRequestSetReleaseCallback(Object *, Released *, void *);
Object *TRITONSERVER_InferenceRequestSetResponseCallback(Object *, Object *, void *, Responded *, void *);
Object *TRITONSERVER_InferenceResponseError(Object *);
Object *TRITONSERVER_InferenceResponseOutput(Object *, uint32_t, const char **, int *, const int64_t **, uint64_t *,
                                             const void **, uint64_t *, int *, int64_t *, void **);
Object *TRITONSERVER_InferenceResponseDelete(Object *);
Object *TRITONSERVER_ServerInferAsync(Object *, Object *, Object *);
const char *TRITONSERVER_ErrorMessage(Object *);
const char *TRITONSERVER_MemoryTypeString(int);
CALL(ModelServer, Object *, Object **);
CALL(BackendMemoryManager, Object *, Object **);
CALL(MemoryManagerAllocate, Object *, void **, int, int64_t, uint64_t);
CALL(MemoryManagerFree, Object *, void *, int, int64_t);
CALL(ModelInstanceKind, Object *, int *);
CALL(ModelInstanceDeviceId, Object *, int32_t *);
CALL(ModelInstanceIsPassive, Object *, bool *);
CALL(ModelInstanceHostPolicy, Object *, Object **);

#ifdef __cplusplus
}
#endif
