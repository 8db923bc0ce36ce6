/* Libraries that cannot run here, or are never ready; -DKIND chooses why. */
#include "backend.h"

CALL(ModelInstanceExecute, Object *instance, Object **requests, uint32_t count)
{
    (void)instance, (void)requests, (void)count;
    return 0;
}

#ifdef NEWER
CALL(Initialize, Object *backend)
{
    uint32_t major, minor;
    (void)backend;
    TRITONBACKEND_ApiVersion(&major, &minor);
    return minor < 99 ? TRITONSERVER_ErrorNew(5, "the backend needs version 1.99 of the interface") : 0;
}
#endif
#ifdef UNKNOWN
CALL(ModelInstanceImagine, Object *);
CALL(Initialize, Object *backend) { return TRITONBACKEND_ModelInstanceImagine(backend); }
#endif
#ifdef UNREADY
CALL(ModelInstanceReady, Object *instance)
{
    (void)instance;
    return TRITONSERVER_ErrorNew(4, "not yet");
}
#endif
#ifdef BATCHER
CALL(ModelBatchIncludeRequest, Object *request, void *user, bool *include)
{
    (void)request, (void)user, (void)include;
    return 0;
}
#endif
