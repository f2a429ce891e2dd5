"""Tools of OpenAI's responses: functions, and namespaces of functions.

Codex sends the tools of each MCP server, and some of its own, as a namespace. A chat template knows
one flat list, so a model calls them by a name that has both in it; items have the two again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from hotset.core.errors import RequestError
from hotset.server import wire
from hotset.server.ask import Tool

# Name that the model calls -> namespace, name in it; only of tools that have a namespace.
Names = Mapping[str, tuple[str, str]]


class FunctionTool(wire.Part):
    """A function. `defer_loading` changes nothing of an answer: every tool is in the prompt."""

    type: Literal["function"]
    name: wire.ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class NamespaceTool(wire.Part):
    """Functions under a shared name."""

    type: Literal["namespace"]
    name: wire.ToolName
    description: str = ""
    tools: wire.Entries[FunctionTool]


ResponseTool = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]


def flat_name(namespace: str | None, name: str) -> str:
    """What the model calls a tool by."""
    if namespace is None:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def names_of(tools: Sequence[ResponseTool]) -> Names:
    """What to write in items for names that the model calls."""
    return {
        flat_name(space.name, tool.name): (space.name, tool.name)
        for space in tools
        if isinstance(space, NamespaceTool)
        for tool in space.tools
    }


def to_tools(tools: Sequence[ResponseTool]) -> tuple[Tool, ...]:
    """One flat list; what a namespace says of itself is said with its first function.

    Raises:
        RequestError: two would have one name.
    """
    made: dict[str, Tool] = {}
    for number, entry in enumerate(tools):
        inner = entry.tools if isinstance(entry, NamespaceTool) else [entry]
        about = entry.description if isinstance(entry, NamespaceTool) else ""
        for tool in inner:
            name = flat_name(entry.name if tool is not entry else None, tool.name)
            if name in made:
                raise RequestError(
                    f"`tools[{number}]` has a second tool that is called by `{name}`",
                    option=f"tools[{number}]",
                )
            said = "\n".join(text for text in (about, tool.description) if text)
            parameters = tool.parameters or {"type": "object", "properties": {}}
            made[name], about = Tool(name=name, description=said, parameters=parameters), ""
    return tuple(made.values())
