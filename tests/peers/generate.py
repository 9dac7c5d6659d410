"""Makes reference outputs of Hugging Face `transformers` for tests/zoo/test_parity.py.

Runs in an environment of its own, which has torch and transformers and neither jax nor this project (CONTRIBUTING.md
says how to make one): `python tests/peers/generate.py` rewrites tests/peers/data. With `--live` it draws other weights
into a temporary folder and runs the parity tests on those; `--live --seed N` repeats a run.

Each case is a folder with `config.json` and `model.safetensors` as `save_pretrained` writes them, and with
`reference.safetensors`, whose tensors are

- `tokens` `[batch, seq]`, `logits` `[batch, seq, vocab]`, and `loss`, the mean cross-entropy of the next token;
- `grad/<name>`: the gradient of the loss for each parameter, under its name in `model.safetensors`;
- `module/<name>/in` and `/out`: what a module received and returned in that same forward pass. The router `mlp.gate`
  and `mlp.experts` have one row a token; the router has no `/out` but `/indices` `[tokens, k]`, ascending in each row,
  and `/weights` in that order; `mlp.experts` received both beside `/in`. A router with a bias and groups also has
  `/lowered_indices`: what it chooses, ascending, when 2 is taken from each entry of its bias;
- `module/rotary/positions` `[1, n]`, their `/cos` and `/sin` `[1, n, dim/2]` with YaRN's factor in them, and random
  `/in` `[1, n, heads, dim]` with `/out`, as attention turns it. DeepSeek V3 reads coordinates in pairs `(2i, 2i + 1)`
  and returns them in halves `(i, i + dim/2)`; the other models return them in the order they read.
"""
# pyright: reportMissingImports=false

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from cases import CASES, LENGTH, Case
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.llama import modeling_llama as llama

ROOT = Path(__file__).resolve().parent.parent.parent
Tensors = dict[str, torch.Tensor]

# A choice of experts that rounding could change proves nothing: such draws are thrown away.
LEAST_GAP = 1e-4

# Each family's model, and the function with which its attention turns queries and keys.
FAMILIES = {
    "llama": (llama.LlamaForCausalLM, llama.apply_rotary_pos_emb),
    "deepseek_v2": (v2.DeepseekV2ForCausalLM, v2.apply_rotary_emb),
    "deepseek_v3": (v3.DeepseekV3ForCausalLM, v3.apply_rotary_pos_emb_interleave),
}


def build(case: Case, generator: torch.Generator) -> Any:
    """The model of a case, every parameter and buffer drawn."""
    make = FAMILIES[case.family][0]
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = make(make.config_class(vocab_size=23, **eager, **case.config)).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(drawn(name, value.shape, generator))
            if "kv_a_proj" in name:
                value[: model.config.kv_lora_rank] *= 0.1
    return model


