"""A Python gRPC client against a running door, with stubs made from the .proto files. Usage: grpc_client.py ADDRESS MODEL PROTO_DIR."""

import pathlib
import sys
import tempfile

import grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_tools import protoc

address, model, protos = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
out = tempfile.mkdtemp()
files = [str(path.relative_to(protos)) for path in protos.rglob("*.proto")]
if protoc.main(["protoc", f"-I{protos}", f"--python_out={out}", f"--grpc_python_out={out}", *files]) != 0:
    sys.exit("FAILED: the .proto files do not compile")
sys.path.insert(0, out)
from kvasir.inference.v1 import inference_pb2 as pb  # noqa: E402
from kvasir.inference.v1 import inference_pb2_grpc as stubs  # noqa: E402

channel = grpc.insecure_channel(address)
inference = stubs.InferenceStub(channel)


def check(condition, message):
    if not condition:
        sys.exit(f"FAILED: {message}")


def chat(**parameters):
    extensions = pb.Extensions(report=True)
    return pb.ChatRequest(
        model=model,
        messages=[pb.Message(role="user", content="List three colours, separated by commas.")],
        parameters=pb.Parameters(**parameters),
        kvasir=extensions,
    )


def collect(stream):
    events = list(stream)
    kinds = [event.WhichOneof("event") for event in events]
    check(kinds[0] == "started" and kinds[-1] == "finished" and kinds.count("finished") == 1, f"order: {kinds}")
    texts = {}
    for event in events:
        if event.WhichOneof("event") == "delta":
            texts[event.delta.choice] = texts.get(event.delta.choice, "") + event.delta.text
    return texts, events[-1].finished


def expect(code, call, needle):
    try:
        call()
    except grpc.RpcError as error:
        check(error.code() == code and needle in error.details(), f"{error.code()}: {error.details()} (wanted {code}, {needle!r})")
        return
    sys.exit(f"FAILED: no {code} for {needle}")


def test_reflection():
    services = ProtoReflectionDescriptorDatabase(channel).get_services()
    check("kvasir.inference.v1.Inference" in services, f"services: {services}")


def test_health():
    from grpc_reflection.v1alpha import reflection_pb2  # noqa: F401

    check("grpc.health.v1.Health" in ProtoReflectionDescriptorDatabase(channel).get_services(), "health is served")


def test_models_and_tokenize():
    models = [entry.id for entry in inference.Models(pb.ModelsRequest()).models]
    check(models == [model], f"models: {models}")
    reply = inference.Tokenize(pb.TokenizeRequest(model=model, text="hello world"))
    check(reply.count == len(reply.tokens) > 0, f"tokenize: {reply}")


def test_chat_repeats_and_hits():
    # The router may spread over its two workers; of three equal prompts one has to come to a worker for the second time.
    answers = [collect(inference.Chat(chat(temperature=0, max_tokens=16))) for _ in range(3)]
    first = answers[0][0]
    check(first[0] and all(text == first for text, _ in answers), f"{answers}")
    check(any(finished.usage.cached_tokens > 0 for _, finished in answers), f"{answers}")
    for _, finished in answers:
        check(sum(hit.tokens for hit in finished.report.hits) == finished.usage.cached_tokens, f"{finished}")


def test_choices():
    texts, finished = collect(inference.Chat(chat(temperature=1.0, n=3, seed=7, max_tokens=8)))
    check(len(finished.reasons) == 3 and set(texts) <= {0, 1, 2}, f"{texts}")


def test_errors():
    bad = chat(temperature=9.0)
    expect(grpc.StatusCode.INVALID_ARGUMENT, lambda: list(inference.Chat(bad)), "temperature")
    other = chat()
    other.model = "nobody"
    expect(grpc.StatusCode.NOT_FOUND, lambda: list(inference.Chat(other)), "nobody")


def test_cancel():
    stream = inference.Chat(chat(temperature=0, max_tokens=2000, ignore_eos=True))
    for seen, _ in enumerate(stream):
        if seen == 3:
            stream.cancel()
            break
    collect(inference.Chat(chat(temperature=0, max_tokens=2)))


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print(f"ok {name}")
