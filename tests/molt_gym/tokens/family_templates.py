"""Small chat templates, each of which looks back and ahead in a conversation in the way of a family of models."""

HEADER = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif -%}"
CALLS = """{%- for call in m.tool_calls or [] -%}
  {{- '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' -}}
{%- endfor -%}"""

# Reasoning since the last question; a tool's result in a user message is no question; results stand in one turn.
QWEN3 = (
    """{%- if tools %}{{ '<|im_start|>system\n' }}
  {%- if messages[0].role == 'system' %}{{ messages[0].content ~ '\n' }}{% endif %}
  {%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}{% endif -%}
{%- set at = namespace(question=messages | length - 1, searching=true) -%}
{%- for m in messages | reverse -%}
  {%- set fed = m.role == 'user' and m.content.startswith('<tool_response>') -%}
  {%- if at.searching and m.role == 'user' and not fed -%}
    {%- set at.searching = false -%}{%- set at.question = messages | length - loop.index -%}
  {%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > at.question and (m.reasoning_content or loop.last) -%}
      {{- '<think>\n' ~ (m.reasoning_content or '') ~ '\n</think>\n\n' -}}
    {%- endif -%}
    {{- m.content -}}"""
    + CALLS
    + """{{- '<|im_end|>\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
    {{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}
  {%- elif not (loop.first and m.role == 'system') -%}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}"""
    + HEADER
)

# No reasoning; a system message of its own where there is none.
QWEN2 = QWEN3.replace("loop.index0 > at.question", "false").replace(
    "{%- set at =", "{%- if messages[0].role != 'system' %}{{ 'You help.\n' }}{% endif -%}{%- set at ="
)

# Tools stand in the first user message; one call a turn.
LLAMA3 = """{{- '<|bos|>' -}}
{%- set at = namespace(told=false) -%}
{%- for m in messages -%}
  {{- '<|im_start|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '\n\n' -}}
  {%- if m.role == 'user' and tools and not at.told -%}
    {%- set at.told = true -%}
    {%- for tool in tools %}{{ tool | tojson }}{% endfor -%}
  {%- endif -%}
  {%- if m.tool_calls -%}
    {%- if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
    {%- set call = m.tool_calls[0].function -%}
    {{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) ~ '}' -}}
  {%- else -%}{{- m.content | trim -}}{%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif -%}"""

# The system message stands in the first user message; user and model take turns.
GEMMA = """{{- '<|bos|>' -}}
{%- set prefix = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' -%}
{%- set talk = messages[1:] if messages[0].role == 'system' else messages -%}
{%- for m in talk -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif -%}
  {{- '<|im_start|>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' -}}
  {{- (prefix if loop.first else '') ~ (m.content | trim) ~ '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif -%}"""

# Tools stand before the last user message, the system message within it; ids of calls have nine characters.
MISTRAL = """{{- '<|bos|>' -}}
{%- set at = namespace(last=-1, turn=0) -%}
{%- for m in messages if m.role in ('user', 'assistant') and not m.tool_calls -%}
  {%- if (m.role == 'user') != (at.turn % 2 == 0) %}{{ raise_exception('take turns') }}{% endif -%}
  {%- set at.turn = at.turn + 1 -%}
{%- endfor -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {%- if loop.index0 == at.last and tools %}{{ '[TOOLS]' ~ (tools | tojson) ~ '[/TOOLS]' }}{% endif -%}
    {{- '[INST]' -}}
    {%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content ~ '\n\n' }}{% endif -%}
    {{- m.content ~ '[/INST]' -}}
  {%- elif m.tool_calls -%}
    {{- '[CALLS]' -}}
    {%- for call in m.tool_calls -%}
      {%- if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif -%}
      {{- call.function | tojson ~ call.id -}}
    {%- endfor -%}{{- '<|im_end|>' -}}
  {%- elif m.role == 'assistant' %}{{ m.content ~ '<|im_end|>' }}
  {%- elif m.role == 'tool' %}{{ '[RESULTS]' ~ m.content ~ m.tool_call_id ~ '[/RESULTS]' }}{% endif -%}
{%- endfor -%}"""

# System messages go to the front; a reply to tools has no header of its own; no reasoning of earlier turns.
DEEPSEEK = """{{- '<|bos|>' -}}
{%- set at = namespace(tool=false) -%}
{%- for m in messages if m.role == 'system' %}{{ m.content ~ '\n\n' }}{% endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{- '<|im_start|>User' ~ m.content -}}{%- set at.tool = false -%}
  {%- elif m.role == 'tool' -%}
    {{- ('\n' if at.tool else '[outputs]') ~ m.content -}}{%- set at.tool = true -%}
  {%- elif m.role == 'assistant' -%}
    {{- '[/outputs]' if at.tool else '<|im_start|>Assistant' -}}{%- set at.tool = false -%}
    {{- m.content.split('</think>')[-1] -}}
    {%- for call in m.tool_calls or [] %}{{ '[call]' ~ (call.function | tojson) }}{% endfor -%}
    {{- '<|im_end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not at.tool %}{{ '<|im_start|>Assistant' }}{% endif -%}"""

# Reasoning since the last answer that called no tool.
KIMI = (
    """{%- set at = namespace(answer=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' and not m.tool_calls %}{% set at.answer = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {{- '<|im_start|>' ~ m.role ~ '\n' -}}
  {%- if m.role == 'assistant' -%}
    {{- '<think>' ~ (m.reasoning_content or '' if loop.index0 > at.answer) ~ '</think>' -}}
  {%- endif -%}
  {{- m.content -}}"""
    + CALLS
    + "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    + HEADER
)

# Reasoning of tool calls until an answer follows.
HARMONY = KIMI.replace(
    "{{- '<think>' ~ (m.reasoning_content or '' if loop.index0 > at.answer) ~ '</think>' -}}",
    "{%- if m.reasoning_content and (m.tool_calls and loop.index0 > at.answer or loop.last) -%}"
    "{{- '<think>' ~ m.reasoning_content ~ '</think>' -}}{%- endif -%}",
)

FAMILIES = {
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "harmony": HARMONY,
}
