/* Metrics of a backend, counted in memory that the server reads when it is asked for them.
 *
 * The numbers of a metric (`shm/counters.py`): whether it exists; then the value of a counter; the value of a gauge and
 * when it was set; or the sum of a histogram and the count of each bucket. */
#include "host.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    Head head;
    MetricKind kind;
    char *name, *help;
} Family;

typedef struct {
    uint64_t count;
    double *edges;
} MetricArgs;

typedef struct {
    Head head;
    MetricKind kind;
    uint64_t edge_count;
    double *edges, *numbers;
} Metric;

static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

EXPORT Error *TRITONSERVER_MetricFamilyNew(Family **family, MetricKind kind, const char *name, const char *help)
{
    Family *made = claim(sizeof *made);
    made->head.tag = A_FAMILY;
    made->kind = kind;
    made->name = copied(name);
    made->help = copied(help);
    *family = made;
    return NULL;
}

EXPORT Error *TRITONSERVER_MetricFamilyDelete(Family *family)
{
    LIVE(family, A_FAMILY);
    free(family->name);
    free(family->help);
    bury(family);
    return NULL;
}

EXPORT Error *TRITONSERVER_GetMetricFamilyKind(Family *family, MetricKind *kind)
{
    LIVE(family, A_FAMILY);
    *kind = family->kind;
    return NULL;
}

EXPORT Error *TRITONSERVER_MetricArgsNew(MetricArgs **arguments)
{
    *arguments = claim(sizeof **arguments);
    return NULL;
}

EXPORT Error *TRITONSERVER_MetricArgsSetHistogram(MetricArgs *arguments, const double *edges, uint64_t count)
{
    free(arguments->edges);
    arguments->edges = memcpy(claim(count * sizeof *edges), edges, count * sizeof *edges);
    arguments->count = count;
    return NULL;
}

EXPORT Error *TRITONSERVER_MetricArgsDelete(MetricArgs *arguments)
{
    free(arguments->edges);
    free(arguments);
    return NULL;
}

/* A metric that the server refuses is counted where nobody reads it: a backend does not expect a failure here. */
EXPORT Error *TRITONSERVER_MetricNewWithArgs(Metric **metric, Family *family, Parameter *const *labels, uint64_t count,
                                             const MetricArgs *arguments)
{
    LIVE(family, A_FAMILY);
    Metric *made = claim(sizeof *made);
    made->head.tag = A_METRIC;
    made->kind = family->kind;
    if (arguments != NULL) {
        made->edge_count = arguments->count;
        made->edges = memcpy(claim(arguments->count * sizeof(double)), arguments->edges, arguments->count * sizeof(double));
    }
    const char **texts = claim(2 * count * sizeof *texts);
    for (uint64_t index = 0; index < count; index++) {
        texts[2 * index] = labels[index]->name;
        texts[2 * index + 1] = labels[index]->type == PARAMETER_STRING ? labels[index]->value.text : "";
    }
    made->numbers = (double *)host.python.metric(made->kind, family->name, family->help, count, texts, made->edge_count,
                                                 made->edges);
    free(texts);
    if (made->numbers == NULL)
        made->numbers = claim((made->edge_count + 3) * sizeof(double)); /* kept: another thread may still count */
    *metric = made;
    return NULL;
}

EXPORT Error *TRITONSERVER_MetricNew(Metric **metric, Family *family, Parameter *const *labels, uint64_t count)
{
    return TRITONSERVER_MetricNewWithArgs(metric, family, labels, count, NULL);
}

/* What was counted remains. */
EXPORT Error *TRITONSERVER_MetricDelete(Metric *metric)
{
    LIVE(metric, A_METRIC);
    free(metric->edges);
    bury(metric);
    return NULL;
}

EXPORT Error *TRITONSERVER_GetMetricKind(Metric *metric, MetricKind *kind)
{
    LIVE(metric, A_METRIC);
    *kind = metric->kind;
    return NULL;
}

EXPORT Error *TRITONSERVER_MetricValue(Metric *metric, double *value)
{
    LIVE(metric, A_METRIC);
    if (metric->kind == METRIC_HISTOGRAM)
        return fail(UNSUPPORTED, "a histogram has no single value");
    *value = metric->numbers[1];
    return NULL;
}

static void count(double *number, double value)
{
    pthread_mutex_lock(&counting);
    *number += value;
    pthread_mutex_unlock(&counting);
}

EXPORT Error *TRITONSERVER_MetricIncrement(Metric *metric, double value)
{
    LIVE(metric, A_METRIC);
    if (metric->kind == METRIC_HISTOGRAM || (metric->kind == METRIC_COUNTER && value < 0))
        return fail(UNSUPPORTED, "a metric of this kind cannot be incremented by %g", value);
    count(&metric->numbers[1], value);
    return NULL;
}

EXPORT Error *TRITONSERVER_MetricSet(Metric *metric, double value)
{
    LIVE(metric, A_METRIC);
    if (metric->kind != METRIC_GAUGE)
        return fail(UNSUPPORTED, "only a gauge can be set");
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&counting);
    metric->numbers[1] = value;
    metric->numbers[2] = now.tv_sec + now.tv_nsec * 1e-9;
    pthread_mutex_unlock(&counting);
    return NULL;
}

EXPORT Error *TRITONSERVER_MetricObserve(Metric *metric, double value)
{
    LIVE(metric, A_METRIC);
    if (metric->kind != METRIC_HISTOGRAM)
        return fail(UNSUPPORTED, "only a histogram can observe");
    uint64_t bucket = 0;
    while (bucket < metric->edge_count && value > metric->edges[bucket])
        bucket++;
    count(&metric->numbers[1], value);
    count(&metric->numbers[2 + bucket], 1);
    return NULL;
}
