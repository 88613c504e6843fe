"""Chat templates: the environment that Hugging Face's templates count on, and what goes wrong in one line."""

import datetime
import re
import sys

import pytest

from minite_jax.errors import UserError
from minite_jax.text import ChatTemplate, Tokenizer

pytest.importorskip("jinja2")
USER = [{"role": "user", "content": "2+2?"}]


def _line(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def _render(source, messages=USER, **options):
    return ChatTemplate(source, {"eos_token": "</s>"}).render(messages, **options)


def test_the_small_template(tokenizer):
    said = [*USER, {"role": "assistant", "content": "4"}]
    asked = "<|im_start|>user\n2+2?<|im_end|>\n"
    assert tokenizer.apply_chat_template(USER) == asked
    assert tokenizer.apply_chat_template(USER, add_generation_prompt=True) == asked + "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(USER, add_generation_prompt=True, enable_thinking=True).endswith("assistant\n")
    assert tokenizer.apply_chat_template(said, add_generation_prompt=True, enable_thinking=False) == (
        asked + "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    ids = tokenizer.encode_chat(USER, add_generation_prompt=True)
    assert ids == [271, *b"user\n2+2?", 272, 10, 271, *b"assistant\n"]


def test_lines_of_blocks_leave_nothing():
    """trim_blocks and lstrip_blocks."""
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n<{{ m.content }}>\n    {% endif %}\n{% endfor %}\n"
    assert _render(source) == "<2+2?>\n"


def test_json_is_plain():
    messages = [{"role": "tool", "content": {"b": "é<\n", "a": [1, None]}}]
    assert _render("{{ messages[0].content | tojson }}", messages) == '{"b": "é<\\n", "a": [1, null]}'
    assert _render("{{ messages[0].content | tojson(indent=1) }}", [{"role": "tool", "content": [1]}]) == "[\n 1\n]"


def test_functions_and_marks_of_templates():
    assert _render("{{ messages[0].content + eos_token }}") == "2+2?</s>"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", _render("{{ strftime_now('%Y-%m-%d') }}"))
    assert _render("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year + i) for i in (-1, 0)}
    assert _render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}") == "13"
    assert _render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "2+2?!"
    assert _render("{{ tools[0].name if tools else 'none' }}") == "none"
    assert _render("{{ tools[0].name if tools else 'none' }}", tools=[{"name": "add"}]) == "add"
    assert _render("{{ date }}", date="today") == "today"


def test_products_of_a_usual_size():
    assert _render("{{ '-' * 3 }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 0.5 * 4 }}{{ ([1] * 2) | length }}") == "---610242.02"


def test_a_template_refuses(tokenizer):
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('a system\nmessage comes first') }}{% endif %}"
    assert _line(_render, source) == "the chat template refuses these messages: a system message comes first"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ messages[0].content + 1 }}", "fails for these messages: can only concatenate str"),
        ("{{ messages[7].content.text }}", "fails for these messages: "),
        ("{{ messages.append(1) }}", "fails for these messages: "),  # the sandbox
        ("{{ messages.__class__.__mro__ }}", "fails for these messages: "),
        ("{{ 1 // 0 }}", "fails for these messages: "),
        ("{% include '/etc/hostname' %}", "fails for these messages: /etc/hostname"),
        ("{{ open('/etc/hostname').read() }}", "fails for these messages: 'open' is undefined"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "fails for these messages: access to attribute '__init__'"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "fails for these messages: Range too big"),
        ("{{ 'a' * 10 ** 9 }}", "fails for these messages: a product of this size is not allowed"),
        ("{{ 10 ** 9 * ['a'] }}", "fails for these messages: a product of this size is not allowed"),
        ("{{ lipsum(100000) }}", "fails for these messages: 'lipsum' is undefined"),
        ("{{ 9 ** 9 ** 9 }}", "fails for these messages: a power of this size is not allowed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails for these messages: maximum recursion depth"),
    ],
)
def test_a_template_fails(source, wanted):
    assert f"the chat template {wanted}" in _line(_render, source)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("a\n{% for %}", "the chat template, line 2: "),
        ("{% if messages %}", "the chat template, line 1: Unexpected end of template"),
        ("{{ messages | no_such_filter }}", "the chat template, line 1: No filter named 'no_such_filter'"),
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "the chat template is nested too deeply"),
        ("{% no_such_tag %}", "the chat template, line 1: Encountered unknown tag 'no_such_tag'"),
    ],
)
def test_a_wrong_template(source, wanted):
    line = _line(ChatTemplate, source)
    assert line.startswith(wanted) and line.endswith("; mend the chat template")


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([], "messages must be a list, at least [{'role': 'user', 'content': ...}]"),
        ("2+2?", "messages must be a list, at least"),
        ({"role": "user", "content": ""}, "messages must be a list, at least"),
        (["2+2?"], "message 0 must be a mapping with 'role' and 'content'"),
        ([*USER, {"role": "user"}], "message 1 must be a mapping with 'role' and 'content'"),
        ([*USER, {"content": "4"}], "message 1 must be a mapping with 'role' and 'content'"),
        ([*USER, {"role": "assitant", "content": "4"}], "message 1 has the role 'assitant': say one of system, developer, user"),
    ],
)
def test_wrong_messages(tokenizer, messages, wanted):
    """Without the checks of annotations, which only the test-suite has, they reach the template."""
    assert wanted in _line(tokenizer.chat_template._check, messages)


def test_a_role_of_the_templates_own():
    source = "{% for m in messages if m.role == 'ipython' %}{{ m.content }}{% endfor %}"
    assert _render(source, [{"role": "ipython", "content": "4"}]) == "4"


def test_a_variable_that_the_template_does_not_use():
    line = _line(_render, "{{ messages[0].content }}", enable_thinking=False)
    assert line == "the chat template has no enable_thinking: leave it out, or take a model that has it"
    assert "has no tools" in _line(_render, "{{ messages[0].content }}", tools=[])


def test_where_a_folder_keeps_its_template(folder):
    folder.config["chat_template"] = [
        {"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ eos_token }}{{ pad_token }}{{ bos_token }}"},
    ]  # fmt: skip
    assert folder.load().apply_chat_template(USER) == "<|im_end|><|endoftext|>"
    (folder.path / "chat_template.jinja").write_text("from a file: é", encoding="utf-8")
    assert folder.load().apply_chat_template(USER) == "from a file: é"


def test_errors_of_a_folders_template(folder):
    name = folder.path / "tokenizer_config.json"
    folder.config["chat_template"] = [{"name": "rag", "template": "t"}, {"name": ["default"], "template": "t"}, 5]
    assert "has chat templates but none named 'default'" in _line(folder.load)
    folder.config["chat_template"] = 3
    assert _line(folder.load) == f"{name}: chat_template must be a text, not int; copy it anew"
    folder.config["chat_template"] = "{% if %}"
    assert _line(folder.load).startswith(f"the chat template of {name}, line 1: Expected an expression")
    (folder.path / "chat_template.jinja").write_bytes(b"\xff")
    assert f"{folder.path / 'chat_template.jinja'} cannot be read" in _line(folder.load)
    (folder.path / "chat_template.jinja").write_text("\n{% else %}")
    assert _line(folder.load).startswith(f"{folder.path / 'chat_template.jinja'}, line 2: ")


def test_a_missing_package_is_named(folder, monkeypatch):
    path = folder.write()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"jinja2 is needed here and is not installed: pip install 'minite_jax\[hf\]'"):
        Tokenizer.from_folder(path)
