"""Agents of the CONDDA/OND protocol, one file each; a new file is found by itself.

Every module of this package is an agent named like its file, except `base` and names that begin
with an underscore.
"""

from collections.abc import Mapping
from typing import Any

from tasks.condda.agents.base import Agent
from tasks.engine.plugins import Plugins

PLUGINS = Plugins(__name__, __path__, "agent", Agent)
agent_names = PLUGINS.names
find_agent = PLUGINS.find
chosen_names = PLUGINS.chosen


def make_agent(name: str, settings: Mapping[str, Any] | None = None) -> Agent:
    """The agent called `name`, with settings by name over its defaults."""
    kind = find_agent(name)
    return kind(kind.resolve(None, settings))
