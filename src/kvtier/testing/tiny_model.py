"""A small Llama checkpoint whose outputs show a wrong KV byte, made here: nothing is downloaded.

1. Written without transformers: a config.json and one safetensors file under the tensor names of the Hugging Face
   Llama, float32.
2. Dummy weights hide errors: all logits are nearly equal. Weights drawn wider (0.10 instead of 0.02) do not: one
   wrong block moves the first token's log probabilities by 0.5 to 1.2, a plain recomputation by 1e-5.
3. Equal arguments give equal files.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

VOCAB = 2048
LAYERS = 4


def make_tiny_model(directory: Path, *, seed: int = 7, context_tokens: int = 4096) -> Path:
    """The smallest one, for tests: 4 layers, 2 KV heads of 64, so 8 KiB of KV a token. Returns `directory`."""
    return make_checkpoint(directory, layers=LAYERS, vocab=VOCAB, positions_max=context_tokens, seed=seed)


def tiny_prompt(seed: int, tokens: int) -> list[int]:
    """A prompt of random token ids; equal seed, equal prompt."""
    found: list[int] = np.random.default_rng(seed).integers(2, VOCAB, tokens).tolist()
    return found


def make_checkpoint(
    path: str | Path,
    *,
    layers: int = LAYERS,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 512,
    vocab: int = VOCAB,
    positions_max: int = 8192,
    initial_range: float = 0.10,
    seed: int = 0,
) -> Path:
    """Write a checkpoint into the folder `path`, made if it is not there, and return it.

    A token's KV takes `layers * 2 * kv_heads * (hidden / heads) * 4` bytes. vLLM's CPU build takes a `hidden / heads`
    of 32, 64, 80, 96, 112, 128, 192 or 256. There is no tokenizer: use `skip_tokenizer_init`.
    """
    if hidden % heads or heads % kv_heads:
        raise ValueError(f"{hidden=} must be a multiple of {heads=}, and that of {kv_heads=}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions_max,
        "initializer_range": initial_range,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    kv_hidden = kv_heads * (hidden // heads)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_hidden, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_hidden, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, intermediate),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    _write_safetensors(folder / "model.safetensors", shapes, initial_range, seed)
    return folder


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], initial_range: float, seed: int) -> None:
    """A length of 8 bytes, a JSON header, and the tensors' bytes in the header's order. Norms are ones."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            tensor: Array = np.ones(shape, np.float32)
            if len(shape) > 1:
                tensor = random.standard_normal(shape, np.float32) * np.float32(initial_range)
            file.write(tensor.tobytes())
