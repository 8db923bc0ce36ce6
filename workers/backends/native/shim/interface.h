/* The interface between Triton and its backends, version 1.19: enumerations, numbers and callbacks. The functions are
 * defined in the .c files. Written from the documented interface; a value that both sides exchange must not change. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API_MAJOR 1
#define API_MINOR 19
#define SERVER_API_MAJOR 1
#define SERVER_API_MINOR 34

typedef enum {
    TYPE_INVALID, TYPE_BOOL, TYPE_UINT8, TYPE_UINT16, TYPE_UINT32, TYPE_UINT64, TYPE_INT8, TYPE_INT16, TYPE_INT32,
    TYPE_INT64, TYPE_FP16, TYPE_FP32, TYPE_FP64, TYPE_BYTES, TYPE_BF16, TYPES
} DataType;
typedef enum { MEMORY_CPU, MEMORY_CPU_PINNED, MEMORY_GPU } MemoryType;
typedef enum {
    PARAMETER_STRING, PARAMETER_INT, PARAMETER_BOOL, PARAMETER_DOUBLE, PARAMETER_BYTES
} ParameterType;
typedef enum { KIND_AUTO, KIND_CPU, KIND_GPU, KIND_MODEL } InstanceKind;
typedef enum { LOG_INFO, LOG_WARN, LOG_ERROR, LOG_VERBOSE } LogLevel;
typedef enum {
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED
} ErrorCode;
typedef enum { METRIC_COUNTER, METRIC_GAUGE, METRIC_HISTOGRAM } MetricKind;
typedef enum { EXECUTION_BLOCKING, EXECUTION_DEVICE_BLOCKING } ExecutionPolicy;

enum { RELEASE_ALL = 1, RELEASE_RESCHEDULE = 2 };
enum { RESPONSE_FINAL = 1 };
enum { ARTIFACT_FILESYSTEM = 0 };
enum { CONFIG_VERSION = 1 };
