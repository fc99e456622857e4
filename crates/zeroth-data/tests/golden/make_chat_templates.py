"""Writes chat_templates.json and tokenizer/tokenizer.json: what transformers makes of conversations and rows.

Needs transformers (5.x), jinja2 and tokenizers. Run from this folder: python make_chat_templates.py

Texts come from `apply_chat_template` on the templates as they are. Masks come from `return_assistant_tokens_mask` on
copies in which this script puts `{% generation %}` around what is trained (what the model has to write, to and with
the token that ends the turn); a copy must give the same text as the template it was made from. `loss` is taken out of
messages before a template sees them, and lists of text parts are joined, as none of these templates knows lists.
"""

import hashlib
import json
import struct
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
DATE = "26 Jul 2024"
SPECIAL = """<|im_start|> <|im_end|> <|endoftext|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>
<|eom_id|> <|python_tag|> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]
[/TOOL_RESULTS] <bos> <eos> <start_of_turn> <end_of_turn>""".split()
# Phi's take the white space behind them, as in its own tokenizer.
SWALLOWING = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def trained(body):
    """A piece of a template that is marked where the message is trained."""
    return ("{%- if message.trained %}{%- generation %}" + body + "{%- endgeneration %}{%- else %}" + body
            + "{%- endif %}")


def qwen3(source):
    header = "{{- '<|im_start|>' + message.role + '\\n' }}"
    start = source.index("        {%- if loop.index0 > ns.last_query_index %}")
    end = source.index("        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}")
    body = source[start:end].replace("{{- '<|im_start|>' + message.role + '\\n<think>\\n' +", "{{- '<think>\\n' +")
    body = body.replace("{{- '<|im_start|>' + message.role + '\\n' + content }}", "{{- content }}")
    assert body.count("<|im_start|>") == 0
    source = source[:start] + header + trained(body + "{{- '<|im_end|>' }}") + "{{- '\\n' }}" + source[end:].replace(
        "        {{- '<|im_end|>\\n' }}\n", "", 1)
    whole = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    return replaced(source, whole, header + trained("{{- message.content + '<|im_end|>' }}") + "{{- '\\n' }}")


def qwen25(source):
    whole = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    header = "{{- '<|im_start|>' + message.role + '\\n' }}"
    source = replaced(source, whole, header + trained("{{- message.content + '<|im_end|>' }}") + "{{- '\\n' }}")
    start = source.index("        {{- '<|im_start|>' + message.role }}\n")
    end = source.index("        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}")
    body = source[start:end].split("\n", 1)[1]
    # The line break that ends the header is written with what follows it.
    body = body.replace("{{- '\\n' + message.content }}", "{{- message.content }}").replace(
        "{{- '\\n<tool_call>\\n{\"name\": \"' }}",
        "{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}{{- '<tool_call>\\n{\"name\": \"' }}")
    return (source[:start] + header + trained(body + "{{- '<|im_end|>' }}") + "{{- '\\n' }}"
            + source[end:].replace("        {{- '<|im_end|>\\n' }}\n", "", 1))


def llama(source):
    whole = ("{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + "
             "'<|eot_id|>' }}")
    header = "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    source = replaced(source, whole, header + trained("{{- message['content'] | trim + '<|eot_id|>' }}"))
    start = source.index("        {%- if builtin_tools is defined and tool_call.name") if "builtin_tools" in source else (
        source.index("        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}"))
    end = source.index('    {%- elif message.role == "tool" or message.role == "ipython" %}')
    header = "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}"
    return source[:start] + header + trained(source[start:end].replace(header, "")) + source[end:]


def mistral(source):
    source = replaced(source, '{{- message["content"] + eos_token}}', trained('{{- message["content"] + eos_token}}'))
    start = source.index('        {{- "[TOOL_CALLS][" }}')
    end = source.index('    {%- elif message["role"] == "assistant" %}')
    source = source[:start] + trained(source[start:end]) + source[end:]
    content = trained('{{- message["content"] + "[/INST]" }}')
    source = replaced(source, '{{- "[INST]" + message["content"] + "[/INST]" }}', '{{- "[INST]" }}' + content)
    return replaced(source, '{{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}',
                    '{{- "[INST]" + system_message + "\\n\\n" }}' + content)


