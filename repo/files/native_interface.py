"""The functions that a backend in C or C++ can call, by what the server does."""

from __future__ import annotations

BACKEND, SERVER = "TRITONBACKEND_", "TRITONSERVER_"

_GROUPS = (
    # As in Triton: the backend, its model and instance.
    (
        BACKEND,
        """
        ApiVersion BackendArtifacts BackendConfig BackendExecutionPolicy BackendMemoryManager BackendName
        BackendSetExecutionPolicy BackendSetState BackendState ModelAutoCompleteConfig ModelBackend ModelConfig
        ModelInstanceDeviceId ModelInstanceHostPolicy ModelInstanceIsPassive ModelInstanceKind ModelInstanceModel
        ModelInstanceName ModelInstanceSetState ModelInstanceState ModelName ModelRepository ModelServer ModelSetConfig
        ModelSetState ModelState ModelVersion
    """,
    ),
    # As in Triton: requests, inputs, outputs, responses and states.
    (
        BACKEND,
        """
        InferenceRequestTimeoutMicroseconds InferenceResponseOutput InferenceResponseOutputByName InputBuffer
        InputBufferAttributes InputBufferForHostPolicy InputProperties InputPropertiesForHostPolicy OutputBuffer
        OutputBufferAttributes RequestCorrelationId RequestCorrelationIdString RequestFlags RequestId RequestInput
        RequestInputByIndex RequestInputCount RequestInputName RequestIsCancelled RequestOutputCount RequestOutputName
        RequestParameter RequestParameterCount RequestRelease ResponseDelete ResponseFactoryDelete
        ResponseFactoryIsCancelled ResponseFactoryNew ResponseFactorySendFlags ResponseNew ResponseNewFromFactory
        ResponseOutput ResponseSend ResponseSetBoolParameter ResponseSetDoubleParameter ResponseSetIntParameter
        ResponseSetStringParameter StateBuffer StateBufferAttributes StateNew StateUpdate
    """,
    ),
    # As in Triton: values and logs.
    (
        SERVER,
        """
        ApiVersion BufferAttributesByteSize BufferAttributesCudaIpcHandle BufferAttributesDelete
        BufferAttributesMemoryType BufferAttributesMemoryTypeId BufferAttributesNew BufferAttributesSetByteSize
        BufferAttributesSetCudaIpcHandle BufferAttributesSetMemoryType BufferAttributesSetMemoryTypeId DataTypeByteSize
        DataTypeString ErrorCode ErrorCodeString ErrorDelete ErrorMessage ErrorNew InstanceGroupKindString LogIsEnabled
        LogMessage MemoryTypeString MessageDelete MessageNewFromSerializedJson MessageSerializeToJson ParameterBytesNew
        ParameterDelete ParameterNew ParameterTypeString StringToDataType
    """,
    ),
    # Memory on the GPU of the instance, and pinned; UNSUPPORTED without a GPU.
    (
        BACKEND,
        """
        MemoryManagerAllocate MemoryManagerFree
    """,
    ),
    # Always memory on the host.
    (BACKEND, "RequestOutputBufferProperties"),
    # Calls of other models and questions about models, like those of a Python model.
    (
        SERVER,
        """
        InferenceRequestAddInput InferenceRequestAddRequestedOutput InferenceRequestAppendInputData
        InferenceRequestAppendInputDataWithBufferAttributes InferenceRequestAppendInputDataWithHostPolicy
        InferenceRequestCancel InferenceRequestCorrelationId InferenceRequestCorrelationIdString InferenceRequestDelete
        InferenceRequestFlags InferenceRequestId InferenceRequestIsCancelled InferenceRequestNew
        InferenceRequestPriority InferenceRequestPriorityUInt64 InferenceRequestRemoveAllInputs
        InferenceRequestRemoveAllRequestedOutputs InferenceRequestSetBoolParameter InferenceRequestSetCorrelationId
        InferenceRequestSetCorrelationIdString InferenceRequestSetDoubleParameter InferenceRequestSetFlags
        InferenceRequestSetId InferenceRequestSetIntParameter InferenceRequestSetPriority
        InferenceRequestSetPriorityUInt64 InferenceRequestSetReleaseCallback InferenceRequestSetResponseCallback
        InferenceRequestSetStringParameter InferenceRequestSetTimeoutMicroseconds InferenceRequestTimeoutMicroseconds
        InferenceResponseDelete InferenceResponseError InferenceResponseId InferenceResponseModel
        InferenceResponseOutput InferenceResponseOutputCount InferenceResponseParameter InferenceResponseParameterCount
        ResponseAllocatorDelete ResponseAllocatorNew ResponseAllocatorSetBufferAttributesFunction
        ResponseAllocatorSetQueryFunction ServerInferAsync ServerLoadModel ServerLoadModelWithParameters
        ServerModelIsReady ServerModelTransactionProperties ServerUnloadModel ServerUnloadModelAndDependents
    """,
    ),
    # Metrics of the server, which remain when the backend deletes them.
    (
        SERVER,
        """
        GetMetricFamilyKind GetMetricKind MetricArgsDelete MetricArgsNew MetricArgsSetHistogram MetricDelete
        MetricFamilyDelete MetricFamilyNew MetricIncrement MetricNew MetricNewWithArgs MetricObserve MetricSet
        MetricValue
    """,
    ),
    # Accepted and not used: the server measures all models itself.
    (
        BACKEND,
        """
        ModelInstanceReportBatchStatistics ModelInstanceReportMemoryUsage ModelInstanceReportResponseStatistics
        ModelInstanceReportStatistics ModelInstanceResponseStatisticsDelete ModelInstanceResponseStatisticsNew
        ModelInstanceResponseStatisticsSetComputeOutputStart ModelInstanceResponseStatisticsSetError
        ModelInstanceResponseStatisticsSetModelInstance ModelInstanceResponseStatisticsSetResponseEnd
        ModelInstanceResponseStatisticsSetResponseFactory ModelInstanceResponseStatisticsSetResponseStart
        ModelReportMemoryUsage
    """,
    ),
    # Accepted and not used: instances are those of the configuration.
    (
        BACKEND,
        """
        BackendAttributeAddPreferredInstanceGroup BackendAttributeSetParallelModelInstanceLoading
    """,
    ),
    # Always none.
    (
        BACKEND,
        """
        ModelInstanceProfileCount ModelInstanceProfileName ModelInstanceSecondaryDeviceCount
        ModelInstanceSecondaryDeviceProperties RequestTrace
    """,
    ),
    # Accepted and not used: a request has no trace.
    (
        SERVER,
        """
        InferenceTraceContext InferenceTraceReportActivity InferenceTraceSpawnChildTrace
    """,
    ),
)
FUNCTIONS = frozenset(prefix + name for prefix, names in _GROUPS for name in names.split())