def drawn(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Values that leave no part without effect: before a norm they are small, so that its epsilon shows."""
    if name.endswith("e_score_correction_bias"):
        return torch.randperm(shape[0], generator=generator) * (0.4 / shape[0])
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.3 * values
    if "embed_tokens" in name:
        return 0.2 * values
    scales = {"q_a_proj": 0.1, "mlp.gate.": 1.5, "lm_head": 0.3}
    return values * shape[-1] ** -0.5 * next((scale for part, scale in scales.items() if part in name), 1.0)


def observe(model: Any) -> dict[str, Any]:
    """A mapping that the next forward pass fills: module name to what it received first and what it returned."""
    seen: dict[str, Any] = {}

    def watch(name: str, module: Any) -> None:
        def keep(module: Any, args: tuple, kwargs: dict, output: Any) -> None:
            received = args[0] if args else kwargs["hidden_states"]
            seen[name] = received, output[0] if name.endswith("self_attn") else output

        module.register_forward_hook(keep, with_kwargs=True)

    wanted = {"0.input_layernorm", "0.mlp", "1.mlp", "1.mlp.shared_experts", "1.mlp.experts"}
    wanted |= {"1.self_attn", "1.self_attn.q_a_layernorm", "1.self_attn.kv_a_layernorm"}
    for name, module in model.named_modules():
        if name.removeprefix("model.layers.") in wanted or name.endswith("mlp.gate"):
            watch(name, module)
    return seen


def choose(gate: Any, scores: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The experts of largest score, ascending, and how little another score would make another choice."""
    gaps = []
    if (gate.num_group or 1) > 1:
        grouped = scores.view(len(scores), gate.num_group, -1)
        best = 1 if isinstance(gate, v2.DeepseekV2TopkRouter) else 2
        order = grouped.topk(best)[0].sum(-1).sort(descending=True)
        gaps.append(order.values[:, gate.topk_group - 1] - order.values[:, gate.topk_group])
        dropped = order.indices[:, gate.topk_group :, None].expand(-1, -1, grouped.shape[-1])
        scores = grouped.scatter(1, dropped, -torch.inf).flatten(1)
    order = scores.sort(descending=True)
    gaps.append(order.values[:, gate.top_k - 1] - order.values[:, gate.top_k])
    return order.indices[:, : gate.top_k].sort().values, float(torch.cat(gaps).min())


def is_clear(model: Any, seen: dict[str, Any]) -> bool:
    """Whether no router nearly chose otherwise, and each bias mattered."""
    for name, (_, output) in seen.items():
        if not name.endswith("mlp.gate"):
            continue
        gate, (logits, _, indices) = model.get_submodule(name), output
        bias = getattr(gate, "e_score_correction_bias", None)
        scores = logits.softmax(-1) if bias is None else logits.sigmoid()
        chosen, gap = choose(gate, scores if bias is None else scores + bias)
        if gap < LEAST_GAP or (bias is not None and torch.equal(chosen, choose(gate, scores)[0])):
            return False
        assert torch.equal(chosen, indices.sort().values)
    return True


def split_experts(name: str, value: torch.Tensor) -> Tensors:
    """A parameter under its published names: transformers fuses the experts, which checkpoints hold apart."""
    prefix, found, kind = name.partition("mlp.experts.")
    if not found:
        return {name: value}
    kinds = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
    parts = zip(kinds, value.chunk(len(kinds), dim=1), strict=True)
    return {f"{prefix}{found}{i}.{kind}.weight": part[i] for kind, part in parts for i in range(len(part))}


def modules(model: Any, seen: dict[str, Any]) -> Tensors:
    found: Tensors = {}
    for name, (received, output) in seen.items():
        if not name.endswith("mlp.gate"):
            found |= {f"module/{name}/in": received, f"module/{name}/out": output}
    if "model.layers.1.mlp.experts" in seen:
        found |= choice(model.model.layers[1].mlp.gate, *seen["model.layers.1.mlp.gate"])
    return found


def choice(gate: Any, received: torch.Tensor, output: tuple[torch.Tensor, ...]) -> Tensors:
    """What the router of layer 1 chose, which is what its experts received."""
    mlp = "module/model.layers.1.mlp"
    indices, order = output[2].sort()
    found = {f"{mlp}.{part}/indices": indices.int() for part in ("gate", "experts")}
    found |= {f"{mlp}.{part}/weights": output[1].gather(1, order) for part in ("gate", "experts")}
    found[f"{mlp}.gate/in"] = received.flatten(0, 1)
    if hasattr(gate, "e_score_correction_bias") and gate.num_group > 1:
        gate.e_score_correction_bias -= 2
        found[f"{mlp}.gate/lowered_indices"] = gate(received)[2].sort().values.int()
        gate.e_score_correction_bias += 2
    return found


def rotary(case: Case, model: Any, generator: torch.Generator) -> Tensors:
    positions = torch.tensor([[0, 1, 2, 5, LENGTH - 1, LENGTH, 19, 63]])
    half = len(model.model.rotary_emb.inv_freq)
    x = torch.randn(1, positions.shape[1], 3, 2 * half, generator=generator)
    turns = model.model.rotary_emb(x, positions)  # complex numbers in V2, otherwise cosines and sines of each dim
    turns = turns if isinstance(turns, tuple) else (turns,)
    by_head = x.transpose(1, 2)
    out = FAMILIES[case.family][1](by_head, by_head, *turns)[0].transpose(1, 2)
    cos, sin = turns if len(turns) == 2 else (turns[0].real, turns[0].imag)
    values = {"positions": positions.int(), "cos": cos[..., :half], "sin": sin[..., :half], "in": x, "out": out}
    return {f"module/rotary/{name}": value for name, value in values.items()}


def write(case: Case, folder: Path, seed: int) -> None:
    """Writes a case with the first draw of `seed` that is clear."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        model = build(case, generator)
        seen = observe(model)
        tokens = torch.randint(model.config.vocab_size, (2, case.seq), generator=generator)
        output = model(tokens, labels=tokens)
        with torch.no_grad():
            if is_clear(model, seen):
                break
    output.loss.backward()
    found = {"tokens": tokens.int(), "logits": output.logits, "loss": output.loss}
    for name, parameter in model.named_parameters():
        found |= {f"grad/{part}": value for part, value in split_experts(name, parameter.grad).items()}
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    parameters = {name for name in load_file(folder / "model.safetensors") if "correction_bias" not in name}
    assert {f"grad/{name}" for name in parameters} == {name for name in found if name.startswith("grad/")}
    with torch.no_grad():
        found |= modules(model, dict(seen)) | rotary(case, model, generator)
    found = {name: value.detach().clone().contiguous() for name, value in found.items()}
    made = f"transformers {transformers.__version__}, torch {torch.__version__}, seed {seed}"
    save_file(found, folder / "reference.safetensors", metadata={"made_by": made})


def write_all(data: Path, seed: int) -> None:
    for name, case in CASES.items():
        folder = data / name
        folder.mkdir(parents=True, exist_ok=True)
        write(case, folder, seed)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name:20}{size / 1000:6.0f} kB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes reference outputs of Hugging Face transformers.")
    parser.add_argument("--live", action="store_true", help="draw other weights and run the parity tests on them")
    parser.add_argument("--seed", type=int, help="the seed of a live run that is to be repeated")
    options = parser.parse_args()
    if options.seed is not None and not options.live:
        parser.error("--seed goes with --live")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not options.live:
        write_all(ROOT / "tests/peers/data", seed=0)
        return 0
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"--live --seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as data:
        write_all(Path(data), seed)
        command = [str(ROOT / ".venv/bin/pytest"), "tests/zoo/test_parity.py"]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "ZOO_PEERS": data}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