def gemma(source):
    whole = "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    body = trained("{{- message['content'] | trim + '<end_of_turn>' }}")
    return replaced(source, whole, "{{ '<start_of_turn>' + role + '\n' }}" + body + "{{- '\n' }}")


def phi(source):
    for role in ["user", "assistant"]:
        whole = "{{'<|" + role + "|>\n' + message['content'] + '<|end|>\n'}}"
        body = trained("{{- message['content'] + '<|end|>' }}")
        source = replaced(source, whole, "{{'<|" + role + "|>\n' }}" + body + "{{- '\n' }}")
    return source


def smollm3(source):
    body = trained('{{- content.lstrip("\\n") + "<|im_end|>" }}') + '{{- "\\n" -}}'
    for header in ['"<|im_start|>assistant\\n"', '"<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n"']:
        whole = "{{ " + header + ' + content.lstrip("\\n") + "<|im_end|>\\n" }}'
        source = replaced(source, whole, "{{ " + header + " -}}" + body)
    whole = '{{ "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}'
    body = trained('{{- content + "<|im_end|>" }}') + '{{- "\\n" -}}'
    return replaced(source, whole, '{{ "<|im_start|>" + message.role + "\\n" -}}' + body)


def replaced(source, old, new):
    assert source.count(old) == 1, (source.count(old), old)
    return source.replace(old, new)


# Template, its special tokens, how its copy is marked, whether it drops tool calls.
TEMPLATES = {
    "Qwen-Qwen3-0.6B": ({"eos_token": "<|im_end|>"}, qwen3, False),
    "Qwen-Qwen2.5-7B-Instruct": ({"eos_token": "<|im_end|>"}, qwen25, False),
    "meta-llama-Llama-3.1-8B-Instruct": ({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, llama, False),
    "meta-llama-Llama-3.2-3B-Instruct": ({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, llama, False),
    "mistralai-Mistral-Nemo-Instruct-2407": ({"bos_token": "<s>", "eos_token": "</s>"}, mistral, False),
    "google-gemma-2-2b-it": ({"bos_token": "<bos>", "eos_token": "<eos>"}, gemma, True),
    "microsoft-Phi-3.5-mini-instruct": ({"bos_token": "<s>", "eos_token": "<|endoftext|>"}, phi, True),
    "HuggingFaceTB-SmolLM3-3B": ({"eos_token": "<|im_end|>"}, smollm3, True),
}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments, **more):
    return {"type": "function", "id": "abcdefgh1", "function": {"name": name, "arguments": arguments}, **more}


WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a city, in °C & more <now>.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                   "required": ["city"]}}}
ADD = {"type": "function", "function": {
    "name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {
        "a": {"type": "number", "default": 1.5}, "b": {"type": "number", "minimum": 1e-7}}, "required": []}}}
HI, HELLO = say("user", "Hi"), say("assistant", "Hello!")
ASKED = say("user", "What is the weather in Oslo?")
CALLED = say("assistant", "", tool_calls=[call("get_weather", {"city": "Oslo", "days": 2})])
ANSWERED = say("tool", '{"temp": -3}', name="get_weather", tool_call_id="abcdefgh1")

