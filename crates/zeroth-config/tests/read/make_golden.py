"""Writes golden.json: what the Python package `hjson`, DeepSpeed's reader, makes of the texts below.

Run it in this folder after `pip install hjson==3.1.0`. tests/it/reading.rs compares our reader with the file.
"""

import json
import pathlib

import hjson

# Read here exactly as by hjson.
SAME = {
    "strict JSON": '{"train_batch_size": 32, "fp16": {"enabled": true, "loss_scale": 0}, "x": [1, "a", null, false]}',
    "empty object": "{}",
    "empty containers": '{"a": {}, "b": [], "c": ""}',
    "JSON on many lines": '{\n  "a": 1,\n  "b": {\n    "c": [\n      1,\n      2\n    ]\n  }\n}\n',
    "tabs and CRLF": '{\r\n\t"a":\t1,\r\n\t"b": "x"\r\n}\r\n',
    "line comments": '// head\n{ # one\n"a": 1, // two\n"b": 2 # three\n} // tail\n',
    "block comments": '/* head */ {"a": /* in */ 1 /* after */, /* before */ "b": 2} /* tail\n*/',
    "comment after a number": '{"stage": 3 // comment\n}',
    "comment after a boolean": '{"on": true# comment\n, "off": false/* c */}',
    "trailing commas": '{"a": [1, 2,], "b": {"c": 1,},}',
    "commas missing at line ends": '{"a": 1\n"b": "x"\n"c": [1\n2\n"y"\n]\n"d": {}\n}',
    "a comma on the next line": '{"a": 1\n, "b": 2}',
    "numbers": '{"a": 5e8, "b": -0.5, "c": 1E-5, "d": 0, "e": 1.0, "f": 15099494.4, "g": 2e+2, "h": -12}',
    "large numbers": '{"a": 9007199254740993, "b": 1e10, "c": 1e300, "d": 9223372036854775807}',
    "escapes": r'{"a": "\"\\\/\b\f\n\r\t\u00e9\u20AC", "b": "it\'s"}',
    "surrogate pair": r'{"a": "\ud83d\ude00"}',
    "unicode as it is": '{"клю\u0447": "日本\u00a0語 \U0001f600"}',
    "key with an escape": r'{"a\u0062": 1, "": 2, "with space": 3}',
    "duplicate keys": '{"a": 1, "b": 2, "a": 3}',
    "no outer braces": "train_batch_size: 8\nfp16: {\n  enabled: true\n}\n",
    "no outer braces, quoted keys and commas": '"a": 1,\n"b": "x",\n',
    "no outer braces, on one line": "a: 1, b: true, c: null",
    "unquoted keys": '{stage: 3, overlap_comm: true, a-b.c$d: "x", 1: 2, "q": 4}',
    "unquoted keys with odd signs": "{\n  a\"b: 1\n  c#d: 2\n  e//f: 3\n  g=h: 4\n}",
    "white space around the colon": '{a : 1, b\t:\t2, c\n:\n3, "d" : 4}',
    "quoteless text": "{\n  device: cpu\n  path: /data/nvme  \n  name: a b, c\n}",
    "quoteless text keeps comments and brackets": "{\n  a: x # y\n  b: x // y\n  c: x } ]\n  d: \"no\"\n}",
    "quoteless text with quotes and colons inside": "a: it's \"so\": http://x/y\nb: -x\nc: 1 2 3\nd: true story\n",
    "quoteless text of other languages": "a: 012\nb: .5\nc: +1\nd: 0x1F\ne: 1_000\nf: 5.\ng: 1e\n",
    "quoteless text with a tab": "a: x\ty\t\n",
    "numbers before comments": "stage: 3 # x\nlr: 1e-5 // y\nn: 7/* z */\nb: [ 1 # one\n  2 # two\n]\n",
    "booleans before comments": "a: true # x\nb: false // y\nc: null /* z */\n",
    "a number with a stop, or text": "a: 3, b: 4\nc: 3 x, d: 4\ne: 3 /x\n",
    "list of quoteless texts": "{\n  a: [\n    one\n    two, three\n    4\n    five\n  ]\n}",
    "list with commas and numbers": "betas: [0.9, 0.999]\nx: [true, null,]\n",
    "value on the next line": "a:\n  1\nb:\n  word\ne:\n  \"x: y\"\nf:\n  'x: y'\nc: # comment\n  [\n  ]\nd:\n{\n}\n",
    "single quotes": "{'a': 'x', b: 'it\\'s \"so\"', \"c\": 'y'}",
    "multi-line text": "{\n  a: '''\n     one\n       two\n     three\n     '''\n  b: 1\n}",
    "multi-line text on one line": "{\n  a: ''' x 'y' ''z '''\n  b: ''''''\n  \"c\": '''q''', d: 1\n}",
    "multi-line text with little indent": "{\n      a: '''\n  one\n\n            two\n      '''\n}",
    "multi-line text with CRLF": "{\r\n  a: '''\r\n     one\r\n     two\r\n     '''\r\n}\r\n",
    "multi-line text that ends in line ends": "{\n  a: '''x\n\n'''\n}",
    "nested without commas": "{\n  zero_optimization: {\n    stage: 3\n    offload_param: {device: \"cpu\", pin_memory: true}\n"
    "  }\n  steps_per_print: 10\n}",
    "a DeepSpeed config": '{\n  // the usual file\n  "train_batch_size": "auto",\n  "gradient_clipping": 1.0,\n'
    '  "zero_optimization": {\n    "stage": 3,\n    "reduce_bucket_size": 5e8, # elements\n'
    '    "sub_group_size": 1e9,\n    "offload_optimizer": {"device": "cpu", "pin_memory": true},\n  },\n'
    '  "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8}}\n}\n',
}

