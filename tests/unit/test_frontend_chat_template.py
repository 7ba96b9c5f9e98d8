"""Chat templates render as transformers renders them, and nothing of them can leave the sandbox."""

from __future__ import annotations

from datetime import datetime

import pytest

from ramet.errors import InvalidArgument, Unsupported
from ramet.frontend.chat_template import ChatTemplate, choose_template

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi <b> & 'you' é😀"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye\n"},
]
TEMPLATES = {
    "chatml": "{% for m in messages %}\n    {{ '<|im_start|>' + m.role + '\\n' + m['content'] + '<|im_end|>\\n' }}\n"
    "{% endfor %}\n{%- if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}",
    "llama3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|h|>' + "
    "message['role'] + '<|/h|>\n\n'+ message['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}",
    "namespace": "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}{{ messages[::-1][0].content }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tools are none": "{% if tools is not none %}tools{% else %}no tools{% endif %}{{ documents is none }}",
    "whitespace": "  {% if true %}\n  a\n  {% endif %}\n b \n",
    "undefined": "{{ nothing }}{% if nothing is defined %}x{% endif %}{{ eos_token }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_transformers(name: str, add_generation_prompt: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = utils.render_jinja_template(
        conversations=[MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        **special,
    )
    assert ChatTemplate(TEMPLATES[name], special).render(MESSAGES, add_generation_prompt) == expected[0]


def test_a_variable_reaches_the_template() -> None:
    template = ChatTemplate("{% if enable_thinking is defined and not enable_thinking %}quiet{% else %}loud{% endif %}")
    assert template.render(MESSAGES) == "loud"
    assert template.render(MESSAGES, enable_thinking=False) == "quiet"


def test_the_time_is_the_given_one() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(MESSAGES) == "26 Jul 2024"


def test_a_template_that_refuses_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        template.render(MESSAGES)


def test_a_syntax_error_is_found_at_once() -> None:
    with pytest.raises(InvalidArgument, match="cannot be compiled"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidArgument):
        ChatTemplate(source).render(MESSAGES)


def test_rendering_changes_no_message() -> None:
    with pytest.raises(InvalidArgument):
        ChatTemplate("{{ messages[0].update({'content': 'x'}) }}").render(MESSAGES)
    assert MESSAGES[0] == {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize("messages", ["Hi", {}, [], None, 3, ["Hi"], [{"content": "x"}], [{"role": 1, "content": "x"}]])
def test_what_is_no_conversation_is_refused(messages: object) -> None:
    with pytest.raises(InvalidArgument, match="messages"):
        ChatTemplate("x").render(messages)  # type: ignore[arg-type]


def test_content_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"messages\[0\]\['content'\] is 3"):
        ChatTemplate("x").render([{"role": "user", "content": 3}])


def test_a_failing_expression_is_one_clear_error() -> None:
    with pytest.raises(InvalidArgument, match="fails on the messages"):
        ChatTemplate("{{ 'a' + 1 }}").render(MESSAGES)


def test_a_named_template_that_is_missing_is_refused_with_those_there() -> None:
    with pytest.raises(Unsupported, match="tool_use"):
        choose_template([{"name": "tool_use", "template": "x"}])
    with pytest.raises(Unsupported, match="dict"):
        choose_template({"x": 1})