# Name, messages, tools.
CONVERSATIONS = [
    ("one turn", [HI, HELLO], None),
    ("system", [say("system", "Be brief."), HI, HELLO], None),
    ("two turns", [HI, HELLO, say("user", "How are you?"), say("assistant", "Fine, thanks.")], None),
    ("system and three turns", [say("system", "You are a pirate."), HI, say("assistant", "Ahoy!"),
                                say("user", "Who?"), say("assistant", "Me."), say("user", "Bye"),
                                say("assistant", "Farewell, matey.")], None),
    ("only a question", [say("user", "Anyone there?")], None),
    ("ends with a question", [HI, HELLO, say("user", "And then?")], None),
    ("unicode", [say("user", "Grüß Gott 👋🏽 你好 ﷺ"), say("assistant", "¡Hola! 🇳🇴 naïve — ẞ\u00a0e\u0301 日本")], None),
    ("white space around", [say("user", "  \n spaced \n\n"), say("assistant", "\n\n  indented answer \t\n")], None),
    ("white space around, two turns", [say("user", "\tx\n"), say("assistant", " first\n"), say("user", "y "),
                                       say("assistant", "\nlast ")], None),
    ("empty answer", [HI, say("assistant", "")], None),
    ("empty answer in the middle", [HI, say("assistant", ""), say("user", "Hello?"), HELLO], None),
    ("empty question", [say("user", ""), say("assistant", "You said nothing.")], None),
    ("empty system", [say("system", ""), HI, HELLO], None),
    ("blank answer", [HI, say("assistant", " \n ")], None),
    ("code", [say("user", "Reverse a list?"),
              say("assistant", "```python\nxs = [1, 2]\nxs[::-1]  # {{ not }} {% jinja %} {# here #}\n```")], None),
    ("quotes and escapes", [say("user", "Say \"a\\b\" & <c>"), say("assistant", "'a\\b' \"q\" <c> & \\n {}")], None),
    ("same words twice", [HI, say("assistant", "Hi"), HI, say("assistant", "Hi")], None),
    ("answer holds the header", [HI, say("assistant", "assistant\nuser\nsystem\n")], None),
    ("reasoning last", [say("user", "2+2?"), say("assistant", "4", reasoning_content="Two and two.")], None),
    ("reasoning first and last", [say("user", "2+2?"), say("assistant", "4", reasoning_content="Easy."),
                                  say("user", "3+3?"), say("assistant", "6", reasoning_content="\nThree twice.\n")],
     None),
    ("reasoning by another name", [say("user", "2+2?"), say("assistant", "4", thinking="Hm.")], None),
    ("thoughts in the content", [say("user", "2+2?"), say("assistant", "<think>\nTwo and two.\n</think>\n\n4")], None),
    ("thoughts in all contents", [say("user", "2+2?"), say("assistant", "<think>\nA\n</think>\n\n4"),
                                  say("user", "3+3?"), say("assistant", "<think>\nB\n</think>\n\n6")], None),
    ("thoughts in the first content", [say("user", "2+2?"), say("assistant", "<think>\nA\n</think>\n\n4"),
                                       say("user", "3+3?"), say("assistant", "6")], None),
    ("no thinking", [say("system", "Answer shortly. /no_think"), say("user", "2+2?"), say("assistant", "4")], None),
    ("tools, none called", [say("user", "Hi there"), HELLO], [WEATHER]),
    ("two tools and a system", [say("system", "Use tools."), say("user", "Hi there"), HELLO], [WEATHER, ADD]),
    ("a call", [ASKED, CALLED], [WEATHER]),
    ("a call and its result", [ASKED, CALLED, ANSWERED, say("assistant", "It is -3 degrees.")], [WEATHER]),
    ("a call with words", [ASKED, {**CALLED, "content": "Let me look."}, ANSWERED, say("assistant", "Cold."),
                           say("user", "Thanks"), say("assistant", "Sure.")], [WEATHER]),
    ("two calls at once", [say("user", "1+2 and 3+4?"),
                           say("assistant", "", tool_calls=[call("add", {"a": 1, "b": 2.0}),
                                                            call("add", {"a": 3, "b": 4e20, "note": "ü \"q\"\n"})]),
                           say("tool", "3", tool_call_id="abcdefgh1"), say("tool", "7", tool_call_id="abcdefgh1"),
                           say("assistant", "3 and 7")], [ADD]),
    ("arguments as text", [ASKED, say("assistant", "", tool_calls=[call("get_weather", '{"city": "Oslo"}')])],
     [WEATHER]),
    ("a call without a content", [ASKED, {**CALLED, "content": None}, ANSWERED, say("assistant", "Cold.")], [WEATHER]),
    ("a call and reasoning", [ASKED, {**CALLED, "reasoning_content": "I need a tool."}, ANSWERED,
                              say("assistant", "Cold.", reasoning_content="Minus three.")], [WEATHER]),
    ("a tool's object", [ASKED, CALLED, {**ANSWERED, "content": {"temp": -3, "ok": True, "at": None}},
                         say("assistant", "Cold.")], [WEATHER]),
    ("a user that speaks as a tool", [HI, say("user", "<tool_response>\n3\n</tool_response>"), HELLO], None),
    ("no content", [HI, say("assistant", None)], None),
    ("roles out of order", [HI, HI, HELLO], None),
    ("begins with the assistant", [say("assistant", "Welcome."), HI, HELLO], None),
    ("system in the middle", [HI, HELLO, say("system", "Now rhyme."), say("user", "Go"), say("assistant", "So")], None),
    ("unknown role", [HI, say("critic", "Bad."), HELLO], None),
    ("parts", [say("user", [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]),
               say("assistant", [{"type": "text", "text": "Hello!"}])], None),
    ("loss: first answer not", [HI, say("assistant", "Hello!", loss=False), say("user", "Again"),
                                say("assistant", "Hello again!", loss=True)], None),
    ("loss: a question too", [say("user", "Hi", loss=True), HELLO, say("user", " Bye ", loss=True),
                              say("assistant", "See you.", loss=None)], None),
    ("loss: none", [HI, say("assistant", "Hello!", loss=False)], None),
]


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [json.dumps(messages, ensure_ascii=False) for _, messages, _ in CONVERSATIONS]
    texts += [path.read_text() for path in sorted((HERE / "templates").glob("*.jinja"))]
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                  show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False, rstrip=True) for text in SWALLOWING])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)])])
    folder = HERE / "tokenizer"
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def as_template_sees(messages):
    clean = []
    for message in messages:
        message = {key: value for key, value in message.items() if key != "loss"}
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
        clean.append(message)
    return clean


