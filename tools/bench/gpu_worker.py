"""transformers' beam search on a GPU, random weights, measured for `tools.bench gpu`. Not for people; see `worker`."""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    """Reads a JSON object from the command line, writes one."""
    spec = json.loads(sys.argv[1])
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(**spec["config"])
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # no end-of-sequence token
    ids = torch.randint(5, config.vocab_size, (1, spec["prompt"]), device="cuda")
    times: list[float] = []

    def clock(_, scores):  # called once per loop, after the forward pass
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        return scores

    best, growth = float("inf"), 0
    for _ in range(3):
        times.clear()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=spec["new_tokens"],
                num_beams=spec["beams"],
                do_sample=False,
                early_stopping=False,
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=[clock],
            )
        best = min(best, (times[-1] - times[0]) / (len(times) - 1))
        growth = torch.cuda.max_memory_allocated() - before
    print(json.dumps({"seconds": best, "growth": growth, "version": transformers.__version__}))


main()
