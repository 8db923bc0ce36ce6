"""Each row of the table of actions has a handler, and each handler has a row."""

from __future__ import annotations

from shmserve.errors import ServeError
from shmserve.gateway.upstream.documents import Arguments, Route, query_of
from shmserve.gateway.upstream.regions import Regions
from shmserve.protocol.actions import Action
from shmserve.protocol.roles import QUERIES, names

OTHER_HANDLERS = {
    "infer", "generate", "generate_stream", "completions", "chat_completions", "embeddings", "openai_models",
    "openai_model", "metrics", "openapi", "page_file", "page_events", "page_preflight", "page_model",
}  # fmt: skip
"""Actions that `Requests` of the HTTP listener does not pass to `query_of`."""


def test_an_action_needs_the_roles_of_its_query() -> None:
    """Except for actions that show a part of the answer."""
    shown = {Action.PAGE_EVENTS, Action.PAGE_MODEL, Action.OPENAI_MODELS, Action.OPENAI_MODEL}
    for action in set(Action) - shown:
        if action.row.query:
            assert list(action.row.roles) == names(QUERIES[action.row.query]), action


def has_query(action: Action) -> bool:
    try:
        query_of(Route(action, "m", kind="system"), Arguments(), Regions(False), ("", ""))
    except ServeError as error:  # of this gateway, or of the handler
        return "not supported by this gateway" not in str(error)
    return True


def test_every_http_action_has_a_row_and_a_handler() -> None:
    assert {action for action in Action if has_query(action)} | OTHER_HANDLERS == {
        action for action in Action if action.row.http
    }
    assert not any(map(has_query, map(Action, OTHER_HANDLERS)))