# Errors here and there.
BOTH_REFUSE = {
    "never closed": '{"a": 1',
    "never closed list": '{"a": [1, 2',
    "never closed text": '{"a": "x\n}',
    "tab in quotes": '{"a": "x\ty"}',
    "unknown escape": r'{"a": "\d"}',
    "half a unicode escape": r'{"a": "\u12"}',
    "no colon": '{"a" 1}',
    "no value": '{"a": }',
    "space in a key": "{a b: 1}",
    "two commas": '{"a": [1,,2]}',
    "comma first": '{, "a": 1}',
    "stray bracket": '{"a": 1}}',
    "more after the end": '{"a": 1} x',
    "wrong bracket": '{"a": [1}\n',
    "bracket in quoteless text": "{device: cpu}",
    "number out of range": '{"a": 1e999}',
    "comment never closed": '{"a": 1} /* x',
    "unclosed multi-line text": "{\n  a: '''x\n}",
}

# Read there, refused here: each is a slip of the hand. See the header of src/read/mod.rs.
STRICTER = {
    "a word where JSON demands a value": '{\n"stage": treu,\n"b": 1\n}',
    "Python's True": "a: True\n",
    "Python's None before a comma": "a: None, b\n",
    "NaN": "a: NaN\n",
    "minus Infinity": "a: -Infinity # x\n",
    "members without a comma": '{"a": "x" "b": "y"}',
    "elements without a comma": '{"a": ["x" "y"]}',
    "objects without a comma": '{"a": {} "b": {}}',
    "a key without a value": "stage:\noverlap_comm: true\n",
    "a lone surrogate": r'{"a": "\ud83d"}',
    "typographic quotes": "{“a”: 1}",
    "a no-break space in a key": "a\u00a0: 1",
    "a control character": "a: x\u0001y",
    "an empty file": " \n",
    "only a comment": "# nothing\n",
    "a list": "[1]",
    "a number": "3",
    "a text": '"x"',
}


def read(text):
    try:
        return True, hjson.loads(text, object_pairs_hook=dict)
    except (ValueError, IndexError, OverflowError):
        return False, None


def main():
    golden = {"hjson": hjson.__version__, "same": [], "both_refuse": [], "stricter": []}
    for group, texts, accepted in (
        ("same", SAME, True),
        ("both_refuse", BOTH_REFUSE, False),
        ("stricter", STRICTER, True),
    ):
        for about, text in texts.items():
            was_accepted, value = read(text)
            assert was_accepted == accepted, (group, about, value)
            case = {"about": about, "text": text}
            if group == "same":
                case["value"] = value
            elif group == "stricter":
                # For the reader of the file only, and as text: a lone surrogate is no JSON value to everyone.
                case["read_there_as"] = json.dumps(value)
            golden[group].append(case)
    path = pathlib.Path(__file__).with_name("golden.json")
    path.write_text(json.dumps(golden, indent=1) + "\n", encoding="ascii")


main()
