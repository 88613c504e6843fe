"""Chat templates: Jinja texts that turn messages into a prompt, run in a sandbox as Hugging Face runs them.

Source of the environment (blocks trimmed, which functions and filters a template may use):
https://huggingface.co/docs/transformers/chat_templating_writing
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from minite_jax.errors import UserError
from minite_jax.optional import require

# Templates pass over a role that they do not know, and the message with it: a misspelt one is refused before.
_ROLES = ("system", "developer", "user", "assistant", "tool")
_LARGE = 1_000_000  # numbers, and characters of a product, that no template of a conversation needs


class ChatTemplate:
    """A chat template, compiled.

    Args:
      source: the Jinja text.
      variables: what the template sees beside the messages, such as `eos_token`.
      where: file or folder that it is from, for messages.

    Raises:
      UserError: the text is no template; names the line.
      ImportError: jinja2 is not installed.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, where: str = "the chat template"):
        jinja2 = require("jinja2", "hf")
        environment = _environment()
        self._where = where
        self._variables = dict(variables or {})
        self._source = source
        try:
            self._template = environment.from_string(source)
            self._names = require("jinja2.meta", "hf").find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{where}, line {error.lineno}: {_one_line(error.message)}; mend the chat template") from error
        except RecursionError:
            raise UserError(f"{where} is nested too deeply; mend the chat template") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
          messages: mappings with "role" (system, developer, user, assistant, tool, or one that the template names) and
            "content", in their order.
          add_generation_prompt: whether the text ends where an answer of the assistant begins.
          enable_thinking: whether the model may think before it answers; None leaves it to the template.
          tools: descriptions of functions that the model may call.
          **variables: more of what this template asks for.

        Raises:
          UserError: messages that are none, or that the template refuses; a variable that it does not use.
        """
        self._check(messages)
        given = dict(variables)
        if enable_thinking is not None:
            given["enable_thinking"] = enable_thinking
        if tools is not None:
            given["tools"] = list(tools)
        unused = [name for name in given if name not in self._names]
        if unused:
            raise UserError(f"{self._where} has no {unused[0]}: leave it out, or take a model that has it")
        try:
            return self._template.render(
                **(self._variables | given), messages=list(messages), add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template can raise anything that an expression in Python can
            what = "refuses these messages" if isinstance(error, _RefusalError) else "fails for these messages"
            raise UserError(f"{self._where} {what}: {_one_line(str(error)) or type(error).__name__}") from error

    def _check(self, messages) -> None:
        if isinstance(messages, str | Mapping) or not len(messages):
            raise UserError("messages must be a list, at least [{'role': 'user', 'content': ...}]")
        for index, message in enumerate(messages):
            role = message.get("role") if isinstance(message, Mapping) else None
            if not isinstance(role, str) or not ("content" in message or "tool_calls" in message):
                raise UserError(f"message {index} must be a mapping with 'role' and 'content'")
            if role not in _ROLES and f"'{role}'" not in self._source and f'"{role}"' not in self._source:
                raise UserError(f"message {index} has the role {role!r}: say one of {', '.join(_ROLES)}")


class _RefusalError(Exception):
    """Raised by a template itself."""


def _environment():
    """A sandbox as Hugging Face's templates expect it."""
    jinja2, sandbox = require("jinja2", "hf"), require("jinja2.sandbox", "hf")

    class Generation(require("jinja2.ext", "hf").Extension):
        """`{% generation %}` marks what the assistant said, for masks of losses; here it is its contents."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message):
        raise _RefusalError(message)

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        """The sandbox keeps a template from files and from Python's insides, and from long ranges; here from large products too,
        with which a template from elsewhere could fill the memory.
        """

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context, operator, left, right):
            numbers = all(isinstance(each, int | float) and abs(each) < _LARGE for each in (left, right))
            if operator == "**" and not (numbers and abs(right) < 64):
                raise sandbox.SecurityError("a power of this size is not allowed")
            size = max((len(each) for each in (left, right) if hasattr(each, "__len__")), default=1)
            times = max((abs(each) for each in (left, right) if isinstance(each, int)), default=1)
            if operator == "*" and not numbers and size * times > _LARGE:
                raise sandbox.SecurityError("a product of this size is not allowed")
            return super().call_binop(context, operator, left, right)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"], loader=jinja2.BaseLoader()
    )
    environment.globals.pop("lipsum", None)  # Jinja's random prose, as much as is asked for
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter writes "<" as an escape, for web pages; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
