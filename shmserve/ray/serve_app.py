"""`shmserve.ray:app`, the Ray Serve application, for `serve run`, configuration files of Serve, and `serve.run`."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from shmserve.ray.config import AppConfig
from shmserve.ray.handle import SERVER
from shmserve.ray.ingress import Ingress
from shmserve.ray.replica import ServerReplica

POLICY = "shmserve.ray.autoscaling:QueueTimePolicy"
ROUTER = "shmserve.ray.routing:KServeRouter"
STATS_S = 1.0
"""Interval at which replicas with many models report which models are awake."""


def app(arguments: dict[str, Any]) -> Any:
    """The application: an ingress and a server per node. docs/ray.md describes the arguments."""
    config = AppConfig.of(arguments)
    wanted = config.replicas or (1 if config.autoscaled else _nodes())
    servers = serve.deployment(
        name=SERVER,
        max_ongoing_requests=config.max_ongoing_requests,
        max_replicas_per_node=1,
        health_check_period_s=config.health_seconds,
        health_check_timeout_s=max(10.0, 2 * config.health_seconds),
        graceful_shutdown_timeout_s=config.drain_seconds,
        graceful_shutdown_wait_loop_s=1.0,
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus, "resources": config.resources},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER, request_routing_stats_period_s=STATS_S),
        **_scaling(config, wanted),
    )(ServerReplica).bind(config)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=max(wanted, config.max_replicas),
        max_ongoing_requests=config.max_ongoing_requests,
        max_replicas_per_node=1,
        health_check_period_s=config.health_seconds,
        graceful_shutdown_timeout_s=config.drain_seconds,
        graceful_shutdown_wait_loop_s=1.0,
        ray_actor_options={"num_cpus": 0},
    )(Ingress)
    return ingress.bind(servers, config.retries, config.max_input_bytes)


def _nodes() -> int:
    """The current number of nodes of the cluster. `serve run` connects to the cluster only later, with its own options,
    and starts one on this machine if none runs.
    """
    if ray.is_initialized():
        return _alive()
    try:
        ray.init("auto", log_to_driver=False, configure_logging=False)
    except ConnectionError:
        return 1
    try:
        return _alive()
    finally:
        ray.shutdown()


def _alive() -> int:
    return sum(1 for node in ray.nodes() if node["Alive"])


def _scaling(config: AppConfig, wanted: int) -> dict[str, Any]:
    if not config.autoscaled:
        return {"num_replicas": wanted}
    bounds = {"min_replicas": wanted, "max_replicas": config.max_replicas}
    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"queue_ms": config.queue_ms})
    return {"autoscaling_config": AutoscalingConfig(**bounds, policy=policy, **config.autoscaling)}
