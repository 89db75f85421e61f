"""One engine in a process of its own, measured from outside by `tools.bench peers`; not a command for users.

Run by path with `python -P`, away from the project: the project's folder `kernels` has the name of a package that
transformers looks for. Nothing of the project is imported unless the engine is ours. Reads a JSON object from the
command line (see `peers.Worker`), loads, reports that, then answers each line of JSON on stdin with one on stdout.
"""

import ctypes
import json
import os
import platform
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


class Coppice:
    """This project's engine, trie beam search."""

    def __init__(self, spec: dict[str, Any]):
        sys.path.insert(0, spec["root"])
        import torch

        from engine import Engine, Request
        from engine.version import __version__
        from models.threads import MACHINE
        from search import Trie
        from tools.bench.measure import weight_bytes

        kind = spec["dtype"]
        dtype, quant = ("bfloat16", kind) if kind.startswith("int") else (kind, "none")
        dtype, quant = spec.get("compute", dtype), spec.get("quant", quant)
        self.engine = Engine.load(spec["folder"], dtype=dtype, quant=quant, device=spec.get("device", "cpu"),
                                  threads=spec["threads"],
                                  activations=spec.get("activations", "auto"))  # fmt: skip
        self.request, self.search = Request, Trie(beams=spec["beams"])
        self.versions = {"coppice": __version__, "torch": str(torch.__version__)}
        touch(torch, self.engine.runner.model)
        self.facts = {"weight_bytes": weight_bytes(self.engine.runner.model)}
        MACHINE.ignore_others()

    def generate(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        request = self.request(prompt, self.search, max_new_tokens=new_tokens, ignore_eos=True)
        ends: list[float] = []  # of passes
        [(_, result)] = self.engine.serve([request], on_step=lambda _: ends.append(time.perf_counter()))
        if isinstance(result, Exception):
            raise result
        s = result.stats
        steps = [b - a for a, b in pairwise(ends)][-(s["steps"] - 1) :]
        times = {"prefill_seconds": s["prefill_seconds"], "decode_seconds": s["decode_seconds"], "steps": s["steps"]}
        kv = {k: s[k] for k in ("kv_bytes_peak", "kv_bytes_per_token", "live_nodes_peak")} | {"step_seconds": steps}
        return {"tokens": result.outputs[0].token_ids, "score": result.outputs[0].score, **times, **kv}


class Transformers:
    """`generate` of Hugging Face transformers with its default settings."""

    def __init__(self, spec: dict[str, Any]):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(spec["threads"])
        dtype = getattr(torch, spec["dtype"])
        self.device = spec.get("device", "cpu")
        if "config" in spec:  # random weights, made on the device
            with torch.device(self.device):
                torch.set_default_dtype(dtype)
                self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**spec["config"])).eval()
        else:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(spec["folder"], dtype=dtype).eval()
            self.model.to(self.device)
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # no end-of-sequence token
        self.torch, self.beams = torch, spec["beams"]
        self.versions = {"transformers": transformers.__version__, "torch": str(torch.__version__)}
        touch(torch, self.model)

    def generate(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        times: list[float] = []

        def clock(_: Any, scores: Any) -> Any:  # called once per loop, after the forward pass
            if not times and self.device == "cuda":
                self.torch.cuda.synchronize()
            times.append(time.perf_counter())
            return scores

        with self.torch.inference_mode():
            ids = self.torch.tensor([prompt], device=self.device)
            mask = self.torch.ones_like(ids)
            begin = time.perf_counter()
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                num_beams=self.beams,
                do_sample=False,
                early_stopping=False,
                length_penalty=1.0,
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=[clock],
            )
            end = time.perf_counter()
        return {
            "tokens": out[0, len(prompt) :].tolist(),
            "prefill_seconds": times[0] - begin,
            "decode_seconds": end - times[0],
            "steps": len(times),
        }


