"""How families of models write chats: templates of our own in each one's format, and chats with what they must become.

In what is expected, the assistant has generated what stands in ⟦ ⟧: that is what the loss counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chats import Message, chat, write_tokenizer

Row = dict[str, Any]

TURNS: Row = {"messages": chat("hi", "hello", "and?", "so")}
BRIEF: Row = {"messages": chat("hi", " hello \n", "and?", "so", system="Be brief.")}
TOOL = {"type": "function", "function": {"name": "warmth", "parameters": {}}}
JSON = '{"type": "function", "function": {"name": "warmth", "parameters": {}}}'


def call(unit: str) -> Message:
    function = {"name": "warmth", "arguments": {"unit": unit}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "abc", "function": function}]}


CALLS: Row = {
    "messages": [
        {"role": "user", "content": "warm?"},
        call("C"),
        {"role": "tool", "content": "21", "tool_call_id": "abc", "name": "warmth"},
        {"role": "assistant", "content": "21 C"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "so"},
    ],
    "tools": [TOOL],
}


def thought(reasoning: str, content: str, **more: object) -> Message:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, **more}


THOUGHTS: Row = {
    "messages": [
        {"role": "user", "content": "hi"},
        thought("a greeting", "hello"),
        {"role": "user", "content": "warm?"},
        {**call("C"), **thought("look", "")},
        {"role": "tool", "content": "21"},
        thought("warm", "yes"),
    ],
    "tools": [TOOL],
}


@dataclass(frozen=True)
class FamilyChats:
    """Of a family of models.

    Args:
        template: In its format.
        end: The tokenizer's token of the end.
        special: All its special tokens, with blanks between them.
        begin: The tokenizer's token of the beginning.
        stops: At which generating ends, of its generation_config.json.
        cases: {name: (a row, the examples it becomes)}.
        refused: Messages that the template raises at, and its words.
    """

    template: str
    end: str
    special: str
    cases: Mapping[str, tuple[Row, Sequence[str]]]
    begin: str | None = None
    stops: Sequence[str] = ()
    refused: Mapping[str, Sequence[Message]] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Such a tokenizer."""
        special = self.special.split()
        return write_tokenizer(folder, self.template, self.end, special=special, begin=self.begin, stops=self.stops)


ALTERNATE = """\
{% set ns = namespace(user=true) %}
{% for m in messages if m.role in ['user', 'assistant'] and not m.tool_calls %}
{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{% set ns.user = not ns.user %}
{% endfor %}
"""
TWO_OF_THE_USER = {"roles must alternate user/assistant": [*chat("hi"), *chat("and?", "so")]}

