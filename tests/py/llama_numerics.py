"""Logits of a real llama.cpp at every position of given windows, for `cargo xtask bench numerics`.

Arguments: model file, windows (JSON: text, windows of token ids, threads), file for the logits (f32, row per token).
Prints what was measured as JSON. llama.cpp's own settings are kept (16-bit KV store, its own choice of attention kernel).
"""

import json
import platform
import sys

import llama_cpp
import numpy


def flags():
    """Instruction sets that this build of llama.cpp uses on this machine."""
    words = llama_cpp.llama_print_system_info().decode().replace("CPU :", "|").split("|")
    return sorted(word.split("=")[0].strip() for word in words if word.strip().endswith("= 1"))


def cpu():
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main():
    model, asked, answer = sys.argv[1:]
    with open(asked, encoding="utf-8") as file:
        task = json.load(file)
    width = max(map(len, task["windows"]))
    llama = llama_cpp.Llama(
        model, n_ctx=width, n_batch=width, n_threads=task["threads"], n_threads_batch=task["threads"], logits_all=True, verbose=False
    )
    ids = llama.tokenize(task["text"].encode(), add_bos=False, special=False)
    flat = [token for window in task["windows"] for token in window]
    if ids[: len(flat)] != flat:
        at = next(i for i, (left, right) in enumerate(zip(ids, flat)) if left != right)
        sys.exit(f"llama.cpp's tokenizer differs at token {at}: {ids[at]}, not {flat[at]}")
    with open(answer, "wb") as file:
        for window in task["windows"]:
            llama.reset()
            llama.eval(window)
            file.write(numpy.ascontiguousarray(llama.scores[: len(window)], dtype="<f4").tobytes())
    print(
        json.dumps(
            {
                "name": "llama.cpp",
                "package": f"llama-cpp-python {llama_cpp.__version__}, its own llama.cpp, built from source with GGML_NATIVE=ON and no AMX",
                "settings": f"defaults, {task['threads']} threads, each window one batch",
                "cpu": cpu(),
                "instruction_sets": flags(),
            }
        )
    )


if __name__ == "__main__":
    main()