def is_trained(message):
    return message["role"] == "assistant" if message.get("loss") is None else message["loss"]


def runs(mask):
    """Where trained tokens begin and end."""
    edges = [place for place in range(len(mask) + 1)
             if (mask[place - 1] if place else 0) != (mask[place] if place < len(mask) else 0)]
    return edges


def hashed(ids):
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()[:16]


class Chat:
    """A template and its marked copy."""

    def __init__(self, tokenizer, name):
        special, marker, self.drops_calls = TEMPLATES[name]
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
        self.source = (HERE / "templates" / f"{name}.jinja").read_text()
        self.marked = marker(self.source)

    def render(self, messages, tools, prompt):
        return self.tokenizer.apply_chat_template(
            as_template_sees(messages), tools=tools, chat_template=self.source, tokenize=False,
            add_generation_prompt=prompt, date_string=DATE)

    def tokens(self, messages, tools):
        """Ids and mask."""
        marked = [{**clean, "trained": is_trained(message)} for clean, message in
                  zip(as_template_sees(messages), messages)]
        arguments = {"tools": tools, "chat_template": self.marked, "date_string": DATE}
        text = self.tokenizer.apply_chat_template(marked, tokenize=False, **arguments)
        assert text == self.render(messages, tools, False), (text, self.render(messages, tools, False))
        out = self.tokenizer.apply_chat_template(marked, tokenize=True, return_dict=True,
                                                 return_assistant_tokens_mask=True, **arguments)
        return out["input_ids"], out["assistant_masks"]

    def golden(self, messages, tools):
        try:
            text = self.render(messages, tools, False)
        except Exception as error:
            return {"raises": str(error)}
        entry = {"text": text}
        try:
            prompted = self.render(messages, tools, True)
            entry["prompted"] = ["+", prompted[len(text):]] if prompted.startswith(text) else ["=", prompted]
        except Exception as error:
            entry["prompted"] = ["raises", str(error)]
        # An answer of which the template writes nothing, or `None`, is refused: there is nothing to train.
        if any(is_trained(message) and (self.drops_calls and not message["content"] if message.get("tool_calls")
                                        else message["content"] is None) for message in messages):
            entry["dropped"] = True
            return entry
        ids, mask = self.tokens(messages, tools)
        return {**entry, "ids": hashed(ids), "trained": runs(mask)}


def labels(ids, mask):
    return [token if trains else -100 for token, trains in zip(ids, mask)]