LLAMA_3 = """\
{{ bos_token }}{% for m in messages %}
{% set role = 'ipython' if m.role == 'tool' else m.role %}
{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}
{% if m.tool_calls | length > 1 %}{{ raise_exception('only single tool calls') }}{% endif %}
{% set f = m.tool_calls[0].function %}
{{ '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}
{%- else %}
{% if tools and m.role == 'user' and loop.first %}{{ 'Functions: ' + tools | tojson + '\n\n' }}{% endif %}
{{ m.content | trim }}
{%- endif %}
{{ '<|eot_id|>' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

LLAMA_2 = (
    ALTERNATE
    + """\
{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' if messages[0].role == 'system' else '' %}
{% for m in messages if m.role != 'system' %}
{% if m.role == 'user' %}
{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content | trim + ' [/INST]' }}
{%- else %}
{{ ' ' + m.content | trim + ' ' + eos_token }}
{%- endif %}
{% endfor %}
"""
)

MISTRAL = (
    ALTERNATE
    + """\
{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{{ bos_token }}
{%- for m in messages if m.role != 'system' %}
{% if m.role == 'user' %}
{% if tools and m == last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{ '[INST] ' + (system if m == last else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}
{{ c.function | tojson | replace('}}', '}, "id": "' + c.id + '"}') }}{{ ', ' if not loop.last }}
{%- endfor %}
{{ ']' + eos_token }}
{%- elif m.role == 'tool' %}
{{ '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}
{{ ' ' + m.content + eos_token }}
{%- endif %}
{% endfor %}
"""
)

# Tools in the words of the system, calls as JSON, what tools answer in turns of the user. Thoughts only after the
# user's last question.
_QWEN = """\
{% set said = messages[0].content if messages[0].role == 'system' else DEFAULT %}
{% if said or tools %}
{{ '<|im_start|>system\n' + said }}
{%- if tools %}{{ '\n\n<tools>\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}{{ '</tools>' }}{% endif %}
{{ '<|im_end|>\n' }}
{%- endif %}
{% set ns = namespace(asked=-1) %}
{% for m in messages if m.role == 'user' %}{% set ns.asked = messages.index(m) %}{% endfor %}
{% for m in messages if m.role != 'system' %}
{% set before, after = loop.previtem, loop.nextitem %}
{% if m.role == 'tool' %}
{% if before.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if not after or after.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{% else %}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if THINKS and m.role == 'assistant' and messages.index(m) > ns.asked and (loop.last or m.reasoning_content) %}
{{ '<think>\n' + (m.reasoning_content or '') | trim('\n') + '\n</think>\n\n' + m.content | trim('\n') }}
{%- else %}
{{ m.content }}
{%- endif %}
{% for c in m.tool_calls or [] %}
{{ '\n' if m.content or not loop.first }}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{ '<|im_end|>\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
_QWEN_TOKENS = (
    "<|im_start|> <|im_end|> <|endoftext|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
)


def qwen(default: str, thinks: bool) -> str:
    return _QWEN.replace("DEFAULT", repr(default)).replace("THINKS", str(thinks).lower())


GEMMA = (
    ALTERNATE
    + """\
{{ bos_token }}
{%- set system = '' %}
{% if messages[0].role == 'system' %}SYSTEM{% endif %}
{% for m in messages if m.role != 'system' %}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- (system if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
)

PHI_3 = """\
{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}
"""

PHI_4 = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}
"""

OLMO_2 = """\
{{ bos_token }}
{%- for m in messages %}
{{ '<|' + m.role + '|>\n' + m.content }}
{%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}
{{ '\n' if m.role != 'assistant' or not loop.last }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
"""

GLM_4 = """\
[gMASK]<sop>
{%- if tools %}{{ '<|system|>\nTools: ' + tools | tojson }}{% endif %}
{% for m in messages %}
{% if m.tool_calls %}
{% for c in m.tool_calls %}{{ '<|assistant|>' + c.function.name + '\n' + c.function.arguments | tojson }}{% endfor %}
{% else %}
{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' + m.content }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

GRANITE = """\
{% macro turn(role, text) %}
{{ '<|start_of_role|>' + role + '<|end_of_role|>' + text + '<|end_of_text|>\n' }}
{%- endmacro %}
{% if tools %}{{ turn('tools', tools | tojson) }}{% endif %}
{% for m in messages %}
{% set calls = m.tool_calls | map(attribute='function') | list | tojson if m.tool_calls else '' %}
{{ turn(m.role, '<|tool_call|>' + calls if calls else m.content) }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
"""

COHERE = """\
{{ bos_token }}
{%- for m in messages %}
{% set role = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] %}
{{ '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' + m.content | trim + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}
"""

# It marks the header of a turn and the line that ends it, too.
SMOLLM3 = """\
{% for m in messages %}
{% if m.role == 'assistant' %}
{% generation %}
{{ '<|im_start|>assistant\n<think>\n\n</think>\n' + m.content.lstrip('\n') + '<|im_end|>\n' }}
{%- endgeneration %}
{% else %}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# Thoughts in the last turn alone, and each part that is generated marked.
MARKED_THOUGHTS = """\
{% for m in messages %}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
{% if loop.last %}{% generation %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endgeneration %}{% endif %}
{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{% else %}
{{ m.content + '<|im_end|>' }}
{%- endif %}
{{ '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

STABLELM = """\
{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
"""

NEMOTRON = """\
{{ '<extra_id_0>System\n' + (messages[0].content if messages[0].role == 'system' else '') + '\n' }}
{%- for m in messages if m.role != 'system' %}
{{ '<extra_id_1>' + ('User' if m.role == 'user' else 'Assistant') + '\n' + m.content + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<extra_id_1>Assistant\n' }}{% endif %}
"""

# What ends the last turn is another token than what ends those before it, which have lost their thoughts.
GPT_OSS = """\
{% for m in messages %}
{% if m.role == 'assistant' %}
{% if loop.last and m.thinking %}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- else %}
{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

_HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
_L3 = {role: _HEAD.format(role) for role in ("system", "user", "assistant", "ipython")}
_TOOLS = f"\n\n<tools>\n{JSON}\n</tools><|im_end|>\n"
_CALL = '<tool_call>\n{"name": "warmth", "arguments": {"unit": "C"}}\n</tool_call>'
_ANSWER = "<|im_start|>user\n<tool_response>\n21\n</tool_response><|im_end|>\n"

FAMILY_CHATS: Mapping[str, FamilyChats] = {
    "llama-3": FamilyChats(
        LLAMA_3,
        "<|eot_id|>",
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        {
            "brief": (
                BRIEF,
                [
                    f"<|begin_of_text|>{_L3['system']}Be brief.<|eot_id|>{_L3['user']}hi<|eot_id|>{_L3['assistant']}"
                    f"⟦hello<|eot_id|>⟧{_L3['user']}and?<|eot_id|>{_L3['assistant']}⟦so<|eot_id|>⟧"
                ],
            ),
            "calls": (
                CALLS,
                [
                    f"<|begin_of_text|>{_L3['user']}Functions: [{JSON}]\n\nwarm?<|eot_id|>{_L3['assistant']}"
                    f'⟦{{"name": "warmth", "parameters": {{"unit": "C"}}}}<|eot_id|>⟧{_L3["ipython"]}21<|eot_id|>'
                    f"{_L3['assistant']}⟦21 C<|eot_id|>⟧{_L3['user']}and?<|eot_id|>{_L3['assistant']}⟦so<|eot_id|>⟧"
                ],
            ),
        },
        begin="<|begin_of_text|>",
        refused={"only single tool calls": [*chat("hi"), {**call("C"), "tool_calls": call("C")["tool_calls"] * 2}]},
    ),
    "llama-2": FamilyChats(
        LLAMA_2,
        "</s>",
        "<s> </s>",
        {
            "brief": (
                BRIEF,
                [
                    "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nhi [/INST]⟦ hello </s>⟧<s>[INST] and? [/INST]⟦ so </s>⟧",
                ],
            ),
        },
        begin="<s>",
        refused=TWO_OF_THE_USER,
    ),
    "mistral": FamilyChats(
        MISTRAL,
        "</s>",
        "<s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        {
            "turns": (TURNS, ["<s>[INST] hi[/INST]⟦ hello</s>⟧[INST] and?[/INST]⟦ so</s>⟧"]),
            # The words of the system and the tools stand before the last message of the user, wherever that is.
            "brief": (
                BRIEF,
                [
                    "<s>[INST] Be brief.\n\nhi[/INST]⟦  hello \n</s>⟧",
                    "<s>[INST] hi[/INST]  hello \n</s>[INST] Be brief.\n\nand?[/INST]⟦ so</s>⟧",
                ],
            ),
            "calls": (
                CALLS,
                [
                    f"<s>[AVAILABLE_TOOLS] [{JSON}][/AVAILABLE_TOOLS][INST] warm?[/INST]"
                    '⟦[TOOL_CALLS] [{"name": "warmth", "arguments": {"unit": "C"}, "id": "abc"}]</s>⟧'
                    '[TOOL_RESULTS] {"content": 21, "call_id": "abc"}[/TOOL_RESULTS]⟦ 21 C</s>⟧',
                    '<s>[INST] warm?[/INST][TOOL_CALLS] [{"name": "warmth", "arguments": {"unit": "C"}, "id": "abc"}]'
                    '</s>[TOOL_RESULTS] {"content": 21, "call_id": "abc"}[/TOOL_RESULTS] 21 C</s>'
                    f"[AVAILABLE_TOOLS] [{JSON}][/AVAILABLE_TOOLS][INST] and?[/INST]⟦ so</s>⟧",
                ],
            ),
        },
        begin="<s>",
        refused=TWO_OF_THE_USER,
    ),
    "qwen2.5": FamilyChats(
        qwen("You help.", thinks=False),
        "<|im_end|>",
        _QWEN_TOKENS,
        {
            "turns": (
                TURNS,
                [
                    "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
                    "⟦hello<|im_end|>⟧\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n⟦so<|im_end|>⟧"
                ],
            ),
            "calls": (
                CALLS,
                [
                    f"<|im_start|>system\nYou help.{_TOOLS}<|im_start|>user\nwarm?<|im_end|>\n<|im_start|>assistant\n"
                    f"⟦{_CALL}<|im_end|>⟧\n{_ANSWER}<|im_start|>assistant\n⟦21 C<|im_end|>⟧\n<|im_start|>user\nand?"
                    "<|im_end|>\n<|im_start|>assistant\n⟦so<|im_end|>⟧"
                ],
            ),
        },
    ),
    "qwen3": FamilyChats(
        qwen("", thinks=True),
        "<|im_end|>",
        _QWEN_TOKENS,
        {
            # The last turn has a place for thoughts, and those before it have none: each is learned as the last.
            "turns": (
                TURNS,
                [
                    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nhello<|im_end|>⟧",
                    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nand?"
                    "<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nso<|im_end|>⟧",
                ],
            ),
            # Turns since the last question keep their thoughts, and are learned together.
            "thoughts": (
                THOUGHTS,
                [
                    f"<|im_start|>system\n{_TOOLS}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
                    "⟦<think>\na greeting\n</think>\n\nhello<|im_end|>⟧",
                    f"<|im_start|>system\n{_TOOLS}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
                    "<|im_start|>user\nwarm?<|im_end|>\n<|im_start|>assistant\n"
                    f"⟦<think>\nlook\n</think>\n\n{_CALL}<|im_end|>⟧\n{_ANSWER}<|im_start|>assistant\n"
                    "⟦<think>\nwarm\n</think>\n\nyes<|im_end|>⟧",
                ],
            ),
        },
    ),
    "gemma": FamilyChats(
        GEMMA.replace("SYSTEM", "{{ raise_exception('System role not supported') }}"),
        "<eos>",
        "<bos> <eos> <start_of_turn> <end_of_turn>",
        {
            "turns": (
                {"messages": chat("hi", " hello \n", "and?", "so")},
                [
                    "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n⟦hello<end_of_turn>⟧\n"
                    "<start_of_turn>user\nand?<end_of_turn>\n<start_of_turn>model\n⟦so<end_of_turn>⟧"
                ],
            )
        },
        begin="<bos>",
        refused={"System role not supported": BRIEF["messages"], **TWO_OF_THE_USER},
    ),
    "gemma-3": FamilyChats(
        GEMMA.replace("SYSTEM", "{% set system = messages[0].content + '\n\n' %}"),
        "<eos>",
        "<bos> <eos> <start_of_turn> <end_of_turn>",
        {
            "brief": (
                BRIEF,
                [
                    "<bos><start_of_turn>user\nBe brief.\n\nhi<end_of_turn>\n<start_of_turn>model\n"
                    "⟦hello<end_of_turn>⟧\n<start_of_turn>user\nand?<end_of_turn>\n<start_of_turn>model\n"
                    "⟦so<end_of_turn>⟧"
                ],
            )
        },
        begin="<bos>",
        refused=TWO_OF_THE_USER,
    ),
    "phi-3": FamilyChats(
        PHI_3,
        "<|endoftext|>",
        "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>",
        {
            "brief": (
                BRIEF,
                [
                    "<|system|>\nBe brief.<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n⟦ hello \n<|end|>⟧\n"
                    "<|user|>\nand?<|end|>\n<|assistant|>\n⟦so<|end|>\n<|endoftext|>⟧"
                ],
            )
        },
    ),
    "phi-4": FamilyChats(
        PHI_4,
        "<|im_end|>",
        "<|im_start|> <|im_sep|> <|im_end|>",
        {
            "brief": (
                BRIEF,
                [
                    "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>hi<|im_end|>"
                    "<|im_start|>assistant<|im_sep|>⟦ hello \n<|im_end|>⟧<|im_start|>user<|im_sep|>and?<|im_end|>"
                    "<|im_start|>assistant<|im_sep|>⟦so<|im_end|>⟧"
                ],
            )
        },
    ),
    "olmo-2": FamilyChats(
        OLMO_2,
        "<|endoftext|>",
        "<|endoftext|>",
        {
            "brief": (
                BRIEF,
                [
                    "<|endoftext|><|system|>\nBe brief.\n<|user|>\nhi\n<|assistant|>\n⟦ hello \n<|endoftext|>⟧\n"
                    "<|user|>\nand?\n<|assistant|>\n⟦so<|endoftext|>⟧"
                ],
            )
        },
        begin="<|endoftext|>",
    ),
    # No token ends a turn but that of the next role, at which generating stops; at the end of a chat it is another.
    "glm-4": FamilyChats(
        GLM_4,
        "<|endoftext|>",
        "[gMASK] <sop> <|endoftext|> <|system|> <|user|> <|assistant|> <|observation|>",
        {
            "turns": (
                TURNS,
                [
                    "[gMASK]<sop><|user|>\nhi<|assistant|>⟦\nhello<|user|>⟧\nand?<|assistant|>⟦\nso<|endoftext|>⟧",
                ],
            ),
            "calls": (
                CALLS,
                [
                    f"[gMASK]<sop><|system|>\nTools: [{JSON}]<|user|>\nwarm?<|assistant|>"
                    '⟦warmth\n{"unit": "C"}<|observation|>⟧\n21<|assistant|>⟦\n21 C<|user|>⟧\nand?<|assistant|>'
                    "⟦\nso<|endoftext|>⟧"
                ],
            ),
        },
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "granite": FamilyChats(
        GRANITE,
        "<|end_of_text|>",
        "<|start_of_role|> <|end_of_role|> <|end_of_text|> <|tool_call|>",
        {
            "calls": (
                CALLS,
                [
                    f"<|start_of_role|>tools<|end_of_role|>[{JSON}]<|end_of_text|>\n"
                    "<|start_of_role|>user<|end_of_role|>warm?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
                    '⟦<|tool_call|>[{"name": "warmth", "arguments": {"unit": "C"}}]<|end_of_text|>⟧\n'
                    "<|start_of_role|>tool<|end_of_role|>21<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
                    "⟦21 C<|end_of_text|>⟧\n<|start_of_role|>user<|end_of_role|>and?<|end_of_text|>\n"
                    "<|start_of_role|>assistant<|end_of_role|>⟦so<|end_of_text|>⟧"
                ],
            )
        },
    ),
    "cohere": FamilyChats(
        COHERE,
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>",
        {
            "brief": (
                BRIEF,
                [
                    "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
                    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
                    "⟦hello<|END_OF_TURN_TOKEN|>⟧<|START_OF_TURN_TOKEN|><|USER_TOKEN|>and?<|END_OF_TURN_TOKEN|>"
                    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦so<|END_OF_TURN_TOKEN|>⟧"
                ],
            )
        },
        begin="<BOS_TOKEN>",
    ),
    "smollm3": FamilyChats(
        SMOLLM3,
        "<|im_end|>",
        _QWEN_TOKENS,
        {
            "turns": (
                TURNS,
                [
                    "<|im_start|>user\nhi<|im_end|>\n⟦<|im_start|>assistant\n<think>\n\n</think>\nhello<|im_end|>\n⟧"
                    "<|im_start|>user\nand?<|im_end|>\n⟦<|im_start|>assistant\n<think>\n\n</think>\nso<|im_end|>\n⟧"
                ],
            )
        },
    ),
    "marked-thoughts": FamilyChats(
        MARKED_THOUGHTS,
        "<|im_end|>",
        _QWEN_TOKENS,
        {
            "thoughts": (
                {"messages": [*chat("hi"), thought("a greeting", "hello"), *chat("and?"), thought("what", "so")]},
                [
                    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>a greeting</think>hello<|im_end|>⟧",
                    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nand?"
                    "<|im_end|>\n<|im_start|>assistant\n⟦<think>what</think>so<|im_end|>⟧",
                ],
            )
        },
    ),
    "stablelm": FamilyChats(
        STABLELM,
        "<|endoftext|>",
        "<|endoftext|>",
        {
            "turns": (
                TURNS,
                [
                    "<|user|>\nhi<|endoftext|>\n<|assistant|>\n⟦hello<|endoftext|>⟧\n"
                    "<|user|>\nand?<|endoftext|>\n<|assistant|>\n⟦so<|endoftext|>⟧"
                ],
            )
        },
    ),
    # No token ends a turn, and no config says that generating stops where the next begins: each ends a text of its own.
    "nemotron": FamilyChats(
        NEMOTRON,
        "</s>",
        "</s> <extra_id_0> <extra_id_1>",
        {
            "brief": (
                BRIEF,
                [
                    "<extra_id_0>System\nBe brief.\n<extra_id_1>User\nhi\n<extra_id_1>Assistant\n⟦ hello \n\n</s>⟧",
                    "<extra_id_0>System\nBe brief.\n<extra_id_1>User\nhi\n<extra_id_1>Assistant\n hello \n\n"
                    "<extra_id_1>User\nand?\n<extra_id_1>Assistant\n⟦so\n</s>⟧",
                ],
            )
        },
    ),
    "gpt-oss": FamilyChats(
        GPT_OSS,
        "<|return|>",
        "<|start|> <|end|> <|message|> <|channel|> <|return|>",
        {
            "thoughts": (
                {
                    "messages": [
                        *chat("hi"),
                        {"role": "assistant", "content": "hello", "thinking": "a greeting"},
                        *chat("and?"),
                        {"role": "assistant", "content": "so"},
                    ]
                },
                [
                    "<|start|>user<|message|>hi<|end|><|start|>assistant⟦<|channel|>analysis<|message|>"
                    "a greeting<|end|><|start|>assistant<|channel|>final<|message|>hello<|return|>⟧",
                    "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>hello<|end|>"
                    "<|start|>user<|message|>and?<|end|><|start|>assistant⟦<|channel|>final<|message|>so<|return|>⟧",
                ],
            )
        },
    ),
}
