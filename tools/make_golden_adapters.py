"""Golden adapters: random LoRA adapters of peft over golden checkpoints, and the logits that peft computes.

Run as tools/make_golden.py, with an environment that has transformers and peft:

    cd / && OMP_NUM_THREADS=1 python -P REPO/tools/make_golden_adapters.py [--out DIR]

Writes `tests/golden/adapters/`: a folder for each adapter as peft saves it (every other one in bfloat16; all values are
exactly representable in it), `golden.json` with its model and token ids, and `golden.safetensors`, whose tensors
`logits.<adapter>` are the last rows of a float32 pass.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
EVERY, TOKENS, ROWS = "all-linear", 12, 4
PATTERNS = {
    "rank_pattern": {"q_proj": 2, "layers.0.mlp.up_proj": 6, "^model.layers.1.self_attn.v_proj": 3},
    "alpha_pattern": {"down_proj": 32, "layers.1.mlp.up_proj": 1},
}
GPT2 = {"fan_in_fan_out": True}
ADAPTERS = {  # name -> model, rank, alpha, modules, further options
    "llama_all": ("llama/gqa", 8, 16, EVERY, {}),
    "llama_some": ("llama/gqa", 4, 4, ["q_proj", "v_proj"], {}),
    "llama_patterns": ("llama/gqa", 4, 8, EVERY, PATTERNS),
    "llama_biases": ("llama/both_biases", 16, 16, EVERY, {}),
    "qwen2_rslora": ("qwen2/plain", 9, 5, EVERY, {"use_rslora": True}),
    "gpt2_all": ("gpt2/plain", 5, 10, ["c_attn", "c_proj", "c_fc"], GPT2),
    "gpt2_fused": ("gpt2/plain", 16, 16, ["c_attn"], GPT2),
    "phi3_fused": ("phi3/plain", 8, 8, EVERY, {}),
    "opt_all": ("opt/plain", 4, 8, ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"], {}),
    "gemma3_mlp": ("gemma/three", 8, 16, ["gate_proj", "up_proj", "down_proj"], {}),
    "phi_layer": ("phi/plain", 4, 4, ["dense", "fc1"], {"layers_to_transform": [1]}),
    "lfm2_conv": ("lfm2/plain", 4, 8, ["in_proj", "out_proj", "q_proj", "w1"], {}),
    "llama_whole": ("llama/gqa", 4, 8, ["q_proj"], {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "llama_ends": ("llama/gqa", 4, 8, ["embed_tokens", "lm_head", "up_proj"], {}),
    "tied_head": ("qwen2/tied", 4, 8, ["lm_head", "v_proj"], {}),
    "tied_whole": ("qwen2/tied", 4, 8, ["o_proj"], {"modules_to_save": ["lm_head"]}),
    "gemma3_ends": ("gemma/three", 4, 8, ["embed_tokens", "q_proj"], {}),
    "gpt2_ends": ("gpt2/plain", 4, 8, ["wte", "lm_head"], {}),
    "opt_ends": ("opt/plain", 4, 8, ["embed_tokens", "fc1"], {}),
    "qwen3_5_gates": ("qwen3_5/plain", 4, 8, ["q_proj", "v_proj"], {}),
    "phi_whole": ("phi/plain", 4, 8, ["fc1"], {"modules_to_save": ["lm_head"]}),
    "phi_ends": ("phi/plain", 4, 8, ["lm_head", "fc1"], {}),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=GOLDEN / "adapters", metavar="DIR")
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    asked, logits = {}, {}
    for i, (name, (model, rank, alpha, modules, more)) in enumerate(ADAPTERS.items()):
        g = torch.Generator().manual_seed(i)
        base = AutoModelForCausalLM.from_pretrained(GOLDEN / model, dtype=torch.float32, attn_implementation="eager")
        options = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, target_modules=modules, **more)
        adapted = get_peft_model(base, options).eval()
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name or "modules_to_save" in parameter_name:
                values = torch.randn(parameter.shape, generator=g) * 0.5 / parameter.shape[-1] ** 0.5
                parameter.data = values.bfloat16().float()
        ids = torch.randint(0, base.config.vocab_size, (TOKENS,), generator=g)
        with torch.no_grad():
            rows = adapted(input_ids=ids[None]).logits[0].float()
            with adapted.disable_adapter():
                change = (rows - adapted(input_ids=ids[None]).logits[0]).abs().max().item()
        assert change > 0.1, f"{name}: the adapter changes logits by {change} at most"
        adapted.save_pretrained(out / name)
        (out / name / "README.md").unlink()
        file, config = out / name / "adapter_model.safetensors", out / name / "adapter_config.json"
        dtype = torch.bfloat16 if i % 2 else torch.float32
        save_file({key: x.to(dtype) for key, x in load_file(file).items()}, file)
        fields = json.loads(config.read_text()) | {"base_model_name_or_path": model}
        fields["target_modules"] = sorted(fields["target_modules"])  # a set, whose order changes from run to run
        config.write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")
        asked[name] = {"model": model, "ids": ids.tolist()}
        logits[f"logits.{name}"] = rows[-ROWS:].contiguous()
        print(f"{name}: {model}, logits change by {change:.2f}")
    (out / "golden.json").write_text(json.dumps(asked, indent=1) + "\n")
    save_file(logits, out / "golden.safetensors")


if __name__ == "__main__":
    main()