def row_cases(chat):
    """Rows of every format; `template` says whether the folder has Qwen3's."""
    tokenizer = chat.tokenizer
    eos = tokenizer.eos_token_id

    def conversation(row, messages, tools=None, columns=""):
        ids, mask = chat.tokens(messages, tools)
        return {"row": row, "columns": columns, "template": True, "ids": ids, "labels": labels(ids, mask)}

    def plain(row, prompt, completion, columns="", template=False):
        out = tokenizer(prompt + completion, return_offsets_mapping=True)
        ids, offsets = out["input_ids"] + [eos], out["offset_mapping"]
        mask = [not prompt or end > len(prompt) for _, end in offsets] + [True]
        return {"row": row, "columns": columns, "template": template, "ids": ids, "labels": labels(ids, mask)}

    hello = [HI, HELLO]
    system = say("system", "Be brief.")
    history = [["Who?", "Me."], ["Why?", "So."]]
    told = [say("user", "Who?"), say("assistant", "Me."), say("user", "Why?"), say("assistant", "So.")]
    calls = [say("user", "Add"), say("assistant", "", tool_calls=[{"type": "function", "function": {
        "name": "add", "arguments": {"a": 1}}}]), say("tool", "1"), say("assistant", "One.")]
    turn = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
    return [
        conversation({"messages": hello, "id": 7}, hello),
        conversation({"messages": hello, "tools": json.dumps([ADD])}, hello, [ADD]),
        conversation({"chat": hello}, hello, columns="messages=chat"),
        conversation({"conversations": turn}, hello),
        conversation({"conversations": turn, "system": "Be brief.", "tools": [ADD]}, [system] + hello, [ADD]),
        conversation({"conversations": [{"from": "user", "value": "Add"},
                                        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                                        {"from": "observation", "value": "1"},
                                        {"from": "assistant", "value": "One."}]}, calls),
        conversation({"conversations": [{"from": "human", "value": "Hi", "loss": True},
                                        {"from": "gpt", "value": "Hello!", "loss": False}]},
                     [say("user", "Hi", loss=True), say("assistant", "Hello!", loss=False)]),
        conversation({"instruction": "Hi", "input": "", "output": "Hello!", "text": "Hi Hello!"}, hello),
        conversation({"instruction": "Add.", "input": "1, 2", "output": "3", "system": "Be brief.",
                      "history": history}, [system] + told + [say("user", "Add.\n1, 2"), say("assistant", "3")]),
        conversation({"question": "Hi", "answer": "Hello!"}, hello),
        conversation({"query": "Hi", "response": "Hello!", "history": history}, told + hello),
        conversation({"problem": "Hi", "solution": "Hello!"}, hello, columns="question=problem,answer=solution"),
        conversation({"translation": {"en": "Hi", "no": "Hello!"}}, hello),
        conversation({"translation": {"en": "Hello!", "de": "x", "no": "Hi"}}, hello, columns="source=no,target=en"),
        conversation({"prompt": [HI], "completion": [HELLO]}, hello),
        conversation({"prompt": told[:3], "completion": told[3:]},
                     [told[0], {**told[1], "loss": False}] + told[2:]),
        plain({"prompt": "The capital of Norway is", "completion": " Oslo."}, "The capital of Norway is", " Oslo."),
        plain({"prompt": "Hé 👋🏽", "completion": "🇳🇴"}, "Hé 👋🏽", "🇳🇴", template=True),
        plain({"prompt": "", "completion": "All of it."}, "", "All of it."),
        plain({"question": "Hi", "answer": "Hello!"}, "Hi\n", "Hello!"),
        plain({"instruction": "Add.", "input": "1, 2", "output": "3", "system": "S"}, "S\nAdd.\n1, 2\n", "3"),
        plain({"text": "Any text, 你好.\n"}, "", "Any text, 你好.\n", template=True),
        plain({"body": "Any text"}, "", "Any text", columns="text=body"),
    ]


def main():
    tokenizer = make_tokenizer()
    chats = {name: Chat(tokenizer, name) for name in TEMPLATES}
    golden = {
        "conversations": [{"name": name, "messages": messages, **({"tools": tools} if tools else {})}
                          for name, messages, tools in CONVERSATIONS],
        "templates": {name: {"special": TEMPLATES[name][0],
                             "cases": [chat.golden(messages, tools) for _, messages, tools in CONVERSATIONS]}
                      for name, chat in chats.items()},
        "rows": row_cases(chats["Qwen-Qwen3-0.6B"]),
    }
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    # One template, one line: a change shows which.
    for name in TEMPLATES:
        text = text.replace(f'"{name}":{{"special"', f'\n"{name}":{{"special"')
    (HERE / "chat_templates.json").write_text(text.replace('"rows":', '\n"rows":', 1) + "\n")


main()
