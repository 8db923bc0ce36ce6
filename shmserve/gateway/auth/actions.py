"""Sets of the actions that HTTP and gRPC callers can ask for. Routes and calls map to an action; access rules refer to
actions, never to paths."""

from __future__ import annotations

from shmserve.protocol.actions import Action

INFER, GENERATE, GENERATE_STREAM = Action.INFER, Action.GENERATE, Action.GENERATE_STREAM
"""Module-level names, because reading an attribute of an Enum takes 0.2 us."""
TO_MODELS = tuple(action for action in Action if action.row.groups == ("inference",))
"""Requests that run a model."""
FORMS = frozenset((Action.TRANSCRIPTIONS,))
"""Those whose body is a form with files; the others have JSON."""
UPLOADS = FORMS | {GENERATE, GENERATE_STREAM}
"""Those whose body may be such a form."""
ANTHROPIC = frozenset((Action.MESSAGES, Action.COUNT_TOKENS))
"""Those of Anthropic's clients, which expect errors in another form than OpenAI's."""
STREAMED = frozenset(
    (
        GENERATE_STREAM,
        Action.COMPLETIONS,
        Action.CHAT_COMPLETIONS,
        Action.RESPONSES,
        Action.MESSAGES,
        Action.TRANSCRIPTIONS,
    )
)
"""Those whose response may be a stream of server-sent events."""
SHARED = frozenset((Action.PAGE_EVENTS, Action.PAGE_PREFLIGHT))
"""Actions allowed to the pages of other servers."""
PAGE = frozenset((*SHARED, *(action for action in Action if "page" in action.row.roles)))
CHANGES = frozenset(action for action in Action if action.row.changes)
"""Requests that change something or take computing time."""
