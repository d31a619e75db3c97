"""The OpenAI Python SDK against a running door. Usage: openai_sdk.py BASE_URL MODEL. Exits non-zero at the first broken promise."""

import sys
import time

import openai

base, model = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=base + "/v1", api_key="unused", max_retries=0, timeout=120)
USER = [{"role": "user", "content": "List three colours, separated by commas."}]


def check(condition, message):
    if not condition:
        sys.exit(f"FAILED: {message}")


def test_models():
    names = [entry.id for entry in client.models.list()]
    check(names == [model], f"models: {names}")
    check(client.models.retrieve(model).id == model, "retrieve")


def test_whole_and_stream_agree():
    whole = client.chat.completions.create(model=model, messages=USER, temperature=0, max_tokens=24)
    choice = whole.choices[0]
    check(choice.message.role == "assistant" and choice.message.content, f"reply: {whole}")
    check(choice.finish_reason in ("stop", "length"), f"finish: {choice.finish_reason}")
    usage = whole.usage
    check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, f"usage: {usage}")
    check(usage.prompt_tokens_details.cached_tokens is not None, "cached_tokens is always filled")
    text, finishes, roles, last_usage = "", [], [], None
    stream = client.chat.completions.create(
        model=model, messages=USER, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.usage:
            last_usage = chunk.usage
        for part in chunk.choices:
            text += part.delta.content or ""
            if part.delta.role:
                roles.append(part.delta.role)
            if part.finish_reason:
                finishes.append(part.finish_reason)
    check(text == choice.message.content, f"stream {text!r} != whole {choice.message.content!r}")
    check(finishes == [choice.finish_reason] and roles == ["assistant"], f"{finishes} {roles}")
    check(last_usage.completion_tokens == usage.completion_tokens, f"{last_usage} != {usage}")


def test_equal_prompts_hit_the_cache():
    # The router may spread over its two workers; of three equal prompts one has to come to a worker for the second time.
    replies = [client.chat.completions.create(model=model, messages=USER, temperature=0, max_tokens=4) for _ in range(3)]
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in replies]
    check(any(tokens > 0 for tokens in cached), f"an equal prompt hits the cache: {cached}")
    check(len({reply.choices[0].message.content for reply in replies}) == 1, "and changes no character")


def test_choices():
    reply = client.chat.completions.create(model=model, messages=USER, temperature=1.0, n=3, seed=7, max_tokens=12)
    check([choice.index for choice in reply.choices] == [0, 1, 2], f"{reply.choices}")
    again = client.chat.completions.create(model=model, messages=USER, temperature=1.0, n=3, seed=7, max_tokens=12)
    check([c.message.content for c in reply.choices] == [c.message.content for c in again.choices], "a seed repeats")
    per_index = {0: [], 1: [], 2: []}
    for chunk in client.chat.completions.create(model=model, messages=USER, temperature=1.0, n=3, seed=7, max_tokens=12, stream=True):
        for part in chunk.choices:
            check(not per_index[part.index] or per_index[part.index][-1] is None, "nothing after a finish reason")
            per_index[part.index].append(part.finish_reason)
    for index, reasons in per_index.items():
        check(sum(reason is not None for reason in reasons) == 1, f"choice {index}: {reasons}")


def test_stop_and_logprobs():
    whole = client.chat.completions.create(model=model, messages=USER, temperature=0, max_tokens=24)
    text = whole.choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = client.chat.completions.create(model=model, messages=USER, temperature=0, max_tokens=24, stop=[stop])
    check(cut.choices[0].message.content == text[: text.index(stop)], f"stop {stop!r}: {cut.choices[0].message.content!r}")
    check(cut.choices[0].finish_reason == "stop", "finish of a stop")
    logs = client.chat.completions.create(model=model, messages=USER, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3)
    content = logs.choices[0].logprobs.content
    check(len(content) == logs.usage.completion_tokens, f"{len(content)} entries for {logs.usage.completion_tokens} tokens")
    for entry in content:
        check(entry.logprob <= 0 and len(entry.top_logprobs) == 3, f"{entry}")
        check(entry.top_logprobs[0].logprob == entry.logprob, "greedy takes the most likely token")


def test_completions_and_echo():
    reply = client.completions.create(model=model, prompt="The capital of France is", temperature=0, max_tokens=6, echo=True, logprobs=1)
    choice = reply.choices[0]
    check(choice.text.startswith("The capital of France is"), f"echo: {choice.text!r}")
    check(choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.tokens) == reply.usage.total_tokens, "echo logprobs")


def test_json_schema():
    schema = {"type": "object", "properties": {"colour": {"type": "string", "maxLength": 12}}, "required": ["colour"], "additionalProperties": False}
    reply = client.chat.completions.create(
        model=model, messages=USER, temperature=0, max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": True}},
    )
    import json

    if reply.choices[0].finish_reason == "stop":
        check(set(json.loads(reply.choices[0].message.content)) == {"colour"}, reply.choices[0].message.content)


def expect(error, call, needle):
    try:
        call()
    except error as caught:
        check(needle in str(caught), f"{needle!r} not in {caught}")
        return
    sys.exit(f"FAILED: no {error.__name__} for {needle}")


def test_errors():
    chat = client.chat.completions.create
    expect(openai.NotFoundError, lambda: chat(model="nobody", messages=USER), "nobody")
    expect(openai.BadRequestError, lambda: chat(model=model, messages=USER, temperature=9), "temperature")
    expect(openai.BadRequestError, lambda: chat(model=model, messages=USER, stop=["", "x"]), "stop")
    expect(openai.BadRequestError, lambda: chat(model=model, messages=USER, logit_bias={"999999": 5}), "logit_bias")
    expect(openai.BadRequestError, lambda: chat(model=model, messages=[]), "messages")
    expect(openai.BadRequestError, lambda: chat(model=model, messages=[{"role": "user", "content": "x " * 20000}]), "context")
    expect(openai.BadRequestError, lambda: chat(model=model, messages=USER, extra_body={"kvasir": {"reprot": True}}), "reprot")


def test_cancel():
    stream = client.chat.completions.create(model=model, messages=USER, temperature=0, max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    for seen, _ in enumerate(stream):
        if seen == 3:
            stream.close()
            break
    began = time.monotonic()
    client.chat.completions.create(model=model, messages=USER, temperature=0, max_tokens=2)
    check(time.monotonic() - began < 60, "a new request starts after a cancel")


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print(f"ok {name}")
