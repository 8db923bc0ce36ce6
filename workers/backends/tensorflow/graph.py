"""The nodes of a graph that its outputs depend on.

Invariant: functions that a node calls count as part of it, so what is in them is never overlooked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

KEEPING = re.compile(
    r"Assign|AssignVariableOp|Stack(Push|PushV2)|Barrier\w*|GetSessionHandle\w*|\w*(Enqueue|Stage|Accumulator|Dataset|"
    r"Iterator)\w*"
)
"""Operators that may store a tensor itself instead of a copy, to be read in a later run."""


def node_of(tensor: str) -> str:
    """Returns the name of the node that produces a tensor: `x`, `x:0` and `^x` are of the node `x`."""
    return tensor.removeprefix("^").partition(":")[0]


def nodes_behind(graph: Any, outputs: Iterable[str], fed: Collection[str] = ()) -> list[Any]:
    """Returns the nodes that these tensors of a GraphDef depend on. Nodes behind `fed` tensors are not needed."""
    nodes = {node.name: node for node in graph.node}
    stop = {node_of(tensor) for tensor in fed}
    todo, seen = [node_of(tensor) for tensor in outputs], set[str]()
    while todo:
        name = todo.pop()
        if name not in seen and name in nodes:
            seen.add(name)
            if name not in stop:
                todo += map(node_of, nodes[name].input)
    return [nodes[name] for name in seen]


def operators(graph: Any, nodes: Iterable[Any]) -> set[str]:
    """Returns the names of all operators of these nodes, and of the functions that they call."""
    functions = {function.signature.name: function for function in graph.library.function}
    found, called, todo = set[str](), set[str](), list(nodes)
    while todo:
        node = todo.pop()
        found.add(node.op)
        for name in (node.op, *_functions(node)):
            if name in functions and name not in called:
                called.add(name)
                todo += functions[name].node_def
    return found


def _functions(node: Any) -> Iterable[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for function in value.list.func:
            yield function.name


def keeps_tensors(graph: Any, outputs: Iterable[str]) -> bool:
    """Whether a run that computes these tensors may store a tensor for later runs."""
    return any(KEEPING.fullmatch(name) for name in operators(graph, nodes_behind(graph, outputs)))
