"""Writes golden renderings of chat templates by Jinja2 with the settings of the reference library.

    python make_templates.py OUT.json [MODEL.gguf]        needs the package `jinja2`

With a model its own template is rendered as well (the fixture then holds the renderings only, under "model").
"""

import json
import sys

from jinja2.exceptions import TemplateError, UndefinedError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATES = {
    "whitespace": """{% for m in messages %}
    {% if m.role == 'user' %}
  [{{ m.content | trim }}]
    {%- else %}
<{{ m.role }}>{{ m['content'] }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
>>
{% endif %}
""",
    "json": """{% for t in tools %}{{ t | tojson }}
{{ t | tojson(indent=4) }}
{{ t | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}
{% endfor %}""",
    "python_strings": """{% for m in messages %}{{ m.content.strip().split(' ')[0].upper() }}|{{ m.content.startswith('Hi') }}|{{ m.content.replace('a', 'A') }}
{{ m.get('name', 'nobody') }}|{{ none }}|{{ true }}|{{ m.content[:3] }}|{{ m.content[-2:] }}|{{ m.content | length }}
{% endfor %}""",
    "control_flow": """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% if loop.index0 > 3 %}{% break %}{% endif %}{% set ns.last = loop.index0 %}{{ loop.index }}:{{ m.content }}{{ ',' if not loop.last }}{% endfor %} last={{ ns.last }}
{%- macro wrap(x, by='*') %}{{ by }}{{ x }}{{ by }}{% endmacro %}
{{ wrap('w') }} {{ wrap('v', by='#') }} {{ messages | map(attribute='role') | join('+') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{% for m in messages[::-1] %}{{ m.role[0] }}{% endfor %} {{ range(3) | list | join }} {{ (messages | length) % 2 }} {{ 7 // 2 }} {{ 'a' ~ 1 ~ 'b' }} {{ x is defined }} {{ messages[0].nope is none }}{{ messages[0].nope is undefined }}
""",
    "bos": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
    "raises": "{% if messages[0].role != 'system' %}{{ raise_exception('the first message must be a system message') }}{% endif %}ok",
    "tools_and_calls": """{%- if tools %}
# Tools
{%- for tool in tools %}
{{- '\\n' }}
{{- tool | tojson }}
{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{{- '<call>' + call.function.name + ' ' }}{{ call.function.arguments | tojson }}</call>
{%- endfor %}
{%- elif message.content is string %}
{{- message.role + ': ' + message.content + '\\n' }}
{%- endif %}
{%- endfor %}
""",
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city, <b>in</b> °C & \"quotes\"\n\t\\ \u2028 🙂",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1, "x": 1.5, "y": 1e-7, "z": 1e20}}, "required": [], "extra": {}, "flag": True, "none": None},
        },
    }
]

CONVERSATIONS = {
    "plain": [{"role": "user", "content": " Hi there a \n"}],
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": "Hello <b> & 'x' ü"},
        {"role": "tool", "content": "{\"a\": 1}"},
        {"role": "user", "content": "Bye aa"},
    ],
    "calls": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "n": [1, 2.0, None]}}}]},
        {"role": "tool", "content": "21"},
    ],
}


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise TemplateError(message)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


def chat_template_of(path):
    from make_ids import read

    return read(path)["tokenizer.chat_template"]


def main(out, model=None):
    env = environment()
    templates = dict(TEMPLATES)
    if model:
        templates["model"] = chat_template_of(model)
    cases = []
    for name, source in templates.items():
        for conversation, messages in CONVERSATIONS.items():
            for generation in (False, True):
                variables = {"messages": messages, "tools": TOOLS, "add_generation_prompt": generation, "bos_token": "<s>", "eos_token": "</s>"}
                case = {"template": name, "conversation": conversation, "add_generation_prompt": generation}
                try:
                    case["text"] = env.from_string(source).render(**variables)
                except (UndefinedError, TypeError):
                    case["failed"] = True
                except TemplateError as error:
                    case["raised"] = str(error)
                cases.append(case)
    document = {"templates": TEMPLATES, "tools": TOOLS, "conversations": CONVERSATIONS, "cases": cases}
    with open(out, "w", encoding="utf-8") as f:
        json.dump(document, f, ensure_ascii=True, indent=1)
        f.write("\n")
    print(f"{len(cases)} renderings")


if __name__ == "__main__":
    main(*sys.argv[1:])
