"""Writes golden token ids of a GGUF file's tokenizer, by two implementations that share no code with Kvasir.

    python make_ids.py MODEL.gguf OUT.json        needs the packages `regex` and `tokenizers`

First implementation: byte-level BPE in plain Python below, with the `regex` package for Unicode classes. Second: the Python package
`tokenizers` with a pipeline assembled here. Both must agree, or nothing is written. `plain` encodes with the spellings of control tokens as
text, `special` with them as tokens.
"""

import json
import struct
import sys
import unicodedata

import regex

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\r\n\r\n",
    "\t\ttabs\tand  blanks   ",
    " leading and trailing ",
    "a\n\n\nb \n c",
    "Hello, world!",
    "hello world and the user",
    "I'm you're he'll WE'VE THEY'D it's DON'T 'S 'Tis",
    "0 1 12 123 1234567890 3.14159 1,000,000 ½ Ⅷ ٣ ४२",
    "你好，世界。今天天氣很好。",
    "日本語のテキスト、カタカナ",
    "안녕하세요 세계",
    "emoji 🙂 👩‍👩‍👧‍👦 🇩🇪 ☃️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "naïve café — “quotes” … ß Æ",
    "e\u0301 vs \u00e9, A\u030a vs \u00c5 vs \u212b, \u1e9b\u0323",
    "Ελληνικά Русский עברית العربية ไทย हिन्दी",
    "\u00a0\u2003\u3000wide\u200bspaces\ufeff",
    "\x00\x01\x07\x1b[0m\x7f control bytes",
    "fn main() {\n    println!(\"{:?}\", x);\n}\n",
    "https://example.org/a?b=c&d=%20#e",
    "!!!???...---===>>><<<|||",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "CamelCaseIdentifier snake_case_identifier",
    "\ufdd0 noncharacter \U0010ffff",
]


def read(path):
    f = open(path, "rb")
    number = lambda fmt: struct.unpack(fmt, f.read(struct.calcsize(fmt)))[0]
    text = lambda: f.read(number("<Q")).decode("utf-8")
    formats = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

    def value(ty):
        if ty == 8:
            return text()
        if ty == 9:
            element, count = number("<I"), number("<Q")
            return [value(element) for _ in range(count)]
        return number(formats[ty])

    assert f.read(4) == b"GGUF"
    number("<I"), number("<Q")
    return {text(): value(number("<I")) for _ in range(number("<Q"))}


def byte_symbols():
    plain = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    symbols, extra = {}, 0
    for byte in range(256):
        symbols[byte] = chr(byte if byte in plain else 256 + extra)
        extra += byte not in plain
    return symbols


class PlainBpe:
    def __init__(self, keys):
        tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
        self.pre = keys["tokenizer.ggml.pre"]
        self.ids = {token: id for id, (token, kind) in enumerate(zip(tokens, kinds)) if kind != 5}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(keys["tokenizer.ggml.merges"])}
        self.control = [token for token, kind in zip(tokens, kinds) if kind == 3]
        self.user = [token for token, kind in zip(tokens, kinds) if kind == 4]
        self.symbols = byte_symbols()

    def encode(self, text, special):
        added = sorted(self.user + (self.control if special else []), key=len, reverse=True)
        pieces = regex.split("(" + "|".join(map(regex.escape, added)) + ")", text) if added else [text]
        return [id for piece in pieces for id in ([self.ids[piece]] if piece in added else self.piece(piece))]

    def piece(self, text):
        if self.pre == "qwen2":
            words = regex.findall(QWEN2, unicodedata.normalize("NFC", text))
        else:
            runs = regex.findall(r"\p{N}|[^\p{N}]+", text)
            words = [word for run in runs for word in regex.findall(GPT2, run)]
        return [id for word in words for id in self.word(word)]

    def word(self, word):
        # A byte whose symbol the vocabulary lacks is dropped before merging, as there is no unknown token.
        parts = [self.symbols[byte] for byte in word.encode("utf-8", "surrogatepass")]
        parts = [part for part in parts if part in self.ids]
        while len(parts) > 1:
            rank, at = min((self.ranks.get(pair, 1 << 60), at) for at, pair in enumerate(zip(parts, parts[1:])))
            if rank == 1 << 60:
                break
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        return [self.ids[part] for part in parts]


def library(keys):
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    bpe = PlainBpe(keys)
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=bpe.ids, merges=merges))
    byte_level = pre_tokenizers.ByteLevel
    if bpe.pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level(add_prefix_space=False, use_regex=False)])
    else:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level(add_prefix_space=False, use_regex=True)])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in bpe.control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in bpe.user])
    return tokenizer


def main(model, out):
    keys = read(model)
    bpe, tokenizer = PlainBpe(keys), library(keys)
    texts = list(TEXTS)
    for token in (bpe.control + bpe.user)[:12]:
        texts += [token, f"x{token}y", f"  {token}  \n", token[:-1], token + token]
    cases = []
    for text in texts:
        case = {"text": text}
        for mode, special in (("plain", False), ("special", True)):
            tokenizer.encode_special_tokens = not special
            case[mode] = bpe.encode(text, special)
            other = tokenizer.encode(text, add_special_tokens=False).ids
            assert case[mode] == other, (text, mode, case[mode], other)
        cases.append(case)
    with open(out, "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases) + "\n]\n")
    print(f"{len(cases)} cases from {model}")


if __name__ == "__main__":
    main(*sys.argv[1:])