class CTranslate2:
    """CTranslate2 on the checkpoint converted to its format; end-of-sequence is suppressed, as it cannot be ignored."""

    def __init__(self, spec: dict[str, Any]):
        import ctranslate2

        folder = Path(spec["scratch"]) / f"ctranslate2-{spec['dtype']}"
        if not folder.exists():
            convert = "import sys; sys.modules['kernels'] = None; from ctranslate2.converters import transformers as t"
            flags = ["--model", spec["folder"], "--output_dir", str(folder), "--quantization", spec["dtype"]]
            subprocess.run([sys.executable, "-P", "-c", f"{convert}; t.main()", *flags], check=True, stdout=sys.stderr)
        self.vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        self.generator = ctranslate2.Generator(
            str(folder),
            device=spec.get("device", "cpu"),
            compute_type=spec["dtype"],
            inter_threads=1,
            intra_threads=spec["threads"],
        )
        self.beams = spec["beams"]
        self.versions = {"ctranslate2": ctranslate2.__version__}

    def generate(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        def run(length: int) -> tuple[list[int], float]:
            begin = time.perf_counter()
            [result] = self.generator.generate_batch(
                [[self.vocabulary[i] for i in prompt]],
                beam_size=self.beams,
                length_penalty=1,
                max_length=length,
                min_length=length,
                include_prompt_in_result=False,
            )
            return result.sequences_ids[0], time.perf_counter() - begin

        _, prefill = run(1)  # it reports no times of its own
        tokens, total = run(new_tokens)
        return {"tokens": tokens, "seconds": total, "prefill_seconds": prefill, "decode_seconds": total - prefill,
                "steps": None}  # fmt: skip


class OpenVINO:
    """OpenVINO GenAI's pipeline with paged attention, on the checkpoint exported by optimum-intel.

    float32 rows compute in float32; bfloat16 rows are the same export at the precision that OpenVINO chooses.
    """

    def __init__(self, spec: dict[str, Any]):
        import numpy
        import openvino
        import openvino_genai

        kind = spec["dtype"]
        weights = "float32" if kind == "bfloat16" else kind
        folder = Path(spec["scratch"]) / f"openvino-{weights}"
        if not (folder / "done").exists():
            export = "import sys; sys.modules['kernels'] = None; from optimum.commands.optimum_cli import main; main()"
            flags = ["--model", spec["folder"], "--task", "text-generation-with-past"]
            flags += ["--weight-format", "fp32" if weights == "float32" else weights, str(folder)]
            command = [sys.executable, "-P", "-c", export, "export", "openvino", *flags]
            subprocess.run(command, check=True, stdout=sys.stderr)
            (folder / "done").touch()
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # the next run has the same prompt
        scheduler.max_num_batched_tokens = 1 << 20  # a prompt in one pass: the pipeline's choice for a single request
        options = {"INFERENCE_NUM_THREADS": spec["threads"]}
        if kind == "float32":
            options |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        self.pipeline = openvino_genai.LLMPipeline(str(folder), "CPU", scheduler_config=scheduler, **options)
        self.genai, self.openvino, self.numpy, self.beams = openvino_genai, openvino, numpy, spec["beams"]
        self.versions = {"openvino_genai": openvino_genai.__version__}

    def generate(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        def run(length: int) -> tuple[list[int], float]:
            config = self.genai.GenerationConfig(max_new_tokens=length, min_new_tokens=length, ignore_eos=True)
            if self.beams > 1:
                config.num_beams, config.length_penalty = self.beams, 1.0
                config.stop_criteria = self.genai.StopCriteria.NEVER
            begin = time.perf_counter()
            result = self.pipeline.generate(self.openvino.Tensor(self.numpy.array([prompt], "int64")), config)
            return list(result.tokens[0]), time.perf_counter() - begin

        _, prefill = run(1)
        tokens, total = run(new_tokens)
        return {"tokens": tokens, "seconds": total, "prefill_seconds": prefill, "decode_seconds": total - prefill,
                "steps": None}  # fmt: skip


class LlamaCpp:
    """llama-batched-bench: sequences that share a prompt and go on with random tokens, without a search."""

    TRIES = 5

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.facts = spec, {"measured": False}  # its memory is that of another process
        shown = subprocess.run([spec["program"], "--version"], check=True, capture_output=True, text=True)
        lines = (shown.stdout + shown.stderr).splitlines()
        version = next((line for line in lines if line.startswith("version: ")), "version: ?")
        self.versions = {"llama.cpp": version.removeprefix("version: ")}

    def generate(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        beams, threads = self.spec["beams"], str(self.spec["threads"])
        context = len(prompt) + beams * new_tokens
        command = [
            self.spec["program"], "-m", self.spec["folder"], "-c", str(-(-context // 256) * 256), "-npp",
            str(len(prompt)), "-ntg", str(new_tokens), "-npl", str(beams), "-pps", "-kvu", "-fa", "on", "-t", threads,
            "-tb", threads, "--output-format", "jsonl",
        ]  # fmt: skip
        for _ in range(self.TRIES):  # it may end before its thread for output has written the line
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
            for found in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
                decode = found["t_tg"] * (new_tokens - 1) / new_tokens  # the prompt gives the first token
                return {"tokens": None, "seconds": found["t_pp"] + decode, "prefill_seconds": found["t_pp"],
                        "decode_seconds": decode, "steps": None}  # fmt: skip
        raise RuntimeError(f"{Path(command[0]).name} printed no figures")


ENGINES = {"coppice": Coppice, "transformers": Transformers, "ctranslate2": CTranslate2, "openvino": OpenVINO,
           "llama.cpp": LlamaCpp}  # fmt: skip


def touch(torch: Any, model: Any) -> None:
    """Read every weight once: pages that a loader maps lazily belong to the loaded model, not to the growth."""
    left = [vars(module) for module in model.modules()]
    while left:
        found = left.pop()
        if isinstance(found, torch.Tensor) and found.layout == torch.strided:
            found.sum()
        elif isinstance(found, dict):
            left += found.values()
        elif isinstance(found, (list, tuple)):
            left += found
        elif type(found).__module__.startswith("kernels."):  # packed matrices
            left += getattr(found, "__dict__", {}).values()


def trim() -> None:
    """Give freed heap back to the system, so that what loading left behind does not hide growth (glibc only)."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # so that libraries cannot print into the answers

    def send(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=channel, flush=True)

    spec = json.loads(sys.argv[1])
    if spec["engine"] != "coppice":
        sys.modules["kernels"] = None  # type: ignore[assignment]  # ours, installed beside it, is not what it looks for
    begin = time.perf_counter()
    try:
        engine = ENGINES[spec["engine"]](spec)
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "ctranslate2", "torch", "openvino", "openvino_genai"):
            raise
        send({"absent": f"{error.name} is not installed"})
        return
    trim()
    facts = getattr(engine, "facts", {})
    cuda = None if spec.get("device") != "cuda" or isinstance(engine, CTranslate2) else sys.modules["torch"].cuda
    if cuda:
        facts = facts | {"device_bytes": cuda.memory_allocated()}
    send({"load_seconds": time.perf_counter() - begin, "versions": engine.versions, **facts})
    for line in sys.stdin:
        job = json.loads(line)
        before = cuda.memory_allocated() if cuda else 0
        if cuda:
            cuda.reset_peak_memory_stats()
        begin, used = time.perf_counter(), time.process_time()
        answer = engine.generate(job["prompt"], job["new_tokens"])
        answer = {"seconds": time.perf_counter() - begin, **answer}
        if facts.get("measured", True):
            answer["cpu_seconds"] = time.process_time() - used
        if cuda:  # our pages were allocated with the pool, before the run
            answer["device_growth"] = cuda.max_memory_allocated() - before + answer.get("kv_bytes_peak", 0)
        send(answer)


if __name__ == "__main__":
    main()
